"""The scans for Hopper (bf16, K and V of 64 or 128): `scan.py` with its layouts chosen.

One warpgroup owns 64 value columns of a sequence and head, or of a segment of it, and keeps the
state transposed, [64 values, K channels]: values are the rows of every product. So each link of the
serial chain takes the result of the last one as its left operand without leaving registers; the
right operands are the first kernel's tiles in shared memory. Each of them is there once: the next
chunk's is copied as soon as the last product that reads it is through, and two programs share a
multiprocessor and hide each other's waits. States are stored [M, H, V, K].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .segments import SEQUENCES, run_of_chunks
from .tiles_sm90 import (
    CHUNK,
    COPY64,
    COPY128,
    LEFT,
    LINE,
    PAIR,
    STRIP,
    TILE,
    VECTOR,
    barrier,
    copy_line,
    copy_tile,
    left_rows,
    store_tile,
)


@gluon.jit
def copy_channels(smem, tiles, chunk, K: gl.constexpr):
    """Start the copy of a chunk's [C, K] tile."""
    copy_tile(smem, tiles + chunk * (CHUNK * K), K, CHUNK, COPY128 if K == 128 else COPY64)


@gluon.jit
def copy_square(smem, squares, chunk):
    """Start the copy of a chunk's [C, C] tile."""
    copy_tile(smem, squares + chunk * (CHUNK * CHUNK), CHUNK, CHUNK, COPY64)


@gluon.jit
def copy_rows(
    value_s, beta_s, gamma_s, value, beta, gamma, chunk, tokens, num_heads, rows,
    K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Start the copies of the first `rows` rows of a chunk's values, and of its vectors."""
    copy_tile(value_s, value + tokens, num_heads * V, rows, COPY64)
    copy_line(beta_s, beta + chunk * CHUNK, CHUNK)
    copy_line(gamma_s, gamma + chunk * K, K)


@gluon.jit
def scan_memory(K: gl.constexpr):
    """Where kp, kc, qp, Ainv, Aqk, values, beta and gamma lie; a state and values to store."""
    kp_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, K], TILE)
    kc_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, K], TILE)
    qp_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, K], TILE)
    ainv_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], TILE)
    aqk_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], TILE)
    value_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, STRIP], TILE)
    beta_s = gl.allocate_shared_memory(gl.float32, [CHUNK], VECTOR)
    gamma_s = gl.allocate_shared_memory(gl.float32, [K], VECTOR)
    state_s = gl.allocate_shared_memory(gl.bfloat16, [STRIP, K], TILE)
    out_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, STRIP], TILE)
    return kp_s, kc_s, qp_s, ainv_s, aqk_s, value_s, beta_s, gamma_s, state_s, out_s


@gluon.jit(do_not_specialize=["num_heads", "num_sequences", "length"])
def forward_scan_sm90_kernel(
    kp, kc, qp, ainv, aqk, gamma, chunk_beta, v, initial_state, offsets, cu_seqlens,
    o, v_new, states, final_state, ends, num_heads, num_sequences, length,
    K: gl.constexpr, V: gl.constexpr, HAS_INITIAL: gl.constexpr, IS_KEPT: gl.constexpr,
    IS_CUT: gl.constexpr,
):  # fmt: skip
    """Grid (H * V / 64, N), 4 warps. `states` [M, H, V, K]: the state entering each chunk.

    Cut into segments of `length` chunks: grid (H * V / 64, slots), see `segments_sm90`.
    """
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    COPY_K: gl.constexpr = COPY128 if K == 128 else COPY64
    h = gl.program_id(0) // (V // STRIP)
    column = gl.program_id(0) % (V // STRIP) * STRIP
    n, first, count, start, end, place, segments = run_of_chunks(
        gl.program_id(1), gl.arange(0, SEQUENCES, layout=LINE), offsets, cu_seqlens,
        num_sequences, length, IS_CUT,
    )  # fmt: skip
    if IS_CUT and n < 0:
        return
    value_row = column + gl.arange(0, STRIP, layout=gl.SliceLayout(1, STATE))[:, None]
    channel = gl.arange(0, K, layout=gl.SliceLayout(0, STATE))[None, :]
    boundary = (n * num_heads + h) * (K * V) + channel * V + value_row
    S = gl.zeros([STRIP, K], gl.float32, layout=STATE)
    if HAS_INITIAL and place == 0:
        S = gl.load(initial_state + boundary)
    if IS_CUT and place > 0:
        before = ((gl.program_id(1) - 1).to(gl.int64) * num_heads + h) * (K * V)
        S = gl.load(ends + before + value_row * K + channel)
    kp_s, kc_s, qp_s, ainv_s, aqk_s, v_s, beta_s, gamma_s, state_s, written_s = scan_memory(K)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, STRIP], TILE)
    zero = gl.zeros([STRIP, CHUNK], gl.float32, layout=PAIR)
    if count > 0:
        chunk = first * num_heads + h
        copy_channels(kp_s, kp, chunk, K)
        copy_rows(
            v_s, beta_s, gamma_s, v, chunk_beta, gamma, chunk,
            (start * num_heads + h) * V + column, num_heads, end - start, K, V,
        )  # fmt: skip
        copy_channels(qp_s, qp, chunk, K)
        async_copy.commit_group()
        copy_square(ainv_s, ainv, chunk)
        copy_channels(kc_s, kc, chunk, K)
        copy_square(aqk_s, aqk, chunk)
        async_copy.commit_group()
    for i in range(0, count):
        chunk = (first + i) * num_heads + h
        token = start + i * CHUNK
        here = (token * num_heads + h) * V + column
        async_copy.wait_group(1)
        fence_async_shared()
        barrier()
        S_low = left_rows(S)
        x = warpgroup_mma(S_low, kp_s.permute((1, 0)), zero, use_acc=False, is_async=True)
        o_VC = warpgroup_mma(S_low, qp_s.permute((1, 0)), zero, use_acc=False, is_async=True)
        if IS_KEPT:
            state_s.store(S.to(gl.bfloat16))
        S *= gamma_s.load(gl.SliceLayout(0, STATE))[None, :]
        beta_C = beta_s.load(gl.SliceLayout(0, PAIR))[None, :]
        v_VC = v_s.permute((1, 0)).load(PAIR).to(gl.float32)
        x, o_VC = warpgroup_mma_wait(0, deps=[x, o_VC])
        x = (v_VC - x) * beta_C
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        written = warpgroup_mma(left_rows(x), ainv_s.permute((1, 0)), x, is_async=True)
        if i + 1 < count:
            copy_channels(kp_s, kp, chunk + num_heads, K)
            copy_rows(
                v_s, beta_s, gamma_s, v, chunk_beta, gamma, chunk + num_heads,
                here + CHUNK * num_heads * V, num_heads, end - token - CHUNK, K, V,
            )  # fmt: skip
            copy_channels(qp_s, qp, chunk + num_heads, K)
        async_copy.commit_group()
        written = warpgroup_mma_wait(0, deps=[written])
        written_low = left_rows(written)
        S = warpgroup_mma(written_low, kc_s, S, is_async=True)
        o_VC = warpgroup_mma(written_low, aqk_s.permute((1, 0)), o_VC, is_async=True)
        if IS_KEPT:
            written_s.permute((1, 0)).store(written.to(gl.bfloat16))
        S, o_VC = warpgroup_mma_wait(0, deps=[S, o_VC])
        o_s.permute((1, 0)).store(o_VC.to(gl.bfloat16))
        barrier()
        if i + 1 < count:
            copy_square(ainv_s, ainv, chunk + num_heads)
            copy_channels(kc_s, kc, chunk + num_heads, K)
            copy_square(aqk_s, aqk, chunk + num_heads)
        async_copy.commit_group()
        if IS_KEPT:
            store_tile(states + chunk * (K * V) + column * K, state_s, K, STRIP, COPY_K)
            store_tile(v_new + chunk * (CHUNK * V) + column, written_s, V, CHUNK, COPY64)
        store_tile(o + here, o_s, num_heads * V, end - token, COPY64)
    if place == segments - 1:
        gl.store(final_state + boundary, S)


@gluon.jit(do_not_specialize=["num_heads", "num_sequences", "length"])
def reverse_scan_sm90_kernel(
    kp, kc, qp, ainv, aqk, gamma, chunk_beta, do, d_final_state, offsets, cu_seqlens,
    dv, d_states, d_initial_state, ends, num_heads, num_sequences, length,
    K: gl.constexpr, V: gl.constexpr, HAS_FINAL: gl.constexpr, PASS: gl.constexpr,
):  # fmt: skip
    """Grid (H * V / 64, N), 4 warps. `d_states` [M, H, V, K]: of each chunk's last state.

    Cut into segments, grid (H * V / 64, slots): pass 1 gives what leaves each segment at its start
    to `ends` [slots, H, V, K] fp32, from zero or the sequence's own; pass 2 the outputs.
    """
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    COPY_K: gl.constexpr = COPY128 if K == 128 else COPY64
    h = gl.program_id(0) // (V // STRIP)
    column = gl.program_id(0) % (V // STRIP) * STRIP
    n, first, count, start, end, place, segments = run_of_chunks(
        gl.program_id(1), gl.arange(0, SEQUENCES, layout=LINE), offsets, cu_seqlens,
        num_sequences, length, PASS > 0,
    )  # fmt: skip
    if PASS > 0 and (n < 0) | ((PASS == 1) & (place == 0)):
        return
    value_row = column + gl.arange(0, STRIP, layout=gl.SliceLayout(1, STATE))[:, None]
    channel = gl.arange(0, K, layout=gl.SliceLayout(0, STATE))[None, :]
    boundary = (n * num_heads + h) * (K * V) + channel * V + value_row
    dS = gl.zeros([STRIP, K], gl.float32, layout=STATE)
    if HAS_FINAL and place == segments - 1:
        dS = gl.load(d_final_state + boundary)
    if PASS == 2 and place < segments - 1:
        after = ((gl.program_id(1) + 1).to(gl.int64) * num_heads + h) * (K * V)
        dS = gl.load(ends + after + value_row * K + channel)
    kp_s, kc_s, qp_s, ainv_s, aqk_s, do_s, beta_s, gamma_s, state_s, dv_s = scan_memory(K)
    zero = gl.zeros([STRIP, CHUNK], gl.float32, layout=PAIR)
    last = start + (count - 1) * CHUNK
    if count > 0:
        chunk = (first + count - 1) * num_heads + h
        copy_rows(
            do_s, beta_s, gamma_s, do, chunk_beta, gamma, chunk,
            (last * num_heads + h) * V + column, num_heads, end - last, K, V,
        )  # fmt: skip
        copy_square(aqk_s, aqk, chunk)
        copy_channels(kc_s, kc, chunk, K)
        async_copy.commit_group()
        copy_square(ainv_s, ainv, chunk)
        copy_channels(qp_s, qp, chunk, K)
        copy_channels(kp_s, kp, chunk, K)
        async_copy.commit_group()
    for i in range(0, count):
        chunk = (first + count - 1 - i) * num_heads + h
        token = last - i * CHUNK
        here = (token * num_heads + h) * V + column
        async_copy.wait_group(1)
        fence_async_shared()
        barrier()
        do_VC = do_s.permute((1, 0)).load(LEFT)
        y = warpgroup_mma(do_VC, aqk_s, zero, use_acc=False, is_async=True)
        y = warpgroup_mma(left_rows(dS), kc_s.permute((1, 0)), y, is_async=True)
        if PASS != 1:
            state_s.store(dS.to(gl.bfloat16))
        dS *= gamma_s.load(gl.SliceLayout(0, STATE))[None, :]
        beta_C = beta_s.load(gl.SliceLayout(0, PAIR))[None, :]
        y = warpgroup_mma_wait(0, deps=[y])
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        y = warpgroup_mma(left_rows(y), ainv_s, y, is_async=True)
        dS = warpgroup_mma(do_VC, qp_s, dS, is_async=True)
        if i + 1 < count:
            copy_rows(
                do_s, beta_s, gamma_s, do, chunk_beta, gamma, chunk - num_heads,
                here - CHUNK * num_heads * V, num_heads, CHUNK, K, V,
            )  # fmt: skip
            copy_square(aqk_s, aqk, chunk - num_heads)
            copy_channels(kc_s, kc, chunk - num_heads, K)
        async_copy.commit_group()
        y = warpgroup_mma_wait(1, deps=[y])
        y *= beta_C
        dS = warpgroup_mma(left_rows(-y), kp_s, dS, is_async=True)
        if PASS != 1:
            dv_s.permute((1, 0)).store(y.to(gl.bfloat16))
        dS = warpgroup_mma_wait(0, deps=[dS])
        barrier()
        if i + 1 < count:
            copy_square(ainv_s, ainv, chunk - num_heads)
            copy_channels(qp_s, qp, chunk - num_heads, K)
            copy_channels(kp_s, kp, chunk - num_heads, K)
        async_copy.commit_group()
        if PASS != 1:
            store_tile(d_states + chunk * (K * V) + column * K, state_s, K, STRIP, COPY_K)
            store_tile(dv + here, dv_s, num_heads * V, end - token, COPY64)
    if PASS == 1:
        segment = gl.program_id(1).to(gl.int64) * num_heads + h
        gl.store(ends + segment * (K * V) + value_row * K + channel, dS)
    elif place == 0:
        gl.store(d_initial_state + boundary, dS)
