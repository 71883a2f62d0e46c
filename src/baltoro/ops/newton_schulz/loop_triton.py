"""The Newton-Schulz loop on an NVIDIA GPU, for matrices of any size in bf16 and in one launch.

    G = X X',   P = b G + c G G,   X <- a X + P X

Sums are fp32 and every matrix is rounded to bf16 once, as in `dense.py`, but what is added to a
product is read with it instead of being copied first, and of the symmetric G and P the tiles on and
below the diagonal are computed and written twice.

Launched one after another the products of many matrices go through memory, and those of a few fill
no GPU. So programs take tiles from one list: all steps of a few matrices, which the cache holds,
then those of the next few. A tile waits until the tiles that it reads are counted as done. These
stand before it in the list and were taken by programs that run, so the wait ends however many
programs run at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baltoro.ops.newton_schulz.shared import COEFFICIENTS, SQUARE_SIDE
from baltoro.ops.triton import cdiv, enqueue

# the fastest of those timed on an H200
ROWS, COLUMNS, INNER = SQUARE_SIDE, 128, 64  # of a tile, and how much of a row is taken at once
NUM_WARPS, NUM_STAGES = 4, 3
PROGRAMS = 264  # two for each multiprocessor of an H200
CACHE_BYTES = 56 * 2**20  # of it, which X twice, G and P of a few matrices may take
GRAM, POLY, STEP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # counters of a matrix


@triton.jit
def product(
    x, y, rows, columns, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    Y_STEP: tl.constexpr, Y_STRIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """fp32 `[M, N]` of `x` `[R, K]` and `y` `[K, C]`, whose element (k, c) is at k Y_STEP +
    c Y_STRIDE."""
    inner = tl.arange(0, B)
    total = tl.zeros([M, N], tl.float32)
    for start in tl.range(0, K, B, num_stages=STAGES):
        k = start + inner
        x_here = (rows < R)[:, None] & (k < K)[None, :]
        y_here = (k < K)[:, None] & (columns < C)[None, :]
        left = tl.load(x + rows[:, None] * K + k[None, :], mask=x_here, other=0.0)
        right = tl.load(
            y + k[:, None] * Y_STEP + columns[None, :] * Y_STRIDE, mask=y_here, other=0.0
        )
        total = tl.dot(left, right, total)
    return total


@triton.jit
def square_tile(
    x, out, tile, scale, share, R: tl.constexpr, K: tl.constexpr, HAS_SHARE: tl.constexpr,
    M: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of `scale` X X' + `share` X, X `[R, K]`; with the second term X is symmetric."""
    # tiles on and below the diagonal, row after row; 2 for 1 under the root, which is not exact
    i = ((tl.sqrt(8.0 * tile.to(tl.float32) + 2.0) - 1.0) * 0.5).to(tl.int32)
    j = tile - i * (i + 1) // 2
    rows = i * M + tl.arange(0, M)
    columns = j * M + tl.arange(0, M)
    total = scale * product(x, x, rows, columns, R, R, K, 1, K, M, M, B, STAGES)
    is_here = (rows < R)[:, None] & (columns < R)[None, :]
    at = rows[:, None] * R + columns[None, :]
    if HAS_SHARE:
        total += share * tl.load(x + at, mask=is_here, other=0.0).to(tl.float32)
    low = total.to(out.dtype.element_ty)
    tl.store(out + at, low, mask=is_here)
    if i != j:
        is_there = (columns < R)[:, None] & (rows < R)[None, :]
        tl.store(out + columns[:, None] * R + rows[None, :], tl.trans(low), mask=is_there)


@triton.jit
def step_tile(
    poly, x, out, tile, a, R: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of `a` X + P X."""
    across: tl.constexpr = (C + N - 1) // N
    rows = tile // across * M + tl.arange(0, M)
    columns = tile % across * N + tl.arange(0, N)
    total = product(poly, x, rows, columns, R, C, R, C, 1, M, N, B, STAGES)
    is_here = (rows < R)[:, None] & (columns < C)[None, :]
    at = rows[:, None] * C + columns[None, :]
    total += a * tl.load(x + at, mask=is_here, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=is_here)


@triton.jit
def wait(counter, needed):
    """Until `needed` tiles are counted."""
    seen = tl.atomic_add(counter, 0, sem="acquire")
    while seen < needed:
        seen = tl.atomic_add(counter, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit(do_not_specialize=["num_matrices", "steps", "group"])
def loop_kernel(
    x, even, odd, gram, poly, counters, num_matrices, steps, group, a, b, c,
    R: tl.constexpr, C: tl.constexpr, SQUARES: tl.constexpr, TILES: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles as long as there are any; step i writes `even` or `odd`, which the next one reads."""
    per_step: tl.constexpr = 2 * SQUARES + TILES
    total = num_matrices * steps * per_step
    taken = tl.atomic_add(counters, 1)
    while taken < total:
        # groups, in a group steps, in a step the three products, in a product matrices
        first = taken // (group * steps * per_step) * group
        count = tl.minimum(group, num_matrices - first)
        rest = taken - first * steps * per_step
        step = rest // (count * per_step)
        rest -= step * count * per_step
        squares = count * SQUARES
        if rest < 2 * squares:
            at = rest % squares
            matrix = (first + at // SQUARES).to(tl.int64)
            tile = at % SQUARES
            own = counters + 1 + matrix * 3
            gram_of = gram + matrix * (R * R)
            if rest < squares:
                wait(own + STEP, step * TILES)
                source = x
                if step > 0:
                    source = even if step % 2 == 1 else odd
                square_tile(
                    source + matrix * (R * C), gram_of, tile, 1.0, 0.0, R, C, False, M, B, STAGES
                )
                done = own + GRAM
            else:
                wait(own + GRAM, (step + 1) * SQUARES)
                square_tile(gram_of, poly + matrix * (R * R), tile, c, b, R, R, True, M, B, STAGES)
                done = own + POLY
        else:
            at = rest - 2 * squares
            matrix = (first + at // TILES).to(tl.int64)
            own = counters + 1 + matrix * 3
            wait(own + POLY, (step + 1) * SQUARES)
            source = x
            if step > 0:
                source = even if step % 2 == 1 else odd
            target = even if step % 2 == 0 else odd
            step_tile(
                poly + matrix * (R * R), source + matrix * (R * C), target + matrix * (R * C),
                at % TILES, a, R, C, M, N, B, STAGES,
            )  # fmt: skip
            done = own + STEP
        tl.debug_barrier()
        tl.atomic_add(done, 1, sem="release")
        taken = tl.atomic_add(counters, 1)


def newton_schulz_loop(x_BRC: Tensor, steps: int) -> Tensor:
    """`steps` of contiguous bf16 matrices `[B, R, C]` with R <= C, of norm at most 1.

    Sides that are multiples of 8 are served well.
    """
    B, R, C = x_BRC.shape
    across = cdiv(R, ROWS)
    gram_BRR, poly_BRR = (x_BRC.new_empty(B, R, R) for _ in range(2))
    even_BRC, odd_BRC = (torch.empty_like(x_BRC) for _ in range(2))
    counters = torch.zeros(1 + 3 * B, dtype=torch.int32, device=x_BRC.device)
    num_groups = max(1, B * 2 * R * (R + C) * x_BRC.itemsize // CACHE_BYTES)
    group = cdiv(B, num_groups)
    squares, tiles = across * (across + 1) // 2, across * cdiv(C, COLUMNS)
    enqueue(
        loop_kernel, (min(PROGRAMS, B * tiles),), x_BRC, even_BRC, odd_BRC, gram_BRR, poly_BRR,
        counters, B, steps, group, *COEFFICIENTS, R=R, C=C, SQUARES=squares, TILES=tiles,
        M=ROWS, N=COLUMNS, B=INNER, STAGES=NUM_STAGES, num_warps=NUM_WARPS,
    )  # fmt: skip
    return even_BRC if steps % 2 == 1 else odd_BRC
