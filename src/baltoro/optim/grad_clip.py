"""Clipping of gradients by their global norm."""

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def clip_grad_norm_(grads: Iterable[Tensor], *, max_norm: float) -> Tensor:
    """Scale `grads` in place so that their joint Euclidean norm is at most `max_norm`.

    bf16 gradients take the factor rounded down to bf16, so they may come out .8 % shorter.
    Returns the norm before clipping, fp32 `[]`. If it is not finite the gradients are left as they
    are: the caller reads the norm and skips the step. Nothing is read back to the host.
    """
    if not max_norm > 0.0:
        raise ValueError(f"max_norm={max_norm}: must be positive; use inf to measure only")
    found = list(grads)
    if not found:
        return torch.zeros(())
    by_dtype: dict[torch.dtype, list[Tensor]] = {}  # lists of one dtype take one launch
    for grad in found:
        by_dtype.setdefault(grad.dtype, []).append(grad)
    norms = [
        norm
        for same in by_dtype.values()
        for norm in torch._foreach_norm(same, 2, dtype=torch.float32)
    ]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    factor = torch.where(norm.isfinite(), (max_norm / norm).clamp(max=1.0), 1.0)
    for dtype, same in by_dtype.items():
        torch._foreach_mul_(same, _rounded_down(factor) if dtype == torch.bfloat16 else factor)
    return norm


def _rounded_down(factor: Tensor) -> Tensor:
    """fp32 `[]` to bf16, towards zero: a list times a scalar of its own dtype takes one launch."""
    return (factor.view(torch.int32) & -65536).view(torch.float32).bfloat16()
