"""Clipping of gradients by their global norm."""

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def clip_grad_norm_(grads: Iterable[Tensor], *, max_norm: float) -> Tensor:
    """Scale `grads` in place so that their joint Euclidean norm is at most `max_norm`.

    Returns the norm before clipping, fp32 `[]`. If it is not finite the gradients are left as they
    are: the caller reads the norm and skips the step. Nothing is read back to the host.
    """
    if not max_norm > 0.0:
        raise ValueError(f"max_norm={max_norm}: must be positive; use inf to measure only")
    found = list(grads)
    if not found:
        return torch.zeros(())
    norms = torch._foreach_norm(found, 2, dtype=torch.float32)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    factor = torch.where(norm.isfinite(), (max_norm / norm).clamp(max=1.0), 1.0)
    torch._foreach_mul_(found, factor)
    return norm
