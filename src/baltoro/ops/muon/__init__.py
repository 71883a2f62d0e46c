"""What Muon does around Newton-Schulz, over matrices of one size that lie anywhere.

M <- mu M + G,   D = G + mu M        `Stack.directions`
W <- decay W - rate O                `Stack.update`
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from baltoro.ops.impl import ImplError, choose
from baltoro.ops.muon.dense import DenseStack
from baltoro.ops.muon.shared import LINE_BYTES, MuonBlocks

__all__ = ["LINE_BYTES", "MuonBlocks", "Stack", "stack_of"]


class Stack(Protocol):
    """N matrices of one size, or its transpose, wide ones first and in the order given."""

    sides: tuple[int, int]  # short and long
    is_normed: bool  # directions are divided by their norm, plus `NORM_EPS`
    is_placed: bool  # serves every step while weights and momenta stay where they are

    def directions(self, mu: float) -> Tensor:
        """Take the gradients into the momenta; `[N, short, long]`."""

    def update(self, orthogonal: Tensor, *, decay: float, rate: float) -> None:
        """Weights, and their rounded copies, from `orthogonal` `[N, short, long]`."""

    def move_gradients(self, starts: Tensor, steps: Tensor) -> None:
        """Read gradients elsewhere from now on, if `is_placed`.

        `starts`, int64 and ascending, are the addresses of the parameters' gradients until now,
        `steps` the bytes by which each has moved, multiples of `LINE_BYTES`.
        """


def _triton(entries: Sequence[MuonBlocks]) -> Stack:
    try:
        from .triton import PlacedStack
    except ModuleNotFoundError as error:
        raise ImplError(f"muon: impl='triton' needs triton ({error})") from error
    return PlacedStack(entries)


_IMPLS = {"torch": DenseStack, "triton": _triton}


def stack_of(entries: Sequence[MuonBlocks], *, impl: str) -> Stack:
    """The matrices of all `entries`, whose short and long sides must be the same.

    `"torch"` makes directions of the weights' dtype. `"triton"` reads, for fp32 weights, every
    number once a pass whatever parameter it belongs to, and makes bf16 directions divided by their
    norm; it remembers where tensors lie, so that it serves as long as they stay there.
    Raises `ImplError` for an unknown `impl` or what it does not serve.
    """
    return choose("muon", impl, _IMPLS)(entries)
