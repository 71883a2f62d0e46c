"""Learning rates over the steps of a run, as pure functions of the step (zero-based).

Both rise linearly, lr(s) = peak (s + 1) / warm-up, until the peak is reached on the last step of
the warm-up. Cosine then falls to the floor over the rest of the run (the report's choice, section
3.2); WSD stays at the peak and falls, also along a cosine as in K2 (arXiv 2507.20534), over its
last part.
"""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """A learning-rate schedule of one run."""

    kind: Literal["cosine", "wsd"] = "cosine"
    num_steps: int
    peak: float
    floor: float = 0.0
    warmup_fraction: float = 0.01  # of num_steps; at least one step unless zero
    decay_fraction: float = 0.2  # of num_steps, the falling part of WSD; cosine ignores it

    @property
    def num_warmup_steps(self) -> int:
        return math.ceil(self.num_steps * self.warmup_fraction)

    @property
    def num_decay_steps(self) -> int:
        after_warmup = self.num_steps - self.num_warmup_steps
        if self.kind == "cosine":
            return after_warmup
        return min(after_warmup, math.ceil(self.num_steps * self.decay_fraction))

    def __post_init__(self) -> None:
        if self.kind not in ("cosine", "wsd"):
            raise ValueError(f"kind={self.kind!r}: must be 'cosine' or 'wsd'")
        if self.num_steps < 1:
            raise ValueError(f"num_steps={self.num_steps}: must be at least 1")
        if not 0.0 < self.peak < math.inf:
            raise ValueError(f"peak={self.peak}: must be positive and finite")
        if not 0.0 <= self.floor <= self.peak:
            raise ValueError(f"floor={self.floor}: must be between 0 and peak={self.peak}")
        for field in ("warmup_fraction", "decay_fraction"):
            if not 0.0 <= getattr(self, field) <= 1.0:
                raise ValueError(f"{field}={getattr(self, field)}: must be in [0, 1]")


def learning_rate(config: ScheduleConfig, step: int) -> float:
    """The rate of `step`; raises `ValueError` outside 0 ... num_steps - 1."""
    if not 0 <= step < config.num_steps:
        raise ValueError(
            f"step={step}: the schedule has {config.num_steps} steps, counted from 0; "
            "a longer run needs a longer schedule"
        )
    if step < config.num_warmup_steps:
        return config.peak * (step + 1) / config.num_warmup_steps
    into_decay = step + 1 - (config.num_steps - config.num_decay_steps)
    if into_decay <= 0:
        return config.peak
    return cosine(into_decay / config.num_decay_steps, start=config.peak, end=config.floor)


def cosine(fraction: float, *, start: float, end: float) -> float:
    """Half a cosine from `start` at fraction 0 to `end` at fraction 1."""
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * fraction))
