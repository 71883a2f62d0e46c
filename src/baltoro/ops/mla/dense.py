"""Attention through PyTorch's fused kernel, one sequence at a time; scores are never materialised.

The fused CPU kernel wants values as wide as keys, so the narrower of the two is padded with zeros.
Its causal mask is aligned to the first key; where a sequence has more keys than queries (a later
slice of a prefill) the queries go in tiles, each with a mask over the keys it can see.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_MASK_ROWS = 512  # queries of one masked tile
# without cuDNN, whose bf16 backward gives NaN at some lengths (pytorch issue 196678, torch 2.11)
_CUDA_BACKENDS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


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
    q, k, v = (widen(tensor, width).transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    outs = []
    for n in range(len(bounds_q) - 1):
        q_seq = q[:, :, bounds_q[n] : bounds_q[n + 1]]
        keys = slice(bounds_k[n], bounds_k[n + 1])
        if q_seq.shape[2] > 0:
            outs += _attend(q_seq, k[:, :, keys], v[:, :, keys], causal, scale)
    if not outs:  # nothing to attend, and still a gradient of zeros for all three
        outs = [tensor[:, :, :0] for tensor in (q, k, v)]
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    return out[0, :, :, :value_dim].transpose(0, 1)


def widen(tensor: Tensor, width: int) -> Tensor:
    """`[T, H, K]` to `[T, H, width]`, zeros behind K; itself if as wide (a pad would copy)."""
    return F.pad(tensor, (0, width - tensor.shape[2])) if tensor.shape[2] < width else tensor


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> list[Tensor]:
    """Outputs of one sequence, in order."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    if not causal or num_queries == 1:
        return [_fused_attention(q, k, v, scale=scale)]
    if num_queries == num_keys:
        return [_fused_attention(q, k, v, is_causal=True, scale=scale)]
    outs = []
    for start in range(0, num_queries, _MASK_ROWS):
        rows = min(_MASK_ROWS, num_queries - start)
        seen = num_keys - num_queries + start + rows
        mask = torch.ones((rows, seen), dtype=torch.bool, device=q.device).tril(seen - rows)
        tile = q[:, :, start : start + rows]
        outs.append(
            _fused_attention(tile, k[:, :, :seen], v[:, :, :seen], attn_mask=mask, scale=scale)
        )
    return outs


def latent_attention(
    q_latent: Tensor, kv_latent: Tensor, lengths: list[int], kv_lora_rank: int, scale: float
) -> Tensor:
    out = torch.empty(
        (*q_latent.shape[:2], kv_lora_rank), dtype=q_latent.dtype, device=q_latent.device
    )
    for n, length in enumerate(lengths):
        # The heads of the one query are the rows of one attention head; rows are keys and values.
        rows = kv_latent[None, n : n + 1, :length]
        mixed = _fused_attention(q_latent[None, n : n + 1], rows, rows, scale=scale)
        out[n] = mixed[0, 0, :, :kv_lora_rank]
    return out


def _fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float,
) -> Tensor:
    if not q.is_cuda:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale
        )
    with sdpa_kernel(_CUDA_BACKENDS):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale
        )
