"""The mixture of experts as grouped products: one launch for all experts, no trip to the host.

The same sorted pairs, and the same backward, as the dense form; see there. Counts of tokens stay on
the device, so ids are trusted to be in range.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from baltoro.ops.impl import ImplError
from baltoro.ops.moe.dense import activate, activate_backward
from baltoro.ops.moe.shared import Glu

_ALIGNED = 16  # bytes that a row of every operand must be a multiple of


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
    _check(x, gate_up_proj, down_proj)
    return _Experts.apply(x, expert_ids, weights, gate_up_proj, down_proj, glu)


def _check(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> None:
    sizes = (gate_up_proj.shape[2], down_proj.shape[2])
    if x.dtype != torch.bfloat16 or any(size * 2 % _ALIGNED for size in sizes):
        raise ImplError(
            f"moe_experts: impl='grouped' serves bf16 with Z and F multiples of {_ALIGNED // 2}, "
            f"not {x.dtype} with Z={sizes[0]}, F={sizes[1]}; use impl='torch'"
        )


def _plan(expert_ids: Tensor, num_experts: int) -> _Plan:
    flat = expert_ids.flatten()
    pair = flat.argsort(stable=True)
    row = torch.empty_like(pair)
    row[pair] = torch.arange(pair.shape[0], device=pair.device)
    token = torch.div(pair, expert_ids.shape[1], rounding_mode="floor")
    counts = torch.zeros(num_experts, dtype=torch.int32, device=flat.device)
    counts.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return _Plan(token, pair, row, counts.cumsum(0, dtype=torch.int32))


def _combine(y_sorted: Tensor, row: Tensor, weights: Tensor) -> Tensor:
    y = y_sorted.index_select(0, row).view(*weights.shape, y_sorted.shape[1])
    return torch.bmm(weights.unsqueeze(1), y.to(weights.dtype)).squeeze(1)


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
    ) -> Tensor:
        plan = _plan(expert_ids, gate_up_proj.shape[0])
        x_sorted = x.index_select(0, plan.token)
        inner = F.grouped_mm(x_sorted, gate_up_proj.mT, offs=plan.stops)
        y_sorted = F.grouped_mm(activate(inner, glu), down_proj.mT, offs=plan.stops)
        ctx.save_for_backward(x, weights, gate_up_proj, down_proj, inner, *plan)
        ctx.glu = glu
        return _combine(y_sorted, plan.row, weights).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, gate_up_proj, down_proj, inner, token, pair, row, stops = ctx.saved_tensors
        x_sorted = x.index_select(0, token)
        d_y = d_out.index_select(0, token)
        weight = weights.flatten().index_select(0, pair).unsqueeze(-1)
        d_act = F.grouped_mm(d_y, down_proj, offs=stops)
        act, d_inner = activate_backward(d_act * weight, inner, ctx.glu)
        d_weight = (d_act * act).sum(-1, dtype=weights.dtype)
        d_inner = d_inner.to(x.dtype)
        act = (act * weight).to(x.dtype)
        d_down = F.grouped_mm(d_y.mT, act, offs=stops)
        d_gate_up = F.grouped_mm(d_inner.mT, x_sorted, offs=stops)
        d_x_sorted = F.grouped_mm(d_inner, gate_up_proj, offs=stops)
        d_x = d_x_sorted.index_select(0, row).view(*weights.shape, x.shape[1])
        d_x = d_x.sum(1, dtype=weights.dtype).to(x.dtype)
        return d_x, None, d_weight.index_select(0, row).view_as(weights), d_gate_up, d_down, None
