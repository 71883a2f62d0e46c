"""Muon's stack in lists of plain PyTorch, copied together for the products and apart again."""

from collections.abc import Sequence

import torch
from torch import Tensor

from baltoro.ops.muon.shared import MuonBlocks, alike


class DenseStack:
    """`ops.muon.Stack`; directions have the dtype of the weights and are not normed."""

    is_normed = False
    is_placed = False

    def __init__(self, entries: Sequence[MuonBlocks]) -> None:
        short, long = sorted(entries[0].weight.shape[1:])
        self.sides = (short, long)
        self._groups = [part for group in alike(entries) for part in _as_lists(group)]
        self._num_matrices = sum(len(entry.weight) for entry in entries)

    def directions(self, mu: float) -> Tensor:
        first = 0
        directions = self._groups[0][0].weight.new_empty(self._num_matrices, *self.sides)
        for group in self._groups:
            counts = [len(entry.weight) for entry in group]
            place = directions[first : first + sum(counts)]
            first += sum(counts)
            own = place.new_empty(place.mT.shape) if group[0].is_tall else place
            momenta = _flat([entry.momentum for entry in group])
            parts = _like(momenta, own.split(counts))
            torch._foreach_copy_(parts, _like(parts, [entry.grad for entry in group]))
            torch._foreach_mul_(momenta, mu)
            torch._foreach_add_(momenta, parts)
            torch._foreach_add_(parts, momenta, alpha=mu)
            if own is not place:
                place.copy_(own.mT)
        return directions

    def update(self, orthogonal: Tensor, *, decay: float, rate: float) -> None:
        first = 0
        for group in self._groups:
            counts = [len(entry.weight) for entry in group]
            update = orthogonal[first : first + sum(counts)]
            first += sum(counts)
            updates = update.mT.contiguous() if group[0].is_tall else update
            weights = _flat([entry.weight for entry in group])
            torch._foreach_mul_(weights, decay)
            torch._foreach_add_(weights, _like(weights, updates.split(counts)), alpha=-rate)
            copies = [entry.low for entry in group if entry.low is not None]
            if copies:
                torch._foreach_copy_(_flat(copies), weights)

    def move_gradients(self, starts: Tensor, steps: Tensor) -> None:
        raise AssertionError("a stack of lists holds its gradients")


def _as_lists(group: Sequence[MuonBlocks]) -> list[list[MuonBlocks]]:
    """What lists of tensors must share beyond `alike` to be updated in one launch: a layout."""
    lists: dict[tuple[bool, bool], list[MuonBlocks]] = {}
    for entry in group:
        layout = (entry.weight.is_contiguous(), entry.grad.is_contiguous())
        lists.setdefault(layout, []).append(entry)
    return list(lists.values())


def _flat(tensors: list[Tensor]) -> list[Tensor]:
    """Contiguous tensors as vectors: a list takes one launch only if all strides agree, those of
    dimensions of size one included."""
    return [tensor.view(-1) if tensor.is_contiguous() else tensor for tensor in tensors]


def _like(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """`others` in the shapes of `tensors`."""
    return [other.reshape(tensor.shape) for tensor, other in zip(tensors, others, strict=True)]
