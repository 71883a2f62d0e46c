"""What a parameter is: the matrices a stored tensor holds, or none.

The optimiser decides by these records and never by a name. They are made by `optim.rules` for our
model, or by hand for another.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Kind = Literal[
    "embedding",
    "head",  # lm_head
    "norm",
    "conv",
    "pseudo_query",  # [1, D] projections of attention residuals
    "beta",  # one row per head, no mixing of channels
    "decay",  # A_log, dt_bias
    "vision",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixBlocks:
    """A tensor `[*stack, rows, cols]` that holds one or more true matrices.

    The rows are `num_groups` times `row_parts` (heads and what a head consists of), the columns
    `col_parts`; every pair of a row part and a column part, in every group and every entry of the
    stack, is a matrix.
    """

    row_parts: tuple[int, ...]
    col_parts: tuple[int, ...]
    num_groups: int = 1
    why: str

    def __post_init__(self) -> None:
        for field in ("row_parts", "col_parts"):
            parts = getattr(self, field)
            if not parts or min(parts) < 1:
                raise ValueError(f"{field}={parts}: give the positive size of every part")
        if self.num_groups < 1:
            raise ValueError(f"num_groups={self.num_groups}: must be at least 1")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns that the stored tensor must have."""
        return self.num_groups * sum(self.row_parts), sum(self.col_parts)

    @property
    def num_parts(self) -> int:
        """Views that `views` gives."""
        return len(self.row_parts) * len(self.col_parts)

    def views(self, tensor: Tensor) -> list[Tensor]:
        """Views `[N, rows, cols]` of a contiguous `tensor`, one for each pair of parts."""
        groups = tensor.view(-1, sum(self.row_parts), sum(self.col_parts))
        return [
            groups[:, top:bottom, left:right]
            for top, bottom in _bounds(self.row_parts)
            for left, right in _bounds(self.col_parts)
        ]

    def describe(self, shape: Sequence[int]) -> str:
        """The matrices of a tensor of `shape` in words, for example `96 x [128, 7168]`."""
        stack = self.num_groups
        for size in shape[:-2]:
            stack *= size
        sizes = [f"[{rows}, {cols}]" for rows in self.row_parts for cols in self.col_parts]
        return " + ".join(f"{stack} x {size}" if stack > 1 else size for size in sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Elementwise:
    """A tensor without matrix structure worth keeping: its entries are updated one by one."""

    kind: Kind
    use_decay: bool = True  # weight decay
    why: str


Structure = MatrixBlocks | Elementwise


def _bounds(parts: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(itertools.accumulate(parts, initial=0)))
