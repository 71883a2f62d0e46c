"""RMS normalisation with few passes over memory and a backward that keeps only `x` and 1/rms.

With r = 1/rms and n = x r: dx = r (dn - n mean(dn n)).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if torch.is_grad_enabled():
        return _RmsNorm.apply(x, weight, eps)
    return _weighted(x, weight, _inverse_rms(x, eps))


def gated_rms_norm(x: Tensor, weight: Tensor, gate_logits: Tensor, eps: float) -> Tensor:
    if torch.is_grad_enabled():
        return _GatedRmsNorm.apply(x, weight, gate_logits, eps)
    return _gated(x, weight, gate_logits, _inverse_rms(x, eps))


def _high(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_high(x.dtype))
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _weighted(x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    normed = (x * rstd).to(x.dtype)
    if weight.dtype == x.dtype:
        return normed.mul_(weight)
    return (normed * weight).to(x.dtype)


def _gated(x: Tensor, weight: Tensor, gate_logits: Tensor, rstd: Tensor) -> Tensor:
    gate = gate_logits.to(rstd.dtype).sigmoid()
    return gate.mul_(x).mul_(rstd).mul_(weight).to(x.dtype)


def _input_gradient(d_normed: Tensor, normed: Tensor, rstd: Tensor) -> Tensor:
    """Gradient through the quotient; overwrites both of its large arguments."""
    mean = torch.linalg.vecdot(d_normed, normed).div_(normed.shape[-1]).unsqueeze(-1)
    return d_normed.sub_(normed.mul_(mean)).mul_(rstd)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rstd = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, rstd)
        return _weighted(x, weight, rstd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        normed = x * rstd
        d_x = d_weight = None
        if ctx.needs_input_grad[1]:
            rounded = normed.to(x.dtype).to(normed.dtype)
            d_weight = (rounded * d_out).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            d_normed = d_out.to(normed.dtype) * weight
            d_x = _input_gradient(d_normed, normed, rstd).to(x.dtype)
        return d_x, d_weight, None


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gate_logits: Tensor, eps: float) -> Tensor:
        rstd = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, gate_logits, rstd)
        return _gated(x, weight, gate_logits, rstd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate_logits, rstd = ctx.saved_tensors
        d_x = d_weight = d_gate_logits = None
        normed = x * rstd
        gate = gate_logits.to(rstd.dtype).sigmoid()
        gated = d_out * gate
        product = gated * normed
        if ctx.needs_input_grad[1]:
            d_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            d_gate_logits = product.mul_(weight).mul_(1 - gate).to(gate_logits.dtype)
        if ctx.needs_input_grad[0]:
            d_x = _input_gradient(gated.mul_(weight), normed, rstd).to(x.dtype)
        return d_x, d_weight, d_gate_logits, None
