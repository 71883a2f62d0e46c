"""The counts of Quantile Balancing on an NVIDIA GPU: a micro-batch's scores are read once.

Counts are whole numbers, so that the order in which programs add them does not matter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baltoro.ops.impl import ImplError
from baltoro.ops.triton import cdiv, enqueue, padded_width, refuse_unserved

MAX_EXPERTS = 1024  # scores of a token in one program
SCORES = 2048  # of a program
NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_tokens"])
def count_kernel(
    scores, bias, mask, histogram, loads, counted, num_tokens,
    E: tl.constexpr, A: tl.constexpr, BE: tl.constexpr, R: tl.constexpr, NUM_BINS: tl.constexpr,
):  # fmt: skip
    """Margins and chosen experts of `R` tokens."""
    tokens = tl.program_id(0) * R + tl.arange(0, R)
    experts = tl.arange(0, BE)
    is_expert = experts < E
    is_here = tokens < num_tokens
    if mask is not None:
        is_here &= tl.load(mask + tokens, mask=is_here, other=0) != 0
    at = tokens.to(tl.int64)[:, None] * E + experts[None, :]
    is_score = is_here[:, None] & is_expert[None, :]
    score = tl.load(scores + at, mask=is_score, other=0.0).to(tl.float32)
    own = tl.load(bias + experts, mask=is_expert, other=0.0).to(tl.float32)
    low = tl.min(tl.where(is_expert, own, float("inf")), 0)
    high = tl.max(tl.where(is_expert, own, float("-inf")), 0)
    width = tl.div_rn(high - low + 2.0, NUM_BINS * 1.0)
    low -= 1.0
    # a token with a score that is no number has no cutoff, and is not counted
    is_number = tl.sum((score != score).to(tl.int32), 1) == 0
    is_score &= is_number[:, None]
    rest = tl.where(is_score, score + own[None, :], float("-inf"))
    for _ in tl.static_range(A):
        best = tl.argmax(rest, 1, tie_break_left=True)
        rest = tl.where(experts[None, :] == best[:, None], float("-inf"), rest)
    is_chosen = is_score & (rest == float("-inf"))
    cutoff = tl.max(rest, 1)
    position = tl.div_rn(cutoff[:, None] - score - low, width)
    bins = tl.minimum(tl.maximum(position, 0.0), NUM_BINS - 1.0).to(tl.int32)
    is_margin = is_score & (score >= 0.0) & (score <= 1.0)
    tl.atomic_add(histogram + experts[None, :] * NUM_BINS + bins, 1, mask=is_margin, sem="relaxed")
    tl.atomic_add(loads + experts, tl.sum(is_chosen.to(tl.int32), 0), mask=is_expert, sem="relaxed")
    tl.atomic_add(counted, tl.sum(is_here.to(tl.int32), 0), sem="relaxed")


def margin_counts(
    scores: Tensor, bias: Tensor, top_k: int, num_bins: int, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Histogram `[E, B]`, loads `[E]` and the number of tokens, int32."""
    refuse_unserved("margin_counts", scores, bias)
    num_tokens, num_experts = scores.shape
    if num_experts > MAX_EXPERTS:
        raise ImplError(
            f"margin_counts: impl='triton' serves up to {MAX_EXPERTS} experts, not {num_experts}; "
            "use 'torch'"
        )
    room = torch.zeros(num_experts * (num_bins + 1) + 1, dtype=torch.int32, device=scores.device)
    histogram, loads, counted = room.split([num_experts * num_bins, num_experts, 1])
    padded = padded_width(num_experts)
    rows = max(1, SCORES // padded)
    if num_tokens:
        enqueue(
            count_kernel, (cdiv(num_tokens, rows),),
            scores.contiguous(), bias.contiguous(), None if mask is None else mask.contiguous(),
            histogram, loads, counted, num_tokens,
            E=num_experts, A=top_k, BE=padded, R=rows, NUM_BINS=num_bins, num_warps=NUM_WARPS,
        )  # fmt: skip
    return histogram.view(num_experts, num_bins), loads, counted[0]
