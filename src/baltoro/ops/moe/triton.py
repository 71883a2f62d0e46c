"""What stands between the grouped products on an NVIDIA GPU, each in one pass.

The gated unit reads pre-activations `[TA, 2F]` once; its backward also applies a pair's weight and
takes that weight's gradient. The combination gathers the rows of a token's experts and sums them,
weighted or not, without a copy in token order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baltoro.ops.moe.shared import Glu
from baltoro.ops.triton import refuse_unserved

__all__ = ["activate", "activate_backward", "combine", "refuse_unserved"]

ROWS = 4  # pairs of a program
COLUMNS = 512  # F or Z at once
WARPS = 4


@triton.jit
def tanh(x):
    """exp(-2 |x|) cannot overflow; below .05 its difference from one would cancel."""
    decayed = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - decayed) / (1.0 + decayed)
    square = x * x
    small = tl.abs(x) * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
    size = tl.where(tl.abs(x) < 0.05, small, large)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def glu_parts(gate, up, beta, linear_beta, IS_SITU: tl.constexpr, IS_CAPPED: tl.constexpr):
    """Gate factor, its slope, up factor, its slope."""
    sigmoid = tl.sigmoid(gate)
    if IS_SITU:
        capped = tanh(gate / beta)
        factor = beta * capped * sigmoid
        slope = (1.0 - capped * capped) * sigmoid + factor * (1.0 - sigmoid)
    else:
        factor = gate * sigmoid
        slope = sigmoid + factor * (1.0 - sigmoid)
    if IS_CAPPED:
        capped_up = tanh(up / linear_beta)
        return factor, slope, linear_beta * capped_up, 1.0 - capped_up * capped_up
    return factor, slope, up, tl.full(up.shape, 1.0, tl.float32)


@triton.jit
def glu_kernel(
    inner, act, num_rows, beta, linear_beta,
    F: tl.constexpr, IS_SITU: tl.constexpr, IS_CAPPED: tl.constexpr,
    R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """A tile of pairs and columns; grid (pairs, columns)."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    columns = tl.program_id(1) * B + tl.arange(0, B)
    mask = (rows < num_rows)[:, None] & (columns < F)[None, :]
    source = inner + rows[:, None] * (2 * F) + columns[None, :]
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + F, mask=mask, other=0.0).to(tl.float32)
    factor, _, up_factor, _ = glu_parts(gate, up, beta, linear_beta, IS_SITU, IS_CAPPED)
    target = act + rows[:, None] * F + columns[None, :]
    tl.store(target, (factor * up_factor).to(act.dtype.element_ty), mask=mask)


@triton.jit
def glu_backward_kernel(
    d_act, inner, weight, d_inner, act, d_weight, num_rows, beta, linear_beta,
    F: tl.constexpr, IS_SITU: tl.constexpr, IS_CAPPED: tl.constexpr,
    R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Pairs over all columns: gradient of `inner`, weighted activation, gradient of the weight."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    is_row = rows < num_rows
    low = inner.dtype.element_ty
    scale = tl.load(weight + rows, mask=is_row, other=0.0)
    total = tl.zeros([R], tl.float32)
    for start in tl.range(0, F, B):
        columns = start + tl.arange(0, B)
        mask = is_row[:, None] & (columns < F)[None, :]
        source = rows[:, None] * (2 * F) + columns[None, :]
        single = rows[:, None] * F + columns[None, :]
        gate = tl.load(inner + source, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(inner + source + F, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(d_act + single, mask=mask, other=0.0).to(tl.float32)
        factor, slope, up_factor, up_slope = glu_parts(
            gate, up, beta, linear_beta, IS_SITU, IS_CAPPED
        )
        total += tl.sum(d * factor * up_factor, axis=1)
        d *= scale[:, None]
        tl.store(d_inner + source, (d * slope * up_factor).to(low), mask=mask)
        tl.store(d_inner + source + F, (d * factor * up_slope).to(low), mask=mask)
        tl.store(act + single, (scale[:, None] * factor * up_factor).to(low), mask=mask)
    tl.store(d_weight + rows, total, mask=is_row)


@triton.jit
def combine_kernel(
    values, row, weights, out, num_tokens,
    A: tl.constexpr, Z: tl.constexpr, IS_WEIGHTED: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """A tile of tokens and columns; grid (tokens, columns)."""
    tokens = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    columns = tl.program_id(1) * B + tl.arange(0, B)
    is_token = tokens < num_tokens
    mask = is_token[:, None] & (columns < Z)[None, :]
    total = tl.zeros([R, B], tl.float32)
    for a in tl.static_range(A):
        source = tl.load(row + tokens * A + a, mask=is_token, other=0)
        value = tl.load(values + source[:, None] * Z + columns[None, :], mask=mask, other=0.0)
        value = value.to(tl.float32)
        if IS_WEIGHTED:
            value *= tl.load(weights + tokens * A + a, mask=is_token, other=0.0)[:, None]
        total += value
    target = out + tokens[:, None] * Z + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)


def activate(inner: Tensor, glu: Glu) -> Tensor:
    """Pre-activations `[TA, 2F]` to activations `[TA, F]`."""
    num_rows, width = inner.shape[0], inner.shape[1] // 2
    act = inner.new_empty((num_rows, width))
    block = min(COLUMNS, triton.next_power_of_2(width))
    grid = (triton.cdiv(num_rows, ROWS), triton.cdiv(width, block))
    if num_rows:
        glu_kernel[grid](
            inner, act, num_rows, *_caps(glu), F=width, **_kind(glu), R=ROWS, B=block,
            num_warps=WARPS,
        )  # fmt: skip
    return act


def activate_backward(
    d_act: Tensor, inner: Tensor, weight: Tensor, glu: Glu
) -> tuple[Tensor, Tensor, Tensor]:
    """From `d_act` `[TA, F]` before weighting: weighted activation, `d_inner` and `d_weight`."""
    num_rows, width = d_act.shape
    d_inner, act = torch.empty_like(inner), torch.empty_like(d_act)
    d_weight = torch.empty_like(weight)
    block = min(COLUMNS, triton.next_power_of_2(width))
    if num_rows:
        glu_backward_kernel[(triton.cdiv(num_rows, ROWS),)](
            d_act, inner, weight, d_inner, act, d_weight, num_rows, *_caps(glu), F=width,
            **_kind(glu), R=ROWS, B=block, num_warps=WARPS,
        )  # fmt: skip
    return act, d_inner, d_weight


def combine(values: Tensor, row: Tensor, weights: Tensor, *, is_weighted: bool) -> Tensor:
    """Sum of the rows `row` `[TA]` of `values` `[TA, Z]` for each token, `[T, Z]`.

    `weights` `[T, A]` fp32 says how many rows a token has, and weighs them if `is_weighted`.
    """
    (num_tokens, num_active), width = weights.shape, values.shape[1]
    out = values.new_empty((num_tokens, width))
    block = min(COLUMNS, triton.next_power_of_2(width))
    grid = (triton.cdiv(num_tokens, ROWS), triton.cdiv(width, block))
    if num_tokens:
        combine_kernel[grid](
            values, row, weights, out, num_tokens, A=num_active, Z=width,
            IS_WEIGHTED=is_weighted, R=ROWS, B=block, num_warps=WARPS,
        )  # fmt: skip
    return out


def _caps(glu: Glu) -> tuple[float, float]:
    return glu.beta, glu.linear_beta or 1.0


def _kind(glu: Glu) -> dict[str, bool]:
    is_situ = glu.activation == "situ"
    return {"IS_SITU": is_situ, "IS_CAPPED": is_situ and glu.linear_beta is not None}
