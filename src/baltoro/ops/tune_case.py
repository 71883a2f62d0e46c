"""What `baltoro bench tune` is given for a kernel and a class of shapes, and what cases share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .launch_table import Launch

BF16 = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel to tune for a class of shapes."""

    kernel: str
    shape_class: str
    run: Callable[[], Sequence[Tensor]]  # launches the kernel; every result
    candidates: Sequence[Launch]


def normal(*shape: int, device: torch.device, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_()


def used(results: Sequence[Tensor]) -> list[Tensor]:
    """Without the empty ones, which stand for inputs that were not given."""
    return [tensor for tensor in results if tensor.numel() > 0]


def named(names: str, *rows: Sequence[int]) -> list[Launch]:
    """Candidates as a table: a row of numbers each, under `names` parted by spaces."""
    return [dict(zip(names.split(), row, strict=True)) for row in rows]
