"""Which experts a token visits and with what weight (k3-facts 3.4, steps 1 to 3)."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from baltoro.ops.derivatives import no_second_derivatives
from baltoro.ops.impl import ImplError

_SUM_EPS = 1e-20  # of the released code, in the renormalisation


class Routing(NamedTuple):
    """The router's decision for `T` tokens."""

    scores: Tensor  # [T, E] unbiased, without gradient unless it was asked for
    expert_ids: Tensor  # int64 [T, A], best first
    weights: Tensor  # [T, A], carries the router's gradient
    num_rerouted: int = 0  # rows that `replay_ids` lacked and that were routed anew


def route(
    router_logits: Tensor,
    expert_bias: Tensor | None,
    *,
    num_experts_per_token: int,
    activation: Literal["sigmoid", "softmax"],
    renormalize: bool,
    scaling_factor: float,
    num_groups: int = 1,
    topk_groups: int = 1,
    has_score_gradient: bool = False,
    replay_ids: Tensor | None = None,
    impl: str = "torch",
) -> Routing:
    """Choose `A = num_experts_per_token` of `E` experts per token.

    `router_logits` `[T, E]` fp32 (or fp64); `expert_bias` `[E]` is added for the choice only, never
    to the weights. With several groups, the `topk_groups` groups with the best sum of their two
    best biased scores stay, the others count as -inf. The weights are the unbiased scores of the
    chosen experts, divided by (their sum + 1e-20) if `renormalize`, times `scaling_factor`. Among
    equal biased scores the lowest expert id wins, and among equal groups the lowest group.
    `has_score_gradient` lets the returned scores carry the router's gradient too, for an auxiliary
    loss on them.

    `replay_ids` int64 `[T, A]` are choices made elsewhere, by the engine that drew the tokens: they
    are taken as they are, in their order, and weighed with the scores of this call, whatever this
    call would have chosen. A row of -1 is missing; it is routed anew and counted. They may lie on
    the host, where looking at them does not wait for the device.

    `impl="triton"` is one kernel each way, for fp32, one group and no replay; every other name is
    the same plain code.
    """
    _check(router_logits, expert_bias, num_experts_per_token, activation, num_groups, topk_groups)
    if replay_ids is not None:
        _check_replay(replay_ids, router_logits, num_experts_per_token)
    if impl == "triton":
        if replay_ids is not None:
            raise ImplError("route: impl='triton' does not serve replay_ids; use impl='torch'")
        if topk_groups < num_groups:
            raise ImplError(
                f"route: impl='triton' chooses among all experts, not those of {topk_groups} of "
                f"{num_groups} groups; use impl='torch'"
            )
        law = _Law(activation == "softmax", renormalize, scaling_factor)
        return _route_triton(
            router_logits, expert_bias, num_experts_per_token, law, has_score_gradient
        )
    if activation == "sigmoid":
        scores = torch.sigmoid(router_logits)
    else:
        scores = torch.softmax(router_logits, dim=-1)
    unbiased = scores.detach()
    choice = unbiased if expert_bias is None else unbiased + expert_bias.detach()
    if topk_groups < num_groups:
        choice = _keep_groups(choice, num_groups, topk_groups)
    expert_ids = _first_largest(choice, num_experts_per_token)
    num_rerouted = 0
    if replay_ids is not None:
        num_rerouted = int((replay_ids[:, 0] < 0).sum())
        replay_ids = replay_ids.to(router_logits.device, non_blocking=True)
        expert_ids = torch.where(replay_ids < 0, expert_ids, replay_ids)
    weights = scores.gather(-1, expert_ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _SUM_EPS)
    if scaling_factor != 1.0:
        weights = weights * scaling_factor
    scores = scores if has_score_gradient else unbiased
    return Routing(scores, expert_ids, weights, num_rerouted)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """`x` `[T, D]` times `weight` `[E, D]` as fp32 (fp64 of fp64) `[T, E]`, and so its gradients.

    A product of two bf16 numbers is exact in fp32, so bf16 on a GPU is not widened first; the
    gradient of the logits then goes on as the sum of two bf16 numbers, 2^-17 from its value.
    """
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
        logits: Tensor = _Logits.apply(x, weight)
        return logits
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(dtype), weight.to(dtype))


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.mT, out_dtype=torch.float32)

    @staticmethod
    @no_second_derivatives("router_logits: bf16 on a GPU", instead="fp32 has them")
    def backward(
        ctx: Any, saved: tuple[Tensor, ...], d_logits: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight = saved
        num_experts = weight.shape[0]
        parts = x.new_empty((x.shape[0], 2 * num_experts))
        high, low = parts.split(num_experts, 1)
        high.copy_(d_logits)
        torch.sub(d_logits, high, out=low)
        d_x = torch.mm(parts, torch.cat((weight, weight)))
        d_weights = torch.mm(parts.mT, x, out_dtype=torch.float32)
        d_weight = torch.add(*d_weights.split(num_experts), out=torch.empty_like(weight))
        return d_x, d_weight


class _Law(NamedTuple):
    """How scores become weights."""

    is_softmax: bool
    is_renormalized: bool
    scaling: float


def _route_triton(
    logits: Tensor, bias: Tensor | None, num_active: int, law: _Law, has_score_gradient: bool
) -> Routing:
    try:
        from ..triton import refuse_unserved
        from . import pairs
    except ModuleNotFoundError as error:
        raise ImplError(f"route: impl='triton' needs triton ({error})") from error
    refuse_unserved("route", logits)
    if not torch.is_grad_enabled() or not logits.requires_grad:
        return Routing(*pairs.choose_experts(logits, bias, num_active, *law))
    kernels = (pairs.choose_experts, pairs.choose_backward)
    return Routing(*_Choice.apply(logits, bias, num_active, law, has_score_gradient, kernels))


class _Choice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        bias: Tensor | None,
        num_active: int,
        law: _Law,
        has_score_gradient: bool,
        kernels: tuple[Callable[..., tuple[Tensor, Tensor, Tensor]], Callable[..., Tensor]],
    ) -> tuple[Tensor, Tensor, Tensor]:
        choose, ctx.backward_kernel = kernels
        scores, ids, weights = choose(logits, bias, num_active, *law)
        ctx.mark_non_differentiable(ids, *(() if has_score_gradient else (scores,)))
        ctx.save_for_backward(scores, ids, weights)  # weights for their way back to the logits
        ctx.law, ctx.has_score_gradient = law, has_score_gradient
        return scores, ids, weights

    @staticmethod
    @no_second_derivatives("route: impl='triton'")
    def backward(
        ctx: Any, saved: tuple[Tensor, ...], d_scores: Tensor, d_ids: None, d_weights: Tensor
    ) -> tuple[Tensor | None, ...]:
        scores, ids, _ = saved
        given = d_scores if ctx.has_score_gradient else None
        d_logits = ctx.backward_kernel(scores, ids, given, d_weights, *ctx.law)
        return d_logits, None, None, None, None, None


def _first_largest(values: Tensor, count: int) -> Tensor:
    # topk promises no order among equals; a stable sort does.
    order = values.sort(dim=-1, descending=True, stable=True).indices
    return order.narrow(-1, 0, count)


def _keep_groups(choice: Tensor, num_groups: int, topk_groups: int) -> Tensor:
    grouped = choice.unflatten(-1, (num_groups, -1))
    group_score = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    kept = _first_largest(group_score, topk_groups)
    dropped = torch.ones_like(group_score, dtype=torch.bool).scatter_(-1, kept, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(-2)


def _check(
    router_logits: Tensor,
    expert_bias: Tensor | None,
    num_experts_per_token: int,
    activation: str,
    num_groups: int,
    topk_groups: int,
) -> None:
    if router_logits.dim() != 2 or router_logits.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"route: router_logits is {router_logits.dtype} {list(router_logits.shape)}; "
            "expected fp32 [T, E]"
        )
    num_experts = router_logits.shape[1]
    if expert_bias is not None and (
        expert_bias.shape != (num_experts,) or expert_bias.dtype != router_logits.dtype
    ):
        raise ValueError(
            f"route: expert_bias is {expert_bias.dtype} {list(expert_bias.shape)}; "
            f"it must be {router_logits.dtype} [{num_experts}], or choices among near ties change"
        )
    if activation not in ("sigmoid", "softmax"):
        raise ValueError(f"route: activation={activation!r} must be 'sigmoid' or 'softmax'")
    if num_groups < 1 or num_experts % num_groups != 0:
        raise ValueError(f"route: num_groups={num_groups} must divide the {num_experts} experts")
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(f"route: topk_groups={topk_groups} must be between 1 and {num_groups}")
    kept = num_experts // num_groups * topk_groups
    if not 1 <= num_experts_per_token <= kept:
        raise ValueError(
            f"route: num_experts_per_token={num_experts_per_token} must be between 1 and {kept}, "
            "the experts left by the groups"
        )


def _check_replay(replay_ids: Tensor, router_logits: Tensor, num_active: int) -> None:
    num_tokens, num_experts = router_logits.shape
    expected = f"int64 [{num_tokens}, {num_active}] on the host or {router_logits.device}"
    if replay_ids.shape != (num_tokens, num_active) or replay_ids.dtype != torch.int64:
        raise ValueError(
            f"route: replay_ids is {replay_ids.dtype} {list(replay_ids.shape)}; expected {expected}"
        )
    if replay_ids.device not in (torch.device("cpu"), router_logits.device):
        raise ValueError(f"route: replay_ids is on {replay_ids.device}; expected {expected}")
    ordered = replay_ids.sort(-1).values
    is_choice = (ordered[:, 0] >= 0) & (ordered[:, -1] < num_experts)
    is_choice &= (ordered[:, 1:] > ordered[:, :-1]).all(-1)
    is_wrong = ~(is_choice | (replay_ids == -1).all(-1))
    if is_wrong.any():
        row = int(is_wrong.nonzero()[0])
        raise ValueError(
            f"route: replay_ids[{row}] is {replay_ids[row].tolist()}; a row holds {num_active} "
            f"different ids in [0, {num_experts}), or -1 throughout to be routed anew"
        )
