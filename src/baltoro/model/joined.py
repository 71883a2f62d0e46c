"""Projections of one input as one product.

Where no gradient is wanted, their weights become rows of one matrix and the parameters views of it,
so an optimiser or a loader that writes into them writes into the matrix. Parameters that became
other tensors since (a cast, a move, an assignment to `.data`) are noticed, and the projections are
computed one by one again.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = 16  # each weight begins at a multiple: products like aligned columns


Groups = Sequence[Sequence[nn.Linear]]  # maps of one input, without biases


class Stack:
    """Parameters that lie in one tensor from now on, each beginning at its row of it."""

    def __init__(self, parts: Sequence[Tensor], starts: Sequence[int], num_rows: int) -> None:
        self._parts = parts
        shape = (num_rows, *parts[0].shape[1:])
        self.whole = parts[0].new_zeros(shape, requires_grad=False)
        for part, start in zip(parts, starts, strict=True):
            rows = self.whole[start : start + len(part)]
            rows.copy_(part.detach())
            part.data = rows
        self._addresses = self._current()

    @property
    def is_intact(self) -> bool:
        """Whether the parameters still are rows of the tensor."""
        return self._current() == self._addresses

    def _current(self) -> list[int]:
        return [part.data_ptr() for part in self._parts]


def stacked(parts: Sequence[Tensor], stack: Stack | None) -> Stack:
    """`parts` one behind the other: as they are if they still are."""
    if stack is not None and stack.is_intact:
        return stack
    *starts, num_rows = accumulate((len(part) for part in parts), initial=0)
    return Stack(parts, starts, num_rows)


class Joined:
    """Maps whose weights lie side by side from now on, those of a group without a gap."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        widths = [sum(part.out_features for part in group) for group in groups]
        starts = [0]
        for width in widths:
            starts.append(starts[-1] + -(-width // ROWS) * ROWS)
        rows = []
        for group, start in zip(groups, starts, strict=False):
            rows += list(accumulate((part.out_features for part in group), initial=start))[:-1]
        parts = [part.weight for group in groups for part in group]
        self._stack = Stack(parts, rows, starts[-1])
        self._columns = [
            slice(start, start + width) for start, width in zip(starts, widths, strict=False)
        ]

    @property
    def is_intact(self) -> bool:
        """Whether the weights still lie so."""
        return self._stack.is_intact

    def __call__(self, x_TD: Tensor) -> list[Tensor]:
        """What each group gives."""
        if torch.is_grad_enabled() or not self.is_intact:
            return projected(x_TD, self.groups, None)
        y_TC = F.linear(x_TD, self._stack.whole)
        return [y_TC[:, columns] for columns in self._columns]


def rejoined(groups: Groups, joined: Joined | None) -> Joined:
    """`groups` joined: as they are if they still are."""
    return joined if joined is not None and joined.is_intact else Joined(groups)


def projected(x_TD: Tensor, groups: Groups, joined: Joined | None) -> list[Tensor]:
    """What each group gives, its maps side by side: in one product if they are joined.

    With gradients a group is one product too, and its input gets one gradient instead of a sum of
    several.
    """
    if joined is not None:
        return joined(x_TD)
    return [_side_by_side(x_TD, group) for group in groups]


class _SideBySide(torch.autograd.Function):
    """One product with the weights one behind the other, which are put together for it only."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, *weights)
        return F.linear(x_TD, torch.cat(weights))

    @staticmethod
    def backward(ctx: Any, d_y_TC: Tensor) -> tuple[Tensor | None, ...]:
        """Of products, which are differentiable themselves."""
        x_TD, *weights = ctx.saved_tensors
        needs_x, *needs_weights = ctx.needs_input_grad
        d_x_TD = d_y_TC @ torch.cat(weights) if needs_x else None
        if not any(needs_weights):
            return d_x_TD, *(None for _ in weights)
        return d_x_TD, *(d_y_TC.mT @ x_TD).split([len(part) for part in weights])


def _side_by_side(x_TD: Tensor, group: Sequence[nn.Linear]) -> Tensor:
    if len(group) == 1:
        return group[0](x_TD)
    if torch.is_grad_enabled():
        y_TC: Tensor = _SideBySide.apply(x_TD, *(part.weight for part in group))
        return y_TC
    return torch.cat([part(x_TD) for part in group], -1)
