"""The first pass of a cut scan for Hopper (bf16, K and V of 64 or 128): `segments.py`.

As in `scan_sm90.py`, the state is transposed and a warpgroup owns 64 of its rows: 64 value columns
of E, or 64 key columns of P.
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
    LINE,
    PAIR,
    STRIP,
    TILE,
    VECTOR,
    barrier,
    copy_line,
    copy_tile,
    left_rows,
)


@gluon.jit
def copy_transition_chunk(
    kp_s, kc_s, ainv_s, v_s, beta_s, gamma_s, kp, kc, ainv, v, beta, gamma, chunk, tokens,
    num_heads, rows, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Start the copies of what one chunk does to a state; of v the first `rows` rows."""
    COPY_K: gl.constexpr = COPY128 if K == 128 else COPY64
    copy_tile(kp_s, kp + chunk * (CHUNK * K), K, CHUNK, COPY_K)
    copy_tile(v_s, v + tokens, num_heads * V, rows, COPY64)
    copy_tile(ainv_s, ainv + chunk * (CHUNK * CHUNK), CHUNK, CHUNK, COPY64)
    copy_tile(kc_s, kc + chunk * (CHUNK * K), K, CHUNK, COPY_K)
    copy_line(beta_s, beta + chunk * CHUNK, CHUNK)
    copy_line(gamma_s, gamma + chunk * K, K)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["num_heads", "num_sequences", "length"])
def segment_ends_sm90_kernel(
    kp, kc, ainv, gamma, chunk_beta, v, initial_state, offsets, cu_seqlens, ends, transitions,
    num_heads, num_sequences, length,
    K: gl.constexpr, V: gl.constexpr, HAS_INITIAL: gl.constexpr,
):  # fmt: skip
    """Grid (H * (V + K) / 64, slots), 4 warps: E, and P' where a segment has others on both sides.

    `ends` [slots, H, V, K] fp32, that of a sequence's first segment from its initial state;
    `transitions` [slots, H, K, K] fp32.
    """
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    BLOCKS: gl.constexpr = (V + K) // STRIP
    h = gl.program_id(0) // BLOCKS
    block = gl.program_id(0) % BLOCKS
    slot = gl.program_id(1)
    n, first, count, start, _end, place, segments = run_of_chunks(
        slot, gl.arange(0, SEQUENCES, layout=LINE), offsets, cu_seqlens, num_sequences, length, True
    )
    if (n < 0) | (place == segments - 1) | ((place == 0) & (block >= V // STRIP)):
        return
    column = block % (V // STRIP) * STRIP
    rows_read = gl.where(block < V // STRIP, CHUNK, 0)

    kp_s = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, K], TILE)
    kc_s = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, K], TILE)
    ainv_s = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, CHUNK], TILE)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, STRIP], TILE)
    beta_s = gl.allocate_shared_memory(gl.float32, [2, CHUNK], VECTOR)
    gamma_s = gl.allocate_shared_memory(gl.float32, [2, K], VECTOR)

    row = gl.arange(0, STRIP, layout=gl.SliceLayout(1, STATE))[:, None]
    channel = gl.arange(0, K, layout=gl.SliceLayout(0, STATE))[None, :]
    key = (block - V // STRIP) * STRIP + row  # negative for values
    S = gl.where(key == channel, 1.0, 0.0)
    if HAS_INITIAL and place == 0:
        S = gl.load(initial_state + (n * num_heads + h) * (K * V) + channel * V + column + row)
    zero = gl.zeros([STRIP, CHUNK], gl.float32, layout=PAIR)
    chunk = first * num_heads + h
    tokens = (start * num_heads + h) * V + column
    copy_transition_chunk(
        kp_s.index(0), kc_s.index(0), ainv_s.index(0), v_s.index(0), beta_s.index(0),
        gamma_s.index(0), kp, kc, ainv, v, chunk_beta, gamma, chunk, tokens, num_heads,
        rows_read, K, V,
    )  # fmt: skip
    for i in range(0, count):
        b = i % 2
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        if i + 1 < count:
            chunk += num_heads
            tokens += CHUNK * num_heads * V
            copy_transition_chunk(
                kp_s.index(1 - b), kc_s.index(1 - b), ainv_s.index(1 - b), v_s.index(1 - b),
                beta_s.index(1 - b), gamma_s.index(1 - b), kp, kc, ainv, v, chunk_beta, gamma,
                chunk, tokens, num_heads, rows_read, K, V,
            )  # fmt: skip
        x = warpgroup_mma(
            left_rows(S), kp_s.index(b).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        S *= gamma_s.index(b).load(gl.SliceLayout(0, STATE))[None, :]
        beta_C = beta_s.index(b).load(gl.SliceLayout(0, PAIR))[None, :]
        v_VC = v_s.index(b).permute((1, 0)).load(PAIR).to(gl.float32)
        x = warpgroup_mma_wait(0, deps=[x])
        x = (v_VC - x) * beta_C
        x = warpgroup_mma(left_rows(x), ainv_s.index(b).permute((1, 0)), x, is_async=True)
        x = warpgroup_mma_wait(0, deps=[x])
        S = warpgroup_mma(left_rows(x), kc_s.index(b), S, is_async=True)
        S = warpgroup_mma_wait(0, deps=[S])
    segment = slot.to(gl.int64) * num_heads + h
    if block < V // STRIP:
        gl.store(ends + segment * (K * V) + (column + row) * K + channel, S)
    else:
        gl.store(transitions + segment * (K * K) + key * K + channel, S)
