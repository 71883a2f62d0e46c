"""Newton-Schulz on an NVIDIA GPU, of many short, wide matrices in Gram form with bf16 products.

`dense.py` has the algebra. Three kernels: parts of G = X X', all steps for one matrix in one
program, X <- F X. X is rounded to bf16, whose products in fp32 make G exact up to its sums; on the
short side every number is a pair of bf16, high and low, and a product is three of theirs, so that
what falls below zero starts near 1e-6. F is applied as a pair too: its entries reach a^5 = 485
where singular values are small, and a rounding of those would be seen in the large ones.

Bytes: X is read twice and written once, and rounded before where it is fp32. Operations: 2 r^2 c
for G, 4 r^2 c for F X, and 3 * 2 r^3 for each of the 4 products of a step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from baltoro.ops.impl import ImplError
from baltoro.ops.launch_table import launch
from baltoro.ops.newton_schulz.loop_triton import newton_schulz_loop
from baltoro.ops.newton_schulz.shared import (
    COEFFICIENTS,
    MAX_GRAM_STEPS,
    NORM_EPS,
    as_wide,
    normed,
)
from baltoro.ops.triton import cdiv, padded_width, refuse_unserved

MAX_ROWS = 128  # of the shorter side: a program holds its square on chip
MIN_TILE = 16


@triton.jit
def split(x):
    """x as a sum of two bf16."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def product(x_high, x_low, y_high, y_low):
    return tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high)))


@triton.jit
def columns_of(num_columns, columns_per_part):
    """First and last of the columns of this program."""
    first = tl.program_id(1) * columns_per_part
    return first, tl.minimum(first + columns_per_part, num_columns)


@triton.jit
def gram_kernel(
    x, parts, num_columns, columns_per_part,
    R: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The part of X X' that a range of columns makes."""
    matrix = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, BR)
    x += matrix * R * num_columns
    first, last = columns_of(num_columns, columns_per_part)
    gram = tl.zeros([BR, BR], tl.float32)
    for start in tl.range(first, last, BC, num_stages=NUM_STAGES):
        columns = start + tl.arange(0, BC)
        is_here = (rows < R)[:, None] & (columns < num_columns)[None, :]
        at = rows[:, None] * num_columns + columns[None, :]
        tile = tl.load(x + at, mask=is_here, other=0.0)
        gram = tl.dot(tile, tl.trans(tile), gram)
    part = matrix * tl.num_programs(1) + tl.program_id(1)
    tl.store(parts + part * (BR * BR) + rows[:, None] * BR + rows[None, :], gram)


@triton.jit(do_not_specialize=["num_parts", "steps"])
def factor_kernel(
    parts, factors, num_parts, steps, a, b, c, eps, BR: tl.constexpr, IS_NORMED: tl.constexpr
):
    """The factor that takes one matrix through all steps, as a pair of bf16.

    It stays in memory, since the square of the Gram matrix leaves no registers for it.
    """
    matrix = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, BR)
    is_diagonal = rows[:, None] == rows[None, :]
    place = rows[:, None] * BR + rows[None, :]
    gram = tl.zeros([BR, BR], tl.float32)
    for part in range(num_parts):
        gram += tl.load(parts + (matrix * num_parts + part) * (BR * BR) + place)
    inverse = 1.0
    if not IS_NORMED:
        inverse = 1.0 / (tl.sqrt(tl.sum(tl.where(is_diagonal, gram, 0.0))) + eps)
    g_high, g_low = split(gram * inverse * inverse)
    f_high, f_low = split(tl.where(is_diagonal, inverse, 0.0))
    at_high = factors + matrix * (2 * BR * BR) + place
    at_low = at_high + BR * BR
    tl.store(at_high, f_high)
    tl.store(at_low, f_low)
    for _ in tl.range(0, steps, num_stages=1):  # a load ahead would miss the store of its step
        poly = c * product(g_high, g_low, g_high, g_low)
        poly += b * (g_high.to(tl.float32) + g_low.to(tl.float32)) + tl.where(is_diagonal, a, 0.0)
        p_high, p_low = split(poly)
        tl.debug_barrier()
        f_high, f_low = split(product(tl.load(at_high), tl.load(at_low), p_high, p_low))
        tl.debug_barrier()
        tl.store(at_high, f_high)
        tl.store(at_low, f_low)
        # of no use after the last step, but a condition costs registers
        h_high, h_low = split(product(g_high, g_low, p_high, p_low))
        g_high, g_low = split(product(h_high, h_low, p_high, p_low))


@triton.jit
def apply_kernel(
    x, factors, out, num_columns, columns_per_part,
    R: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """F X for a range of columns."""
    matrix = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, BR)
    at_factor = factors + matrix * (2 * BR * BR) + rows[:, None] * BR + rows[None, :]
    f_high = tl.load(at_factor)
    f_low = tl.load(at_factor + BR * BR)
    x += matrix * R * num_columns
    out += matrix * R * num_columns
    first, last = columns_of(num_columns, columns_per_part)
    for start in tl.range(first, last, BC, num_stages=NUM_STAGES):
        columns = start + tl.arange(0, BC)
        is_here = (rows < R)[:, None] & (columns < num_columns)[None, :]
        at = rows[:, None] * num_columns + columns[None, :]
        tile = tl.load(x + at, mask=is_here, other=0.0)
        y = tl.dot(f_high, tile, tl.dot(f_low, tile))
        tl.store(out + at, y.to(out.dtype.element_ty), mask=is_here)


def newton_schulz(x_BRC: Tensor, steps: int, compute_dtype: torch.dtype, is_normed: bool) -> Tensor:
    """`[B, R, C]` matrices to their orthogonal factors, by the loop beyond `MAX_ROWS`.

    A tall matrix is copied to a wide one and back.
    """
    refuse_unserved("newton_schulz", x_BRC)
    if compute_dtype is not torch.bfloat16:
        raise ImplError(f"newton_schulz: impl='triton' serves bfloat16, not {compute_dtype}")
    y_BRC = as_wide(x_BRC).contiguous()
    if y_BRC.shape[1] > MAX_ROWS:
        y_BRC = y_BRC if is_normed else normed(y_BRC, torch.float32)
        R, C = y_BRC.shape[1:]
        y_BRC = y_BRC.to(torch.bfloat16)
        if R % 8 or C % 8:  # tiles are copied ahead from addresses of 16 bytes only
            y_BRC = pad(y_BRC, (0, -C % 8, 0, -R % 8))
        y_BRC = newton_schulz_loop(y_BRC, steps)[:, :R, :C].to(x_BRC.dtype).contiguous()
        return y_BRC if y_BRC.shape == x_BRC.shape else y_BRC.mT.contiguous()
    for first in range(0, steps, MAX_GRAM_STEPS):
        # not rounded in the kernel: with operands in registers ptxas of CUDA 12.8 loses addresses
        rounded_BRC = y_BRC.to(torch.bfloat16)
        y_BRC = torch.empty_like(y_BRC)
        count = min(MAX_GRAM_STEPS, steps - first)
        _steps(rounded_BRC, y_BRC, count, is_normed=is_normed or first > 0)
    return y_BRC if y_BRC.shape == x_BRC.shape else y_BRC.mT.contiguous()


def _steps(x_BRC: Tensor, out_BRC: Tensor, steps: int, *, is_normed: bool) -> None:
    """Write what `steps` steps, `MAX_GRAM_STEPS` at most, make of wide, contiguous matrices."""
    B, R, C = x_BRC.shape
    BR = max(MIN_TILE, padded_width(R))
    # a class is a padded number of rows; `part`, columns of a program, is the same for any stack,
    # so that a matrix gets the same bits in every one
    gram, factor, apply = (
        launch(f"newton_schulz_{name}", f"r{BR}", x_BRC.device)
        for name in ("gram", "factor", "apply")
    )
    num_parts = cdiv(C, gram["part"])
    parts = x_BRC.new_empty(B, num_parts, BR, BR, dtype=torch.float32)
    gram_kernel[(B, num_parts)](
        x_BRC, parts, C, gram["part"], R=R, BR=BR, BC=gram["columns"],
        NUM_STAGES=gram["num_stages"], num_warps=gram["num_warps"],
    )  # fmt: skip
    factors = x_BRC.new_empty(B, 2, BR, BR, dtype=torch.bfloat16)
    factor_kernel[(B,)](
        parts, factors, num_parts, steps, *COEFFICIENTS, NORM_EPS, BR=BR, IS_NORMED=is_normed,
        num_warps=factor["num_warps"],
    )  # fmt: skip
    apply_kernel[(B, cdiv(C, apply["part"]))](
        x_BRC, factors, out_BRC, C, apply["part"], R=R, BR=BR, BC=apply["columns"],
        NUM_STAGES=apply["num_stages"], num_warps=apply["num_warps"],
    )  # fmt: skip
