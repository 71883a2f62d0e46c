"""From logits to token ids: temperature, top-k, top-p, min-p, with log-probabilities."""

import torch
from torch import Tensor

from baltoro.serve.sampling import Sampling


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
