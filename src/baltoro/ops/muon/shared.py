"""Matrices that forms of Muon take."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LINE_BYTES = 16  # what a thread reads at once


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonBlocks:
    """Equal matrices of one parameter, `[N, rows, cols]`, all views of one layout.

    All but the gradient are written; `low` is a copy of the weight in the parameter's own dtype.
    """

    weight: Tensor
    momentum: Tensor
    grad: Tensor
    low: Tensor | None = None

    @property
    def is_tall(self) -> bool:
        return self.weight.shape[1] > self.weight.shape[2]

    def parts(self, count: int) -> Iterator["MuonBlocks"]:
        """The same cut along N, at most `count` matrices each."""
        if count >= len(self.weight):
            yield self
            return
        for first in range(0, len(self.weight), count):
            place = slice(first, first + count)
            yield MuonBlocks(
                weight=self.weight[place],
                momentum=self.momentum[place],
                grad=self.grad[place],
                low=None if self.low is None else self.low[place],
            )


Kind = tuple[bool, torch.dtype, torch.dtype | None]


def alike(entries: Sequence[MuonBlocks]) -> list[list[MuonBlocks]]:
    """Entries that stand upright or not, and are of the same dtypes, together; wide ones first."""
    groups: dict[Kind, list[MuonBlocks]] = {}
    for entry in sorted(entries, key=lambda entry: entry.is_tall):
        low = None if entry.low is None else entry.low.dtype
        groups.setdefault((entry.is_tall, entry.grad.dtype, low), []).append(entry)
    return list(groups.values())
