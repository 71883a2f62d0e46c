"""Anchors of the optimiser: A14 Muon and AdamW, A15 QK-Clip, A16 Muon by head."""

import statistics
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from baltoro.config import replace
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
    is_within,
)
from baltoro.recipes.anchor_trial import nano_config, trial_data, trial_learner
from baltoro.train.config import PretrainConfig
from baltoro.train.learner import Learner, mixers_of
from baltoro.train.step import run_model, token_losses

_NUM_TIMINGS = 20


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


def undecayed_config(num_steps: int) -> PretrainConfig:
    """nano without weight decay."""
    return replace(nano_config(num_steps), {"optim.weight_decay": 0.0})


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
