"""The gated linear unit on an NVIDIA GPU, each way in one pass.

    y = b tanh(g / b) sigmoid(g) * c tanh(u / c)

The three maps are fractions over 1 + e with e = exp(-2 |g| / b), exp(-|g|), exp(-2 |u| / c), all in
(0, 1], so that nothing overflows; for b = 4 the second is the first squared. The kernels wait for
arithmetic as much as for memory, hence the few operations. Near 0 the tanh of fp32 inputs is a
polynomial; for bf16 the 6e-8 that are lost in 1 - e are far below a rounding.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton import as_operator, cdiv, reciprocal, refuse_unserved, rows_of

LOG2E = tl.constexpr(1.4426950408889634)
FLAT_BLOCK, FLAT_WARPS = 2048, 4
ROW_BLOCK, ROW_WARPS = 1024, 2


@triton.jit
def decay(x, rate):
    """exp(-rate |x|)."""
    return tl.exp2(tl.abs(x) * (-LOG2E * rate))


@triton.jit
def with_sign_of(x, y):
    """x >= 0 with the sign of y."""
    sign = y.to(tl.int32, bitcast=True) & -2147483648
    return (x.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def capped(x, e, inverse_beta, IS_EXACT: tl.constexpr):
    """y = tanh(x / beta) and 1 - y^2, where e = exp(-2 |x| / beta)."""
    inverse = 1.0 / (1.0 + e) if IS_EXACT else reciprocal(1.0 + e)
    y = with_sign_of((1.0 - e) * inverse, x)
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
def gate_parts(g, beta, IS_EXACT: tl.constexpr, IS_SQUARE: tl.constexpr):
    """y = tanh(g / beta) and 1 - y^2, s = sigmoid(g) and 1 - s."""
    e = decay(g, 2.0 / beta)
    y, slope = capped(g, e, 1.0 / beta, IS_EXACT)
    e = e * e if IS_SQUARE else decay(g, 1.0)
    inverse = 1.0 / (1.0 + e) if IS_EXACT else reciprocal(1.0 + e)
    s = tl.where(g < 0.0, e, 1.0) * inverse
    rest = tl.where(g < 0.0, 1.0, e) * inverse if IS_EXACT else 1.0 - s
    return y, slope, s, rest


@triton.jit
def place_of(width, BLOCK: tl.constexpr, IS_FLAT: tl.constexpr):
    """Row (int64), columns and mask of this program's piece of a row."""
    row = tl.program_id(1 if IS_FLAT else 0).to(tl.int64)
    first = tl.program_id(0 if IS_FLAT else 1).to(tl.int64) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    return row, columns, columns < width


@triton.jit
def forward_kernel(
    gate, up, out, width, gate_stride, up_stride, out_stride, beta, linear_beta,
    BLOCK: tl.constexpr, IS_FLAT: tl.constexpr, IS_CAPPED: tl.constexpr, IS_EXACT: tl.constexpr,
    IS_SQUARE: tl.constexpr,
):  # fmt: skip
    row, columns, is_here = place_of(width, BLOCK, IS_FLAT)
    g = tl.load(gate + row * gate_stride + columns, mask=is_here, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=is_here, other=0.0).to(tl.float32)
    tanh, _, sigmoid, _ = gate_parts(g, beta, IS_EXACT, IS_SQUARE)
    if IS_CAPPED:
        tanh_up, _ = capped(u, decay(u, 2.0 / linear_beta), 1.0 / linear_beta, IS_EXACT)
        y = tanh * sigmoid * tanh_up * (beta * linear_beta)
    else:
        y = tanh * sigmoid * u * beta
    tl.store(out + row * out_stride + columns, y.to(out.dtype.element_ty), mask=is_here)


@triton.jit
def backward_kernel(
    gate, up, d_out, out, d_gate, d_up, width, gate_stride, up_stride, d_out_stride, out_stride,
    beta, linear_beta,
    BLOCK: tl.constexpr, IS_FLAT: tl.constexpr, IS_CAPPED: tl.constexpr, IS_EXACT: tl.constexpr,
    IS_SQUARE: tl.constexpr, HAS_OUT: tl.constexpr,
):  # fmt: skip
    """Gradients of gate and up, and where `HAS_OUT` the output again."""
    row, columns, is_here = place_of(width, BLOCK, IS_FLAT)
    g = tl.load(gate + row * gate_stride + columns, mask=is_here, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=is_here, other=0.0).to(tl.float32)
    dy = tl.load(d_out + row * d_out_stride + columns, mask=is_here, other=0.0).to(tl.float32)
    tanh, slope, sigmoid, rest = gate_parts(g, beta, IS_EXACT, IS_SQUARE)
    capped_gate = beta * tanh * sigmoid
    slope_gate = slope * sigmoid + capped_gate * rest
    d_capped_gate = dy * capped_gate
    if IS_CAPPED:
        tanh_up, slope_up = capped(u, decay(u, 2.0 / linear_beta), 1.0 / linear_beta, IS_EXACT)
        capped_up = linear_beta * tanh_up
        d_u = d_capped_gate * slope_up
    else:
        capped_up = u
        d_u = d_capped_gate
    d_g = dy * slope_gate * capped_up
    place = row * out_stride + columns
    tl.store(d_gate + place, d_g.to(d_gate.dtype.element_ty), mask=is_here)
    tl.store(d_up + place, d_u.to(d_up.dtype.element_ty), mask=is_here)
    if HAS_OUT:
        y = capped_gate * capped_up
        tl.store(out + place, y.to(out.dtype.element_ty), mask=is_here)


class _Pieces(NamedTuple):
    """The tensors as rows of a width, cut into blocks."""

    rows: list[Tensor]
    width: int
    strides: list[int]  # between rows of each tensor and of the result
    grid: tuple[int, int]
    constants: dict[str, int]


def _pieces(*tensors: Tensor) -> _Pieces:
    """One long row where all are contiguous: its stride of 0 is the most aligned."""
    if all(x.is_contiguous() for x in tensors):
        width = tensors[0].numel()
        constants = {"BLOCK": FLAT_BLOCK, "IS_FLAT": True, "num_warps": FLAT_WARPS}
        grid = (cdiv(width, FLAT_BLOCK), 1)
        return _Pieces(list(tensors), width, [0] * (len(tensors) + 1), grid, constants)
    rows = [rows_of(x) for x in tensors]
    num_rows, width = rows[0].shape
    constants = {"BLOCK": ROW_BLOCK, "IS_FLAT": False, "num_warps": ROW_WARPS}
    grid = (num_rows, cdiv(width, ROW_BLOCK))
    return _Pieces(rows, width, [*(x.stride(0) for x in rows), width], grid, constants)


def _forward(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    out = gate.new_empty(gate.shape)
    if gate.numel() > 0:
        pieces = _pieces(gate, up)
        forward_kernel[pieces.grid](
            *pieces.rows, out, pieces.width, *pieces.strides,
            beta, 0.0 if linear_beta is None else linear_beta,
            IS_CAPPED=linear_beta is not None, IS_EXACT=gate.dtype == torch.float32,
            IS_SQUARE=beta == 4.0, **pieces.constants,
        )  # fmt: skip
    return out


def _forward_outputs(gate, up, beta, linear_beta):
    return gate.new_empty(gate.shape)


_forward_operator = as_operator("situ_glu_forward", _forward, _forward_outputs)


def _backward(
    d_out: Tensor,
    gate: Tensor,
    up: Tensor,
    beta: float,
    linear_beta: float | None,
    has_out: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    out, d_gate, d_up = _gradients(gate, up, has_out)
    if gate.numel() > 0:
        pieces = _pieces(gate, up, d_out)
        backward_kernel[pieces.grid](
            *pieces.rows, out, d_gate, d_up, pieces.width, *pieces.strides,
            beta, 0.0 if linear_beta is None else linear_beta,
            IS_CAPPED=linear_beta is not None, IS_EXACT=gate.dtype == torch.float32,
            IS_SQUARE=beta == 4.0, HAS_OUT=has_out, **pieces.constants,
        )  # fmt: skip
    return out, d_gate, d_up


def _gradients(gate: Tensor, up: Tensor, has_out: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Unfilled output (empty unless asked for) and gradients."""
    out = gate.new_empty(gate.shape if has_out else (0,))
    return out, gate.new_empty(gate.shape), up.new_empty(up.shape)


def _backward_outputs(d_out, gate, up, beta, linear_beta, has_out):
    return _gradients(gate, up, has_out)


_backward_operator = as_operator("situ_glu_backward", _backward, _backward_outputs)


class _SituGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, beta, linear_beta):
        ctx.save_for_backward(gate, up)
        ctx.betas = (beta, linear_beta)
        return _forward_operator(gate, up, beta, linear_beta)

    @staticmethod
    def backward(ctx, d_out):
        _, d_gate, d_up = _backward_operator(d_out, *ctx.saved_tensors, *ctx.betas, False)
        return d_gate, d_up, None, None


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """`baltoro.ops.situ.situ_glu`, whose checks have passed."""
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        refuse_unserved("situ_glu", gate, up)
        return _SituGlu.apply(gate, up, beta, linear_beta)
    return situ_glu_forward(gate, up, beta, linear_beta)


def situ_glu_forward(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """The activation alone, for callers with a backward of their own."""
    refuse_unserved("situ_glu", gate, up)
    return _forward_operator(gate, up, beta, linear_beta)


def situ_glu_backward(
    d_out: Tensor, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The activation again, and the gradients of gate and up."""
    refuse_unserved("situ_glu", gate, up, d_out)
    return _backward_operator(d_out, gate, up, beta, linear_beta, True)
