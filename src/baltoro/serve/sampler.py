"""From logits to token ids: temperature, top-k, top-p, min-p, with log-probabilities."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 1.0  # 0: the likeliest token, lowest id on a tie
    top_k: int | None = None  # keep this many tokens; None: all
    top_p: float = 1.0  # keep the smallest set of this probability
    min_p: float = 0.0  # drop tokens below this share of the likeliest one's probability

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature}: must be 0 or a positive number")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: must be at least 1, or absent")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p}: must be in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p={self.min_p}: must be in [0, 1]")


def sample(
    logits_NW: Tensor, sampling: Sampling, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Returns ids `[N]` int64 and their log-probabilities `[N]` fp32 under the distribution that was
    drawn from; at temperature 0 under the model's own. Raises `ValueError` on logits that are not
    finite.
    """
    logits_NW = logits_NW.float()
    if not torch.isfinite(logits_NW).all():
        raise ValueError("logits: not finite; the weights or the inputs hold NaN or overflow")
    if sampling.temperature == 0.0:
        ids_N = logits_NW.argmax(-1)
        logprobs_NW = logits_NW.log_softmax(-1)
    else:
        logprobs_NW = _restrict(logits_NW / sampling.temperature, sampling).log_softmax(-1)
        ids_N = torch.multinomial(logprobs_NW.exp(), 1, generator=generator).squeeze(-1)
    return ids_N, logprobs_NW.gather(-1, ids_N[:, None]).squeeze(-1)


def _restrict(logits_NW: Tensor, sampling: Sampling) -> Tensor:
    """-inf outside the tokens that top-k, top-p and min-p all keep; the likeliest always stays."""
    dropped = torch.zeros_like(logits_NW, dtype=torch.bool)
    if sampling.top_k is not None and sampling.top_k < logits_NW.shape[-1]:
        kth = logits_NW.topk(sampling.top_k, -1).values[:, -1:]
        dropped |= logits_NW < kth
    if sampling.min_p > 0.0:
        probs_NW = logits_NW.softmax(-1)
        dropped |= probs_NW < sampling.min_p * probs_NW.amax(-1, keepdim=True)
    if sampling.top_p < 1.0:
        sorted_NW, order_NW = logits_NW.masked_fill(dropped, -torch.inf).sort(-1, descending=True)
        probs_NW = sorted_NW.softmax(-1)
        # a token goes when those before it already reach top_p
        beyond_NW = probs_NW.cumsum(-1) - probs_NW >= sampling.top_p
        beyond_NW[:, 0] = False
        dropped |= torch.zeros_like(dropped).scatter(-1, order_NW, beyond_NW)
    return logits_NW.masked_fill(dropped, -torch.inf)
