"""Anchors of the optimiser: A14 Muon and AdamW, A15 QK-Clip, A16 Muon by head.

K2's logits passed 1,000 after weeks; nano's stay near 1. So A15 takes a high rate, at which they
grow beyond 3, and a limit far below K2's 100. A clip follows the measurement of its step and is
late by that step's update, and the next batch may hold a larger logit: the limit is passed by a
little.
"""

import statistics
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from baltoro.config import replace
from baltoro.data.pack import PackedBatch
from baltoro.optim.assignment import Assignment
from baltoro.optim.muon import muon_flops, muon_step, split
from baltoro.optim.rules import k3_structure
from baltoro.optim.structure import MatrixBlocks
from baltoro.recipes.anchor_record import (
    Anchor,
    Arm,
    Finding,
    Numbers,
    Results,
    Study,
    Trial,
    is_lower,
    is_optimum_inside,
    is_within,
    lowest,
)
from baltoro.recipes.anchor_trial import nano_config, train_arm, trial_data, trial_learner
from baltoro.train.config import PretrainConfig
from baltoro.train.learner import Learner, mixers_of
from baltoro.train.step import StepResult, run_model, token_losses

RATES = (0.0025, 0.005, 0.01, 0.02)
SWEEP_RATE = 0.005
UPDATE_SIZES = (0.05, 0.1, 0.4, 0.8)  # beside .2, which is Muon's own
TAU = 1.5  # in place of K2's 100
_NUM_TIMINGS = 20


def measure_loss(trial: Trial) -> Numbers:
    """Losses alone."""
    return train_arm(trial).numbers


def judge_muon(results: Results) -> list[Finding]:
    """A14: each optimiser at the best rate of its own grid, then the sizes of an update."""
    muon, adamw = (
        lowest(results, "loss", [f"{name} {rate:g}" for rate in RATES])
        for name in ("muon", "adamw")
    )
    sweep = {size: f"rms {size:g}" for size in UPDATE_SIZES} | {0.2: f"muon {SWEEP_RATE:g}"}
    return [
        is_lower(
            results,
            "loss",
            low=muon,
            high=adamw,
            claim="Muon at its best rate is below AdamW at its best",
        ),
        *(_is_interior(results, name) for name in ("muon", "adamw")),
        is_optimum_inside(
            results,
            "loss",
            arms=list(sweep.values()),
            inside=[sweep[0.2], sweep[0.4]],
            claim="the best update RMS is .2 or .4",
        ),
    ]


def _is_interior(results: Results, name: str) -> Finding:
    """Whether the grid of an optimiser reached beyond its best rate on both sides."""
    arms = [f"{name} {rate:g}" for rate in RATES]
    best = lowest(results, "loss", arms)
    is_inside = best in arms[1:-1]
    return Finding(
        claim=f"the grid of {name} goes beyond its best rate",
        verdict="holds" if is_inside else "does not hold",
        figures=f"best: {best}",
    )


def measure_logits(trial: Trial) -> Numbers:
    """Losses, the largest attention logit and the clipped heads by step."""
    logits: list[float] = []
    clips: list[float] = []

    def watch(learner: Learner, result: StepResult, batch: PackedBatch) -> None:
        logits.append(result.numbers["attention/max_logit"])
        clips.append(result.numbers["attention/clipped_heads"])

    trained = train_arm(trial, watch=watch)
    fifth = max(1, len(clips) // 5)
    active = [step for step, count in enumerate(clips) if count]
    return {
        **trained.numbers,
        "max logit": max(logits),
        "last logit": statistics.fmean(logits[-fifth:]),
        "clips": sum(clips),
        "last clips": sum(clips[-fifth:]),
        "last active step": float(active[-1]) if active else 0.0,
        "logit by step": logits,
        "clips by step": clips,
    }


def judge_logits(results: Results) -> list[Finding]:
    """A15."""
    return [
        is_within(results, "free", "max logit", least=2 * TAU, claim="free logits pass twice tau"),
        is_within(
            results,
            "clipped",
            "max logit",
            most=1.5 * TAU,
            claim="clipped they stay at tau, with the lag below 1.5 tau",
        ),
        is_within(
            results,
            "clipped",
            "last clips",
            most=0.0,
            claim="no head is clipped in the last fifth of the run",
        ),
        is_lower(
            results,
            "loss",
            low="clipped",
            high="free",
            margin=-0.02,
            claim="clipping costs no more than .02 nats",
        ),
    ]


def measure_heads(trial: Trial) -> Numbers:
    """How far the update sizes of heads differ when their gradients are scaled by 1 to 1/8.

    Steps are taken on real batches without weight decay, so a step's change of a weight over the
    rate is its update. `ratio` is the largest over the smallest RMS among the heads of a matrix,
    averaged over the W_q, W_k and W_v of all layers.
    """
    learner, data = trial_learner(trial), trial_data(trial)
    heads = head_blocks(learner)
    optimizer, rate = learner.optimizer, trial.config.schedule.peak
    gradients: list[float] = []
    updates: list[float] = []
    for step in range(trial.config.schedule.num_steps):
        batch = data.source.batch(step)
        optimizer.zero_grad()
        output = run_model(learner.model, batch)
        targets_T = torch.where(batch.weights > 0, batch.targets, -100)
        (token_losses(learner.model, output, targets_T).sum() / len(targets_T)).backward()
        found = {name: scaled_gradient(learner, name, blocks) for name, blocks in heads.items()}
        before = {name: optimizer.masters[name].clone() for name in heads}
        optimizer.step(rate)
        after = {name: before[name] - optimizer.masters[name] for name in heads}
        gradients = [ratio for name in heads for ratio in head_ratios(found[name], heads[name])]
        updates = [ratio for name in heads for ratio in head_ratios(after[name], heads[name])]
    rows = tuple(optimizer.rows[name] for name in heads)
    return {
        "gradient ratio": statistics.fmean(gradients),
        "ratio": statistics.fmean(updates),
        "worst ratio": max(updates),
        "Newton-Schulz ms": orthogonalisation_ms(learner, list(heads)),
        "Newton-Schulz Mflop": muon_flops(Assignment(rows=rows), optimizer.config) / 1e6,
    }


def head_blocks(learner: Learner) -> Mapping[str, MatrixBlocks]:
    """By name, the head blocks of every W_q, W_k and W_v, however the optimiser treats them."""
    model = learner.model
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    structure = k3_structure(shapes, mixers_of(model.config))
    return {
        name: record
        for name, record in structure.items()
        if isinstance(record, MatrixBlocks) and record.num_groups > 1
    }


def scaled_gradient(learner: Learner, name: str, blocks: MatrixBlocks) -> Tensor:
    """The gradient of a weight after its heads were scaled by 1, 1/2, 1/4, ..."""
    gradient = learner.optimizer.parameters[name].grad
    assert gradient is not None
    factors_H = 0.5 ** torch.arange(blocks.num_groups)
    for part_HRC in blocks.views(gradient):
        part_HRC.mul_(factors_H[:, None, None])
    return gradient


def head_ratios(tensor: Tensor, blocks: MatrixBlocks) -> list[float]:
    """Largest over smallest RMS among heads, for each matrix that a head holds."""
    ratios = []
    for part_HRC in blocks.views(tensor):
        rms_H = part_HRC.square().mean((1, 2)).sqrt()
        ratios.append(float(rms_H.max() / rms_H.min()))
    return ratios


def orthogonalisation_ms(learner: Learner, names: list[str]) -> float:
    """Processor time of the fastest of a few Muon updates of these weights; nothing changes."""
    optimizer = learner.optimizer
    entries = []
    for name in names:
        blocks, gradient = optimizer.rows[name].blocks, optimizer.parameters[name].grad
        assert blocks is not None and gradient is not None
        weight, momentum = optimizer.masters[name].clone(), optimizer.momenta[name].clone()
        entries += split(weight, momentum, gradient, blocks)
    seconds = []
    for _ in range(_NUM_TIMINGS):
        start = time.thread_time()
        muon_step(entries, lr=0.0, config=optimizer.config)
        seconds.append(time.thread_time() - start)
    return 1e3 * min(seconds)


def judge_heads(results: Results) -> list[Finding]:
    """A16."""
    return [
        is_within(
            results, "by head", "ratio", most=1.2, claim="by head: update sizes agree (ratio < 1.2)"
        ),
        is_lower(results, "ratio", low="by head", high="whole", margin=0.5),
        is_lower(results, "Newton-Schulz ms", low="by head", high="whole"),
        is_lower(results, "Newton-Schulz Mflop", low="by head", high="whole"),
    ]


def short_config(num_steps: int) -> PretrainConfig:
    """nano with steps of 1,024 tokens."""
    return nano_config(num_steps, tokens_per_step=1024)


def hot_config(num_steps: int) -> PretrainConfig:
    """The same at a high rate."""
    return replace(short_config(num_steps), _rate(0.01))


def undecayed_config(num_steps: int) -> PretrainConfig:
    """nano without weight decay."""
    return replace(nano_config(num_steps), {"optim.weight_decay": 0.0})


def _rate(peak: float) -> dict[str, object]:
    return {"schedule.peak": peak, "schedule.floor": peak / 10}


MUON = Study(
    name="muon",
    setting="nano without sight, 120 steps of 1,024 tokens, context 512; both optimisers at four "
    "peak rates, and Muon at .005 with other sizes of an update than .2",
    arms=(
        *(
            Arm(name=f"muon {rate:g}", what=f"Muon by head, rate {rate:g}", changes=_rate(rate))
            for rate in RATES
        ),
        *(
            Arm(
                name=f"adamw {rate:g}",
                what=f"AdamW for matrices too, rate {rate:g}",
                changes=_rate(rate),
                matrices="adamw",
            )
            for rate in RATES
        ),
        *(
            Arm(
                name=f"rms {size:g}",
                what=f"Muon by head, rate {SWEEP_RATE:g}, update RMS {size:g}",
                changes=_rate(SWEEP_RATE) | {"optim.update_rms": size},
            )
            for size in UPDATE_SIZES
        ),
    ),
    num_steps=120,
    seconds=220.0,
    base=short_config,
    measure=measure_loss,
)

LOGITS = Study(
    name="logits",
    setting=f"nano without sight, peak rate .01, 150 steps of 1,024 tokens, context 512, tau {TAU}",
    arms=(
        Arm(name="clipped", what=f"QK-Clip at tau {TAU}", changes={"step.qk_clip_tau": TAU}),
        Arm(name="free", what="no limit", changes={"step.qk_clip_tau": 1e9}),
    ),
    num_steps=150,
    seconds=240.0,
    base=hot_config,
    measure=measure_logits,
)

HEADS = Study(
    name="heads",
    setting="nano without sight and weight decay, 5 steps of 2,048 tokens; the gradients of the "
    "four heads of every W_q, W_k, W_v times 1, 1/2, 1/4, 1/8",
    arms=(
        Arm(name="by head", what="one Newton-Schulz per head"),
        Arm(name="whole", what="one for the whole matrix", matrices="muon whole"),
    ),
    num_steps=5,
    seconds=30.0,
    base=undecayed_config,
    measure=measure_heads,
)

ANCHORS = (
    Anchor(
        name="A14",
        study=MUON,
        question="is Muon's loss below AdamW's at equal tokens, and how large should an update be?",
        expected="Muon lower, each at its best rate; the best update RMS .2 to .4",
        columns=("loss", "train loss"),
        judge=judge_muon,
    ),
    Anchor(
        name="A15",
        study=LOGITS,
        question="does QK-Clip hold the largest attention logit without a price?",
        expected="capped at tau, inactive later, loss unchanged",
        columns=("max logit", "last logit", "clips", "last clips", "last active step", "loss"),
        judge=judge_logits,
    ),
    Anchor(
        name="A16",
        study=HEADS,
        question="do heads with small gradients get updates of the same size?",
        expected="by head the ratio of update RMS over heads goes to 1; Newton-Schulz not slower",
        columns=(
            "gradient ratio",
            "ratio",
            "worst ratio",
            "Newton-Schulz ms",
            "Newton-Schulz Mflop",
        ),
        judge=judge_heads,
    ),
)
