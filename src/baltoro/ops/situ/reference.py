"""The gated linear units, written as the formulas read."""

import torch
from torch import Tensor
from torch.nn import functional as F


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    high = torch.promote_types(gate.dtype, torch.float32)
    gate_high, up_high = gate.to(high), up.to(high)
    capped_gate = beta * torch.tanh(gate_high / beta) * torch.sigmoid(gate_high)
    if linear_beta is not None:
        up_high = linear_beta * torch.tanh(up_high / linear_beta)
    return (capped_gate * up_high).to(gate.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up
