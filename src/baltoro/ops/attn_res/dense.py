"""The attention-residual mixture over blocks of tokens; its backward keeps `[T, S]` numbers.

With q = norm * proj, r_j = 1/rms(v_j), s_j = r_j (v_j . q) and p = softmax(s):
ds_j = p_j (dout . v_j - sum_i p_i dout . v_i)
dv_j = p_j dout + ds_j (r_j q - s_j r_j^2 v_j / D),  dq = sum_tj ds_j r_j v_j.
The sources of a block are stacked into one small buffer that is used again for the next block.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from baltoro.ops.blocks import token_blocks
from baltoro.ops.derivatives import no_second_derivatives


def attn_res_mix(
    sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float
) -> Tensor:
    if torch.is_grad_enabled():
        return _AttnResMix.apply(eps, norm_weight, proj_weight, *sources)
    return _mix(sources, _query(norm_weight, proj_weight, sources[0].dtype), eps)[0]


def _query(norm_weight: Tensor, proj_weight: Tensor, dtype: torch.dtype) -> Tensor:
    high = torch.promote_types(dtype, torch.float32)
    return norm_weight.to(high) * proj_weight.to(high)


def _stacked_blocks(
    sources: Sequence[Tensor], dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    """Ranges of tokens, and their sources as one tensor `[tokens, S, D]`."""
    num_tokens, width = sources[0].shape
    device = sources[0].device
    blocks = list(token_blocks(num_tokens, len(sources) * width * dtype.itemsize, device))
    buffer = torch.empty((blocks[0].stop, len(sources), width), dtype=dtype, device=device)
    for tokens in blocks:
        values = buffer[: tokens.stop - tokens.start]
        yield tokens, torch.stack([source[tokens] for source in sources], dim=1, out=values)


def _mix(
    sources: Sequence[Tensor], query: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The mixture `[T, D]`, and 1/rms, scores and probabilities `[T, S]`."""
    blocks = []
    for _, values in _stacked_blocks(sources, query.dtype):
        norm = torch.linalg.vector_norm(values, dim=-1)
        rstd = norm.square_().div_(query.shape[0]).add_(eps).rsqrt_()
        scores = torch.matmul(values, query).mul_(rstd)
        probs = torch.softmax(scores, dim=-1)
        mixed = torch.bmm(probs.unsqueeze(1), values).squeeze(1)
        blocks.append((mixed.to(sources[0].dtype), rstd, scores, probs))
    if len(blocks) == 1:
        return blocks[0]
    out, rstd, scores, probs = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return out, rstd, scores, probs


class _AttnResMix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, eps: float, norm_weight: Tensor, proj_weight: Tensor, *sources: Tensor
    ) -> Tensor:
        query = _query(norm_weight, proj_weight, sources[0].dtype)
        out, rstd, scores, probs = _mix(sources, query, eps)
        ctx.save_for_backward(norm_weight, proj_weight, query, rstd, scores, probs, *sources)
        return out

    @staticmethod
    @no_second_derivatives("attn_res: impl='torch'")
    def backward(ctx: Any, saved: tuple[Tensor, ...], d_out: Tensor) -> tuple[Tensor | None, ...]:
        norm_weight, proj_weight, query, rstd, scores, probs, *sources = saved
        high, width = query.dtype, query.shape[0]
        d_sources = [torch.empty_like(source) for source in sources]
        d_query = torch.zeros_like(query)
        for tokens, values in _stacked_blocks(sources, high):
            d_mixed = d_out[tokens].to(high)
            d_probs = torch.bmm(values, d_mixed.unsqueeze(-1)).squeeze(-1)
            prob = probs[tokens]
            d_scores = (d_probs - (prob * d_probs).sum(-1, keepdim=True)).mul_(prob)
            along_query = d_scores.mul_(rstd[tokens])
            along_value = (along_query * rstd[tokens]).mul_(scores[tokens]).div_(-width)
            d_query.addmv_(values.flatten(0, 1).T, along_query.flatten())
            d_values = values.mul_(along_value.unsqueeze(-1))
            d_values.addcmul_(along_query.unsqueeze(-1), query)
            d_values.addcmul_(prob.unsqueeze(-1), d_mixed.unsqueeze(1))
            for d_source, d_value in zip(d_sources, d_values.unbind(1), strict=True):
                d_source[tokens] = d_value
        d_norm = (d_query * proj_weight.to(high)).to(norm_weight.dtype)
        d_proj = (d_query * norm_weight.to(high)).to(proj_weight.dtype)
        return None, d_norm, d_proj, *d_sources
