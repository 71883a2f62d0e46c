"""What the portable KDA kernels share: the table of chunks, the gate, exponents that never grow.

A chunk has 64 rows (tokens). Rows past a sequence's end hold k = q = v = 0, beta = 0 and g = 0, so
they change nothing. Decays are base 2 inside the kernels.

Pairs of rows j < r meet at levels: two neighbouring blocks of B rows, anchor at the last row of the
first, are joined by one product of 2^(steps after j until the anchor) and 2^(steps after the anchor
until r). So B = 1, 2, 4 .. 32 meets every pair once, both factors are at most 1 for a gate without
a bound too, and where one becomes 0 the weight itself is below 2^-126. No anchor lies in a token's
future. Exponents are sums of the steps themselves, never a difference of longer sums: a step of
-200 takes no digit from a step of -1e-6 beside it. Their gradients are sums likewise.

A chunk is two halves of 32 rows, which join last. Their tiles are smaller than what a warpgroup
multiplies: of the many operands of these kernels the ptxas of CUDA 12.8 would lose the addresses.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
CHUNK = tl.constexpr(64)
HALF = tl.constexpr(32)
LEVELS = tl.constexpr(5)  # inside a half
# A step that decays to 0 in fp32 whatever it meets; longer ones would only lengthen sums.
MIN_STEP = tl.constexpr(-256.0)
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
def softplus(x):
    """log(1 + exp(x)), exact to rounding also where exp(x) is nothing beside 1."""
    power = tl.exp(-tl.abs(x))
    total = 1.0 + power
    # what rounding took from `total` is given back by the quotient
    rest = tl.where(total == 1.0, power, tl.log(total) * (power / (total - 1.0)))
    return tl.maximum(x, 0.0) + rest


@triton.jit
def load_log2_gate(
    g, ptrs, is_valid, bias, rate, lower_bound, FROM_LOGITS: tl.constexpr, IS_BOUNDED: tl.constexpr
):  # fmt: skip
    """Base-2 log-decay of the tile at `ptrs`, 0 where not `is_valid`."""
    x = tl.load(g + ptrs, mask=is_valid, other=0.0).to(tl.float32)
    if FROM_LOGITS:
        if IS_BOUNDED:
            x = bounded_log2_gate(x, bias, rate, lower_bound)
        else:
            x = -LOG2E * rate * softplus(x + bias)
        x = tl.where(is_valid, x, 0.0)
    else:
        x = x * LOG2E
    return tl.where(x < MIN_STEP, MIN_STEP, x)  # keeps nan


@triton.jit
def sum_where(is_term, x, PARTS: tl.constexpr):
    """Sums over t of x[t] where is_term[r, t]: [R, BK] of x [R, BK], cut into bf16 parts.

    Three parts hold all of fp32, two 16 bits.
    """
    ones = tl.where(is_term, 1.0, 0.0).to(tl.bfloat16)
    total = tl.zeros(x.shape, tl.float32)
    for _ in tl.static_range(PARTS - 1):
        part = x.to(tl.bfloat16)
        total = tl.dot(ones, part, total)
        x -= part.to(tl.float32)
    return tl.dot(ones, x.to(tl.bfloat16), total)


@triton.jit
def joins(rows, level):
    """Pairs [R, R], in either order, of rows in two neighbouring blocks of 2^level rows."""
    return ((rows >> level)[:, None] ^ (rows >> level)[None, :]) == 1


@triton.jit
def is_second(rows, level):
    """Rows [R, 1] in the second of two neighbouring blocks of 2^level rows."""
    return ((rows >> level) % 2 == 1)[:, None]


@triton.jit
def lifted(since, until, rows, level):
    """Sums of steps since a row's block began and until it ends, [R, BK], of blocks twice as long.

    Given those of blocks of 2^level rows; `since` has a row's own step, `until` has not.
    """
    last = (((rows >> level) ^ 1) << level) + (1 << level) - 1  # of the other block
    other = tl.gather(since, tl.broadcast_to(last[:, None], since.shape), 0)
    second = is_second(rows, level)
    return since + tl.where(second, other, 0.0), until + tl.where(second, 0.0, other)


@triton.jit
def level_steps(flow, rows, level, PARTS: tl.constexpr):
    """Gradient of the steps [R, BK] from that of a level's exponents.

    A second block's are sums since it began, a first block's sums until it ends.
    """
    is_block = (rows >> level)[:, None] == (rows >> level)[None, :]
    is_from = rows[None, :] >= rows[:, None]
    return sum_where(is_block & (is_from == is_second(rows, level)), flow, PARTS)
