"""RMSNorm of the backbone, its weight in the model's dtype."""

import torch
from torch import Tensor, nn

from baltoro.model.config import ModelConfig
from baltoro.ops.rms_norm import rms_norm


class RmsNorm(nn.Module):
    """x / rms(x) cast to the input dtype, then times the weight (`k3-facts` 3.1)."""

    def __init__(self, size: int, *, eps: float, impl: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.impl = impl

    def forward(self, x: Tensor) -> Tensor:
        """`[..., D]` to `[..., D]`."""
        return rms_norm(x, self.weight, eps=self.eps, impl=self.impl)


def backbone_norm(config: ModelConfig, size: int) -> RmsNorm:
    """A norm of the backbone, with the model's own eps."""
    return RmsNorm(size, eps=config.rms_norm_eps, impl=config.impl.rms_norm)
