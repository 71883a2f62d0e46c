"""One step: micro-batches to gradients, one update, then what follows an update.

    loss = sum_t w_t l_t / sum_t w_t + m * (the same over each MTP layer) + a * sum over MoE layers

with l_t the cross entropy of `targets[t]` and both sums over all micro-batches of the step. MTP
layer i predicts from position t the target of position t + 1 + i. The last term, the auxiliary loss
of every router averaged over micro-batches by their tokens, is there only with `balancing="aux"`.
After the update, in this order: QK-Clip on the masters, the routers' next bias.

Gradients of several micro-batches add up in fp32, whatever the weights are: a sum in bf16 loses
what is below a 256th of it. That of a single micro-batch has the dtype of its weight.

A step whose loss or gradient is not finite, or whose loss is beyond the limit it was given, changes
nothing: no weight, no momentum, no bias.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baltoro.data.pack import PackedBatch
from baltoro.model.model import Model, ModelOutput
from baltoro.ops.cross_entropy import linear_cross_entropy
from baltoro.optim.balancing import LayerBalance, auxiliary_loss
from baltoro.optim.grad_clip import clip_grad_norm_
from baltoro.optim.qk_clip import qk_clip_
from baltoro.optim.router_health import RouterAlarm, router_alarms
from baltoro.train.attention_logits import record_max_logits
from baltoro.train.graph import DeviceBatch, Losses, device_batch
from baltoro.train.learner import (
    Balancer,
    Learner,
    device_of,
    qk_weights,
    router_layers,
    router_parameter,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one step did."""

    numbers: dict[str, float]  # flat, by `room/thing_unit`
    is_skipped: bool  # nothing was changed
    is_spike: bool = False  # skipped for a loss beyond the limit; else loss or gradient not finite
    balances: Mapping[str, LayerBalance] = field(default_factory=dict)  # by MoE layer
    max_logits: Mapping[str, list[float]] = field(default_factory=dict)  # by MLA mixer and head
    router_alarms: Sequence[RouterAlarm] = ()


@dataclass(kw_only=True, slots=True)
class _Sums:
    """Sums over the micro-batches of a step, on the device."""

    weight: float  # of all positions
    num_positions: int
    loss: Tensor
    mtp_loss: Tensor
    aux_loss: Tensor  # mean over layers
    max_logits: dict[str, Tensor] = field(default_factory=dict)  # [H] by MLA mixer, if measured


def train_step(
    learner: Learner, batches: Sequence[PackedBatch], *, lr: float, max_loss: float = math.inf
) -> StepResult:
    """Learn from the micro-batches `batches` with rate `lr`, unless the loss is above `max_loss`.

    Raises `ValueError` if no position of them carries weight, or images come to a model without
    sight.
    """
    model, optimizer, config = learner.model, learner.optimizer, learner.config
    total_weight = sum(float(batch.weights.sum()) for batch in batches)
    if not total_weight > 0.0:
        raise ValueError("weights: no position of this step's micro-batches carries weight")
    optimizer.zero_grad()
    _set_grad_dtypes(optimizer.parameters.values(), num_batches=len(batches))
    device = device_of(model)
    sums = _Sums(
        weight=total_weight,
        num_positions=sum(len(batch.tokens) for batch in batches),
        loss=torch.zeros((), device=device),
        mtp_loss=torch.zeros((), device=device),
        aux_loss=torch.zeros((), device=device),
    )
    is_measured = learner.num_steps % config.qk_clip_every == 0
    if learner.graphs is not None:
        learner.graphs.begin()
    for batch in batches:
        _accumulate(learner, batch, sums, is_measured=is_measured)
    gradients = [
        parameter.grad for parameter in optimizer.parameters.values() if parameter.grad is not None
    ]
    router_norms = _router_grad_norms(learner)
    total_norm = clip_grad_norm_(gradients, max_norm=config.grad_clip)
    plan = optimizer.plan()
    # the step waits for the device here, and once more in each of QK-Clip and balancing
    loss, mtp_loss, aux_loss, grad_norm, *norms = _to_host(
        [sums.loss, sums.mtp_loss, sums.aux_loss, total_norm, *router_norms.values()], device
    )
    numbers = {
        "train/loss": loss,
        "train/grad_norm": grad_norm,
        "train/lr": lr,
        "train/tokens": total_weight,
    }
    if model.config.num_mtp_layers:
        numbers["train/mtp_loss"] = mtp_loss
    if learner.balancer is not None and config.balancing == "aux":
        numbers["router/aux_loss"] = aux_loss
    learner.num_steps += 1
    is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
    is_spike = is_finite and loss > max_loss
    if is_spike or not is_finite:
        if learner.balancer is not None:
            learner.balancer.discard()
        optimizer.zero_grad()
        return StepResult(numbers=numbers, is_skipped=True, is_spike=is_spike)
    learner.num_tokens += round(total_weight)
    optimizer.step(lr, plan)
    clips, logits = _clip_heads(learner, sums.max_logits)
    numbers |= clips
    balances = {} if learner.balancer is None else learner.balancer.update()
    grad_norms = dict(zip(router_norms, norms, strict=True))
    alarms = [
        alarm
        for layer, balance in balances.items()
        if balance.num_tokens
        for alarm in router_alarms(layer, balance, router_grad_norm=grad_norms[layer])
    ]
    numbers |= _router_numbers(balances, grad_norms)
    return StepResult(
        numbers=numbers,
        is_skipped=False,
        balances=balances,
        max_logits=logits,
        router_alarms=alarms,
    )


def _set_grad_dtypes(parameters: Iterable[Tensor], *, num_batches: int) -> None:
    """In which dtype backward passes add up; there must be no gradient yet."""
    for parameter in parameters:
        wide = torch.promote_types(parameter.dtype, torch.float32)
        parameter.grad_dtype = wide if num_batches > 1 else parameter.dtype


def token_losses(model: Model, output: ModelOutput, targets: Tensor) -> Tensor:
    """Cross entropy `[T]` fp32 of `targets` under the model's head."""
    return linear_cross_entropy(
        output.hidden, model.lm_head.weight, targets, impl=model.config.impl.cross_entropy
    )


def run_model(model: Model, batch: PackedBatch, *, recompute: bool = False) -> ModelOutput:
    """The forward pass of a batch, its images included, on the model's device."""
    device = device_of(model)
    return model(
        batch.tokens.to(device),
        batch.cu_seqlens.to(device),
        image_features=_image_features(model, batch),
        recompute=recompute,
    )


def _image_features(model: Model, batch: PackedBatch) -> Tensor | None:
    if batch.pixel_values is None:
        return None
    assert batch.grid_thws is not None
    pixels = batch.pixel_values.to(device_of(model), model.lm_head.weight.dtype)
    return model.encode_images(pixels, batch.grid_thws)


def _accumulate(learner: Learner, batch: PackedBatch, sums: _Sums, *, is_measured: bool) -> None:
    """Forward and backward of one micro-batch; gradients add up in the parameters."""
    device = device_of(learner.model)

    def run(inputs: DeviceBatch) -> tuple[Losses, Mapping[str, Tensor]]:
        if not is_measured:
            return _losses(learner, inputs, batch, sums.num_positions), {}
        impl = learner.config.max_logits_impl
        with record_max_logits(learner.model, impl=impl) as max_logits:
            return _losses(learner, inputs, batch, sums.num_positions), max_logits

    waits = is_measured and learner.config.max_logits_impl == "torch"
    if learner.graphs is None:
        losses, max_logits = run(device_batch(batch, sums.weight, device))
    elif batch.pixel_values is not None or waits:
        losses, max_logits = run(device_batch(batch, sums.weight, device, is_padded=True))
    else:
        inputs = device_batch(batch, sums.weight, device, is_padded=True)
        kind = (sums.num_positions, is_measured)
        losses, max_logits = learner.graphs.run(run, inputs, kind)
    for total, loss in zip((sums.loss, sums.mtp_loss, sums.aux_loss), losses, strict=True):
        total += loss
    for mixer, logits_H in max_logits.items():
        known_H = sums.max_logits.get(mixer)
        # a graph will write its own again
        largest_H = logits_H.clone() if known_H is None else torch.maximum(known_H, logits_H)
        sums.max_logits[mixer] = largest_H


def _losses(
    learner: Learner, inputs: DeviceBatch, batch: PackedBatch, num_positions: int
) -> Losses:
    """Run backward too; the shares of the step's loss, MTP loss and auxiliary loss, each `[]`.

    Of `batch` only pictures are read: without them nothing here waits for the device.
    """
    model, config = learner.model, learner.config
    output = model(
        inputs.tokens,
        inputs.cu_seqlens,
        image_features=_image_features(model, batch),
        recompute=config.recompute,
    )
    losses_T = token_losses(model, output, inputs.targets)
    loss = (losses_T * inputs.weights).sum() / inputs.total_weight
    token_loss = loss.detach()
    mtp_loss = aux_loss = torch.zeros_like(token_loss)
    scores = list(output.router_scores)
    if model.config.num_mtp_layers and config.mtp_loss_weight > 0.0:
        mtp_loss, mtp_scores = _mtp_loss(model, inputs, output.mixture)
        mtp_loss = mtp_loss / inputs.total_weight
        loss = loss + config.mtp_loss_weight * mtp_loss
        scores += mtp_scores
    if learner.balancer is not None:
        # a packed batch has no padding, and placeholders of images are routed like any token;
        # MTP layers without weight were not run and are not observed
        by_layer = dict(zip(router_layers(model.config), scores, strict=False))
        for layer, scores_TE in by_layer.items():
            learner.balancer.observe(layer, scores_TE.detach(), phase="train")
        if config.balancing == "aux":
            aux_loss = _aux_loss(learner.balancer, by_layer) * len(inputs.tokens)
            aux_loss = aux_loss / num_positions
            loss = loss + config.aux_loss_weight * aux_loss
            aux_loss = aux_loss / len(by_layer)
    loss.backward()
    return token_loss, mtp_loss.detach(), aux_loss.detach()


def _aux_loss(balancer: Balancer, scores: Mapping[str, Tensor]) -> Tensor:
    """Sum over layers of the auxiliary loss of `scores`, each `[T, E]` with gradient."""
    losses = [
        auxiliary_loss(scores_TE, balancer.biases[layer], num_experts_per_token=balancer.top_k)
        for layer, scores_TE in scores.items()
    ]
    return torch.stack(losses).sum()


def _mtp_loss(model: Model, inputs: DeviceBatch, mixture_TD: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Weighted sum of the losses of all MTP layers, and their router scores."""
    cu_seqlens = inputs.cu_seqlens
    next_tokens_T, targets_T, weights_T = inputs.tokens, inputs.targets, inputs.weights
    total = mixture_TD.new_zeros((), dtype=torch.float32)
    scores = []
    for index in range(model.config.num_mtp_layers):
        next_tokens_T = shift_left(next_tokens_T, cu_seqlens, fill=0)
        targets_T = shift_left(targets_T, cu_seqlens, fill=-100)
        weights_T = shift_left(weights_T, cu_seqlens, fill=0)
        out = model.predict_next(next_tokens_T, mixture_TD, cu_seqlens, mtp_idx=index)
        losses_T = linear_cross_entropy(
            out.hidden, model.lm_head.weight, targets_T, impl=model.config.impl.cross_entropy
        )
        total = total + (losses_T * weights_T).sum()
        mixture_TD = out.mixture
        if out.router_scores is not None:
            scores.append(out.router_scores)
    return total, scores


def shift_left(values_T: Tensor, cu_seqlens: Tensor, *, fill: int) -> Tensor:
    """`values[t + 1]` at `t` within every sequence, `fill` at its last position."""
    T = len(values_T)
    shifted_T = values_T.new_empty(T + 1)  # the last row takes what empty sequences write
    shifted_T[: T - 1] = values_T[1:]
    is_empty = cu_seqlens[1:] == cu_seqlens[:-1]
    shifted_T.index_fill_(0, torch.where(is_empty, T, cu_seqlens[1:] - 1).long(), fill)
    return shifted_T[:T]


def _router_grad_norms(learner: Learner) -> dict[str, Tensor]:
    """Before clipping, from all losses of the step, `[]` by MoE layer."""
    layers = [] if learner.balancer is None else list(learner.balancer.biases)
    grads = [learner.optimizer.parameters[router_parameter(layer)].grad for layer in layers]
    norms = [torch.zeros(()) if grad is None else grad.float().norm() for grad in grads]
    return dict(zip(layers, norms, strict=True))


def _to_host(scalars: Iterable[Tensor], device: torch.device) -> list[float]:
    """Scalars as numbers, in one transfer; fp64 holds each exactly."""
    return torch.stack([scalar.to(device, torch.float64) for scalar in scalars]).tolist()


def _clip_heads(
    learner: Learner, max_logits: Mapping[str, Tensor]
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Scale heads beyond the limit; numbers of the step, and the logits by mixer and head."""
    if not max_logits:
        return {}, {}
    optimizer = learner.optimizer
    clips = [
        qk_clip_(
            qk_weights(learner.model, optimizer.masters, mixer),
            logits_H,
            tau=learner.config.qk_clip_tau,
        )
        for mixer, logits_H in max_logits.items()
    ]
    counts = torch.stack([clip.num_clipped for clip in clips]).double()
    num_clipped, *values = torch.cat([counts.sum()[None], *max_logits.values()]).tolist()
    if num_clipped:
        optimizer.publish()
    places = iter(values)
    logits = {
        mixer: [next(places) for _ in range(len(logits_H))]
        for mixer, logits_H in max_logits.items()
    }
    numbers = {"attention/max_logit": max(values), "attention/clipped_heads": num_clipped}
    return numbers, logits


def _router_numbers(
    balances: Mapping[str, LayerBalance], grad_norms: Mapping[str, float]
) -> dict[str, float]:
    if not balances:
        return {}
    reports = balances.values()
    return {
        "router/dead_experts": float(sum(balance.num_dead for balance in reports)),
        "router/max_vio": max(balance.max_vio for balance in reports),
        "router/bias_drift": max(balance.bias_drift for balance in reports),
        "router/min_grad_norm": min(grad_norms.values()),
    }
