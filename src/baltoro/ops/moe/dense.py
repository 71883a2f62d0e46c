"""The mixture of experts as dense products over tokens sorted by expert.

Rows of the sorted buffers are token-expert pairs (TA = T * A). The backward keeps the inputs and
the pre-activation `[TA, 2F]`. The gradient of a pair's weight is taken inside the expert, at the
activation (dw = (dout W_down) . act), so expert outputs are not kept (report 5.2.2).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baltoro.ops.moe.shared import Glu
from baltoro.ops.mxfp4 import Mxfp4Tensor, decode_mxfp4
from baltoro.ops.situ import dense as situ

ExpertWeight = Callable[[int], Tensor]


class _Plan(NamedTuple):
    token: Tensor  # [TA] token of a sorted pair
    pair: Tensor  # [TA] unsorted position of a sorted pair
    row: Tensor  # [TA] sorted position of an unsorted pair
    segments: list[tuple[int, slice]]  # expert and its rows, experts without tokens left out


def moe_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    glu: Glu,
) -> Tensor:
    return _Experts.apply(x, expert_ids, weights, gate_up_proj, down_proj, glu)


def moe_experts_mxfp4(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Mxfp4Tensor,
    down: Mxfp4Tensor,
    glu: Glu,
) -> Tensor:
    def decoded(weight: Mxfp4Tensor) -> ExpertWeight:
        packed, scale = weight
        return lambda expert: decode_mxfp4(Mxfp4Tensor(packed[expert], scale[expert]), x.dtype)

    plan = _plan(expert_ids, gate_up.packed.shape[0])
    inner = gate_up.packed.new_empty((plan.token.shape[0], gate_up.packed.shape[1]), dtype=x.dtype)
    return _forward(x, weights, decoded(gate_up), decoded(down), glu, plan, inner)


def _plan(expert_ids: Tensor, num_experts: int) -> _Plan:
    flat = expert_ids.flatten()
    pair = flat.argsort(stable=True)
    row = torch.empty_like(pair)
    row[pair] = torch.arange(pair.shape[0], device=pair.device)
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    segments = []
    start = 0
    for expert, count in enumerate(counts):
        if count:
            segments.append((expert, slice(start, start + count)))
            start += count
    token = torch.div(pair, expert_ids.shape[1], rounding_mode="floor")
    return _Plan(token, pair, row, segments)


def _activate(inner: Tensor, glu: Glu) -> Tensor:
    gate, up = inner.chunk(2, dim=-1)
    if glu.activation == "situ":
        return situ.situ_glu_forward(gate, up, glu.beta, glu.linear_beta)
    return situ.swiglu_forward(gate, up)


def _activate_backward(d_act: Tensor, inner: Tensor, glu: Glu) -> tuple[Tensor, Tensor]:
    gate, up = inner.chunk(2, dim=-1)
    if glu.activation == "situ":
        act, d_gate, d_up = situ.situ_glu_backward(d_act, gate, up, glu.beta, glu.linear_beta)
    else:
        act, d_gate, d_up = situ.swiglu_backward(d_act, gate, up)
    return act, torch.cat((d_gate, d_up), dim=-1)


def _forward(
    x: Tensor,
    weights: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    glu: Glu,
    plan: _Plan,
    inner: Tensor,
) -> Tensor:
    """Run the experts and combine; fills `inner` `[TA, 2F]` with the pre-activations."""
    num_tokens, num_active = weights.shape
    x_sorted = x.index_select(0, plan.token)
    y_sorted = torch.empty_like(x_sorted)
    for expert, rows in plan.segments:
        torch.mm(x_sorted[rows], gate_up(expert).T, out=inner[rows])
        torch.mm(_activate(inner[rows], glu), down(expert).T, out=y_sorted[rows])
    y = (
        y_sorted.index_select(0, plan.row)
        .view(num_tokens, num_active, x.shape[1])
        .to(weights.dtype)
    )
    return torch.bmm(weights.unsqueeze(1), y).squeeze(1).to(x.dtype)


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
        inner = x.new_empty((plan.token.shape[0], gate_up_proj.shape[1]))
        out = _forward(
            x, weights, gate_up_proj.__getitem__, down_proj.__getitem__, glu, plan, inner
        )
        ctx.save_for_backward(
            x, weights, gate_up_proj, down_proj, inner, plan.token, plan.pair, plan.row
        )
        ctx.segments, ctx.glu = plan.segments, glu
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, gate_up_proj, down_proj, inner, token, pair, row = ctx.saved_tensors
        x_sorted = x.index_select(0, token)
        d_y = d_out.index_select(0, token)
        weight_sorted = weights.flatten().index_select(0, pair).unsqueeze(-1)
        d_weight_sorted = torch.empty_like(weight_sorted)
        d_x_sorted = torch.empty_like(x_sorted)
        d_gate_up, d_down = torch.zeros_like(gate_up_proj), torch.zeros_like(down_proj)
        for expert, rows in ctx.segments:
            d_act = torch.mm(d_y[rows], down_proj[expert]).to(weights.dtype)
            act, d_inner = _activate_backward(d_act * weight_sorted[rows], inner[rows], ctx.glu)
            d_weight_sorted[rows, 0] = torch.linalg.vecdot(d_act, act.to(d_act.dtype))
            weighted = (d_y[rows] * weight_sorted[rows]).to(x.dtype)
            torch.mm(weighted.T, act, out=d_down[expert])
            torch.mm(d_inner.T, x_sorted[rows], out=d_gate_up[expert])
            torch.mm(d_inner, gate_up_proj[expert], out=d_x_sorted[rows])
        num_tokens, num_active = weights.shape
        d_x = d_x_sorted.index_select(0, row).view(num_tokens, num_active, x.shape[1])
        d_x = d_x.sum(1, dtype=weights.dtype).to(x.dtype)
        d_weights = d_weight_sorted.view(-1).index_select(0, row).view_as(weights)
        return d_x, None, d_weights, d_gate_up, d_down, None
