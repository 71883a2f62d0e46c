"""Attention of a whole pack in one FlashAttention call: bf16 or fp16 on an NVIDIA GPU.

The kernel wants one width for queries, keys and values, so values are padded with zeros. Unlike
cuDNN's its backward holds at every length.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from baltoro.ops.impl import ImplError
from baltoro.ops.mla.dense import widen

_MAX_DIM = 256


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds_q: list[int],
    bounds_k: list[int],
    causal: bool,
    scale: float,
) -> Tensor:
    _refuse_unserved(q, v)
    if q.shape[0] == 0:
        return q.new_empty((0, *v.shape[1:])) + 0 * (q.sum() + k.sum() + v.sum())
    starts_q, starts_k = (
        torch.tensor(bounds, dtype=torch.int32).to(q.device, non_blocking=True)
        for bounds in (bounds_q, bounds_k)
    )
    longest_q = max(stop - start for start, stop in pairwise(bounds_q))
    longest_k = max(stop - start for start, stop in pairwise(bounds_k))
    return _attend(q, k, v, starts_q, starts_k, longest_q, longest_k, causal, scale)


def captured_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    scale: float,
) -> Tensor:
    """The same from bounds that stay on the device: any sequence may be as long as the pack."""
    _refuse_unserved(q, v)
    starts_q, starts_k = (bounds.int() for bounds in (cu_seqlens_q, cu_seqlens_k))
    return _attend(q, k, v, starts_q, starts_k, len(q), len(k), causal, scale)


def _refuse_unserved(q: Tensor, v: Tensor) -> None:
    width = max(q.shape[2], v.shape[2])
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or width > _MAX_DIM:
        raise ImplError(
            f"varlen_attention: impl='flash' serves bf16 and fp16 heads of at most {_MAX_DIM} on a "
            f"GPU, not {q.dtype} {list(q.shape)} on {q.device}; use impl='torch'"
        )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    causal: bool,
    scale: float,
) -> Tensor:
    value_dim = v.shape[2]
    q, k, v = (widen(tensor, max(q.shape[2], value_dim)) for tensor in (q, k, v))
    window = (-1, 0) if causal else (-1, -1)
    out = varlen_attn(
        q, k, v, starts_q, starts_k, longest_q, longest_k, scale=scale, window_size=window
    )
    assert isinstance(out, Tensor)
    return out[..., :value_dim]
