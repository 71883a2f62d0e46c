"""RMS normalisation with few passes over memory and a backward that keeps only `x` and 1/rms.

With r = 1/rms, n = x r and y = n w: dx = r (w dy - n mean(n w dy)), dw = sum(n dy) over rows; one
product n dy serves both.
"""

from typing import Any

import torch
from torch import Tensor

from baltoro.ops.blocks import token_blocks
from baltoro.ops.derivatives import no_second_derivatives


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if torch.is_grad_enabled():
        return _RmsNorm.apply(x, weight, eps)
    return _weighted(x, weight, _inverse_rms(x, eps))


def gated_rms_norm(x: Tensor, weight: Tensor, gate_logits: Tensor, eps: float) -> Tensor:
    if torch.is_grad_enabled():
        return _GatedRmsNorm.apply(x, weight, gate_logits, eps)
    return _gated(x, weight, gate_logits, _inverse_rms(x, eps))


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    high = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=high)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _weighted(x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    normed = (x * rstd).to(x.dtype)
    if weight.dtype == x.dtype:
        return normed.mul_(weight)
    return (normed * weight).to(x.dtype)


def _gated(x: Tensor, weight: Tensor, gate_logits: Tensor, rstd: Tensor) -> Tensor:
    gate = gate_logits.to(rstd.dtype).sigmoid()
    return gate.mul_(x).mul_(rstd).mul_(weight).to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rstd = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, rstd)
        return _weighted(x, weight, rstd)

    @staticmethod
    @no_second_derivatives("rms_norm: impl='torch'")
    def backward(ctx: Any, saved: tuple[Tensor, ...], d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = saved
        width = x.shape[-1]
        shape = x.shape
        x, d_out, rstd = (t.reshape(-1, t.shape[-1]) for t in (x, d_out, rstd))
        d_x = torch.empty_like(x)
        weight_high = weight.to(rstd.dtype)
        d_weight = torch.zeros_like(weight_high)
        for rows in token_blocks(x.shape[0], width * rstd.element_size(), x.device):
            normed = x[rows] * rstd[rows]
            product = normed * d_out[rows]
            d_weight += product.sum(0)
            mean = torch.mv(product, weight_high).div_(width).unsqueeze(1)
            d_normed = torch.mul(d_out[rows], weight_high, out=product)
            d_x[rows] = d_normed.sub_(normed.mul_(mean)).mul_(rstd[rows])
        return d_x.view(shape), d_weight.to(weight.dtype), None


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gate_logits: Tensor, eps: float) -> Tensor:
        rstd = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, gate_logits, rstd)
        return _gated(x, weight, gate_logits, rstd)

    @staticmethod
    @no_second_derivatives("gated_rms_norm: impl='torch'")
    def backward(ctx: Any, saved: tuple[Tensor, ...], d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate_logits, rstd = saved
        width = x.shape[-1]
        d_x, d_gate_logits = torch.empty_like(x), torch.empty_like(gate_logits)
        weight_high = weight.to(rstd.dtype)
        d_weight = torch.zeros_like(weight_high)
        token_bytes = x[:1].numel() * rstd.element_size()
        for tokens in token_blocks(x.shape[0], token_bytes, x.device):
            normed = x[tokens] * rstd[tokens]
            gate = gate_logits[tokens].to(rstd.dtype).sigmoid()
            gated = gate * d_out[tokens]
            product = gated * normed
            d_weight += product.flatten(0, -2).sum(0)
            mean = torch.matmul(product, weight_high).div_(width).unsqueeze(-1)
            d_gate_logits[tokens] = product.mul_(weight_high).mul_(gate.neg_().add_(1))
            d_x[tokens] = gated.mul_(weight_high).sub_(normed.mul_(mean)).mul_(rstd[tokens])
        return d_x, d_weight.to(weight.dtype), d_gate_logits, None
