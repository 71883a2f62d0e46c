"""The scans for Hopper (bf16, K and V of 64 or 128): `scan.py` with its layouts chosen.

One warpgroup owns 64 value columns of a sequence and head and keeps the state transposed, [64
values, K channels]: values are the rows of every product. So each link of the serial chain takes
the result of the last one as its left operand without leaving registers; the right operands are the
first kernel's tiles, copied into shared memory one chunk ahead. States are stored [M, H, V, K].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .tiles_sm90 import (
    CHUNK,
    COPY64,
    COPY128,
    PAIR,
    STRIP,
    TILE,
    VECTOR,
    barrier,
    copy_tile,
    store_tile,
)

LINE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
LEFT: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, PAIR, 2))


@gluon.jit
def left_rows(value):
    """A [64, R] accumulator as a left operand in bf16."""
    return gl.convert_layout(value.to(gl.bfloat16), LEFT, assert_trivial=True)


@gluon.jit
def copy_line(smem, pointer, N: gl.constexpr):
    i = gl.arange(0, N, layout=LINE)
    async_copy.async_copy_global_to_shared(smem, pointer + i)


@gluon.jit
def copy_chunk(
    a_s, b_s, c_s, ainv_s, aqk_s, value_s, beta_s, gamma_s,
    a, b, c, ainv, aqk, value, beta, gamma, chunk, tokens, num_heads, length,
    K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Start the copies of one chunk: three [C, K] tiles, two [C, C], values, vectors."""
    COPY_K: gl.constexpr = COPY128 if K == 128 else COPY64
    copy_tile(a_s, a + chunk * (CHUNK * K), K, CHUNK, COPY_K)
    copy_tile(value_s, value + tokens, num_heads * V, length, COPY64)
    copy_tile(ainv_s, ainv + chunk * (CHUNK * CHUNK), CHUNK, CHUNK, COPY64)
    copy_tile(b_s, b + chunk * (CHUNK * K), K, CHUNK, COPY_K)
    copy_tile(c_s, c + chunk * (CHUNK * K), K, CHUNK, COPY_K)
    copy_tile(aqk_s, aqk + chunk * (CHUNK * CHUNK), CHUNK, CHUNK, COPY64)
    copy_line(beta_s, beta + chunk * CHUNK, CHUNK)
    copy_line(gamma_s, gamma + chunk * K, K)
    async_copy.commit_group()


@gluon.jit
def forward_scan_sm90_kernel(
    kp, kc, qp, ainv, aqk, gamma, chunk_beta, v, initial_state, offsets, cu_seqlens,
    o, v_new, states, final_state, num_heads,
    K: gl.constexpr, V: gl.constexpr, HAS_INITIAL: gl.constexpr, IS_KEPT: gl.constexpr,
):  # fmt: skip
    """Grid (H * V / 64, N), 4 warps. `states` [M, H, V, K]: the state entering each chunk."""
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    COPY_K: gl.constexpr = COPY128 if K == 128 else COPY64
    h = gl.program_id(0) // (V // STRIP)
    n = gl.program_id(1)
    column = gl.program_id(0) % (V // STRIP) * STRIP
    start = gl.load(cu_seqlens + n).to(gl.int64)
    end = gl.load(cu_seqlens + n + 1)
    first = gl.load(offsets + n).to(gl.int64)
    count = gl.load(offsets + n + 1) - gl.load(offsets + n)

    kp_s = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, K], TILE)
    kc_s = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, K], TILE)
    qp_s = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, K], TILE)
    ainv_s = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, CHUNK], TILE)
    aqk_s = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, CHUNK], TILE)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, STRIP], TILE)
    beta_s = gl.allocate_shared_memory(gl.float32, [2, CHUNK], VECTOR)
    gamma_s = gl.allocate_shared_memory(gl.float32, [2, K], VECTOR)
    state_s = gl.allocate_shared_memory(gl.bfloat16, [STRIP, K], TILE)
    written_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, STRIP], TILE)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, STRIP], TILE)

    value_row = column + gl.arange(0, STRIP, layout=gl.SliceLayout(1, STATE))[:, None]
    channel = gl.arange(0, K, layout=gl.SliceLayout(0, STATE))[None, :]
    boundary = (n.to(gl.int64) * num_heads + h) * (K * V) + channel * V + value_row
    S = gl.zeros([STRIP, K], gl.float32, layout=STATE)
    if HAS_INITIAL:
        S = gl.load(initial_state + boundary)
    zero = gl.zeros([STRIP, CHUNK], gl.float32, layout=PAIR)
    if count > 0:
        copy_chunk(
            kp_s.index(0), kc_s.index(0), qp_s.index(0), ainv_s.index(0), aqk_s.index(0),
            v_s.index(0), beta_s.index(0), gamma_s.index(0),
            kp, kc, qp, ainv, aqk, v, chunk_beta, gamma, first * num_heads + h,
            (start * num_heads + h) * V + column, num_heads, end - start, K, V,
        )  # fmt: skip
    for i in range(0, count):
        chunk = (first + i) * num_heads + h
        token = start + i * CHUNK
        here = (token * num_heads + h) * V + column
        b = i % 2
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        if i + 1 < count:
            copy_chunk(
                kp_s.index(1 - b), kc_s.index(1 - b), qp_s.index(1 - b), ainv_s.index(1 - b),
                aqk_s.index(1 - b), v_s.index(1 - b), beta_s.index(1 - b), gamma_s.index(1 - b),
                kp, kc, qp, ainv, aqk, v, chunk_beta, gamma, chunk + num_heads,
                here + CHUNK * num_heads * V, num_heads, end - token - CHUNK, K, V,
            )  # fmt: skip
        S_low = left_rows(S)
        x = warpgroup_mma(S_low, kp_s.index(b).permute((1, 0)), zero, use_acc=False, is_async=True)
        o_VC = warpgroup_mma(
            S_low, qp_s.index(b).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        if IS_KEPT:
            state_s.store(S.to(gl.bfloat16))
        S *= gamma_s.index(b).load(gl.SliceLayout(0, STATE))[None, :]
        beta_C = beta_s.index(b).load(gl.SliceLayout(0, PAIR))[None, :]
        v_VC = v_s.index(b).permute((1, 0)).load(PAIR).to(gl.float32)
        x = warpgroup_mma_wait(1, deps=[x])
        x = (v_VC - x) * beta_C
        written = warpgroup_mma(left_rows(x), ainv_s.index(b).permute((1, 0)), x, is_async=True)
        written, o_VC = warpgroup_mma_wait(0, deps=[written, o_VC])
        written_low = left_rows(written)
        S = warpgroup_mma(written_low, kc_s.index(b), S, is_async=True)
        o_VC = warpgroup_mma(written_low, aqk_s.index(b).permute((1, 0)), o_VC, is_async=True)
        if IS_KEPT:
            written_s.permute((1, 0)).store(written.to(gl.bfloat16))
        S, o_VC = warpgroup_mma_wait(0, deps=[S, o_VC])
        o_s.permute((1, 0)).store(o_VC.to(gl.bfloat16))
        barrier()
        if IS_KEPT:
            store_tile(states + chunk * (K * V) + column * K, state_s, K, STRIP, COPY_K)
            store_tile(v_new + chunk * (CHUNK * V) + column, written_s, V, CHUNK, COPY64)
        store_tile(o + here, o_s, num_heads * V, end - token, COPY64)
    gl.store(final_state + boundary, S)


@gluon.jit
def reverse_scan_sm90_kernel(
    kp, kc, qp, ainv, aqk, gamma, chunk_beta, do, d_final_state, offsets, cu_seqlens,
    dv, d_states, d_initial_state, num_heads,
    K: gl.constexpr, V: gl.constexpr, HAS_FINAL: gl.constexpr,
):  # fmt: skip
    """Grid (H * V / 64, N), 4 warps. `d_states` [M, H, V, K]: of each chunk's last state."""
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    COPY_K: gl.constexpr = COPY128 if K == 128 else COPY64
    h = gl.program_id(0) // (V // STRIP)
    n = gl.program_id(1)
    column = gl.program_id(0) % (V // STRIP) * STRIP
    start = gl.load(cu_seqlens + n).to(gl.int64)
    end = gl.load(cu_seqlens + n + 1)
    first = gl.load(offsets + n).to(gl.int64)
    count = gl.load(offsets + n + 1) - gl.load(offsets + n)

    kp_s = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, K], TILE)
    kc_s = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, K], TILE)
    qp_s = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, K], TILE)
    ainv_s = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, CHUNK], TILE)
    aqk_s = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, CHUNK], TILE)
    do_s = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, STRIP], TILE)
    beta_s = gl.allocate_shared_memory(gl.float32, [2, CHUNK], VECTOR)
    gamma_s = gl.allocate_shared_memory(gl.float32, [2, K], VECTOR)
    state_s = gl.allocate_shared_memory(gl.bfloat16, [STRIP, K], TILE)
    dv_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, STRIP], TILE)

    value_row = column + gl.arange(0, STRIP, layout=gl.SliceLayout(1, STATE))[:, None]
    channel = gl.arange(0, K, layout=gl.SliceLayout(0, STATE))[None, :]
    boundary = (n.to(gl.int64) * num_heads + h) * (K * V) + channel * V + value_row
    dS = gl.zeros([STRIP, K], gl.float32, layout=STATE)
    if HAS_FINAL:
        dS = gl.load(d_final_state + boundary)
    zero = gl.zeros([STRIP, CHUNK], gl.float32, layout=PAIR)
    last = start + (count - 1) * CHUNK
    if count > 0:
        copy_chunk(
            kc_s.index(0), kp_s.index(0), qp_s.index(0), ainv_s.index(0), aqk_s.index(0),
            do_s.index(0), beta_s.index(0), gamma_s.index(0),
            kc, kp, qp, ainv, aqk, do, chunk_beta, gamma, (first + count - 1) * num_heads + h,
            (last * num_heads + h) * V + column, num_heads, end - last, K, V,
        )  # fmt: skip
    for i in range(0, count):
        chunk = (first + count - 1 - i) * num_heads + h
        token = last - i * CHUNK
        here = (token * num_heads + h) * V + column
        b = i % 2
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        if i + 1 < count:
            copy_chunk(
                kc_s.index(1 - b), kp_s.index(1 - b), qp_s.index(1 - b), ainv_s.index(1 - b),
                aqk_s.index(1 - b), do_s.index(1 - b), beta_s.index(1 - b), gamma_s.index(1 - b),
                kc, kp, qp, ainv, aqk, do, chunk_beta, gamma, chunk - num_heads,
                here - CHUNK * num_heads * V, num_heads, CHUNK, K, V,
            )  # fmt: skip
        do_VC = do_s.index(b).permute((1, 0)).load(LEFT)
        y = warpgroup_mma(do_VC, aqk_s.index(b), zero, use_acc=False, is_async=True)
        y = warpgroup_mma(left_rows(dS), kc_s.index(b).permute((1, 0)), y, is_async=True)
        state_s.store(dS.to(gl.bfloat16))
        dS *= gamma_s.index(b).load(gl.SliceLayout(0, STATE))[None, :]
        dS = warpgroup_mma(do_VC, qp_s.index(b), dS, is_async=True)
        beta_C = beta_s.index(b).load(gl.SliceLayout(0, PAIR))[None, :]
        y = warpgroup_mma_wait(1, deps=[y])
        y = warpgroup_mma(left_rows(y), ainv_s.index(b), y, is_async=True)
        y, dS = warpgroup_mma_wait(0, deps=[y, dS])
        y *= beta_C
        dS = warpgroup_mma(left_rows(-y), kp_s.index(b), dS, is_async=True)
        dv_s.permute((1, 0)).store(y.to(gl.bfloat16))
        dS = warpgroup_mma_wait(0, deps=[dS])
        barrier()
        store_tile(d_states + chunk * (K * V) + column * K, state_s, K, STRIP, COPY_K)
        store_tile(dv + here, dv_s, num_heads * V, end - token, COPY64)
    gl.store(d_initial_state + boundary, dS)
