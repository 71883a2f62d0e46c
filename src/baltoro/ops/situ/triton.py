"""The gated linear units on an NVIDIA GPU, each way in one pass.

    y = b tanh(g / b) sigmoid(g) * c tanh(u / c)

The three maps are fractions over 1 + e with e = exp(-2 |g| / b), exp(-|g|), exp(-2 |u| / c), all in
(0, 1]: nothing overflows; for b = 4 the second is the first squared. The kernels wait for their
instructions more than for memory, so the forward pass takes one reciprocal for all three, and signs
are set by their bit. Near 0 the tanh of fp32 inputs is a polynomial; for bf16 the 6e-8 lost in
1 - e, and the few in a root for a reciprocal, are far below a rounding. Programs that run at once
take neighbouring pieces of a row: what they read and write together lies together in memory.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..derivatives import no_second_derivatives
from ..launch_table import Launch, derived, dtype_class, launch
from ..triton import (
    as_operator,
    cdiv,
    enqueue,
    record,
    refuse_unserved,
    rows_of,
    unfilled_like,
)

LOG2E = tl.constexpr(1.4426950408889634)
SIGN = tl.constexpr(-(2**31))


@triton.jit
def decay(x, rate):
    """exp(-rate |x|)."""
    return tl.exp2(tl.abs(x) * (-LOG2E * rate))


@triton.jit
def with_sign(x, signs):
    """x >= 0 with the first of the bits `signs`."""
    bits = x.to(tl.int32, bitcast=True) | (signs & SIGN)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(x, IS_EXACT: tl.constexpr):
    """1 / x; for x in [1, 8] and not `IS_EXACT` in two instructions, off by 3e-7 of it."""
    if IS_EXACT:
        inverse = 1.0 / x
    else:
        root = tl.rsqrt(x)
        inverse = root * root
    return inverse


@triton.jit
def tanh_and_slope(x, e, inverse_beta, IS_EXACT: tl.constexpr):
    """y = tanh(x / beta) and 1 - y^2, where e = exp(-2 |x| / beta)."""
    inverse = reciprocal(1.0 + e, IS_EXACT)
    y = with_sign(inverse - e * inverse, x.to(tl.int32, bitcast=True))
    slope = 1.0 - y * y
    if IS_EXACT:
        slope = 4.0 * e * inverse * inverse
        small = x * inverse_beta
        z = small * small
        # Taylor to the 13th power: off by 4e-9 of the value at 0.4
        p = -0.00886323552990220 + z * 0.00359212803657248
        p = 0.0218694885361552 + z * p
        p = -0.0539682539682540 + z * p
        p = 0.133333333333333 + z * p
        p = -0.333333333333333 + z * p
        y = tl.where(z < 0.16, small + small * z * p, y)
    return y, slope


@triton.jit
def place_of(width, BLOCK: tl.constexpr):
    """Row (int64), columns and mask of this program's piece of a row; neighbours are of one row."""
    num_pieces = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // num_pieces).to(tl.int64)
    first = (tl.program_id(0) % num_pieces).to(tl.int64) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    return row, columns, columns < width


@triton.jit
def situ_forward_kernel(
    gate, up, out, width, gate_stride, up_stride, out_stride, beta, linear_beta,
    BLOCK: tl.constexpr, IS_CAPPED: tl.constexpr, IS_EXACT: tl.constexpr, IS_SQUARE: tl.constexpr,
):  # fmt: skip
    row, columns, is_here = place_of(width, BLOCK)
    g = tl.load(gate + row * gate_stride + columns, mask=is_here, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=is_here, other=0.0).to(tl.float32)
    e = decay(g, 2.0 / beta)
    s = e * e if IS_SQUARE else decay(g, 1.0)
    if IS_EXACT:
        tanh, _ = tanh_and_slope(g, e, 1.0 / beta, IS_EXACT)
        y = beta * tanh * tl.where(g < 0.0, s, 1.0) / (1.0 + s)
        if IS_CAPPED:
            f = decay(u, 2.0 / linear_beta)
            tanh_up, _ = tanh_and_slope(u, f, 1.0 / linear_beta, IS_EXACT)
            y *= linear_beta * tanh_up
        else:
            y *= u
    else:
        signs = g.to(tl.int32, bitcast=True)
        scale = beta * linear_beta if IS_CAPPED else beta
        over = 1.0 + e
        over += over * s
        y = scale - scale * e
        if IS_CAPPED:
            f = decay(u, 2.0 / linear_beta)
            over += over * f
            y -= y * f
            signs ^= u.to(tl.int32, bitcast=True)
        y *= tl.where(g < 0.0, s, 1.0)
        y = with_sign(y * reciprocal(over, IS_EXACT), signs)
        if not IS_CAPPED:
            y *= u
    tl.store(out + row * out_stride + columns, y.to(out.dtype.element_ty), mask=is_here)


@triton.jit
def situ_backward_kernel(
    gate, up, d_out, d_gate, d_up, width, gate_stride, up_stride, d_out_stride, out_stride,
    beta, linear_beta,
    BLOCK: tl.constexpr, IS_CAPPED: tl.constexpr, IS_EXACT: tl.constexpr, IS_SQUARE: tl.constexpr,
):  # fmt: skip
    row, columns, is_here = place_of(width, BLOCK)
    g = tl.load(gate + row * gate_stride + columns, mask=is_here, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=is_here, other=0.0).to(tl.float32)
    dy = tl.load(d_out + row * d_out_stride + columns, mask=is_here, other=0.0).to(tl.float32)
    e = decay(g, 2.0 / beta)
    s = e * e if IS_SQUARE else decay(g, 1.0)
    tanh, slope = tanh_and_slope(g, e, 1.0 / beta, IS_EXACT)
    inverse = reciprocal(1.0 + s, IS_EXACT)
    sigmoid = tl.where(g < 0.0, s, 1.0) * inverse
    # 1 - sigmoid
    rest = tl.where(g < 0.0, 1.0, s) * inverse if IS_EXACT else 1.0 - sigmoid
    tanh *= beta
    capped_gate = tanh * sigmoid
    if IS_CAPPED:
        f = decay(u, 2.0 / linear_beta)
        tanh_up, slope_up = tanh_and_slope(u, f, 1.0 / linear_beta, IS_EXACT)
        capped_up = linear_beta * tanh_up
        d_u = dy * capped_gate * slope_up
    else:
        capped_up = u
        d_u = dy * capped_gate
    d_g = dy * capped_up * (sigmoid * (slope + tanh * rest))
    place = row * out_stride + columns
    tl.store(d_gate + place, d_g.to(d_gate.dtype.element_ty), mask=is_here)
    tl.store(d_up + place, d_u.to(d_up.dtype.element_ty), mask=is_here)


@derived
def launch_of(way: str, dtype: torch.dtype, device: torch.device) -> Launch:
    """Numbers of a program and its warps. A class is a dtype."""
    return launch(f"situ_glu_{way}", dtype_class(dtype), device)


def _launch(
    kernel: Any, way: str, inputs: Sequence[Tensor], results: Sequence[Tensor], beta: float,
    linear_beta: float | None,
) -> None:  # fmt: skip
    """`kernel` over inputs of one shape and contiguous results: in rows, or in one long row."""
    dtype = results[0].dtype
    shape = launch_of(way, dtype, results[0].device)
    if all(map(Tensor.is_contiguous, inputs)):
        num_rows, width = 1, results[0].numel()
        strides = [0] * (len(inputs) + 1)  # the most aligned
    else:
        inputs = [rows_of(x) for x in inputs]
        num_rows, width = inputs[0].shape
        strides = [*[x.stride(0) for x in inputs], width]
    if num_rows * width == 0:
        return
    enqueue(
        kernel, (num_rows * cdiv(width, shape["block"]),),
        *inputs, *results, width, *strides, beta, 0.0 if linear_beta is None else linear_beta,
        BLOCK=shape["block"], IS_CAPPED=linear_beta is not None,
        IS_EXACT=dtype is torch.float32, IS_SQUARE=beta == 4.0, num_warps=shape["num_warps"],
    )  # fmt: skip


def _forward(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    out = unfilled_like(gate)
    _launch(situ_forward_kernel, "forward", (gate, up), (out,), beta, linear_beta)
    return out


def _forward_outputs(gate, up, beta, linear_beta):
    return unfilled_like(gate)


_forward_operator = as_operator("situ_glu_forward", _forward, _forward_outputs)


def _backward(
    d_out: Tensor, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None
) -> tuple[Tensor, Tensor]:
    d_gate, d_up = grads = _gradients(d_out, gate, up, beta, linear_beta)
    _launch(situ_backward_kernel, "backward", (gate, up, d_out), (d_gate, d_up), beta, linear_beta)
    return grads


def _gradients(
    d_out: Tensor, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None
) -> tuple[Tensor, Tensor]:
    """Unfilled gradients of gate and up."""
    return unfilled_like(gate), unfilled_like(up)


_backward_operator = as_operator("situ_glu_backward", _backward, _gradients)


class _SituGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, beta, linear_beta):
        ctx.save_for_backward(gate, up)
        ctx.betas = (beta, linear_beta)
        return _forward_operator(gate, up, beta, linear_beta)

    @staticmethod
    @no_second_derivatives("situ_glu: impl='triton'")
    def backward(ctx, saved, d_out):
        return *_backward_operator(d_out, *saved, *ctx.betas), None, None


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """`baltoro.ops.situ.situ_glu`, whose checks have passed."""
    refuse_unserved("situ_glu", gate, up)
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return record(_SituGlu, gate, up, beta, linear_beta)
    return _forward_operator(gate, up, beta, linear_beta)
