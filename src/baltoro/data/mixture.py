"""Domains by share, and the endless stream of a domain's documents.

A step consists of slots of `seq_len` positions, each filled from one domain. Slot k of a stage is
the point frac(u + k / golden ratio) on [0, 1), cut by the shares: any stretch of slots has nearly
its exact share of each domain, and which domain a slot has needs no history.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from baltoro.config import nearest
from baltoro.data.dataset import Dataset
from baltoro.data.shuffle import GOLDEN, key, permutation


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions `start .. stop` of a document: its tokens `start .. stop` and the one after."""

    document: int
    start: int
    stop: int


class DomainStream:
    """A domain's documents, epoch after epoch, each epoch in an order of its own.

    A document of n tokens has n - 1 positions. One with pictures is never cut: an edge inside it
    counts as if it stood at its beginning.
    """

    def __init__(self, dataset: Dataset, domain: int, seed: int) -> None:
        self._documents = np.flatnonzero(dataset.domain == domain)
        self._num_positions = dataset.num_tokens[self._documents] - 1
        self._has_pictures = dataset.num_pictures[self._documents] > 0
        self._key = ("epoch", seed, dataset.domains[domain])
        self.epoch_size = int(self._num_positions.sum())  # positions
        self.longest_with_pictures = int(self._num_positions[self._has_pictures].max(initial=0))
        self._epoch = -1
        self._order = self._stops = np.zeros(0, dtype=np.int64)

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """The pieces that fill positions `start .. stop` of the stream."""
        found: list[Piece] = []
        while start < stop:
            epoch, begin = divmod(start, self.epoch_size)
            end = min(begin + stop - start, self.epoch_size)
            self._shuffle(epoch)
            found += self._epoch_pieces(begin, end)
            start += end - begin
        return found

    def _epoch_pieces(self, begin: int, end: int) -> list[Piece]:
        begin, end = self._edge(begin), self._edge(end)
        first, last = np.searchsorted(self._stops, [begin, end - 1], side="right")
        if begin >= end:
            return []
        pieces = []
        for place in range(int(first), int(last) + 1):
            index = int(self._order[place])
            document_start = int(self._stops[place] - self._num_positions[index])
            low = max(begin - document_start, 0)
            high = min(end - document_start, int(self._num_positions[index]))
            pieces.append(Piece(int(self._documents[index]), low, high))
        return pieces

    def _edge(self, position: int) -> int:
        """`position`, or the beginning of the document with pictures that it would cut."""
        if position in (0, self.epoch_size):
            return position
        place = int(np.searchsorted(self._stops, position, side="right"))
        index = self._order[place]
        if not self._has_pictures[index]:
            return position
        return int(self._stops[place] - self._num_positions[index])

    def _shuffle(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = permutation(len(self._documents), *self._key, epoch)
            self._stops = np.cumsum(self._num_positions[self._order])


def slot_domains(shares: Sequence[float], seed: int, first: int, count: int) -> np.ndarray:
    """Domain of slots `first .. first + count` of a stage, int64 [count]; `shares` sum to 1."""
    with np.errstate(over="ignore"):
        slots = np.arange(first, first + count, dtype=np.uint64)
        points = slots * GOLDEN + key("slots", seed)
    edges = np.cumsum(shares)[:-1]
    return np.searchsorted(edges, points / 2.0**64, side="right")


def normalised(mixture: Mapping[str, float], domains: Sequence[str]) -> list[float]:
    """Shares in the order of `domains`, 0 for those that the mixture does not name.

    Raises `ValueError` for an unknown domain, a negative share, or nothing above 0.
    """
    for name, share in mixture.items():
        if name not in domains:
            raise ValueError(
                f"mixture.{name}: the data has no such domain; {nearest(name, domains)}"
            )
        if not 0 <= share < float("inf"):
            raise ValueError(f"mixture.{name}={share}: must be 0 or more")
    total = sum(mixture.values())
    if total <= 0:
        raise ValueError(f"mixture={dict(mixture)}: must give at least one domain a share")
    return [mixture.get(name, 0.0) / total for name in domains]


def natural(dataset: Dataset, exponent: float = 1.0) -> dict[str, float]:
    """The mixture of domains by their tokens to the power of `exponent`: 1 is as they are, 0 even.

    Domains without documents in this split are left out.
    """
    totals = np.bincount(dataset.domain, weights=dataset.num_tokens, minlength=len(dataset.domains))
    weights = np.where(totals > 0, totals**exponent, 0.0)
    return {
        name: float(weight / weights.sum())
        for name, weight in zip(dataset.domains, weights, strict=True)
        if weight > 0
    }
