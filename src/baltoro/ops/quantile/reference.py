"""Quantile Balancing, the definition: token by token, expert by expert, in fp64."""

import math

import torch
from torch import Tensor


def _cutoff(biased_E: list[float], top_k: int) -> tuple[float, list[int]]:
    """The first biased score not chosen, and the chosen experts; ties go to the lower id."""
    order = sorted(range(len(biased_E)), key=lambda expert: (-biased_E[expert], expert))
    return biased_E[order[top_k]], order[:top_k]


def margin_counts(
    scores_TE: Tensor, bias_E: Tensor, top_k: int, num_bins: int, mask_T: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Histogram `[E, B]`, loads `[E]` and the number of tokens, int32."""
    num_experts = bias_E.shape[0]
    histogram = torch.zeros(num_experts, num_bins, dtype=torch.int32)
    loads = torch.zeros(num_experts, dtype=torch.int32)
    bias = bias_E.double().tolist()
    low = min(bias) - 1.0
    width = (max(bias) - min(bias) + 2.0) / num_bins
    keep = [True] * scores_TE.shape[0] if mask_T is None else mask_T.tolist()
    for scores, is_kept in zip(scores_TE.double().tolist(), keep, strict=True):
        if not is_kept:
            continue
        biased = [score + b for score, b in zip(scores, bias, strict=True)]
        cutoff, chosen = _cutoff(biased, top_k)
        for expert, score in enumerate(scores):
            position = (cutoff - score - low) / width
            if 0.0 <= score <= 1.0 and not math.isnan(position):
                histogram[expert, math.floor(min(max(position, 0.0), num_bins - 1))] += 1
        loads[chosen] += 1
    device = bias_E.device
    num_tokens = torch.tensor(sum(keep), dtype=torch.int32, device=device)
    return histogram.to(device), loads.to(device), num_tokens


def histogram_bias(histogram_EB: Tensor, num_tokens: Tensor, bias_E: Tensor, top_k: int) -> Tensor:
    """The first bin that reaches ceil(q), with linear interpolation inside it, less the mean."""
    tokens = int(num_tokens)
    if tokens == 0:
        return bias_E.clone()
    num_experts, num_bins = histogram_EB.shape
    bias = bias_E.double().tolist()
    low = min(bias) - 1.0
    width = (max(bias) - min(bias) + 2.0) / num_bins
    share = tokens * top_k / num_experts
    new = []
    for counts in histogram_EB.tolist():
        before = index = 0
        while index < num_bins - 1 and before + counts[index] < math.ceil(share):
            before += counts[index]
            index += 1
        inside = min(max((share - before) / max(counts[index], 1), 0.0), 1.0)
        new.append(low + (index + inside) * width)
    mean = sum(new) / num_experts
    return torch.tensor([b - mean for b in new], dtype=torch.float64).to(bias_E)


def exact_bias(scores_TE: Tensor, bias_E: Tensor, top_k: int) -> Tensor:
    """The (q+1)-th smallest margin of each expert, less the mean."""
    scores_TE = scores_TE.double()
    num_tokens, num_experts = scores_TE.shape
    if num_tokens == 0:
        return bias_E.clone()
    biased_TE = scores_TE + bias_E.double()
    cutoff_T = biased_TE.sort(dim=1, descending=True).values[:, top_k]
    margins_TE = (cutoff_T[:, None] - scores_TE).sort(dim=0).values
    new_E = margins_TE[num_tokens * top_k // num_experts]
    return (new_E - new_E.mean()).to(bias_E.dtype)
