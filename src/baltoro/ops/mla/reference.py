"""Masked softmax attention, sequence by sequence, written as the formula reads."""

import torch
from torch import Tensor


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds_q: list[int],
    bounds_k: list[int],
    causal: bool,
    scale: float,
) -> Tensor:
    high = torch.promote_types(q.dtype, torch.float32)
    outs = []
    for n in range(len(bounds_q) - 1):
        q_HTK = q[bounds_q[n] : bounds_q[n + 1]].to(high).transpose(0, 1)
        k_HSK = k[bounds_k[n] : bounds_k[n + 1]].to(high).transpose(0, 1)
        v_HSV = v[bounds_k[n] : bounds_k[n + 1]].to(high).transpose(0, 1)
        score_HTS = q_HTK @ k_HSK.transpose(1, 2) * scale
        if causal:
            num_queries, num_keys = score_HTS.shape[1:]
            seen = torch.ones_like(score_HTS[0], dtype=torch.bool).tril(num_keys - num_queries)
            score_HTS = score_HTS.masked_fill(~seen, -torch.inf)
        outs.append((torch.softmax(score_HTS, dim=-1) @ v_HSV).transpose(0, 1))
    empty = q.new_empty((0, q.shape[1], v.shape[2]), dtype=high)
    return torch.cat([empty, *outs]).to(q.dtype)


def latent_attention(
    q_latent: Tensor, kv_latent: Tensor, lengths: list[int], kv_lora_rank: int, scale: float
) -> Tensor:
    high = torch.promote_types(q_latent.dtype, torch.float32)
    outs = []
    for n, length in enumerate(lengths):
        kv_LR = kv_latent[n, :length].to(high)
        prob_HL = torch.softmax(q_latent[n].to(high) @ kv_LR.T * scale, dim=-1)
        outs.append(prob_HL @ kv_LR[:, :kv_lora_rank])
    empty = q_latent.new_empty((0, q_latent.shape[1], kv_lora_rank), dtype=high)
    return torch.cat([empty, *(out.unsqueeze(0) for out in outs)]).to(q_latent.dtype)
