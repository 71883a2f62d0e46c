"""Steps beside attention over latents: where a token's row goes, its way there, the output gate.

    row = rms(c) * weight, then the shared part as it is        y * sigmoid(gate), each rounded

`impl="triton"` is one kernel each, without gradients.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..impl import ImplError, choose
from ..rms_norm import rms_norm


class NextRows(NamedTuple):
    """Where the next row of each sequence goes, and how many it then has."""

    pages: Tensor  # [N] int64
    places: Tensor  # [N] int64, in the page
    lengths: Tensor  # [N] int32


def next_rows(
    positions: Tensor, steps: Tensor, page_table: Tensor, page_size: int, *, impl: str
) -> NextRows:
    """Move `positions` `[N]` on by `steps` `[N]`, 0 or 1, both int64: rows are at the old ones.

    `page_table` is int32 `[N, P]`.
    """
    shape = (page_table.shape[0],)
    for name, x in (("positions", positions), ("steps", steps)):
        if x.dtype != torch.int64 or x.shape != shape:
            raise ValueError(
                f"{name}: expected int64 {list(shape)} to go with page_table, got {x.dtype} "
                f"{list(x.shape)}"
            )
    return NextRows(*choose("next_rows", impl, _NEXT)(positions, steps, page_table, page_size))


def latent_rows(raw: Tensor, weight: Tensor, *, eps: float, impl: str) -> Tensor:
    """Rows to cache `[T, R + P]`: the first R numbers of `raw` normalised, `weight` is `[R]`."""
    latent_TR, shared_TP = raw.split([len(weight), raw.shape[-1] - len(weight)], -1)
    return torch.cat([rms_norm(latent_TR, weight, eps=eps, impl=impl), shared_TP], -1)


def append_rows(
    raw: Tensor,
    weight: Tensor,
    latents: Tensor,
    pages: Tensor,
    places: Tensor,
    *,
    eps: float,
    impl: str,
) -> None:
    """Write `latent_rows` of new tokens into `latents` `[pages, page_size, R + P]`.

    `pages` and `places` int64 `[T]` say where; `triton` trusts them.
    """
    width, num_tokens = latents.shape[-1], raw.shape[0]
    if raw.dim() != 2 or raw.shape[1] != width or raw.dtype != latents.dtype:
        raise ValueError(
            f"raw: expected {latents.dtype} [T, {width}] as latents hold, got {raw.dtype} "
            f"{list(raw.shape)}"
        )
    if weight.dim() != 1 or len(weight) > width:
        raise ValueError(
            f"weight: {list(weight.shape)}; expected [R] with R of at most the row's {width}"
        )
    for name, x in (("pages", pages), ("places", places)):
        if x.dtype != torch.int64 or x.shape != (num_tokens,):
            raise ValueError(
                f"{name}: expected int64 [{num_tokens}], got {x.dtype} {list(x.shape)}"
            )
    choose("append_rows", impl, _APPEND)(raw, weight, latents, pages, places, eps)


def sigmoid_gated(y: Tensor, gate_logits: Tensor, *, impl: str) -> Tensor:
    """`y` `[T, H, V]` times the sigmoid of `gate_logits` `[T, H * V]`, in that shape.

    Kernels have no gradients: where they are enabled `torch` runs, whatever is named.
    """
    if y.dim() != 3 or gate_logits.shape != (y.shape[0], y.shape[1] * y.shape[2]):
        raise ValueError(
            f"y {list(y.shape)}, gate_logits {list(gate_logits.shape)}: expected [T, H, V], "
            "[T, H * V]"
        )
    run = choose("sigmoid_gated", impl, _GATED)
    return (_GATED["torch"] if torch.is_grad_enabled() else run)(y, gate_logits)


def _next(
    positions: Tensor, steps: Tensor, page_table: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    pages = page_table.gather(1, (positions // page_size)[:, None]).squeeze(1).long()
    places = positions % page_size
    return pages, places, positions.add_(steps).to(torch.int32)


def _next_triton(
    positions: Tensor, steps: Tensor, page_table: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    try:
        from . import rows_triton
    except ModuleNotFoundError as error:
        raise ImplError(f"next_rows: impl='triton' needs triton ({error})") from error
    return rows_triton.next_rows(positions, steps, page_table, page_size)


def _append(
    raw: Tensor, weight: Tensor, latents: Tensor, pages: Tensor, places: Tensor, eps: float
) -> None:
    latents[pages, places] = latent_rows(raw, weight, eps=eps, impl="torch")


def _append_triton(
    raw: Tensor, weight: Tensor, latents: Tensor, pages: Tensor, places: Tensor, eps: float
) -> None:
    try:
        from . import rows_triton
    except ModuleNotFoundError as error:
        raise ImplError(f"append_rows: impl='triton' needs triton ({error})") from error
    rows_triton.append_rows(raw, weight, latents, pages, places, eps)


def _gated(y: Tensor, gate_logits: Tensor) -> Tensor:
    return y.flatten(1) * torch.sigmoid(gate_logits)


def _gated_triton(y: Tensor, gate_logits: Tensor) -> Tensor:
    try:
        from . import rows_triton
    except ModuleNotFoundError as error:
        raise ImplError(f"sigmoid_gated: impl='triton' needs triton ({error})") from error
    return rows_triton.sigmoid_gated(y, gate_logits)


_NEXT = {"reference": _next, "torch": _next, "triton": _next_triton}
_APPEND = {"reference": _append, "torch": _append, "triton": _append_triton}
_GATED = {"reference": _gated, "torch": _gated, "triton": _gated_triton}
