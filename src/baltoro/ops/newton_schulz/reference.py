"""Newton-Schulz, the definition: one matrix after another, the polynomial as it is written."""

import torch
from torch import Tensor

from baltoro.ops.newton_schulz.shared import COEFFICIENTS, NORM_EPS


def newton_schulz(x_BRC: Tensor, steps: int, compute_dtype: torch.dtype, is_normed: bool) -> Tensor:
    """`[B, R, C]` matrices (R rows, C columns) to their orthogonal factors."""
    a, b, c = COEFFICIENTS
    norm_dtype = torch.promote_types(x_BRC.dtype, torch.float32)
    results = []
    for x_RC in x_BRC:
        y_RC = x_RC.to(norm_dtype)
        if not is_normed:
            y_RC = y_RC / (y_RC.square().sum().sqrt() + NORM_EPS)
        y_RC = y_RC.to(compute_dtype)
        for _ in range(steps):
            # U f(S) V' for an odd polynomial f: R and C may stand on either side
            cubic_RC = y_RC @ y_RC.T @ y_RC
            quintic_RC = cubic_RC @ y_RC.T @ y_RC
            y_RC = a * y_RC + b * cubic_RC + c * quintic_RC
        results.append(y_RC.to(x_BRC.dtype))
    return torch.stack(results)
