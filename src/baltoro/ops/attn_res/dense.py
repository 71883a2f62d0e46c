"""The attention-residual mixture, source by source, with a backward that keeps `[S, T]` numbers.

With q = norm * proj, r_j = 1/rms(v_j), s_j = r_j (v_j . q) and p = softmax(s):
ds_j = p_j (dout . v_j - sum_i p_i dout . v_i)
dv_j = p_j dout + ds_j (r_j q - s_j r_j^2 v_j / D),  dq = sum_tj ds_j r_j v_j.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def attn_res_mix(
    sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float
) -> Tensor:
    return _AttnResMix.apply(eps, norm_weight, proj_weight, *sources)


class _AttnResMix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, eps: float, norm_weight: Tensor, proj_weight: Tensor, *sources: Tensor
    ) -> Tensor:
        dtype = sources[0].dtype
        high = torch.promote_types(dtype, torch.float32)
        query = norm_weight.to(high) * proj_weight.to(high)
        values = torch.stack(sources).to(high)
        norm = torch.linalg.vector_norm(values, dim=-1)
        rstd = norm.square_().div_(values.shape[-1]).add_(eps).rsqrt_()
        scores = (values @ query).mul_(rstd)
        probs = torch.softmax(scores, dim=0)
        out = torch.linalg.vecdot(values, probs.unsqueeze(-1), dim=0)
        ctx.save_for_backward(norm_weight, proj_weight, query, rstd, scores, probs, *sources)
        return out.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        norm_weight, proj_weight, query, rstd, scores, probs, *sources = ctx.saved_tensors
        high = query.dtype
        d_out_high = d_out.to(high)
        d_probs = torch.stack([torch.linalg.vecdot(d_out_high, v.to(high)) for v in sources])
        d_scores = probs * (d_probs - torch.linalg.vecdot(probs, d_probs, dim=0))
        along_query = d_scores * rstd
        along_value = -along_query * rstd * scores / query.shape[0]
        d_query = sum(v.to(high).T @ along_query[j] for j, v in enumerate(sources))
        d_sources: list[Tensor | None] = []
        for j, value in enumerate(sources):
            if not ctx.needs_input_grad[3 + j]:
                d_sources.append(None)
                continue
            d_value = d_out_high * probs[j].unsqueeze(-1)
            d_value.addr_(along_query[j], query)
            d_value.addcmul_(value.to(high), along_value[j].unsqueeze(-1))
            d_sources.append(d_value.to(value.dtype))
        d_norm = (d_query * proj_weight.to(high)).to(norm_weight.dtype)
        d_proj = (d_query * norm_weight.to(high)).to(proj_weight.dtype)
        return None, d_norm, d_proj, *d_sources
