"""One trial of an anchor: nano without sight, trained by the plain loop on one thread.

The recipe is nano's own (`recipes.pretrain`) but for the horizon, one context length and no
pictures, which cost most of the time and which no anchor asks about. A token of nano is a byte, so
held-out nats per byte are nats per token.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from baltoro.config import replace
from baltoro.data.dataset import Dataset
from baltoro.data.loader import Loader
from baltoro.data.pack import PackedBatch
from baltoro.model.init import init_weights
from baltoro.model.model import Model
from baltoro.optim.assignment import Group, assign
from baltoro.optim.config import OptimConfig
from baltoro.optim.optimizer import Optimizer
from baltoro.optim.rules import k3_structure
from baltoro.optim.schedule import learning_rate
from baltoro.recipes.anchor_record import Matrices, Numbers, Trial
from baltoro.recipes.pretrain import pretrain_config
from baltoro.train.config import PretrainConfig
from baltoro.train.evaluate import evaluate
from baltoro.train.learner import Learner, build_learner, mixers_of
from baltoro.train.pretrain import held_out_batches, image_processor, loader_config
from baltoro.train.step import StepResult, train_step

Watch = Callable[[Learner, StepResult, PackedBatch], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialData:
    """What a trial reads."""

    source: Loader  # of the training split
    held_out: list[PackedBatch]  # the same for every arm and seed
    bytes_per_token: torch.Tensor  # [W]
    domains: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A trained arm."""

    learner: Learner
    data: TrialData
    losses: list[float]  # of every step; NaN from the first that was skipped on
    loss: float  # held out, nats per byte; NaN if a step was skipped

    @property
    def numbers(self) -> Numbers:
        """Held-out loss, and the mean training loss of the last tenth."""
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        return {"loss": self.loss, "train loss": statistics.fmean(tail)}


def nano_config(
    num_steps: int, *, tokens_per_step: int = 2048, seq_len: int = 512
) -> PretrainConfig:
    """nano's recipe without sight, `num_steps` steps at one context length; attention logits are
    measured in every step."""
    return replace(
        pretrain_config("nano", num_tokens=num_steps * tokens_per_step),
        {
            "model.vision": None,
            "data.tokens_per_step": tokens_per_step,
            "data.num_microbatches": 1,
            "data.stages": [{"seq_len": seq_len, "fraction": 1.0}],
            "schedule.num_steps": num_steps,
            "step.qk_clip_every": 1,
        },
    )


def trial_learner(trial: Trial) -> Learner:
    """A fresh model with the arm's optimiser; arms of one seed draw the same weights."""
    config = trial.config
    model = Model(config.model)
    # drawn again: building a module that another arm lacks has moved the global generator on
    init_weights(model, generator=torch.Generator().manual_seed(config.seed))
    learner = build_learner(model, config.optim, config.step)
    learner.optimizer = matrix_optimizer(model, trial.arm.matrices, config.optim)
    return learner


def matrix_optimizer(model: Model, matrices: Matrices, config: OptimConfig) -> Optimizer:
    """An optimiser whose matrices are updated as `matrices` says, the rest by AdamW."""
    parameters = list(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
    structure = k3_structure(shapes, mixers_of(model.config), per_head=matrices == "muon by head")
    group: Group = "adamw" if matrices == "adamw" else "muon"
    return Optimizer(parameters, assign(parameters, structure, matrices=group), config)


def trial_data(trial: Trial) -> TrialData:
    """The loader of the trial and its held-out batches.

    Raises `ValueError` for data that was not built, or has another vocabulary than nano.
    """
    config = trial.config
    vocab_size = config.model.vocab_size
    train_set = Dataset(trial.data, "train", vocab_size=vocab_size)
    held_out = Dataset(trial.data, "held_out", vocab_size=vocab_size)
    images = image_processor(config.model)
    return TrialData(
        source=Loader(train_set, loader_config(config, train_set), images),
        held_out=held_out_batches(config, held_out, images),
        bytes_per_token=torch.from_numpy(held_out.bytes_per_token()),
        domains=tuple(held_out.domains),
    )


def train_arm(
    trial: Trial,
    *,
    prepare: Callable[[Learner], None] | None = None,
    watch: Watch | None = None,
) -> Trained:
    """Train the trial to the end of its schedule and score it on held-out text.

    `prepare` changes the fresh learner, `watch` sees every step. A run whose loss or gradient is
    not finite ends there and counts as diverged: its numbers are NaN.
    """
    learner, data = trial_learner(trial), trial_data(trial)
    if prepare is not None:
        prepare(learner)
    schedule = trial.config.schedule
    losses: list[float] = []
    for step in range(schedule.num_steps):
        batch = data.source.batch(step)
        result = train_step(learner, [batch], lr=learning_rate(schedule, step))
        if result.is_skipped:
            losses += [math.nan] * (schedule.num_steps - step)
            break
        losses.append(result.numbers["train/loss"])
        if watch is not None:
            watch(learner, result, batch)
    loss = math.nan
    if math.isfinite(losses[-1]):
        loss = held_out_loss(learner.model, data)
    return Trained(learner=learner, data=data, losses=losses, loss=loss)


def held_out_loss(model: Model, data: TrialData) -> float:
    """Nats per byte of held-out text."""
    score = evaluate(
        model, data.held_out, bytes_per_token=data.bytes_per_token, domains=data.domains
    )
    return score.bits_per_byte * math.log(2)
