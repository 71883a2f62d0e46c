"""Anchors of depth mixing: A7 loss with attention residuals, A9 sizes over depth.

One study serves both. nano has 8 layers, so a residual block of 4 layers (nano's own) makes two
blocks, and of 1 layer eight; a layer is two modules, which the paper (`k3-recipe` 3.3) counts one
by one, so "full" here still sums pairs. Pseudo-queries start at zero. The vectors of attention
residuals are 0.2 % more parameters; every other initial weight, and the data, agree over arms.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from baltoro.data.pack import PackedBatch
from baltoro.model.layer import Layer, LayerOutput
from baltoro.model.model import Model
from baltoro.model.moe import MoeOutput
from baltoro.recipes.anchor_record import (
    Anchor,
    Arm,
    Finding,
    Numbers,
    Results,
    Study,
    Trial,
    is_lower,
    is_within,
)
from baltoro.recipes.anchor_trial import nano_config, train_arm
from baltoro.train.step import run_model, token_losses

_BLOCK = "model.attn_res_block_size"
# half-way between bounded, 1, and outputs that add up without correlation, sqrt 2
_GROWS = (1.0 + math.sqrt(2.0)) / 2


def measure_residuals(trial: Trial) -> Numbers:
    """Losses, and by layer: RMS of the sum it hands on, RMS of the gradient at its outputs."""
    trained = train_arm(trial)
    sizes, gradients = depth_profile(trained.learner.model, trained.data.held_out[0])
    return {
        **trained.numbers,
        "output RMS": sizes,
        "output growth": growth(sizes),
        "gradient RMS": gradients,
        "gradient spread": max(gradients) / min(gradients),
    }


def growth(sizes: list[float]) -> float:
    """The largest of the deeper half over the largest of the other: 1 if bounded or periodic."""
    half = len(sizes) // 2
    return max(sizes[half:]) / max(sizes[:half])


def depth_profile(model: Model, batch: PackedBatch) -> tuple[list[float], list[float]]:
    """By layer: the RMS of the sum it hands on, and of the loss's gradient at its two mixers'
    outputs (per position and channel, times the number of positions).

    Gradients of the parameters are dropped.
    """
    num_layers = model.config.num_layers
    sizes = [0.0] * num_layers
    squares: list[list[Tensor]] = [[] for _ in range(num_layers)]
    handles: list[Any] = []
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        handles.append(layer.register_forward_hook(_record_size(sizes, index)))
        mixer = layer.block_sparse_moe if layer.is_moe else layer.mlp
        for module in (layer.self_attn, mixer):
            handles.append(module.register_forward_hook(_record_gradient(squares[index])))
    try:
        output = run_model(model, batch)
        targets_T = torch.where(batch.weights > 0, batch.targets, -100)
        token_losses(model, output, targets_T).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    model.zero_grad(set_to_none=True)
    gradients = [float(torch.stack(parts).mean().sqrt()) for parts in squares]
    return sizes, gradients


def _record_size(sizes: list[float], index: int) -> Any:
    def hook(module: nn.Module, inputs: tuple[Any, ...], output: LayerOutput) -> None:
        sizes[index] = float(output.partial_sum.detach().float().square().mean().sqrt())

    return hook


def _record_gradient(squares: list[Tensor]) -> Any:
    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor | MoeOutput) -> None:
        y_TD = output.y if isinstance(output, MoeOutput) else output
        y_TD.register_hook(lambda grad_TD: squares.append(grad_TD.square().mean()))

    return hook


def judge_loss(results: Results) -> list[Finding]:
    """A7."""
    return [
        is_lower(results, "loss", low="block", high="base", margin=0.01),
        is_lower(results, "loss", low="full", high="base", margin=0.01),
        is_lower(results, "loss", low="full", high="block"),
    ]


def judge_dynamics(results: Results) -> list[Finding]:
    """A9."""
    return [
        is_within(
            results,
            "base",
            "output growth",
            least=_GROWS,
            claim="without attention residuals the output grows with depth",
        ),
        is_within(
            results,
            "block",
            "output growth",
            most=_GROWS,
            claim="with blocks it stays bounded",
        ),
        is_within(results, "full", "output growth", most=_GROWS, claim="with single layers too"),
        is_lower(results, "output growth", low="block", high="base"),
        is_lower(results, "gradient spread", low="block", high="base"),
        is_lower(results, "gradient spread", low="full", high="base"),
    ]


RESIDUALS = Study(
    name="residuals",
    setting="nano without sight, 300 steps of 2,048 tokens, context 512, nano's own rate",
    arms=(
        Arm(name="base", what="ordinary residuals", changes={_BLOCK: None}),
        Arm(name="block", what="attention residuals over blocks of 4 layers", changes={_BLOCK: 4}),
        Arm(name="full", what="attention residuals over single layers", changes={_BLOCK: 1}),
    ),
    num_steps=300,
    seconds=950.0,
    base=nano_config,
    measure=measure_residuals,
)

ANCHORS = (
    Anchor(
        name="A7",
        study=RESIDUALS,
        question="do attention residuals lower the loss at the same tokens?",
        expected="full <= block < base, base behind by .01 nats or more",
        columns=("loss", "train loss"),
        judge=judge_loss,
    ),
    Anchor(
        name="A9",
        study=RESIDUALS,
        question="do outputs grow with depth, and gradients differ, less with them?",
        expected="base grows with depth, attention residuals stay bounded; gradients more even",
        columns=("output RMS", "output growth", "gradient RMS", "gradient spread"),
        judge=judge_dynamics,
    ),
)
