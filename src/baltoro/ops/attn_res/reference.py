"""The attention-residual mixture, written as the formula reads."""

from collections.abc import Sequence

import torch
from torch import Tensor


def attn_res_mix(
    sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float
) -> Tensor:
    dtype = sources[0].dtype
    high = torch.promote_types(dtype, torch.float32)
    v_STD = torch.stack([source.to(high) for source in sources])
    query_D = norm_weight.to(high) * proj_weight.to(high)
    key_STD = v_STD * torch.rsqrt(v_STD.square().mean(-1, keepdim=True) + eps)
    prob_ST = torch.softmax((key_STD * query_D).sum(-1), dim=0)
    return (prob_ST.unsqueeze(-1) * v_STD).sum(0).to(dtype)
