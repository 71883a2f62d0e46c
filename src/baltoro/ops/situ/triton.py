"""The gated linear units on an NVIDIA GPU, each way in one pass.

    y = b tanh(g / b) sigmoid(g) * c tanh(u / c)

The three maps are fractions over 1 + e with e = exp(-2 |g| / b), exp(-|g|), exp(-2 |u| / c), all in
(0, 1]: nothing overflows, and one reciprocal serves them all, since such units are what the kernel
waits for. Near 0 the tanh of fp32 inputs is a polynomial; for bf16 the 6e-8 lost in 1 - e are far
below a rounding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton import as_operator, cdiv, refuse_unserved, rows_of

LOG2E = tl.constexpr(1.4426950408889634)
BLOCK = 1024
NUM_WARPS = 2


@triton.jit
def decay(x, rate):
    """exp(-rate |x|)."""
    return tl.exp2(tl.abs(x) * (-LOG2E * rate))


@triton.jit
def tanh_numerator(x, e, inverse_beta, IS_EXACT: tl.constexpr):
    """tanh(x / beta) (1 + e), where e = exp(-2 |x| / beta)."""
    numerator = tl.where(x < 0.0, e - 1.0, 1.0 - e)
    if IS_EXACT:
        y = x * inverse_beta
        z = y * y
        # Taylor to y^13: off by 4e-9 of the value at 0.4
        p = -0.00886323552990220 + z * 0.00359212803657248
        p = 0.0218694885361552 + z * p
        p = -0.0539682539682540 + z * p
        p = 0.133333333333333 + z * p
        p = -0.333333333333333 + z * p
        numerator = tl.where(z < 0.16, (y + y * z * p) * (1.0 + e), numerator)
    return numerator


@triton.jit
def sigmoid_numerator(x, e):
    """sigmoid(x) (1 + e), where e = exp(-|x|)."""
    return tl.where(x < 0.0, e, 1.0)


@triton.jit
def offsets_of(num_blocks, width, BLOCK: tl.constexpr):
    """Row (int64), columns and mask of this program's piece of a row."""
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    first = (tl.program_id(0) % num_blocks).to(tl.int64) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    return row, columns, columns < width


@triton.jit(do_not_specialize=["num_blocks"])
def situ_forward_kernel(
    gate, up, out, num_blocks, width, gate_stride, up_stride, out_stride, beta, linear_beta,
    BLOCK: tl.constexpr, IS_CAPPED: tl.constexpr, IS_EXACT: tl.constexpr,
):  # fmt: skip
    row, columns, is_here = offsets_of(num_blocks, width, BLOCK)
    g = tl.load(gate + row * gate_stride + columns, mask=is_here, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=is_here, other=0.0).to(tl.float32)
    e_tanh = decay(g, 2.0 / beta)
    e_sigmoid = decay(g, 1.0)
    over = (1.0 + e_tanh) * (1.0 + e_sigmoid)
    y = tanh_numerator(g, e_tanh, 1.0 / beta, IS_EXACT) * sigmoid_numerator(g, e_sigmoid)
    if IS_CAPPED:
        e_up = decay(u, 2.0 / linear_beta)
        over *= 1.0 + e_up
        y *= tanh_numerator(u, e_up, 1.0 / linear_beta, IS_EXACT) * (beta * linear_beta)
    else:
        y *= beta * u
    y = y / over
    tl.store(out + row * out_stride + columns, y.to(out.dtype.element_ty), mask=is_here)


@triton.jit(do_not_specialize=["num_blocks"])
def situ_backward_kernel(
    gate, up, d_out, out, d_gate, d_up, num_blocks, width,
    gate_stride, up_stride, d_out_stride, out_stride, beta, linear_beta,
    BLOCK: tl.constexpr, IS_CAPPED: tl.constexpr, IS_EXACT: tl.constexpr, HAS_OUT: tl.constexpr,
):  # fmt: skip
    """Gradients of gate and up, and where `HAS_OUT` the output again."""
    row, columns, is_here = offsets_of(num_blocks, width, BLOCK)
    g = tl.load(gate + row * gate_stride + columns, mask=is_here, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=is_here, other=0.0).to(tl.float32)
    dy = tl.load(d_out + row * d_out_stride + columns, mask=is_here, other=0.0).to(tl.float32)
    e_tanh = decay(g, 2.0 / beta)
    e_sigmoid = decay(g, 1.0)
    over_tanh = 1.0 + e_tanh
    over_sigmoid = 1.0 + e_sigmoid
    over = over_tanh * over_sigmoid
    if IS_CAPPED:
        e_up = decay(u, 2.0 / linear_beta)
        over_up = 1.0 + e_up
        inverse = 1.0 / (over * over_up)
        inverse_up = inverse * over
        t_up = tanh_numerator(u, e_up, 1.0 / linear_beta, IS_EXACT) * inverse_up
        capped_up = linear_beta * t_up
        # 1 - tanh^2 = 4 e / (1 + e)^2, without cancellation
        slope_up = 4.0 * e_up * inverse_up * inverse_up
        inverse *= over_up
    else:
        inverse = 1.0 / over
        capped_up = u
        slope_up = 1.0
    inverse_tanh = inverse * over_sigmoid
    inverse_sigmoid = inverse * over_tanh
    t_gate = tanh_numerator(g, e_tanh, 1.0 / beta, IS_EXACT) * inverse_tanh
    s_gate = sigmoid_numerator(g, e_sigmoid) * inverse_sigmoid
    capped_gate = beta * t_gate * s_gate
    rest = sigmoid_numerator(-g, e_sigmoid) * inverse_sigmoid  # 1 - sigmoid(g)
    slope_gate = 4.0 * e_tanh * inverse_tanh * inverse_tanh * s_gate + capped_gate * rest
    place = row * out_stride + columns
    tl.store(
        d_gate + place, (dy * slope_gate * capped_up).to(d_gate.dtype.element_ty), mask=is_here
    )
    tl.store(d_up + place, (dy * capped_gate * slope_up).to(d_up.dtype.element_ty), mask=is_here)
    if HAS_OUT:
        y = capped_gate * capped_up
        tl.store(out + place, y.to(out.dtype.element_ty), mask=is_here)


def _rows(*tensors: Tensor) -> tuple[list[Tensor], int, list[int]]:
    """The tensors as rows of a width, and what lies between rows of each and of the result.

    Where all are contiguous that is one long row, whose stride of 0 is the most aligned.
    """
    if all(x.is_contiguous() for x in tensors):
        return list(tensors), tensors[0].numel(), [0] * (len(tensors) + 1)
    rows = [rows_of(x) for x in tensors]
    width = rows[0].shape[1]
    return rows, width, [*(x.stride(0) for x in rows), width]


def _forward(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    out = gate.new_empty(gate.shape)
    if gate.numel() > 0:
        (gate, up), width, strides = _rows(gate, up)
        num_blocks = cdiv(width, BLOCK)
        situ_forward_kernel[(gate.numel() // width * num_blocks,)](
            gate, up, out, num_blocks, width, *strides,
            beta, 0.0 if linear_beta is None else linear_beta,
            BLOCK=BLOCK, IS_CAPPED=linear_beta is not None,
            IS_EXACT=gate.dtype == torch.float32, num_warps=NUM_WARPS,
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
        (gate, up, d_out), width, strides = _rows(gate, up, d_out)
        num_blocks = cdiv(width, BLOCK)
        situ_backward_kernel[(gate.numel() // width * num_blocks,)](
            gate, up, d_out, out, d_gate, d_up, num_blocks, width, *strides,
            beta, 0.0 if linear_beta is None else linear_beta,
            BLOCK=BLOCK, IS_CAPPED=linear_beta is not None,
            IS_EXACT=gate.dtype == torch.float32, HAS_OUT=has_out, num_warps=NUM_WARPS,
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
