"""Cross entropy over tiles of the logits, computed again in the backward.

A tile is a range of the vocabulary for a range of tokens, so that the gradient of a stretch of the
weight is summed over all tokens before it is rounded. Kept for the backward: the inputs and the
log-sum-exp per token.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..derivatives import no_second_derivatives

_TILE_BYTES = 16 * 2**20  # logits of one tile
_TILE_TOKENS = 4096  # tokens of one tile at most


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return _LinearCrossEntropy.apply(hidden, weight, targets)


def _ranges(total: int, step: int) -> Iterator[slice]:
    """Cut `total` into ranges; one empty range if it is 0."""
    for start in range(0, max(1, total), step):
        yield slice(start, min(start + step, total))


def _tiles(hidden: Tensor, weight: Tensor) -> tuple[list[slice], list[slice]]:
    """Ranges of the vocabulary and ranges of tokens."""
    num_tokens, vocab_size = hidden.shape[0], weight.shape[0]
    tile_tokens = max(1, min(num_tokens, _TILE_TOKENS))
    item_bytes = torch.promote_types(hidden.dtype, torch.float32).itemsize
    tile_vocab = max(1, min(vocab_size, _TILE_BYTES // (tile_tokens * item_bytes)))
    return list(_ranges(vocab_size, tile_vocab)), list(_ranges(num_tokens, tile_tokens))


def _target_column(targets: Tensor, vocab: slice) -> tuple[Tensor, Tensor]:
    """Which targets lie in the range, and their column in it (any column where they do not)."""
    column = targets - vocab.start
    inside = (column >= 0) & (targets < vocab.stop)
    return inside, column.clamp_(0, vocab.stop - vocab.start - 1).unsqueeze(1)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        high = torch.promote_types(hidden.dtype, torch.float32)
        lse = hidden.new_full(targets.shape, -torch.inf, dtype=high)
        target_logit = torch.zeros_like(lse)
        vocab_ranges, token_ranges = _tiles(hidden, weight)
        for vocab in vocab_ranges:
            for rows in token_ranges:
                logits = torch.mm(hidden[rows], weight[vocab].T).to(high)
                inside, column = _target_column(targets[rows], vocab)
                picked = logits.gather(1, column).squeeze(1)
                target_logit[rows] = torch.where(inside, picked, target_logit[rows])
                lse[rows] = torch.logaddexp(lse[rows], torch.logsumexp(logits, dim=1))
        ctx.save_for_backward(hidden, weight, targets, lse)
        return lse - target_logit

    @staticmethod
    @no_second_derivatives("cross_entropy: impl='torch'")
    def backward(ctx: Any, saved: tuple[Tensor, ...], d_loss: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse = saved
        d_hidden = torch.zeros(hidden.shape, dtype=lse.dtype, device=hidden.device)
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        vocab_ranges, token_ranges = _tiles(hidden, weight)
        for vocab in vocab_ranges:
            d_stretch = None
            for rows in token_ranges:
                probs = torch.mm(hidden[rows], weight[vocab].T).to(lse.dtype)
                probs.sub_(lse[rows].unsqueeze(1)).exp_()
                inside, column = _target_column(targets[rows], vocab)
                probs.scatter_add_(1, column, -inside.to(lse.dtype).unsqueeze(1))
                d_logits = probs.mul_(d_loss[rows].unsqueeze(1)).to(hidden.dtype)
                d_hidden[rows] += torch.mm(d_logits, weight[vocab])
                if d_weight is not None:
                    part = torch.mm(d_logits.T, hidden[rows]).to(lse.dtype)
                    d_stretch = part if d_stretch is None else d_stretch.add_(part)
            if d_weight is not None and d_stretch is not None:
                d_weight[vocab] = d_stretch
        return d_hidden.to(hidden.dtype), d_weight, None
