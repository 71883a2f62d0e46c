"""Newton-Schulz in batched products of plain PyTorch, the Gram matrix on the shorter side."""

import torch
from torch import Tensor

from baltoro.ops.newton_schulz.shared import COEFFICIENTS, NORM_EPS


def newton_schulz(x_BRC: Tensor, steps: int, compute_dtype: torch.dtype) -> Tensor:
    """`[B, R, C]` matrices (R rows, C columns) to their orthogonal factors."""
    a, b, c = COEFFICIENTS
    norm_dtype = torch.promote_types(x_BRC.dtype, torch.float32)
    is_tall = x_BRC.shape[1] > x_BRC.shape[2]
    y_BRC = x_BRC.mT if is_tall else x_BRC
    norm_B11 = torch.linalg.vector_norm(y_BRC, dim=(1, 2), keepdim=True, dtype=norm_dtype)
    y_BRC = (y_BRC / (norm_B11 + NORM_EPS)).to(compute_dtype)
    for _ in range(steps):
        gram_BRR = torch.bmm(y_BRC, y_BRC.mT)
        poly_BRR = torch.baddbmm(gram_BRR, gram_BRR, gram_BRR, beta=b, alpha=c)
        y_BRC = torch.baddbmm(y_BRC, poly_BRR, y_BRC, beta=a)
    return (y_BRC.mT if is_tall else y_BRC).to(x_BRC.dtype).contiguous()
