"""Anchors of balancing: A12 how fast the rules are, A13 what the histogram costs.

Both route among 32 experts, four per token, from the first layer on: among nano's own eight there
is little to balance. Experts have half the width, so a token costs the same. In its first steps a
router changes faster than any rule follows; so A12 lets imbalance grow for a while and then
switches the rule on, at the same weights for every arm.
"""

import dataclasses
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from baltoro.config import replace
from baltoro.data.pack import PackedBatch
from baltoro.ops.quantile import exact_bias
from baltoro.optim.balancing import QuantileBalancer, SignBalancer
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
from baltoro.train.config import PretrainConfig, StepConfig
from baltoro.train.learner import Balancer, Learner, router_layers
from baltoro.train.step import StepResult, run_model, train_step

_NUM_BINS = 1000  # report app. D


def measure_balance(trial: Trial) -> Numbers:
    """MaxVio by step, before and after the arm's rule is switched on."""
    mean: list[float] = []
    worst: list[float] = []
    first: list[float] = []
    switch = switch_step(trial.config.schedule.num_steps)
    rules: list[tuple[StepConfig, Balancer | None]] = []

    def hold_back(learner: Learner) -> None:
        rules.append((learner.config, learner.balancer))
        assert learner.balancer is not None
        learner.config = dataclasses.replace(learner.config, balancing="sign")
        learner.balancer = SignBalancer(
            learner.balancer.biases,
            num_experts_per_token=learner.balancer.top_k,
            step_size=0.0,
        )

    def watch(learner: Learner, result: StepResult, batch: PackedBatch) -> None:
        found = [balance.max_vio for balance in result.balances.values()]
        mean.append(statistics.fmean(found))
        worst.append(max(found))
        first.append(found[0])
        if learner.num_steps == switch:
            learner.config, learner.balancer = rules[0]

    trained = train_arm(trial, prepare=hold_back, watch=watch)
    before = mean[max(0, switch - 5) : switch]
    after = mean[switch + 5 : switch + 10] or mean[-1:]
    late = slice(max(switch, len(mean) - 10), None)
    return {
        **trained.numbers,
        "before": statistics.fmean(before),
        "after 5": statistics.fmean(after),
        "after 5 / before": statistics.fmean(after) / statistics.fmean(before),
        "last 10": statistics.fmean(mean[late]),
        "worst layer": statistics.fmean(worst[late]),
        "first layer": statistics.fmean(first[late]),
        "mean by step": mean,
        "worst by step": worst,
        "first by step": first,
    }


def switch_step(num_steps: int) -> int:
    """Steps that are taken without balancing."""
    return max(1, num_steps * 2 // 5)


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
    rivals = [arm for arm in results if arm != "quantile"]
    return [
        is_within(
            results,
            "quantile",
            "after 5 / before",
            most=0.5,
            claim="quantile: at most half the imbalance is left after 5 steps",
        ),
        *(is_lower(results, "after 5", low="quantile", high=arm) for arm in rivals),
        *(is_lower(results, "last 10", low="quantile", high=arm) for arm in rivals),
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
    """nano with 32 experts of half the width, four per token, from the first layer on; a short
    context, so that a step mixes many documents."""
    return replace(
        nano_config(num_steps, seq_len=256),
        {
            "model.moe.num_experts": 32,
            "model.moe.num_experts_per_token": 4,
            "model.moe.expert_intermediate_size": 32,
            "model.moe.first_moe_layer": 0,
        },
    )


BALANCE = Study(
    name="balance",
    setting="nano without sight, 32 experts, four per token, from the first layer on, 60 steps of "
    "2,048 tokens, context 256; the rule begins after 24 steps without balancing",
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
            name="aux .001",
            what="auxiliary loss with weight 1e-3",
            changes={"step.balancing": "aux", "step.aux_loss_weight": 1e-3},
        ),
    ),
    num_steps=60,
    seconds=270.0,
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
        name="A12",
        study=BALANCE,
        question="how soon and how well do balancing rules even out the experts' loads?",
        expected="quantile within 5 steps and without a step size; sign slow or oscillating",
        columns=("before", "after 5", "last 10", "worst layer", "first layer", "loss"),
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
