"""The largest attention logit of every head, for QK-Clip (K2, arXiv 2507.20534).

S_h = max over tokens i >= j of one sequence of  scale q_ih . k_jh
"""

from itertools import pairwise

import torch
from torch import Tensor

from baltoro.ops.impl import ImplError, choose

__all__ = ["largest_logits"]

_BLOCK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}  # logits held at once, 10 bytes each


def _torch(q_THK: Tensor, k_THK: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """In blocks of queries; products in the dtype of `q_THK`, as attention takes them."""
    largest_H = q_THK.new_full(q_THK.shape[1:2], -torch.inf, dtype=torch.float32)
    block = _BLOCK_ELEMENTS["cuda" if q_THK.is_cuda else "cpu"]
    bounds = cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        rows = max(1, block // max(1, (end - start) * q_THK.shape[1]))
        for top in range(start, end, rows):
            bottom = min(top + rows, end)
            q_HQK = q_THK[top:bottom].transpose(0, 1)
            k_HLK = k_THK[start:bottom].transpose(0, 1)
            logits_HQL = (q_HQK @ k_HLK.mT).float() * scale
            is_later_QL = torch.ones(
                bottom - top, bottom - start, dtype=torch.bool, device=q_THK.device
            ).triu(top - start + 1)
            logits_HQL.masked_fill_(is_later_QL, -torch.inf)
            largest_H = torch.maximum(largest_H, logits_HQL.amax((1, 2)))
    return largest_H


def _triton(q_THK: Tensor, k_THK: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    try:
        from . import largest_triton
    except ModuleNotFoundError as error:
        raise ImplError(f"largest_logits: impl='triton' needs triton ({error})") from error
    return largest_triton.largest_logits(q_THK, k_THK, cu_seqlens, scale)


_IMPLS = {"torch": _torch, "triton": _triton}


@torch.no_grad()
def largest_logits(q: Tensor, k: Tensor, cu_seqlens: Tensor, *, scale: float, impl: str) -> Tensor:
    """`[H]` fp32 of `q` and `k` `[T, H, K]`: the largest causal logit; -inf without tokens.

    `cu_seqlens` int `[N + 1]` from 0 to T. `"triton"` does not wait for the device.
    """
    return choose("largest_logits", impl, _IMPLS)(q, k, cu_seqlens, scale)
