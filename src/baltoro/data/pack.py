"""Rows to one packed batch: no batch axis, no padding, one sequence per row.

A row of n tokens takes n - 1 positions: `tokens` without its last, `targets` without its first. So
no position spans two rows, none is wasted at a boundary, and a document cut in two loses no target
when its pieces share one token. Columns speak of a token and are aligned with `targets`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baltoro.data.row import Row


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """What a training step takes; `N` sequences one after another in `T` positions."""

    tokens: Tensor  # int64 [T]
    targets: Tensor  # int64 [T]; targets[t] follows tokens[t] in the same row
    weights: Tensor  # float32 [T]; 0 where the target is a place of a picture
    cu_seqlens: Tensor  # int32 [N + 1]
    columns: Mapping[str, Tensor]  # name to [T], float32 or int64, aligned with targets
    pixel_values: Tensor | None = None  # float32 [I, 3, 14, 14]; None without pictures
    grid_thws: Tensor | None = None  # int64 [number of pictures, 3]

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The batch on a device; the copy is asynchronous where memory is pinned."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return PackedBatch(
            tokens=self.tokens.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            weights=self.weights.to(device, non_blocking=True),
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=True),
            columns={
                name: column.to(device, non_blocking=True) for name, column in self.columns.items()
            },
            pixel_values=moved(self.pixel_values),
            grid_thws=moved(self.grid_thws),
        )


def pack(rows: Sequence[Row], placeholder_id: int | None) -> PackedBatch:
    """Pack rows in their order.

    placeholder_id: the token whose places image features take (`Tokenizer.media_pad_id`), never a
        target that counts; None for text alone.

    Raises `ValueError` for no rows, rows with unlike columns, or a row whose last token is a
    placeholder: that token is no input, so its features would have no place.
    """
    if not rows:
        raise ValueError("rows=[]: a batch needs at least one row")
    names = sorted(rows[0].columns)
    for index, row in enumerate(rows):
        if sorted(row.columns) != names:
            raise ValueError(
                f"rows[{index}]: has columns {sorted(row.columns)}, rows[0] has {names}; give "
                "every row the same"
            )
        if placeholder_id is not None and row.tokens[-1] == placeholder_id:
            raise ValueError(f"rows[{index}]: ends inside a picture; a row must end in text")
    tokens = _joined(row.tokens[:-1] for row in rows)
    targets = _joined(row.tokens[1:] for row in rows)
    columns = {name: _joined(row.columns[name][1:] for row in rows) for name in names}
    weights = columns.pop("weights", None)
    weights = torch.ones(len(tokens)) if weights is None else weights.float()
    if placeholder_id is not None:
        weights = weights * (targets != placeholder_id)
    stops = np.cumsum([0, *(row.num_positions for row in rows)])
    pixels = [row.pixel_values for row in rows if row.pixel_values is not None]
    grids = [row.grid_thws for row in rows if row.grid_thws is not None]
    return PackedBatch(
        tokens=tokens,
        targets=targets,
        weights=weights,
        cu_seqlens=torch.from_numpy(stops.astype(np.int32)),
        columns=columns,
        pixel_values=_joined(pixels) if pixels else None,
        grid_thws=_joined(grids) if grids else None,
    )


def _joined(parts: Iterable[np.ndarray]) -> Tensor:
    """Parts end to end, as float32 or int64."""
    joined = np.concatenate(list(parts))
    dtype = np.float32 if joined.dtype.kind == "f" else np.int64
    return torch.from_numpy(joined.astype(dtype, copy=False))
