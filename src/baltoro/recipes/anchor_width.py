"""Anchor A11 of width mixing: the norm before W_up and SiTU, at a rate that is too high."""

from typing import Any

import torch
from torch import Tensor, nn

from baltoro.config import replace
from baltoro.data.pack import PackedBatch
from baltoro.model.mlp import Mlp
from baltoro.model.model import Model
from baltoro.model.moe import Experts, Moe
from baltoro.ops.moe import Routing
from baltoro.ops.situ import situ_glu, swiglu
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
from baltoro.train.alarms import AlarmWatch
from baltoro.train.config import PretrainConfig
from baltoro.train.learner import Learner
from baltoro.train.step import StepResult, run_model

_NORM, _ACTIVATION = "model.moe.use_latent_norm", "model.activation"
_LOOK_EVERY = 10  # steps between looks at the activations


def measure_activations(trial: Trial) -> Numbers:
    """Losses, spikes, and the largest values that the channel mixers had over the run."""
    alarms = AlarmWatch(qk_clip_tau=trial.config.step.qk_clip_tau)
    num_spikes = 0
    peaks = {"GLU": [0.0], "routed": [0.0]}

    def watch(learner: Learner, result: StepResult, batch: PackedBatch) -> None:
        nonlocal num_spikes
        found = alarms.check(learner.num_steps, result)
        num_spikes += sum(alarm.name == "loss_spike" for alarm in found)
        if learner.num_steps % _LOOK_EVERY == 0:
            for name, value in activation_peaks(learner.model, batch).items():
                peaks[name].append(value)

    trained = train_arm(trial, watch=watch)
    return {
        **trained.numbers,
        "spikes": float(num_spikes),
        "max GLU": max(peaks["GLU"]),
        "max routed": max(peaks["routed"]),
        "GLU by step": peaks["GLU"][1:],
        "routed by step": peaks["routed"][1:],
    }


@torch.no_grad()
def activation_peaks(model: Model, batch: PackedBatch) -> dict[str, float]:
    """Largest absolute values on one batch: `GLU` of every gated unit, dense, shared and routed;
    `routed` of what the routed experts' sum adds to the residual."""
    glus: list[float] = []
    routed: list[float] = []
    handles: list[Any] = []

    def of_mlp(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        glus.append(float(inputs[0].abs().max()))

    def of_experts(module: nn.Module, inputs: tuple[Tensor, Routing], output: Tensor) -> None:
        assert isinstance(module, Experts)
        glus.append(largest_glu(module, *inputs))

    def of_branch(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        routed.append(float(output.abs().max()))

    for module in model.modules():
        if isinstance(module, Mlp):
            handles.append(module.down_proj.register_forward_pre_hook(of_mlp))
        elif isinstance(module, Moe):
            handles.append(module.experts.register_forward_hook(of_experts))
            handles.append(module.routed_expert_up_proj.register_forward_hook(of_branch))
    try:
        run_model(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return {"GLU": max(glus), "routed": max(routed)}


def largest_glu(experts: Experts, x_TZ: Tensor, routing: Routing) -> float:
    """The largest absolute value inside the chosen experts, between their two matrices."""
    config = experts.config
    largest = 0.0
    for expert, weight_FZ in enumerate(experts.gate_up_proj):
        chosen_T = (routing.expert_ids == expert).any(1)
        if not chosen_T.any():
            continue
        gate_TF, up_TF = (x_TZ[chosen_T] @ weight_FZ.T).chunk(2, -1)
        if config.activation == "silu":
            glu_TF = swiglu(gate_TF, up_TF, impl=config.impl.situ)
        else:
            glu_TF = situ_glu(
                gate_TF,
                up_TF,
                beta=config.situ_beta,
                linear_beta=config.situ_linear_beta,
                impl=config.impl.situ,
            )
        largest = max(largest, float(glu_TF.abs().max()))
    return largest


def judge_activations(results: Results) -> list[Finding]:
    """A11."""
    return [
        is_within(results, "both", "max GLU", most=100.0, claim="norm and SiTU: no GLU beyond 100"),
        is_within(results, "both", "spikes", most=0.0, claim="norm and SiTU: no loss spike"),
        is_lower(results, "max GLU", low="both", high="neither"),
        is_lower(results, "max routed", low="both", high="neither"),
        is_lower(results, "spikes", low="both", high="neither"),
        is_lower(results, "loss", low="both", high="neither"),
    ]


def hot_config(num_steps: int) -> PretrainConfig:
    """nano at 8 times its learning rate, steps of 1,024 tokens."""
    config = nano_config(num_steps, tokens_per_step=1024)
    return replace(config, {"schedule.peak": 8 * config.schedule.peak})


ACTIVATIONS = Study(
    name="activations",
    setting="nano without sight at 8 times its rate, 120 steps of 1,024 tokens, context 512",
    arms=(
        Arm(name="both", what="norm before W_up, SiTU"),
        Arm(name="norm", what="norm before W_up, SwiGLU", changes={_ACTIVATION: "silu"}),
        Arm(name="SiTU", what="no norm, SiTU", changes={_NORM: False}),
        Arm(
            name="neither",
            what="no norm, SwiGLU",
            changes={_NORM: False, _ACTIVATION: "silu"},
        ),
    ),
    num_steps=120,
    seconds=200.0,
    base=hot_config,
    measure=measure_activations,
)

ANCHORS = (
    Anchor(
        name="A11",
        study=ACTIVATIONS,
        question="do the norm before W_up and SiTU bound activations at a high rate?",
        expected="with both: GLU <= 100 and no loss spikes; without: larger",
        columns=("loss", "spikes", "max GLU", "max routed"),
        judge=judge_activations,
    ),
)
