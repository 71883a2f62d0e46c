"""Short causal convolution: each channel sees its last `W` inputs, then SiLU.

    y_t = silu(sum_j w_j x_(t - W + 1 + j))        the last tap is on the current token

The inputs before a sequence's first token come from its state, `W - 1` earlier inputs, or are zero.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..impl import ImplError, choose
from ..packed import read_boundaries
from . import dense, reference

__all__ = ["ShortConvOutput", "short_conv"]

_Run = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    tuple[torch.Tensor, torch.Tensor],
]


def _with_bounds(
    run: Callable[
        [torch.Tensor, torch.Tensor, list[int], torch.Tensor], tuple[torch.Tensor, torch.Tensor]
    ],
) -> _Run:
    """`run` with the boundaries read and checked, and a state of zeros if there is none."""

    def run_with_bounds(
        x: torch.Tensor,
        weight: torch.Tensor,
        cu_seqlens: torch.Tensor,
        initial_state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        bounds = read_boundaries(cu_seqlens, x.shape[0])
        if initial_state is None:
            initial_state = x.new_zeros(len(bounds) - 1, x.shape[1], weight.shape[1] - 1)
        return run(x, weight, bounds, initial_state)

    return run_with_bounds


def _triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        from .triton import short_conv
    except ModuleNotFoundError as error:
        raise ImplError(f"short_conv: impl='triton' needs triton ({error})") from error
    return short_conv(x, weight, cu_seqlens, initial_state)


_IMPLS: dict[str, _Run] = {
    "reference": _with_bounds(reference.short_conv),
    "torch": _with_bounds(dense.short_conv),
    "triton": _triton,
}


class ShortConvOutput(NamedTuple):
    """Result of `short_conv`."""

    y: torch.Tensor  # [T, D] in the dtype of x
    final_state: torch.Tensor  # [N, D, W - 1], the last inputs of each sequence, oldest first


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    impl: str,
) -> ShortConvOutput:
    """Depthwise causal convolution of packed tokens and SiLU, accumulated in fp32.

    `x` `[T, D]`, `weight` `[D, W]` of any float dtype with W >= 2, `cu_seqlens` int32 `[N + 1]`,
    `initial_state` `[N, D, W - 1]` in the dtype of x, zeros if None. A sequence shorter than the
    state keeps the newer part of what it had.

    Raises `ValueError` for shapes and dtypes that do not fit and for `cu_seqlens` that is no
    partition of T; `ImplError` for an unknown `impl` or inputs that it does not serve. Reads
    `cu_seqlens`, so on a GPU it waits for the stream; `triton` does not, and trusts that it is a
    partition of T.
    """
    run = choose("short_conv", impl, _IMPLS)
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] < 2:
        raise ValueError(
            f"x {list(x.shape)}, weight {list(weight.shape)}: expected [T, D], [D, W] with W >= 2"
        )
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens: expected int32 [N + 1] with N >= 1, got {cu_seqlens.dtype} "
            f"{list(cu_seqlens.shape)}"
        )
    state_shape = (cu_seqlens.shape[0] - 1, x.shape[1], weight.shape[1] - 1)
    if initial_state is not None and (
        initial_state.shape != state_shape or initial_state.dtype != x.dtype
    ):
        raise ValueError(
            f"initial_state: expected {x.dtype} {list(state_shape)} to go with x, got "
            f"{initial_state.dtype} {list(initial_state.shape)}"
        )
    return ShortConvOutput(*run(x, weight, cu_seqlens, initial_state))
