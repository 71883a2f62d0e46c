"""The mixture of experts as dense products over token-expert pairs sorted by expert.

Rows of the sorted buffers are pairs (TA = T * A). Experts go in batches: their products, the gated
unit once for the batch, their second products. The backward keeps the inputs and the
pre-activations `[TA, 2F]`; the gradient of a pair's weight is taken at the activation,
dw = (dout W_down) . act, so expert outputs are not kept (report 5.2.2).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baltoro.ops.derivatives import no_second_derivatives
from baltoro.ops.moe.shared import Glu, sorted_pairs
from baltoro.ops.mxfp4 import Mxfp4Tensor, decode_mxfp4
from baltoro.ops.situ import dense as situ

_BATCH_ROWS = 256  # pairs that close a batch: few calls for a few tokens, buffers in cache for many

ExpertWeight = Callable[[int], Tensor]
Segment = tuple[int, slice]  # an expert and its rows


class _Plan(NamedTuple):
    token: Tensor  # [TA] token of a sorted pair
    pair: Tensor  # [TA] unsorted position of a sorted pair
    row: Tensor  # [TA] sorted position of an unsorted pair
    batches: list[tuple[slice, list[Segment]]]  # rows of a batch and its experts with tokens


def moe_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    glu: Glu,
) -> Tensor:
    if torch.is_grad_enabled():
        return _Experts.apply(x, expert_ids, weights, gate_up_proj, down_proj, glu)
    return _infer(
        x, expert_ids, weights, gate_up_proj.__getitem__, down_proj.__getitem__, glu, gate_up_proj
    )


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

    return _infer(x, expert_ids, weights, decoded(gate_up), decoded(down), glu, gate_up.packed)


def _infer(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    glu: Glu,
    stacked: Tensor,
) -> Tensor:
    """The experts without a backward; `stacked` `[E, 2F, ...]` gives the sizes."""
    if x.shape[0] == 1:
        return _one_token(x, expert_ids[0].tolist(), weights, gate_up, down, glu)
    plan = _plan(expert_ids, stacked.shape[0])
    inner = x.new_empty((plan.token.shape[0], stacked.shape[1]))
    return _forward(x, weights, gate_up, down, glu, plan, inner)


def _one_token(
    x: Tensor,
    experts: list[int],
    weights: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    glu: Glu,
) -> Tensor:
    (row,) = x.unbind()
    inner = torch.stack([torch.mv(gate_up(expert), row) for expert in experts])
    acts = activate(inner, glu).unbind()
    y = torch.stack([torch.mv(down(e), act) for e, act in zip(experts, acts, strict=True)])
    return torch.mm(weights, y.to(weights.dtype)).to(x.dtype)


def _plan(expert_ids: Tensor, num_experts: int) -> _Plan:
    pairs, flat = sorted_pairs(expert_ids), expert_ids.flatten()
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    return _Plan(*pairs, _batches(counts))


def _batches(counts: list[int]) -> list[tuple[slice, list[Segment]]]:
    batches: list[tuple[slice, list[Segment]]] = []
    segments: list[Segment] = []
    start = stop = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        segments.append((expert, slice(stop, stop + count)))
        stop += count
        if stop - start >= _BATCH_ROWS:
            batches.append((slice(start, stop), segments))
            segments, start = [], stop
    if segments:
        batches.append((slice(start, stop), segments))
    return batches


def activate(inner: Tensor, glu: Glu) -> Tensor:
    """The gated unit on pre-activations `[R, 2F]`, gate columns first: `[R, F]`."""
    gate, up = inner.chunk(2, dim=-1)
    if glu.activation == "situ":
        return situ.situ_glu_forward(gate, up, glu.beta, glu.linear_beta)
    return situ.swiglu_forward(gate, up)


def activate_backward(d_act: Tensor, inner: Tensor, glu: Glu) -> tuple[Tensor, Tensor]:
    """The activation `[R, F]` again and the gradient of `inner`, from that of the activation."""
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
    x_sorted = x.index_select(0, plan.token)
    y_sorted = torch.empty_like(x_sorted)
    for rows, segments in plan.batches:
        for expert, own in segments:
            torch.mm(x_sorted[own], gate_up(expert).T, out=inner[own])
        act = activate(inner[rows], glu)
        for expert, own in segments:
            local = slice(own.start - rows.start, own.stop - rows.start)
            torch.mm(act[local], down(expert).T, out=y_sorted[own])
    y = y_sorted.index_select(0, plan.row).view(*weights.shape, x.shape[1]).to(weights.dtype)
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
        ctx.batches, ctx.glu = plan.batches, glu
        return out

    @staticmethod
    @no_second_derivatives("moe_experts: impl='torch'")
    def backward(ctx: Any, saved: tuple[Tensor, ...], d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, gate_up_proj, down_proj, inner, token, pair, row = saved
        x_sorted = x.index_select(0, token)
        d_y = d_out.index_select(0, token)
        weight_sorted = weights.flatten().index_select(0, pair).unsqueeze(-1)
        d_weight_sorted = torch.empty_like(weight_sorted)
        d_x_sorted = torch.empty_like(x_sorted)
        d_gate_up, d_down = (
            _gradients(gate_up_proj, ctx.batches),
            _gradients(down_proj, ctx.batches),
        )
        for rows, segments in ctx.batches:
            d_act = inner.new_empty((rows.stop - rows.start, down_proj.shape[2]))
            for expert, own in segments:
                local = slice(own.start - rows.start, own.stop - rows.start)
                torch.mm(d_y[own], down_proj[expert], out=d_act[local])
            weight = weight_sorted[rows]
            act, d_inner = activate_backward(d_act * weight, inner[rows], ctx.glu)
            d_weight_sorted[rows] = (d_act * act).sum(-1, keepdim=True, dtype=weight.dtype)
            act = (act * weight).to(x.dtype)
            for expert, own in segments:
                local = slice(own.start - rows.start, own.stop - rows.start)
                torch.mm(d_y[own].T, act[local], out=d_down[expert])
                torch.mm(d_inner[local].T, x_sorted[own], out=d_gate_up[expert])
                torch.mm(d_inner[local], gate_up_proj[expert], out=d_x_sorted[own])
        d_x = d_x_sorted.index_select(0, row).view(*weights.shape, x.shape[1])
        d_x = d_x.sum(1, dtype=weights.dtype).to(x.dtype)
        d_weights = d_weight_sorted.view(-1).index_select(0, row).view_as(weights)
        return d_x, None, d_weights, d_gate_up, d_down, None


def _gradients(weight: Tensor, batches: list[tuple[slice, list[Segment]]]) -> Tensor:
    """An uninitialised gradient, zero for the experts that no token visits."""
    used = {expert for _, segments in batches for expert, _ in segments}
    gradient = torch.empty_like(weight)
    for expert in range(weight.shape[0]):
        if expert not in used:
            gradient[expert].zero_()
    return gradient
