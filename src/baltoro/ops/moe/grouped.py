"""The mixture of experts as grouped products: one launch for all experts, no trip to the host.

The same sorted pairs, and the same backward, as the dense form; see there. Counts of tokens stay on
the device, so ids are trusted to be in range. What stands between the products comes as `Pieces`:
in PyTorch (`impl="grouped"`), or as one kernel each (`impl="triton"`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from baltoro.ops.derivatives import no_second_derivatives
from baltoro.ops.impl import ImplError
from baltoro.ops.moe.dense import activate, activate_backward
from baltoro.ops.moe.shared import Glu, sorted_pairs
from baltoro.ops.mxfp4 import Mxfp4Tensor

WIDTH_UNIT = 8  # so that rows of every operand begin at multiples of 16 bytes


class _Combine(Protocol):
    def __call__(
        self, values: Tensor, row: Tensor, weights: Tensor, *, is_weighted: bool
    ) -> Tensor: ...


class Pieces(NamedTuple):
    """What stands between the products."""

    impl: str
    # of one or two tensors `[T, Z]`, the rows `[TA]`
    gather: Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor | None]]
    activate: Callable[[Tensor, Glu], Tensor]
    # from (d_act, inner, weights, pair, glu): weighted activation, d_inner, d_weights
    activate_backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Glu], tuple[Tensor, Tensor, Tensor]
    ]
    combine: _Combine  # the sum over a token's rows, `[T, Z]`
    plan: Callable[[Tensor, int], "_Plan"]  # of ids `[T, A]` and the number of experts


class _Plan(NamedTuple):
    token: Tensor  # [TA] token of a sorted pair
    pair: Tensor  # [TA] unsorted position of a sorted pair
    row: Tensor  # [TA] sorted position of an unsorted pair
    stops: Tensor  # int32 [E] end of each expert's rows


def moe_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    glu: Glu,
) -> Tensor:
    _check("grouped", x, gate_up_proj, down_proj)
    weights = weights.contiguous()
    return _Experts.apply(x, expert_ids, weights, gate_up_proj, down_proj, glu, _PIECES)


def moe_experts_triton(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    glu: Glu,
) -> Tensor:
    _check("triton", x, gate_up_proj, down_proj)
    try:
        from ..triton import refuse_unserved
        from . import few, pairs, pieces
    except ModuleNotFoundError as error:
        raise ImplError(f"moe_experts: impl='triton' needs triton ({error})") from error
    refuse_unserved("moe_experts", x, weights, gate_up_proj, down_proj)
    is_few = expert_ids.numel() <= few.MAX_MEAN_TOKENS * gate_up_proj.shape[0]
    if is_few and not torch.is_grad_enabled():
        return few.moe_experts(x, expert_ids, weights, gate_up_proj, down_proj, glu)

    def plan(expert_ids: Tensor, num_experts: int) -> _Plan:
        return _Plan(*pairs.sort(expert_ids.contiguous(), num_experts))

    weights = weights.contiguous()  # kernels find a pair's weight by its place
    made = Pieces(
        "triton", pieces.gather, pieces.activate, pieces.activate_backward, pieces.combine, plan
    )
    return _Experts.apply(x, expert_ids, weights, gate_up_proj, down_proj, glu, made)


def moe_experts_mxfp4(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Mxfp4Tensor,
    down: Mxfp4Tensor,
    glu: Glu,
) -> Tensor:
    if x.dtype != torch.bfloat16:
        raise ImplError(
            f"moe_experts_mxfp4: impl='triton' serves bf16, not {x.dtype}; use impl='torch'"
        )
    try:
        from ..triton import refuse_unserved
        from . import few
    except ModuleNotFoundError as error:
        raise ImplError(f"moe_experts_mxfp4: impl='triton' needs triton ({error})") from error
    refuse_unserved("moe_experts_mxfp4", x, weights)
    return few.moe_experts(x, expert_ids, weights, gate_up, down, glu)


def _check(impl: str, x: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> None:
    sizes = (gate_up_proj.shape[2], down_proj.shape[2])
    if x.dtype != torch.bfloat16 or any(size % WIDTH_UNIT for size in sizes):
        raise ImplError(
            f"moe_experts: impl={impl!r} serves bf16 with Z and F multiples of {WIDTH_UNIT}, "
            f"not {x.dtype} with Z={sizes[0]}, F={sizes[1]}; use impl='torch'"
        )


def _weighted_backward(
    d_act: Tensor, inner: Tensor, weights: Tensor, pair: Tensor, glu: Glu
) -> tuple[Tensor, Tensor, Tensor]:
    weight = weights.flatten().index_select(0, pair).unsqueeze(-1)
    act, d_inner = activate_backward(d_act * weight, inner, glu)
    d_weights = torch.empty_like(weights)
    d_weights.view(-1)[pair] = (d_act * act).sum(-1, dtype=weight.dtype)
    return (act * weight).to(inner.dtype), d_inner, d_weights


def _gather(x: Tensor, other: Tensor | None, row: Tensor) -> tuple[Tensor, Tensor | None]:
    return x.index_select(0, row), None if other is None else other.index_select(0, row)


def _combine(values: Tensor, row: Tensor, weights: Tensor, *, is_weighted: bool) -> Tensor:
    y = values.index_select(0, row).view(*weights.shape, values.shape[1])
    if not is_weighted:
        return y.sum(1, dtype=weights.dtype).to(values.dtype)
    return torch.bmm(weights.unsqueeze(1), y.to(weights.dtype)).squeeze(1).to(values.dtype)


def _plan(expert_ids: Tensor, num_experts: int) -> _Plan:
    pairs, flat = sorted_pairs(expert_ids), expert_ids.flatten()
    counts = torch.zeros(num_experts, dtype=torch.int32, device=flat.device)
    counts.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return _Plan(*pairs, counts.cumsum(0, dtype=torch.int32))


_PIECES = Pieces("grouped", _gather, activate, _weighted_backward, _combine, _plan)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        glu: Glu,
        pieces: Pieces,
    ) -> Tensor:
        plan = pieces.plan(expert_ids, gate_up_proj.shape[0])
        x_sorted, _ = pieces.gather(x, None, plan.token)
        inner = F.grouped_mm(x_sorted, gate_up_proj.mT, offs=plan.stops)
        y_sorted = F.grouped_mm(pieces.activate(inner, glu), down_proj.mT, offs=plan.stops)
        ctx.save_for_backward(x, weights, gate_up_proj, down_proj, inner, *plan)
        ctx.glu, ctx.pieces = glu, pieces
        return pieces.combine(y_sorted, plan.row, weights, is_weighted=True)

    @staticmethod
    @no_second_derivatives(lambda ctx: f"moe_experts: impl={ctx.pieces.impl!r}")
    def backward(ctx: Any, saved: tuple[Tensor, ...], d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, gate_up_proj, down_proj, inner, token, pair, row, stops = saved
        x_sorted, d_y = ctx.pieces.gather(x, d_out, token)
        assert d_y is not None
        d_act = F.grouped_mm(d_y, down_proj, offs=stops)
        act, d_inner, d_weights = ctx.pieces.activate_backward(d_act, inner, weights, pair, ctx.glu)
        d_down = F.grouped_mm(d_y.mT, act, offs=stops)
        d_gate_up = F.grouped_mm(d_inner.mT, x_sorted, offs=stops)
        d_x_sorted = F.grouped_mm(d_inner, gate_up_proj, offs=stops)
        d_x = ctx.pieces.combine(d_x_sorted, row, weights, is_weighted=False)
        return d_x, None, d_weights, d_gate_up, d_down, None, None
