"""Held-out loss in bits per byte of text, by domain.

    bits per byte = sum_t l_t / ln 2 / sum_t bytes(target_t)

over positions whose target is text. Targets without bytes (special tokens, places of pictures)
count in neither sum, so that tokenizers can be compared.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baltoro.data.pack import PackedBatch
from baltoro.model.model import Model
from baltoro.train.learner import device_of
from baltoro.train.step import run_model, token_losses


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutScore:
    """Bits per byte of a model on held-out text."""

    bits_per_byte: float  # of all text together; NaN without any
    by_domain: dict[str, float]  # domains without text are left out


@torch.no_grad()
def evaluate(
    model: Model,
    batches: Iterable[PackedBatch],
    *,
    bytes_per_token: Tensor,
    domains: Sequence[str],
) -> HeldOutScore:
    """The score of `model`, which is in training mode again afterwards if it was.

    `bytes_per_token` `[W]` has the length of each token, 0 for what is no text; `domains` are the
    names behind the column `domain` of the batches.
    """
    was_training = model.training
    model.eval()
    nats, num_bytes = torch.zeros(2, len(domains), dtype=torch.float64)
    try:
        for batch in batches:
            device = device_of(model)
            counted_T = counted_targets(batch, bytes_per_token)
            targets_T = torch.where(counted_T, batch.targets, -100)
            losses_T = token_losses(model, run_model(model, batch), targets_T.to(device)).cpu()
            domain_T = batch.columns["domain"]
            nats.index_add_(0, domain_T, losses_T.double())
            lengths_T = bytes_per_token[batch.targets] * counted_T
            num_bytes.index_add_(0, domain_T, lengths_T.double())
    finally:
        model.train(was_training)
    return score_of(nats, num_bytes, domains)


def counted_targets(batch: PackedBatch, bytes_per_token: Tensor) -> Tensor:
    """`[T]` bool: positions whose target is text and carries weight."""
    return (batch.weights > 0) & (bytes_per_token[batch.targets] > 0)


def score_of(nats: Tensor, num_bytes: Tensor, domains: Sequence[str]) -> HeldOutScore:
    """The score from sums by domain."""
    total_bytes = float(num_bytes.sum())
    bits = nats / math.log(2)
    return HeldOutScore(
        bits_per_byte=float(bits.sum()) / total_bytes if total_bytes else math.nan,
        by_domain={
            name: float(bits[index] / num_bytes[index])
            for index, name in enumerate(domains)
            if num_bytes[index] > 0
        },
    )
