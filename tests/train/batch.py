"""Packed batches of tokens that can be learned, and a source of them with a cursor."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from baltoro.data.pack import PackedBatch, pack
from baltoro.data.row import Row


def tiny_batch(
    seed: int = 0, lengths: Sequence[int] = (20, 12), vocab_size: int = 60
) -> PackedBatch:
    """Sequences that count upwards from a random start; domains 0 and 1 take turns."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index, length in enumerate(lengths):
        start = int(torch.randint(vocab_size, (), generator=generator))
        tokens = (start + np.arange(length + 1)) % vocab_size
        rows.append(Row(tokens=tokens, columns={"domain": np.full(length + 1, index % 2)}))
    return pack(rows, placeholder_id=None)


class TinySource:
    """Batch k is a function of (seed, k)."""

    def __init__(self, seed: int = 0, lengths: Sequence[int] = (20, 12)) -> None:
        self.seed, self.lengths, self.step = seed, lengths, 0

    def batch(self, step: int, part: int = 0, num_parts: int = 1) -> PackedBatch:
        return tiny_batch(self.seed * 100_000 + step * num_parts + part, self.lengths)

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["seed"] != self.seed:
            raise ValueError(f"data cursor: seed={state['seed']}, this source has {self.seed}")
        self.step = int(state["step"])
