"""Settings of a step, of a run and of a whole pretraining."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from baltoro.model.config import ModelConfig
from baltoro.optim.config import OptimConfig
from baltoro.optim.schedule import ScheduleConfig

OnSpike = Literal["alarm", "skip", "rewind"]
Balancing = Literal["quantile", "sign", "aux"]


def require(ok: bool, field: str, value: object, rule: str) -> None:
    """Raises `ValueError` naming the field, the value and the rule unless `ok`."""
    if not ok:
        raise ValueError(f"{field}={value!r}: {rule}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    """What one optimizer update does beside the optimizer's own settings."""

    grad_clip: float = 1.0  # limit of the gradient's global norm; inf only measures
    mtp_loss_weight: float = 0.3  # of each MTP layer; DeepSeek-V3 begins there (`k3-recipe` 12)
    recompute: bool = False  # keep only the input of each layer for the backward pass
    # forward and backward as one CUDA graph (`train.graph`), where launches take longer than the
    # kernels: steps of a few thousand tokens. Activations are held twice
    use_cuda_graph: bool = False
    balancing: Balancing = "quantile"
    balance_ema: float = 0.0  # weight of the old bias in the new one, quantile only
    sign_step_size: float = 1e-3  # of the sign rule, to compare with
    aux_loss_weight: float = (
        1e-3  # of the auxiliary loss, aux only; `k3-recipe` 5.2 compares with it
    )
    qk_clip_tau: float = 100.0  # K2's limit of an attention logit (`optim.qk_clip`)
    # the logits are measured, and clipped, in every so many steps: a clip may be that much late
    qk_clip_every: int = 1
    max_logits_impl: str = "torch"  # of that measurement: torch, or triton on a GPU

    def __post_init__(self) -> None:
        require(self.grad_clip > 0, "step.grad_clip", self.grad_clip, "must be positive")
        weight = self.mtp_loss_weight
        require(0 <= weight < math.inf, "step.mtp_loss_weight", weight, "must not be negative")
        aux = self.aux_loss_weight
        require(0 < aux < math.inf, "step.aux_loss_weight", aux, "must be positive and finite")
        tau = self.qk_clip_tau
        require(tau > 0, "step.qk_clip_tau", tau, "must be positive")
        every = self.qk_clip_every
        require(every >= 1, "step.qk_clip_every", every, "must be at least 1")
        impl = self.max_logits_impl
        known = ("torch", "triton")
        require(impl in known, "step.max_logits_impl", impl, f"one of {known}")
        is_plain = not (self.use_cuda_graph and self.recompute)
        rule = "cannot be captured with step.recompute=True; choose one"
        require(is_plain, "step.use_cuda_graph", self.use_cuda_graph, rule)
        kinds = get_args(Balancing)
        require(self.balancing in kinds, "step.balancing", self.balancing, f"one of {kinds}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How often a run looks up from its steps, and what it keeps."""

    log_every: int = 1  # steps between lines of metrics
    inspect_every: int = 20  # steps between records of expert loads and logits by head
    profile_every: int = 200  # steps between measurements of the share of time in products
    eval_every: int = 100  # steps between evaluations; each follows a save
    save_every: int = 100
    keep_last: int = 2  # checkpoints; the best is kept beside them
    on_spike: OnSpike = "alarm"  # what a loss far above its recent median does: `train.loop`
    max_bad_steps: int = 10  # in a row, not finite or skipped as spikes, before the run stops
    max_rewinds: int = 3  # to one checkpoint, before the run stops
    num_eval_batches: int = 16  # held-out microbatches per evaluation
    num_sample_tokens: int = 64
    num_pictures: int = 4  # held-out ones that samples tell about, at most

    def __post_init__(self) -> None:
        kinds = get_args(OnSpike)
        require(self.on_spike in kinds, "run.on_spike", self.on_spike, f"one of {kinds}")
        for field in self.__slots__:
            value = getattr(self, field)
            if field != "on_spike":
                require(value >= 1, f"run.{field}", value, "must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextStage:
    """A stretch of the run with one context length."""

    seq_len: int  # longest sequence packed
    fraction: float  # of the run's steps

    def __post_init__(self) -> None:
        require(self.seq_len >= 2, "stage.seq_len", self.seq_len, "must be at least 2")
        require(0 < self.fraction <= 1, "stage.fraction", self.fraction, "must be in (0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """How much is read at once, in which order."""

    seed: int
    tokens_per_step: int  # over all microbatches
    num_microbatches: int  # of a step; one is in memory at a time
    stages: tuple[ContextStage, ...]  # in order; their fractions make 1
    # shares of domains go with their tokens to this power: 1 as they are, 0 even
    mixture_exponent: float = 1.0

    def __post_init__(self) -> None:
        require(len(self.stages) > 0, "data.stages", self.stages, "give at least one")
        total = math.fsum(stage.fraction for stage in self.stages)
        require(abs(total - 1) < 1e-6, "data.stages", total, "their fractions must make 1")
        for stage in self.stages:
            require(
                self.tokens_per_step % (stage.seq_len * self.num_microbatches) == 0,
                "data.tokens_per_step",
                self.tokens_per_step,
                f"must be a multiple of num_microbatches={self.num_microbatches} times each "
                f"stage's seq_len, among them {stage.seq_len}",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig:
    """A complete pretraining run; where its data is and where it goes are not part of it."""

    name: str
    seed: int  # of the initial weights
    dtype: Literal["float32", "bfloat16"]  # of weights and activations; masters are fp32
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    step: StepConfig
    run: RunConfig

    @property
    def num_tokens(self) -> int:
        """Positions of the whole run."""
        return self.schedule.num_steps * self.data.tokens_per_step

    def __post_init__(self) -> None:
        longest = max(stage.seq_len for stage in self.data.stages)
        require(
            longest <= self.model.max_seq_len,
            "data.stages",
            longest,
            f"must not exceed model.max_seq_len={self.model.max_seq_len}",
        )
