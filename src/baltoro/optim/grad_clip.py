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
    lists = by_dtype(found)
    norms = [norm for same in lists for norm in torch._foreach_norm(same, 2, dtype=torch.float32)]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    factor = torch.where(norm.isfinite(), (max_norm / norm).clamp(max=1.0), 1.0)
    for same in lists:
        is_bf16 = same[0].dtype == torch.bfloat16
        torch._foreach_mul_(same, _rounded_down(factor) if is_bf16 else factor)
    return norm


def by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors in lists of one dtype each: such a list takes one launch."""
    lists: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        lists.setdefault(tensor.dtype, []).append(tensor)
    return list(lists.values())


def _rounded_down(factor: Tensor) -> Tensor:
    """fp32 `[]` to bf16, towards zero: a list times a scalar of its own dtype takes one launch."""
    return (factor.view(torch.int32) & -65536).view(torch.float32).bfloat16()
