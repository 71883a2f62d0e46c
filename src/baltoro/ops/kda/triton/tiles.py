"""What the KDA kernels share: the table of chunks, the decay of a tile, its bounded exponents.

A chunk has 64 rows (tokens) in two halves of 32. Rows past a sequence's end hold k = q = v = 0,
beta = 0 and g = 0, so they change nothing. Decays are base 2 inside the kernels: G is log2(e) times
the running sum of g from the chunk's first row.

Within a half, 2^(G_r - G_j) is split as (row_r, col_j) around the half's first row with a constant
shift: row = 2^(G_r - G_first + 112), col = 2^(G_first - G_j - 112). At the gate's bound of -5 both
stay within 2^112. Across halves the anchor is the last row of the first half, so that one factor
2^-|G - G_mid| serves rows and columns. No anchor lies in a token's future.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
HALF_SHIFT = tl.constexpr(2.0**56)
CHUNK = tl.constexpr(64)
HALF = tl.constexpr(32)
# beta = 0 would lose the gradient <Y, e> = <dv, v_new> / beta^2; 2^-40 writes nothing visible.
MIN_BETA = tl.constexpr(2.0**-40)


@triton.jit
def table_kernel(
    cu_seqlens, table, offsets, num_sequences, num_chunks, PADDED: tl.constexpr
):  # fmt: skip
    """Row m of `table` [M, 3]: sequence (-1: none), first token, tokens; `offsets` [N + 1]."""
    m = tl.program_id(0)
    n = tl.arange(0, PADDED)  # [N]
    has = n < num_sequences
    start = tl.load(cu_seqlens + n, mask=has, other=0)
    end = tl.load(cu_seqlens + n + 1, mask=has, other=0)
    chunks_end = tl.cumsum((end - start + CHUNK - 1) // CHUNK, 0)  # [N]
    sequence = tl.sum(tl.where(has & (chunks_end <= m), 1, 0), 0)
    first_chunk = tl.max(tl.where(has & (n < sequence), chunks_end, 0), 0)
    is_here = n == sequence
    row_start = tl.sum(tl.where(is_here, start, 0), 0) + (m - first_chunk) * CHUNK
    length = tl.minimum(tl.sum(tl.where(is_here, end, 0), 0) - row_start, CHUNK)
    is_chunk = m < num_chunks
    tl.store(table + m * 3, tl.where(sequence < num_sequences, sequence, -1), mask=is_chunk)
    tl.store(table + m * 3 + 1, row_start, mask=is_chunk)
    tl.store(table + m * 3 + 2, length, mask=is_chunk)
    if m == 0:
        tl.store(offsets, 0)
        tl.store(offsets + 1 + n, chunks_end, mask=has)


@triton.jit
def bounded_log2_gate(logits, bias, rate, lower_bound):
    """log2(e) * lower_bound * sigmoid(rate * (logits + bias)), fp32."""
    return lower_bound * LOG2E / (1.0 + tl.exp2(-rate * LOG2E * (logits + bias)))


@triton.jit
def load_log2_gate(g, ptrs, is_valid, bias, rate, lower_bound, FROM_LOGITS: tl.constexpr):
    """Base-2 log-decay of the tile at `ptrs`, 0 where not `is_valid`."""
    x = tl.load(g + ptrs, mask=is_valid, other=0.0).to(tl.float32)
    if FROM_LOGITS:
        x = tl.where(is_valid, bounded_log2_gate(x, bias, rate, lower_bound), 0.0)
    else:
        x = x * LOG2E
    return x


@triton.jit
def half_factors(log2_gate, first_lo, first_hi, rows):
    """G [C, K], its values at the middle and end [K], the factors row, col and cross [C, K]."""
    total_G = tl.cumsum(log2_gate, 0)  # [C, K]
    is_hi = rows[:, None] >= HALF
    mid = tl.sum(tl.where(is_hi, 0.0, log2_gate), 0)  # [K]
    end = tl.sum(log2_gate, 0)  # [K]
    local = total_G - tl.where(is_hi, (mid + first_hi)[None, :], first_lo[None, :])  # [C, K]
    # halved and squared: `local + SHIFT` would round local to 2^-17
    root = tl.exp2(0.5 * local) * HALF_SHIFT
    row = root * root
    root = tl.exp2(-0.5 * local) / HALF_SHIFT
    col = root * root
    from_mid = total_G - mid[None, :]
    cross = tl.exp2(tl.where(is_hi, from_mid, -from_mid))
    return total_G, mid, end, row, col, cross
