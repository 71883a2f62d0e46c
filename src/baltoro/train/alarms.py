"""Alarms of a run by name: what went wrong, where, and since when.

    not_finite            loss or gradient is NaN or infinite; the step was skipped
    loss_spike            the loss is far above its recent median: by eight median absolute
                          deviations and at least 0.3 nats, once 20 losses are known
    logit_blow_up         an attention logit is beyond twice the limit at which heads are clipped
    dead_experts, imbalance, zero_router_gradient, router_gradient_not_finite
                          of one layer's router (`optim.router_health`)

An alarm is raised once when it begins, and again only after it was gone for a while: a condition
that lasts is one entry in the log and not one per step.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from baltoro.train.step import StepResult

_QUIET_STEPS = 20  # without it, before the same alarm is raised anew
_MIN_HISTORY = 20  # losses, before a spike can be told
_SPIKE_SPREADS = 8.0  # median absolute deviations
_SPIKE_NATS = 0.3  # and at least so much: small spreads are noise


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """One thing that began to be wrong."""

    name: str
    where: str  # a layer, or "" for the whole run
    step: int
    message: str


class AlarmWatch:
    """Looks at every step; holds the recent losses and what is going on."""

    def __init__(self, *, qk_clip_tau: float, history: int = 100) -> None:
        self.max_logit = 2.0 * qk_clip_tau
        self.losses: deque[float] = deque(maxlen=history)
        self.last_seen: dict[tuple[str, str], int] = {}

    def check(self, step: int, result: StepResult) -> list[Alarm]:
        """What begins to be wrong with `step`."""
        alarms = []
        for name, where, message in self._found(result):
            seen = self.last_seen.get((name, where))
            self.last_seen[name, where] = step
            if seen is None or step - seen > _QUIET_STEPS:
                alarms.append(Alarm(name=name, where=where, step=step, message=message))
        return alarms

    def restart(self, losses: Iterable[float]) -> None:
        """Go on from a checkpoint and its recent losses; what is still wrong is named again."""
        self.losses.clear()
        self.losses.extend(losses)
        self.last_seen.clear()

    def spike_limit(self) -> float:
        """The loss beyond which the next step is a spike; infinite while too few are known."""
        typical = self._typical()
        return math.inf if typical is None else typical[1]

    def _found(self, result: StepResult) -> Iterable[tuple[str, str, str]]:
        loss = result.numbers["train/loss"]
        if result.is_skipped and not result.is_spike:
            norm = result.numbers["train/grad_norm"]
            yield "not_finite", "", f"loss {loss}, gradient norm {norm}: the step was skipped"
            return
        typical = self._typical()
        if typical is not None and loss > typical[1]:
            skipped = "; the step was not applied" if result.is_spike else ""
            yield "loss_spike", "", f"loss {loss:.3f} where {typical[0]:.3f} is usual{skipped}"
        self.losses.append(loss)
        for mixer, logits in result.max_logits.items():
            largest = max(logits)
            if any(math.isnan(logit) for logit in logits) or largest > self.max_logit:
                head = logits.index(largest)
                text = f"an attention logit of {largest:.1f} (head {head})"
                yield "logit_blow_up", mixer, text
        for alarm in result.router_alarms:
            yield alarm.name, alarm.layer, alarm.message

    def _typical(self) -> tuple[float, float] | None:
        """The recent median and the loss beyond which a spike begins."""
        if len(self.losses) < _MIN_HISTORY:
            return None
        middle = statistics.median(self.losses)
        spread = statistics.median(abs(loss - middle) for loss in self.losses)
        return middle, middle + max(_SPIKE_NATS, _SPIKE_SPREADS * spread)
