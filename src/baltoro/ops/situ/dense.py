"""The gated linear units with a backward that keeps only their inputs.

With t = tanh(g / b), s = sigmoid(g), v = tanh(u / c): y = b t s * c v,
dy/dg = (1 - t^2) s c v + b t s (1 - s) c v and dy/du = b t s (1 - v^2).
`*_forward` and `*_backward` are used by the experts too, which keep their own inputs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..derivatives import no_second_derivatives


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    if torch.is_grad_enabled():
        return _SituGlu.apply(gate, up, beta, linear_beta)
    return situ_glu_forward(gate, up, beta, linear_beta)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        return _Swiglu.apply(gate, up)
    return swiglu_forward(gate, up)


def situ_glu_forward(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    high = torch.promote_types(gate.dtype, torch.float32)
    gate_high = gate.to(high)
    y = torch.div(gate_high, beta).tanh_().mul_(torch.sigmoid(gate_high))
    if linear_beta is None:
        y.mul_(beta).mul_(up)
    else:
        y.mul_(beta * linear_beta).mul_(torch.div(up.to(high), linear_beta).tanh_())
    return y.to(gate.dtype)


def situ_glu_backward(
    d_out: Tensor, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The activation again, and the gradients of gate and up."""
    high = torch.promote_types(gate.dtype, torch.float32)
    gate_high, up_high = gate.to(high), up.to(high)
    sigmoid = torch.sigmoid(gate_high)
    tanh = torch.div(gate_high, beta).tanh_()
    capped_gate = (tanh * sigmoid).mul_(beta)
    if linear_beta is None:
        capped_up = up_high
        d_up = d_out * capped_gate
    else:
        tanh_up = torch.div(up_high, linear_beta).tanh_()
        capped_up = tanh_up * linear_beta
        d_up = tanh_up.square_().neg_().add_(1).mul_(d_out).mul_(capped_gate)
    # (1 - t^2) s + b t s (1 - s)
    slope = tanh.square_().neg_().add_(1).mul_(sigmoid)
    slope.addcmul_(capped_gate, sigmoid.neg_().add_(1))
    d_gate = slope.mul_(d_out).mul_(capped_up)
    out = capped_gate.mul_(capped_up)
    return out.to(gate.dtype), d_gate.to(gate.dtype), d_up.to(gate.dtype)


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).mul_(up)


def swiglu_backward(d_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The activation again, and the gradients of gate and up, all in the dtype of `gate`."""
    d_out = d_out.to(gate.dtype)
    silu = F.silu(gate)
    d_gate = torch.ops.aten.silu_backward(d_out * up, gate)
    d_up = d_out * silu
    return silu.mul_(up), d_gate, d_up


class _SituGlu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None
    ) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.betas = (beta, linear_beta)
        return situ_glu_forward(gate, up, beta, linear_beta)

    @staticmethod
    @no_second_derivatives("situ_glu: impl='torch'")
    def backward(ctx: Any, saved: tuple[Tensor, ...], d_out: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = saved
        _, d_gate, d_up = situ_glu_backward(d_out, gate, up, *ctx.betas)
        return d_gate, d_up, None, None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu_forward(gate, up)

    @staticmethod
    @no_second_derivatives("swiglu: impl='torch'")
    def backward(ctx: Any, saved: tuple[Tensor, ...], d_out: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = saved
        d_gate = torch.ops.aten.silu_backward(d_out * up, gate)
        return d_gate, F.silu(gate).mul_(d_out)
