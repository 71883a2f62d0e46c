"""What stands between the grouped products on an NVIDIA GPU, each in one pass.

The gated unit reads pre-activations `[TA, 2F]` once; its backward also applies a pair's weight and
takes that weight's gradient, both where the pair stood unsorted. The combination gathers the rows
of a token's experts and sums them, weighted or not, without a copy in token order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baltoro.ops.moe.shared import Glu
from baltoro.ops.situ.triton import decay, reciprocal, tanh_and_slope
from baltoro.ops.triton import cdiv, enqueue, padded_width

ROWS = 4  # pairs of a program
COLUMNS = 512  # F or Z at once
WARPS = 4


@triton.jit
def glu_parts(
    gate, up, beta, linear_beta,
    IS_SITU: tl.constexpr, IS_CAPPED: tl.constexpr, IS_SQUARE: tl.constexpr, IS_EXACT: tl.constexpr,
):  # fmt: skip
    """Gate factor, its slope, up factor, its slope; see `ops.situ.triton`."""
    if IS_SITU:
        e = decay(gate, 2.0 / beta)
        s = e * e if IS_SQUARE else decay(gate, 1.0)
        capped, slope = tanh_and_slope(gate, e, 1.0 / beta, IS_EXACT)
        sigmoid = tl.where(gate < 0.0, s, 1.0) * reciprocal(1.0 + s, IS_EXACT)
        capped *= beta
        factor = capped * sigmoid
        slope = sigmoid * (slope + capped * (1.0 - sigmoid))
    else:
        sigmoid = tl.sigmoid(gate)
        factor = gate * sigmoid
        slope = sigmoid + factor * (1.0 - sigmoid)
    if IS_CAPPED:
        e = decay(up, 2.0 / linear_beta)
        capped_up, up_slope = tanh_and_slope(up, e, 1.0 / linear_beta, IS_EXACT)
        return factor, slope, linear_beta * capped_up, up_slope
    return factor, slope, up, tl.full(up.shape, 1.0, tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def glu_kernel(
    inner, act, num_rows, beta, linear_beta,
    F: tl.constexpr, IS_SITU: tl.constexpr, IS_CAPPED: tl.constexpr, IS_SQUARE: tl.constexpr,
    IS_EXACT: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """A tile of pairs and columns; grid (pairs, columns)."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    columns = tl.program_id(1) * B + tl.arange(0, B)
    mask = (rows < num_rows)[:, None] & (columns < F)[None, :]
    source = inner + rows[:, None] * (2 * F) + columns[None, :]
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + F, mask=mask, other=0.0).to(tl.float32)
    factor, _, up_factor, _ = glu_parts(
        gate, up, beta, linear_beta, IS_SITU, IS_CAPPED, IS_SQUARE, IS_EXACT
    )
    target = act + rows[:, None] * F + columns[None, :]
    tl.store(target, (factor * up_factor).to(act.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def glu_backward_kernel(
    d_act, inner, weight, pair, d_inner, act, d_weight, num_rows, beta, linear_beta,
    F: tl.constexpr, IS_SITU: tl.constexpr, IS_CAPPED: tl.constexpr, IS_SQUARE: tl.constexpr,
    IS_EXACT: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Pairs over all columns: gradient of `inner`, weighted activation, gradient of the weight."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    is_row = rows < num_rows
    low = inner.dtype.element_ty
    pairs = tl.load(pair + rows, mask=is_row, other=0)
    scale = tl.load(weight + pairs, mask=is_row, other=0.0)
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
            gate, up, beta, linear_beta, IS_SITU, IS_CAPPED, IS_SQUARE, IS_EXACT
        )
        total += tl.sum(d * factor * up_factor, axis=1)
        d *= scale[:, None]
        tl.store(d_inner + source, (d * slope * up_factor).to(low), mask=mask)
        tl.store(d_inner + source + F, (d * factor * up_slope).to(low), mask=mask)
        tl.store(act + single, (scale[:, None] * factor * up_factor).to(low), mask=mask)
    tl.store(d_weight + pairs, total, mask=is_row)


@triton.jit(do_not_specialize=["num_rows"])
def gather_kernel(
    x, other, row, x_out, other_out, num_rows, Z: tl.constexpr, R: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """A tile of rows and columns, of two tensors if there are two; grid (rows, columns)."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    columns = tl.program_id(1) * B + tl.arange(0, B)
    mask = (rows < num_rows)[:, None] & (columns < Z)[None, :]
    source = tl.load(row + rows, mask=rows < num_rows, other=0)
    source = source[:, None] * Z + columns[None, :]
    target = rows[:, None] * Z + columns[None, :]
    value = tl.load(x + source, mask=mask, other=0.0)
    if other is not None:
        tl.store(other_out + target, tl.load(other + source, mask=mask, other=0.0), mask=mask)
    tl.store(x_out + target, value, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
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
        source = tokens * A + a
        if row is not None:
            source = tl.load(row + source, mask=is_token, other=0)
        value = tl.load(values + source[:, None] * Z + columns[None, :], mask=mask, other=0.0)
        value = value.to(tl.float32)
        if IS_WEIGHTED:
            value *= tl.load(weights + tokens * A + a, mask=is_token, other=0.0)[:, None]
        total += value
    target = out + tokens[:, None] * Z + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)


def tile_shape(width: int) -> tuple[int, int]:
    """Rows and columns of the gated unit's tiles, with few columns beyond `width`."""
    block = min((512, 256, 128), key=lambda block: cdiv(width, block) * block)
    return 1024 // block, block


def activate(inner: Tensor, glu: Glu) -> Tensor:
    """Pre-activations `[TA, 2F]` to activations `[TA, F]`."""
    num_rows, width = inner.shape[0], inner.shape[1] // 2
    act = inner.new_empty((num_rows, width))
    rows, block = tile_shape(width)
    if num_rows:
        enqueue(
            glu_kernel, (cdiv(num_rows, rows), cdiv(width, block)),
            inner, act, num_rows, *caps(glu), F=width, **kind(glu, inner.dtype), R=rows, B=block,
            num_warps=WARPS,
        )  # fmt: skip
    return act


def activate_backward(
    d_act: Tensor, inner: Tensor, weight: Tensor, pair: Tensor, glu: Glu
) -> tuple[Tensor, Tensor, Tensor]:
    """From `d_act` `[TA, F]` before weighting: weighted activation, `d_inner` and `d_weight`.

    `weight` and its gradient are `[T, A]`, `pair` their order in the other rows.
    """
    num_rows, width = d_act.shape
    d_inner, act = torch.empty_like(inner), torch.empty_like(d_act)
    d_weight = torch.empty_like(weight)
    rows, block = tile_shape(width)
    if num_rows:
        enqueue(
            glu_backward_kernel, (cdiv(num_rows, rows),),
            d_act, inner, weight, pair, d_inner, act, d_weight, num_rows, *caps(glu), F=width,
            **kind(glu, inner.dtype), R=rows, B=block, num_warps=WARPS,
        )  # fmt: skip
    return act, d_inner, d_weight


def gather(x: Tensor, other: Tensor | None, row: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows `row` `[TA]` of one or two tensors `[T, Z]` of one dtype."""
    num_rows, width = row.shape[0], x.shape[1]
    x_out = x.new_empty((num_rows, width))
    other_out = None
    if other is not None:
        other, other_out = other.contiguous(), torch.empty_like(x_out)
    block = min(COLUMNS, padded_width(width))
    if num_rows:
        enqueue(
            gather_kernel, (cdiv(num_rows, ROWS), cdiv(width, block)),
            x.contiguous(), other, row, x_out, other_out, num_rows, Z=width, R=ROWS, B=block,
            num_warps=WARPS,
        )  # fmt: skip
    return x_out, other_out


def combine(values: Tensor, row: Tensor | None, weights: Tensor, *, is_weighted: bool) -> Tensor:
    """Sum of the rows `row` `[TA]` of `values` `[TA, Z]` for each token, `[T, Z]`; None: in order.

    `weights` `[T, A]` fp32 says how many rows a token has, and weighs them if `is_weighted`.
    """
    (num_tokens, num_active), width = weights.shape, values.shape[1]
    out = values.new_empty((num_tokens, width))
    block = min(COLUMNS, padded_width(width))
    grid = (cdiv(num_tokens, ROWS), cdiv(width, block))
    if num_tokens:
        enqueue(
            combine_kernel, grid,
            values, row, weights, out, num_tokens, A=num_active, Z=width,
            IS_WEIGHTED=is_weighted, R=ROWS, B=block, num_warps=WARPS,
        )  # fmt: skip
    return out


def caps(glu: Glu) -> tuple[float, float]:
    return glu.beta, glu.linear_beta or 1.0


def kind(glu: Glu, dtype: torch.dtype) -> dict[str, bool]:
    is_situ = glu.activation == "situ"
    return {
        "IS_SITU": is_situ, "IS_CAPPED": is_situ and glu.linear_beta is not None,
        "IS_SQUARE": glu.beta == 4.0, "IS_EXACT": dtype == torch.float32,
    }  # fmt: skip
