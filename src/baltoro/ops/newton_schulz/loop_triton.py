"""The Newton-Schulz loop on an NVIDIA GPU for matrices of any size, products in bf16.

    G = X X',   P = b G + c G G,   X <- a X + P X

Sums are fp32 and every matrix is rounded to bf16 once, as in `dense.py`, but what is added to a
product is read with it instead of being copied first, and of the symmetric G and P the tiles on and
below the diagonal are computed and written twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baltoro.ops.newton_schulz.shared import COEFFICIENTS, SQUARE_SIDE
from baltoro.ops.triton import cdiv, enqueue

# of a program: rows, columns, and how much of a row is taken at once
ROWS, COLUMNS, INNER = SQUARE_SIDE, 128, 64
NUM_WARPS, NUM_STAGES = 4, 3


@triton.jit
def product(
    x, y, rows, columns, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, X_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr, Y_STEP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
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
        left = tl.load(x + rows[:, None] * X_STRIDE + k[None, :], mask=x_here, other=0.0)
        right = tl.load(
            y + k[:, None] * Y_STEP + columns[None, :] * Y_STRIDE, mask=y_here, other=0.0
        )
        total = tl.dot(left, right, total)
    return total


@triton.jit
def square_kernel(
    x, out, scale, share,
    R: tl.constexpr, K: tl.constexpr, HAS_SHARE: tl.constexpr, NUM_TILES: tl.constexpr,
    M: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`scale` X X' + `share` X of one matrix X `[R, K]`; the second term for a symmetric one."""
    matrix = (tl.program_id(0) // NUM_TILES).to(tl.int64)
    tile = tl.program_id(0) % NUM_TILES
    # tiles on and below the diagonal, row after row; 2 for 1 under the root, which is not exact
    i = ((tl.sqrt(8.0 * tile.to(tl.float32) + 2.0) - 1.0) * 0.5).to(tl.int32)
    j = tile - i * (i + 1) // 2
    rows = i * M + tl.arange(0, M)
    columns = j * M + tl.arange(0, M)
    x += matrix * (R * K)
    out += matrix * (R * R)
    total = scale * product(x, x, rows, columns, R, R, K, K, K, 1, M, M, B, STAGES)
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
def step_kernel(
    poly, x, out, a,
    R: tl.constexpr, C: tl.constexpr, NUM_TILES: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`a` X + P X of one matrix."""
    across: tl.constexpr = (C + N - 1) // N
    matrix = (tl.program_id(0) // NUM_TILES).to(tl.int64)
    tile = tl.program_id(0) % NUM_TILES
    rows = tile // across * M + tl.arange(0, M)
    columns = tile % across * N + tl.arange(0, N)
    x += matrix * (R * C)
    total = product(
        poly + matrix * (R * R), x, rows, columns, R, C, R, R, 1, C, M, N, B, STAGES
    )  # fmt: skip
    is_here = (rows < R)[:, None] & (columns < C)[None, :]
    at = rows[:, None] * C + columns[None, :]
    total += a * tl.load(x + at, mask=is_here, other=0.0).to(tl.float32)
    tl.store(out + matrix * (R * C) + at, total.to(out.dtype.element_ty), mask=is_here)


def newton_schulz_loop(x_BRC: Tensor, steps: int) -> Tensor:
    """`steps` of contiguous bf16 matrices `[B, R, C]` with R <= C, of norm at most 1.

    Sides that are multiples of 8 are served well.
    """
    a, b, c = COEFFICIENTS
    B, R, C = x_BRC.shape
    across = cdiv(R, ROWS)
    num_squares, num_tiles = across * (across + 1) // 2, across * cdiv(C, COLUMNS)
    gram_BRR, poly_BRR = (x_BRC.new_empty(B, R, R) for _ in range(2))
    sizes = {"M": ROWS, "B": INNER, "STAGES": NUM_STAGES, "num_warps": NUM_WARPS}
    square = {"R": R, "NUM_TILES": num_squares, **sizes}
    rooms = [torch.empty_like(x_BRC) for _ in range(min(2, steps))]
    for step in range(steps):
        out_BRC = rooms[step % 2]
        grid = (B * num_squares,)
        enqueue(square_kernel, grid, x_BRC, gram_BRR, 1.0, 0.0, K=C, HAS_SHARE=False, **square)
        enqueue(square_kernel, grid, gram_BRR, poly_BRR, c, b, K=R, HAS_SHARE=True, **square)
        enqueue(
            step_kernel, (B * num_tiles,), poly_BRR, x_BRC, out_BRC, a, C=C, R=R,
            NUM_TILES=num_tiles, N=COLUMNS, **sizes,
        )  # fmt: skip
        x_BRC = out_BRC
    return x_BRC
