"""An interpolated bigram of tokens: what a model must beat to have learned more than pairs.

    P(b | a) = (c(a, b) + u(a) P(b)) / (c(a) + u(a)),   P(b) = (c(b) + 1) / (n + W)

with c counts of pairs and of tokens, u(a) the number of different followers of a (Witten and Bell
1991): the more often a new follower came, the more weight the unigram has. Nothing is tuned.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from baltoro.data.pack import PackedBatch
from baltoro.train.evaluate import HeldOutScore, counted_targets, score_of


class Bigram:
    """Pair counts of the targets a model is trained on."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.codes = np.zeros(0, dtype=np.int64)  # a * W + b of the pairs seen, rising
        self.counts = np.zeros(0, dtype=np.int64)
        self._pending: list[np.ndarray] = []

    def add(self, batch: PackedBatch) -> None:
        """Count the pairs (token, target) of the positions that carry weight."""
        kept = batch.weights > 0
        codes = batch.tokens[kept] * self.vocab_size + batch.targets[kept]
        self._pending.append(codes.numpy())
        if sum(len(part) for part in self._pending) > 1 << 22:
            self._merge()

    def score(
        self, batches: Iterable[PackedBatch], *, bytes_per_token: Tensor, domains: Sequence[str]
    ) -> HeldOutScore:
        """Bits per byte on the positions on which `evaluate.evaluate` scores a model."""
        self._merge()
        firsts, followers = np.divmod(self.codes, self.vocab_size)
        pairs_of = np.bincount(firsts, weights=self.counts, minlength=self.vocab_size)
        kinds_of = np.bincount(firsts, minlength=self.vocab_size)
        unigram = np.bincount(followers, weights=self.counts, minlength=self.vocab_size) + 1.0
        unigram /= unigram.sum()
        nats, num_bytes = torch.zeros(2, len(domains), dtype=torch.float64)
        for batch in batches:
            counted = counted_targets(batch, bytes_per_token)
            first, second = batch.tokens[counted].numpy(), batch.targets[counted].numpy()
            seen = self._count(first * self.vocab_size + second)
            weight = np.maximum(kinds_of[first], 1)  # a token never seen falls to the unigram
            chance = (seen + weight * unigram[second]) / (pairs_of[first] + weight)
            domain = batch.columns["domain"][counted]
            nats.index_add_(0, domain, torch.from_numpy(-np.log(chance)).double())
            num_bytes.index_add_(0, domain, bytes_per_token[batch.targets[counted]].double())
        return score_of(nats, num_bytes, domains)

    def _count(self, codes: np.ndarray) -> np.ndarray:
        if not len(self.codes):
            return np.zeros(len(codes), dtype=np.int64)
        places = np.minimum(np.searchsorted(self.codes, codes), len(self.codes) - 1)
        return np.where(self.codes[places] == codes, self.counts[places], 0)

    def _merge(self) -> None:
        fresh, fresh_counts = np.unique(
            np.concatenate([np.zeros(0, dtype=np.int64), *self._pending]), return_counts=True
        )
        self._pending = []
        codes, places = np.unique(np.concatenate([self.codes, fresh]), return_inverse=True)
        counts = np.zeros(len(codes), dtype=np.int64)
        np.add.at(counts, places, np.concatenate([self.counts, fresh_counts]))
        self.codes, self.counts = codes, counts
