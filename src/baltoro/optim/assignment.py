"""Which optimiser updates which parameter, as a table one can print and check."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from baltoro.optim.structure import Elementwise, MatrixBlocks, Structure

Group = Literal["muon", "adamw"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignmentRow:
    """One parameter of the table."""

    name: str
    shape: tuple[int, ...]
    group: Group
    blocks: MatrixBlocks | None  # the matrices Muon treats one by one; None under AdamW
    use_decay: bool
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """The whole table, in the order of the parameters."""

    rows: tuple[AssignmentRow, ...]

    def __str__(self) -> str:
        """Columns name, shape, group, matrices, decay and reason, then the totals."""
        cells = [("parameter", "shape", "group", "matrices", "decay", "why")]
        for row in self.rows:
            matrices = row.blocks.describe(row.shape) if row.blocks else ""
            decay = "yes" if row.use_decay else "no"
            cells.append((row.name, str(list(row.shape)), row.group, matrices, decay, row.why))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
        for group in ("muon", "adamw"):
            sizes = [math.prod(row.shape) for row in self.rows if row.group == group]
            lines.append(f"{group}: {len(sizes)} tensors, {sum(sizes):,} parameters")
        return "\n".join(lines)


def assign(
    parameters: Iterable[tuple[str, Tensor]],
    structure: Mapping[str, Structure],
    *,
    matrices: Group = "muon",
) -> Assignment:
    """The table for named `parameters` (as `named_parameters()` gives them) of known `structure`.

    Matrices go to the group `matrices` ("adamw" for a run without Muon), the rest to AdamW. Raises
    `ValueError` for a parameter without a record, a record without a parameter, a tensor that does
    not have its record's shape, and a "matrix" of a single row or column.
    """
    rows = []
    for name, tensor in parameters:
        if name not in structure:
            raise ValueError(
                f"{name} {list(tensor.shape)}: unassigned; give it a MatrixBlocks or an Elementwise"
            )
        rows.append(_row(name, tuple(tensor.shape), structure[name], matrices))
    unknown = sorted(set(structure) - {row.name for row in rows})
    if unknown:
        raise ValueError(f"structure describes {unknown}, which are no parameters; remove them")
    return Assignment(rows=tuple(rows))


def _row(name: str, shape: tuple[int, ...], record: Structure, matrices: Group) -> AssignmentRow:
    if isinstance(record, Elementwise):
        return AssignmentRow(
            name=name,
            shape=shape,
            group="adamw",
            blocks=None,
            use_decay=record.use_decay,
            why=f"{record.kind}: {record.why}",
        )
    if shape[-2:] != record.shape:
        raise ValueError(f"{name}: {list(shape)} does not end in {list(record.shape)}")
    if min(*record.row_parts, *record.col_parts) < 2:
        raise ValueError(
            f"{name}: {record.describe(shape)} has a single row or column, a vector: "
            "describe it as Elementwise"
        )
    return AssignmentRow(
        name=name,
        shape=shape,
        group=matrices,
        blocks=record if matrices == "muon" else None,
        use_decay=True,
        why=record.why,
    )
