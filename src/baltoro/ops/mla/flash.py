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
    value_dim = v.shape[2]
    width = max(q.shape[2], value_dim)
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or width > _MAX_DIM:
        raise ImplError(
            f"varlen_attention: impl='flash' serves bf16 and fp16 heads of at most {_MAX_DIM} on a "
            f"GPU, not {q.dtype} {list(q.shape)} on {q.device}; use impl='torch'"
        )
    if q.shape[0] == 0:
        return q.new_empty((0, *v.shape[1:])) + 0 * (q.sum() + k.sum() + v.sum())
    q, k, v = (widen(tensor, width) for tensor in (q, k, v))
    starts_q, starts_k = (
        torch.tensor(bounds, dtype=torch.int32).to(q.device, non_blocking=True)
        for bounds in (bounds_q, bounds_k)
    )
    out = varlen_attn(
        q,
        k,
        v,
        starts_q,
        starts_k,
        max(stop - start for start, stop in pairwise(bounds_q)),
        max(stop - start for start, stop in pairwise(bounds_k)),
        scale=scale,
        window_size=(-1, 0) if causal else (-1, -1),
    )
    assert isinstance(out, Tensor)
    return out[..., :value_dim]
