"""Quantile Balancing: the bias under which every expert gets its share (report eq. 14, app. D).

Expert j of n is chosen where s_ij + b_j is among a token's k largest. With the cutoff alpha_i, the
(k+1)-th largest, and r_ij = alpha_i - s_ij, the new bias is the k/n quantile of r_:j over the m
tokens of a step, less the mean over experts. A step's histogram replaces the sort: r lies in [min b
- 1, max b + 1].

`scores` are a router's, in [0, 1], before any bias; `mask` is True on the tokens that count (None:
all). Equal biased scores go to the lower expert id. Experts whose scores are equal on every token
keep equal biases: no bias tells them apart, only that rule does.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from baltoro.ops.impl import ImplError, choose
from baltoro.ops.quantile import dense, reference


def _triton(
    scores: Tensor, bias: Tensor, top_k: int, num_bins: int, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    try:
        from .triton import margin_counts
    except ModuleNotFoundError as error:
        raise ImplError(f"margin_counts: impl='triton' needs triton ({error})") from error
    return margin_counts(scores, bias, top_k, num_bins, mask)


_COUNTS = {"reference": reference.margin_counts, "torch": dense.margin_counts, "triton": _triton}
_BIAS = {"reference": reference.histogram_bias, "torch": dense.histogram_bias}


class MarginCounts(NamedTuple):
    """What a step adds up over micro-batches and ranks; int32, so their order does not matter."""

    histogram: Tensor  # [E, B] margins r per bin; a score that is NaN or not in [0, 1] is left out
    loads: Tensor  # [E] tokens sent to each expert
    num_tokens: Tensor  # [] tokens counted


def margin_counts(
    scores: Tensor,
    bias: Tensor,
    *,
    num_experts_per_token: int,
    num_bins: int,
    mask: Tensor | None = None,
    impl: str,
) -> MarginCounts:
    """Count margins and loads of `scores` `[T, E]` routed under the old `bias` `[E]`.

    `mask` is bool `[T]`. Computes in fp32 or wider. Raises `ValueError` for shapes that do not fit,
    `num_bins` below one, or `num_experts_per_token` outside 1 ... E - 1.
    """
    _check(scores, bias, num_experts_per_token, mask)
    if num_bins < 1:
        raise ValueError(f"num_bins={num_bins}: must be at least 1")
    function = choose("margin_counts", impl, _COUNTS)
    with torch.no_grad():
        return MarginCounts(*function(scores, bias, num_experts_per_token, num_bins, mask))


def histogram_bias(
    histogram: Tensor, num_tokens: Tensor, bias: Tensor, *, num_experts_per_token: int, impl: str
) -> Tensor:
    """The next bias `[E]` from a step's counts `[E, B]`; the step was routed under `bias`.

    Before centring it lies in the bin of the exact quantile, so it is off by less than the bin
    width (max b - min b + 2) / B. Without tokens `bias` is returned unchanged. Mean zero, dtype of
    `bias`.
    """
    if histogram.ndim != 2 or histogram.shape[0] != bias.shape[0]:
        raise ValueError(
            f"histogram {list(histogram.shape)} does not fit bias {list(bias.shape)}: "
            "give [E, B] and [E]"
        )
    function = choose("histogram_bias", impl, _BIAS)
    with torch.no_grad():
        return function(histogram, num_tokens, bias, num_experts_per_token)


def expert_loads(
    scores: Tensor, bias: Tensor, *, num_experts_per_token: int, mask: Tensor | None = None
) -> Tensor:
    """Tokens sent to each expert, int64 `[E]`, of `scores` `[T, E]` routed under `bias` `[E]`."""
    _check(scores, bias, num_experts_per_token, mask)
    with torch.no_grad():
        return dense.expert_loads(scores + bias, num_experts_per_token, mask)


def exact_bias(scores: Tensor, bias: Tensor, *, num_experts_per_token: int) -> Tensor:
    """The next bias `[E]` from all margins of a step at once, by sorting; for tests.

    `scores` `[T, E]` were routed under `bias` `[E]`. It is minus the (q+1)-th largest of s - alpha
    for q = floor(m k / n), less the mean; without tokens `bias` itself. Dtype of `bias`.
    """
    _check(scores, bias, num_experts_per_token, None)
    with torch.no_grad():
        return reference.exact_bias(scores, bias, num_experts_per_token)


def _check(scores: Tensor, bias: Tensor, top_k: int, mask: Tensor | None) -> None:
    if scores.ndim != 2 or bias.shape != scores.shape[1:]:
        raise ValueError(
            f"scores {list(scores.shape)} and bias {list(bias.shape)} do not fit: "
            "give [T, E] and [E]"
        )
    num_experts = scores.shape[1]
    if not 1 <= top_k < num_experts:
        raise ValueError(
            f"num_experts_per_token={top_k}: must be between 1 and E - 1 = {num_experts - 1}; "
            "with every expert chosen there is nothing to balance"
        )
    if mask is not None and (mask.shape != scores.shape[:1] or mask.dtype != torch.bool):
        raise ValueError(
            f"mask is {mask.dtype} {list(mask.shape)}: give bool [T] with T={scores.shape[0]}"
        )
