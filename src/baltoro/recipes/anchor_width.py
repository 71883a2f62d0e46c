"""Anchors of width mixing: A11 norm and SiTU at a high rate, A12 balancing, A13 its histogram.

A12 and A13 route among 32 experts, four per token, from the first layer on: with nano's own eight
there is little to balance. The width of an expert is a quarter, so a token costs the same.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from baltoro.config import replace
from baltoro.data.pack import PackedBatch
from baltoro.model.mlp import Mlp
from baltoro.model.model import Model
from baltoro.model.moe import Experts, Moe
from baltoro.ops.moe import Routing
from baltoro.ops.quantile import exact_bias
from baltoro.ops.situ import situ_glu, swiglu
from baltoro.optim.balancing import QuantileBalancer
from baltoro.optim.schedule import learning_rate
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
from baltoro.recipes.anchor_trial import nano_config, train_arm, trial_data, trial_learner
from baltoro.train.alarms import AlarmWatch
from baltoro.train.config import PretrainConfig
from baltoro.train.learner import Learner, router_layers
from baltoro.train.step import StepResult, run_model, train_step

_NORM, _ACTIVATION = "model.moe.use_latent_norm", "model.activation"
_NUM_BINS = 1000  # report app. D
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


def measure_balance(trial: Trial) -> Numbers:
    """MaxVio by step, of the mean and the worst layer, and of the first one."""
    mean: list[float] = []
    worst: list[float] = []
    first: list[float] = []

    def watch(learner: Learner, result: StepResult, batch: PackedBatch) -> None:
        found = [balance.max_vio for balance in result.balances.values()]
        mean.append(sum(found) / len(found))
        worst.append(max(found))
        first.append(found[0])

    trained = train_arm(trial, watch=watch)
    late = len(mean) // 2
    return {
        **trained.numbers,
        "before": mean[0],
        "steps 2-6": sum(mean[1:6]) / len(mean[1:6]),
        "later half": sum(mean[late:]) / len(mean[late:]),
        "worst layer": sum(worst[late:]) / len(worst[late:]),
        "first layer": sum(first[late:]) / len(first[late:]),
        "mean by step": mean,
        "worst by step": worst,
        "first by step": first,
    }


def measure_histogram(trial: Trial) -> Numbers:
    """The next bias from a histogram against the sorted one, on the scores of a run in training,
    or (arm `skewed`) on drawn ones; and how much the bias depends on the sharding of the tokens."""
    if trial.arm.name == "skewed":
        return histogram_numbers(skewed_scores(trial.seed, trial.config.schedule.num_steps), 4)
    learner, data = trial_learner(trial), trial_data(trial)
    moe = trial.config.model.moe
    assert moe is not None and learner.balancer is not None
    found: list[tuple[Tensor, Tensor]] = []
    for step in range(trial.config.schedule.num_steps):
        batch = data.source.batch(step)
        biases = [learner.balancer.biases[layer] for layer in router_layers(trial.config.model)]
        with torch.no_grad():
            scores = run_model(learner.model, batch).router_scores
        found += [(s, b.clone()) for s, b in zip(scores, biases, strict=True)]
        train_step(learner, [batch], lr=learning_rate(trial.config.schedule, step))
    return histogram_numbers(found, moe.num_experts_per_token)


def skewed_scores(seed: int, num_steps: int) -> list[tuple[Tensor, Tensor]]:
    """Scores `[8192, 128]` with a strong preference for some experts, each step's with the bias
    that the step before it leaves (the setting of `k3-recipe` 19)."""
    generator = torch.Generator().manual_seed(seed)
    preference_E = 2.0 * torch.randn(128, generator=generator)
    bias_E = torch.zeros(128)
    found = []
    for _ in range(num_steps):
        scores_TE = torch.sigmoid(torch.randn(8192, 128, generator=generator) + preference_E)
        found.append((scores_TE, bias_E))
        bias_E = exact_bias(scores_TE, bias_E, num_experts_per_token=4)
    return found


def histogram_numbers(found: Sequence[tuple[Tensor, Tensor]], top_k: int) -> Numbers:
    """Largest differences of a bias over all pairs of scores `[T, E]` and old bias `[E]`."""
    differences, widths, shardings = [], [], []
    for scores_TE, bias_E in found:
        exact_E = exact_bias(scores_TE, bias_E, num_experts_per_token=top_k)
        whole_E = sharded_bias([[scores_TE]], bias_E, top_k)
        widths.append(float(bias_E.max() - bias_E.min() + 2.0) / _NUM_BINS)
        differences.append(float((whole_E - exact_E).abs().max()))
        for ranks in shardings_of(scores_TE):
            shardings.append(float((sharded_bias(ranks, bias_E, top_k) - whole_E).abs().max()))
    ratios = [d / w for d, w in zip(differences, widths, strict=True)]
    return {
        "difference": max(differences),
        "bin width": max(widths),
        "difference / width": max(ratios),
        "sharding difference": max(shardings),
        "ratios": ratios,
    }


def shardings_of(scores_TE: Tensor) -> list[list[list[Tensor]]]:
    """Ways to spread the rows over ranks and the micro-batches of each, uneven ones among them."""
    halves, sevenths = scores_TE.tensor_split(2), scores_TE.tensor_split(7)
    strided = [scores_TE[start::3] for start in range(3)]
    return [
        [list(scores_TE.tensor_split(4))],
        [list(reversed(sevenths))],
        [[half] for half in halves],
        [list(sevenths[:2]), list(sevenths[2:])],
        [[part] for part in strided],
    ]


def sharded_bias(ranks: Sequence[Sequence[Tensor]], bias_E: Tensor, top_k: int) -> Tensor:
    """The next bias `[E]` as rank 0 computes it from its micro-batches and the other ranks'
    counts."""
    balancers: list[QuantileBalancer] = []

    def all_reduce(counts: Tensor) -> Tensor:
        return torch.stack([balancer.counts.flat for balancer in balancers]).sum(0).int()

    for microbatches in ranks:
        balancer = QuantileBalancer(
            {"layer": bias_E.clone()},
            num_experts_per_token=top_k,
            num_bins=_NUM_BINS,
            all_reduce=all_reduce,
        )
        for scores_TE in microbatches:
            balancer.observe("layer", scores_TE, phase="train")
        balancers.append(balancer)
    balancers[0].update()
    return balancers[0].biases["layer"]


def judge_balance(results: Results) -> list[Finding]:
    """A12."""
    rivals = [arm.name for arm in BALANCE.arms if arm.name not in ("quantile", "none")]
    return [
        is_within(
            results, "quantile", "steps 2-6", most=1.0, claim="quantile: even after 5 updates"
        ),
        *(is_lower(results, "steps 2-6", low="quantile", high=arm) for arm in rivals),
        *(is_lower(results, "later half", low="quantile", high=arm) for arm in rivals),
    ]


def judge_histogram(results: Results) -> list[Finding]:
    """A13."""
    return [
        finding
        for arm in ("nano", "skewed")
        for finding in (
            is_within(
                results,
                arm,
                "difference / width",
                most=1.0,
                claim=f"{arm}: no bias is off by more than a bin",
            ),
            is_within(
                results,
                arm,
                "sharding difference",
                most=0.0,
                claim=f"{arm}: identical over shardings",
            ),
        )
    ]


def wide_config(num_steps: int) -> PretrainConfig:
    """nano with 32 experts of half the width, four per token, from the first layer on."""
    return replace(
        nano_config(num_steps),
        {
            "model.moe.num_experts": 32,
            "model.moe.num_experts_per_token": 4,
            "model.moe.expert_intermediate_size": 32,
            "model.moe.first_moe_layer": 0,
        },
    )


def hot_config(num_steps: int) -> PretrainConfig:
    """nano at eight times its learning rate."""
    config = nano_config(num_steps)
    return replace(config, {"schedule.peak": 8 * config.schedule.peak})


ACTIVATIONS = Study(
    name="activations",
    setting="nano without sight at 8 times its rate, 150 steps of 2,048 tokens, context 512",
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
    num_steps=150,
    seconds=450.0,
    base=hot_config,
    measure=measure_activations,
)

BALANCE = Study(
    name="balance",
    setting="nano without sight, 32 experts, four per token, from the first layer on, 60 steps of "
    "2,048 tokens, context 512",
    arms=(
        Arm(name="quantile", what="Quantile Balancing"),
        Arm(
            name="sign .001",
            what="sign rule with step 1e-3",
            changes={"step.balancing": "sign", "step.sign_step_size": 1e-3},
        ),
        Arm(
            name="sign .01",
            what="sign rule with step 1e-2",
            changes={"step.balancing": "sign", "step.sign_step_size": 1e-2},
        ),
        Arm(
            name="none",
            what="no balancing",
            changes={"step.balancing": "sign", "step.sign_step_size": 0.0},
        ),
    ),
    num_steps=60,
    seconds=200.0,
    base=wide_config,
    measure=measure_balance,
)

HISTOGRAM = Study(
    name="histogram",
    setting="scores of 6 steps: nano in training with 32 experts (8 layers of 2,048 tokens), and "
    "8,192 drawn tokens for 128 experts, four per token",
    arms=(
        Arm(name="nano", what="scores of a run in training"),
        Arm(name="skewed", what="drawn scores that prefer some experts strongly"),
    ),
    num_steps=6,
    seconds=40.0,
    base=wide_config,
    measure=measure_histogram,
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
    Anchor(
        name="A12",
        study=BALANCE,
        question="how soon and how well do balancing rules even out the experts' loads?",
        expected="quantile within 5 steps and without a step size; sign slow or oscillating",
        columns=("before", "steps 2-6", "later half", "worst layer", "first layer", "loss"),
        judge=judge_balance,
    ),
    Anchor(
        name="A13",
        study=HISTOGRAM,
        question="is the bias from 1,000 bins that of a sort, whatever the sharding?",
        expected="largest difference at most the bin width; identical over shardings",
        columns=("difference", "bin width", "difference / width", "sharding difference"),
        judge=judge_histogram,
    ),
)
