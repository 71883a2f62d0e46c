"""The flat training example that a document, a conversation and a trace all become."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

# Names that a packed batch has for itself.
RESERVED = ("tokens", "targets", "cu_seqlens", "pixel_values", "grid_thws")


@dataclass(frozen=True, slots=True)
class Row:
    """`n` tokens and what is known of each of them.

    A column says something about a token itself: `weights[i]` is how much predicting `tokens[i]`
    counts, `logprobs[i]` the log-probability that `tokens[i]` had. Without `weights` each counts 1.
    Raises `ValueError` for less than two tokens, or a column of another length or a reserved name.
    """

    tokens: np.ndarray  # integers [n]; the last one is only ever a target
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)  # name to [n]
    pixel_values: np.ndarray | None = None  # float32 [I, 3, 14, 14], patches of its pictures
    grid_thws: np.ndarray | None = None  # int64 [number of pictures, 3]

    def __post_init__(self) -> None:
        shape, kind = self.tokens.shape, self.tokens.dtype.kind
        if self.tokens.ndim != 1 or len(self.tokens) < 2 or kind not in "iu":
            raise ValueError(
                f"row tokens={self.tokens.dtype}{list(shape)}: must be at least two integers in "
                "one dimension, since each token but the first is predicted from those before it"
            )
        for name, column in self.columns.items():
            if name in RESERVED:
                raise ValueError(f"row column {name!r}: the name is taken; choose another")
            if column.shape != shape:
                raise ValueError(
                    f"row column {name!r}: has shape {list(column.shape)}, the tokens {list(shape)}"
                )
        if (self.pixel_values is None) != (self.grid_thws is None):
            raise ValueError("row pixel_values and grid_thws: give both or neither")

    @property
    def num_positions(self) -> int:
        """Positions that it takes in a batch: one less than its tokens."""
        return len(self.tokens) - 1
