"""Quantile Balancing in plain PyTorch: whole micro-batches at once, nothing read back."""

import torch
from torch import Tensor


def token_cutoffs(biased_TE: Tensor, top_k: int) -> Tensor:
    """The (k+1)-th largest of `[T, E]` per token, `[T]`."""
    return biased_TE.topk(top_k + 1, dim=1, sorted=False).values.amin(1)


def expert_loads(biased_TE: Tensor, top_k: int, mask_T: Tensor | None) -> Tensor:
    """Tokens per expert, int64 `[E]`; among equal biased scores the lower ids are taken."""
    return _loads(biased_TE, token_cutoffs(biased_TE, top_k), top_k, mask_T)


def _loads(biased_TE: Tensor, cutoff_T: Tensor, top_k: int, mask_T: Tensor | None) -> Tensor:
    above_TE = biased_TE > cutoff_T[:, None]
    equal_TE = biased_TE == cutoff_T[:, None]
    free_T1 = top_k - above_TE.sum(1, keepdim=True, dtype=torch.int32)
    chosen_TE = above_TE | (equal_TE & (equal_TE.cumsum(1, dtype=torch.int32) <= free_T1))
    if mask_T is not None:
        chosen_TE &= mask_T[:, None]
    return chosen_TE.sum(0)


def _bins(bias_E: Tensor, num_bins: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Lower end and width of the bins."""
    low, high = bias_E.to(dtype).aminmax()
    return low - 1.0, (high - low + 2.0) / num_bins


def margin_counts(
    scores_TE: Tensor, bias_E: Tensor, top_k: int, num_bins: int, mask_T: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Histogram `[E, B]`, loads `[E]` and the number of tokens, int32."""
    num_tokens, num_experts = scores_TE.shape
    # fp32: bf16 scores would tie by the hundred
    dtype = torch.promote_types(torch.promote_types(scores_TE.dtype, bias_E.dtype), torch.float32)
    scores_TE = scores_TE.to(dtype)
    biased_TE = scores_TE + bias_E.to(dtype)
    cutoff_T = token_cutoffs(biased_TE, top_k)
    low, width = _bins(bias_E, num_bins, dtype)
    position_TE = (cutoff_T[:, None] - scores_TE - low) / width
    # what is left out shows as a sum below num_tokens; rounding at the ends is clamped
    counted_TE = (scores_TE >= 0) & (scores_TE <= 1) & ~position_TE.isnan()
    if mask_T is not None:
        counted_TE &= mask_T[:, None]
    bin_TE = position_TE.nan_to_num().clamp(0, num_bins - 1).long()
    offset_E = torch.arange(num_experts, device=scores_TE.device) * num_bins
    histogram = torch.zeros(num_experts * num_bins, dtype=torch.int32, device=scores_TE.device)
    histogram.scatter_add_(0, (bin_TE + offset_E).flatten(), counted_TE.flatten().int())
    tokens = torch.full_like(histogram[0], num_tokens) if mask_T is None else mask_T.sum().int()
    return (
        histogram.view(num_experts, num_bins),
        _loads(biased_TE, cutoff_T, top_k, mask_T).int(),
        tokens,
    )


def histogram_bias(histogram_EB: Tensor, num_tokens: Tensor, bias_E: Tensor, top_k: int) -> Tensor:
    """The first bin that reaches ceil(q), with linear interpolation inside it, less the mean."""
    num_experts, num_bins = histogram_EB.shape
    low, width = _bins(bias_E, num_bins, torch.float64)
    assigned = num_tokens.long() * top_k
    share = assigned.double() / num_experts
    target = (assigned + num_experts - 1) // num_experts
    total_EB = histogram_EB.long().cumsum(1)
    bin_E1 = (total_EB < target).sum(1, keepdim=True).clamp(max=num_bins - 1)
    inside_E1 = histogram_EB.gather(1, bin_E1)
    before_E1 = total_EB.gather(1, bin_E1) - inside_E1
    part_E1 = ((share - before_E1) / inside_E1.clamp(min=1)).clamp(0, 1)
    new_E = low + (bin_E1 + part_E1).squeeze(1) * width
    return torch.where(num_tokens > 0, (new_E - new_E.mean()).to(bias_E.dtype), bias_E)
