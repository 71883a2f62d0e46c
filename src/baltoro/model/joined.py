"""Projections of one input as one product, where no gradient is wanted.

Their weights become rows of one matrix and the parameters views of it, so an optimiser or a loader
that writes into them writes into the matrix. Parameters that became other tensors since (a cast, a
move, an assignment to `.data`) are noticed, and the projections are computed one by one again.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = 16  # each weight begins at a multiple: products like aligned columns


Groups = Sequence[Sequence[nn.Linear]]  # maps of one input, without biases


class Joined:
    """Maps whose weights lie side by side from now on, those of a group without a gap."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self._parts = [part for group in groups for part in group]
        widths = [sum(part.out_features for part in group) for group in groups]
        starts = [0]
        for width in widths:
            starts.append(starts[-1] + -(-width // ROWS) * ROWS)
        weight = self._parts[0].weight
        self.weight = weight.new_zeros((starts[-1], weight.shape[1]), requires_grad=False)
        for group, start in zip(groups, starts, strict=False):
            for part in group:
                rows = self.weight[start : start + part.out_features]
                rows.copy_(part.weight.detach())
                part.weight.data = rows
                start += part.out_features
        self._columns = [
            slice(start, start + width) for start, width in zip(starts, widths, strict=False)
        ]
        self._addresses = self._current()

    @property
    def is_intact(self) -> bool:
        """Whether the parameters still are rows of the matrix."""
        return self._current() == self._addresses

    def __call__(self, x_TD: Tensor) -> list[Tensor]:
        """What each group gives."""
        if torch.is_grad_enabled() or not self.is_intact:
            return projected(x_TD, self.groups, None)
        y_TC = F.linear(x_TD, self.weight)
        return [y_TC[:, columns] for columns in self._columns]

    def _current(self) -> list[int]:
        return [part.weight.data_ptr() for part in self._parts]


def rejoined(groups: Groups, joined: Joined | None) -> Joined:
    """`groups` joined: as they are if they still are."""
    return joined if joined is not None and joined.is_intact else Joined(groups)


def projected(x_TD: Tensor, groups: Groups, joined: Joined | None) -> list[Tensor]:
    """What each group gives, its maps side by side: in one product if they are joined."""
    if joined is not None:
        return joined(x_TD)
    return [
        group[0](x_TD) if len(group) == 1 else torch.cat([part(x_TD) for part in group], -1)
        for group in groups
    ]
