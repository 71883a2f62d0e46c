"""Routed experts divided over the ranks of a group; tokens travel to them and back.

Rank r of R holds experts [r E / R, (r + 1) E / R). Each rank has tokens of its own, as many as it
likes and also none:

    pairs of token and expert, sorted by expert  ->  all-to-all  ->  products of the experts here
    ->  all-to-all back  ->  weighted sum over the experts of a token

The exchange of counts, of ids and of rows, there and back, forward and backward, happens on every
rank, whatever it sends or receives: a rank without tokens that stayed away would leave the others
waiting. For the same reason the result must take part in the loss on every rank, and the input
must need a gradient on all of them or on none.

A layer moves T A rows twice each way and waits for the host once, for the counts. Not covered: an
overlap of exchange and products, sending a token once for several experts of a rank, packed
experts, a model that is also under `shard`.

The gradient of an expert is whole, from the tokens of all ranks; that of a weight which all ranks
hold is of the rank's own tokens, and is for the caller to add up.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from baltoro.model.model import Model
from baltoro.model.moe import Experts, Moe
from baltoro.ops.moe import Routing, moe_experts
from baltoro.ops.moe.shared import sorted_pairs


def divided_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    group: dist.ProcessGroup,
    activation: Literal["situ", "silu"],
    situ_beta: float,
    situ_linear_beta: float | None,
    impl: str,
) -> Tensor:
    """`ops.moe.moe_experts` of this rank's tokens, with this rank's part of the experts.

    `x` `[T, Z]`, `expert_ids` `[T, A]` among all E experts, `weights` `[T, A]`, for a T that each
    rank chooses; `gate_up_proj` `[E / R, 2F, Z]`, `down_proj` `[E / R, Z, F]`. Returns `[T, Z]`.
    """
    num_ranks, part = group.size(), gate_up_proj.shape[0]
    token, pair, row = sorted_pairs(expert_ids)
    sorted_ids = expert_ids.flatten()[pair]
    sent = torch.bincount(sorted_ids, minlength=num_ranks * part).view(num_ranks, part).sum(1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    there, back = sent.tolist(), received.tolist()
    local_ids = _exchange(sorted_ids % part, there, back, group)
    local_x = _Exchange.apply(x[token], there, back, group)
    local_y = moe_experts(
        local_x,
        local_ids[:, None],
        weights.new_ones(len(local_ids), 1),
        gate_up_proj,
        down_proj,
        activation=activation,
        situ_beta=situ_beta,
        situ_linear_beta=situ_linear_beta,
        impl=impl,
    )
    y = _Exchange.apply(local_y, back, there, group)[row].view(*expert_ids.shape, x.shape[1])
    return (y.to(weights.dtype) * weights[..., None]).sum(1).to(x.dtype)


class DividedExperts(nn.Module):
    """`model.moe.Experts` that keeps this rank's part of the experts."""

    def __init__(self, experts: Experts, group: dist.ProcessGroup) -> None:
        super().__init__()
        part = experts.gate_up_proj.shape[0] // group.size()
        first = group.rank() * part
        self.config = experts.config
        self.group = group
        self.gate_up_proj = nn.Parameter(experts.gate_up_proj.detach()[first:][:part].clone())
        self.down_proj = nn.Parameter(experts.down_proj.detach()[first:][:part].clone())

    def forward(self, x_TZ: Tensor, routing: Routing) -> Tensor:
        """As `Experts.forward`, `[T, Z]` to `[T, Z]`; all ranks call it together."""
        return divided_experts(
            x_TZ,
            routing.expert_ids,
            routing.weights,
            self.gate_up_proj,
            self.down_proj,
            group=self.group,
            activation=self.config.activation,
            situ_beta=self.config.situ_beta,
            situ_linear_beta=self.config.situ_linear_beta,
            impl=self.config.impl.moe,
        )


def divide_experts(model: Model, group: dist.ProcessGroup) -> None:
    """Leave each rank of `group` its part of the experts of every layer; names stay.

    Every rank must bring the same weights. Raises `ValueError` before anything is changed, for
    packed experts and for a number of experts that the ranks do not divide.
    """
    moe = model.config.moe
    if moe is None:
        return
    if moe.expert_format != "dense":
        raise ValueError(f"expert_format={moe.expert_format!r}: only dense experts are divided")
    if moe.num_experts % group.size() != 0:
        raise ValueError(f"{group.size()} ranks do not divide num_experts={moe.num_experts}")
    for module in model.modules():
        if isinstance(module, Moe):
            assert isinstance(module.experts, Experts)
            module.add_module("experts", DividedExperts(module.experts, group))


class _Exchange(torch.autograd.Function):
    """Rows to their ranks; the backward, an exchange too, sends gradients the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.back = received, sent, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(d_rows, *ctx.back), None, None, None


def _exchange(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    """`sent[r]` rows in order to every rank r, `received[r]` from it."""
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out
