"""How a mixer reads what came before it: add the last output, mix the sources, normalise.

    partial <- partial + pending    m = `attn_res_mix`(sources .., partial)    y = rms(m) * weight

One kernel in the place of three where no gradient is wanted; without a query m is `partial`, the
residual stream of a model without attention residuals.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baltoro.ops.attn_res import attn_res_mix
from baltoro.ops.impl import ImplError
from baltoro.ops.rms_norm import rms_norm

__all__ = ["Query", "ResidualRead", "normed_read"]


class Query(NamedTuple):
    """What weighs the sources (`baltoro.ops.attn_res`)."""

    norm_weight: Tensor  # [D]
    proj_weight: Tensor  # [D]
    eps: float
    impl: str


class ResidualRead(NamedTuple):
    """What a read gives, each `[T, D]`."""

    normed: Tensor
    mixture: Tensor  # before the norm
    partial_sum: Tensor  # with what was pending


def normed_read(
    blocks: Sequence[Tensor],
    partial_sum: Tensor,
    pending: Tensor | None,
    query: Query | None,
    weight: Tensor,
    *,
    eps: float,
    impl: str,
) -> ResidualRead:
    """Read finished `blocks` and the running `partial_sum`, `pending` still to be added to it.

    All `[T, D]` of one dtype, `weight` `[D]`. Each step is rounded as by itself: with `triton` too
    the result is that of the sum, of `attn_res_mix` and of `rms_norm` one after another, which is
    what runs where a gradient is wanted, where the two impls differ, or where a token's sources do
    not fit into registers.
    """
    if query is None and blocks:
        raise ValueError(f"query=None: {len(blocks)} blocks need one; give none or a query")
    _check(blocks, partial_sum, pending, query, weight)
    is_plain = not torch.is_grad_enabled()
    if impl == "triton" and is_plain and (query is None or query.impl == "triton"):
        try:
            from . import triton
        except ModuleNotFoundError as error:
            raise ImplError(f"normed_read: impl='triton' needs triton ({error})") from error
        if triton.fits(len(blocks) + 1, partial_sum.shape[1]):
            return ResidualRead(
                *triton.normed_read(blocks, partial_sum, pending, query, weight, eps)
            )
    if pending is not None:
        partial_sum = partial_sum + pending
    mixture = partial_sum
    if query is not None:
        mixture = attn_res_mix(
            (*blocks, partial_sum),
            query.norm_weight,
            query.proj_weight,
            eps=query.eps,
            impl=query.impl,
        )
    return ResidualRead(rms_norm(mixture, weight, eps=eps, impl=impl), mixture, partial_sum)


def _check(
    blocks: Sequence[Tensor],
    partial_sum: Tensor,
    pending: Tensor | None,
    query: Query | None,
    weight: Tensor,
) -> None:
    shape, dtype = partial_sum.shape, partial_sum.dtype
    if len(shape) != 2:
        raise ValueError(f"normed_read: partial_sum has shape {list(shape)}; expected [T, D]")
    for block in blocks if pending is None else (*blocks, pending):
        if block.shape != shape or block.dtype != dtype:
            raise ValueError(
                f"normed_read: a block or pending is {block.dtype} {list(block.shape)}; all must "
                f"be {dtype} {list(shape)} as partial_sum is"
            )
    weights = [weight] if query is None else [weight, query.norm_weight, query.proj_weight]
    for vector in weights:
        if vector.shape != shape[1:]:
            raise ValueError(
                f"normed_read: a weight has shape {list(vector.shape)}; it must be [D] with "
                f"D = {shape[1]}"
            )
