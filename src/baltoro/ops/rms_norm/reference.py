"""RMS normalisation, written as the formula reads."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x_high = x.to(torch.promote_types(x.dtype, torch.float32))
    y_high = x_high * torch.rsqrt(x_high.square().mean(-1, keepdim=True) + eps)
    # The weight multiplies the rounded quotient.
    return (weight * y_high.to(x.dtype)).to(x.dtype)


def gated_rms_norm(x: Tensor, weight: Tensor, gate_logits: Tensor, eps: float) -> Tensor:
    high = torch.promote_types(x.dtype, torch.float32)
    x_THV = x.to(high)
    y_THV = x_THV * torch.rsqrt(x_THV.square().mean(-1, keepdim=True) + eps)
    return (y_THV * weight.to(high) * torch.sigmoid(gate_logits.to(high))).to(x.dtype)
