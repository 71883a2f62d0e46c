"""What an anchor consists of, and how its numbers are judged.

An anchor (`k3-recipe` section 18) is a published direction that must hold at our size: a question
with a judge, put to a study. A study is a few arms that differ in one thing, each run with the same
seeds: seed s gives every arm the same data, order and, where shapes agree, initial weights. So arms
are compared seed by seed:

    d_s = high_s - low_s,    mean(d) -+ t std(d) / sqrt(n),    t one-sided at 95 %

"low lies below high by `margin`" holds if mean(d) >= margin and the interval lies above zero, does
not hold if the interval lies below the margin, and otherwise the seeds do not tell. A negative
margin allows so much the other way: then the interval has to lie above the margin.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from baltoro.config import replace
from baltoro.train.config import PretrainConfig

Number = float | list[float]
Numbers = Mapping[str, Number]
Results = Mapping[str, Sequence[Numbers]]  # by arm, in the order of the seeds
Matrices = Literal["muon by head", "muon whole", "adamw"]
Verdict = Literal["holds", "does not hold", "not told apart"]

# one-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom; more use the last
_T_QUANTILES = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One of the things compared."""

    name: str
    what: str
    changes: Mapping[str, object] = field(default_factory=dict)  # paths of the configuration
    matrices: Matrices = "muon by head"  # what updates the matrices, and in which parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One arm with one seed: what a measurement gets."""

    arm: Arm
    seed: int
    config: PretrainConfig
    data: Path  # folder that `baltoro data build` made


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """Arms, and the measurement that each of them goes through with each seed."""

    name: str
    setting: str  # what is run, in words
    arms: tuple[Arm, ...]
    num_steps: int  # by default
    seconds: float  # of an arm with a seed on one core, expected; only for the time left
    base: Callable[[int], PretrainConfig]  # number of steps to configuration
    measure: Callable[[Trial], Numbers]

    def trial(self, arm: Arm, seed: int, num_steps: int, data: Path) -> Trial:
        """The trial of one pair; its configuration has the arm's changes and the seed."""
        changes = {"seed": seed, "data.seed": seed} | dict(arm.changes)
        config = replace(self.base(num_steps), changes)
        return Trial(arm=arm, seed=seed, config=config, data=data)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What became of one claim."""

    claim: str
    verdict: Verdict
    figures: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchor:
    """A question to a study."""

    name: str
    study: Study
    question: str
    expected: str  # what must hold, in words
    columns: tuple[str, ...]  # the numbers that its table shows
    judge: Callable[[Results], list[Finding]]


def values(results: Results, arm: str, column: str) -> list[float]:
    """One number of an arm by seed; a list counts as its mean."""
    found = [numbers[column] for numbers in results[arm]]
    return [statistics.fmean(item) if isinstance(item, list) else item for item in found]


def spread(items: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation, the latter 0 for a single value."""
    if not all(map(math.isfinite, items)):
        return math.nan, math.nan
    return statistics.fmean(items), statistics.stdev(items) if len(items) > 1 else 0.0


def is_lower(
    results: Results, column: str, *, low: str, high: str, margin: float = 0.0, claim: str = ""
) -> Finding:
    """Whether `column` of arm `low` lies below that of arm `high` by `margin` or more.

    A run that diverged has NaN and lies above every other.
    """
    pairs = zip(values(results, low, column), values(results, high, column), strict=True)
    gaps = [_gap(first, second) for first, second in pairs]
    claim = claim or f"{column}: {low} < {high}" + (f" by {margin:g}" if margin else "")
    if not all(map(math.isfinite, gaps)):
        verdict: Verdict = "holds" if min(gaps) > margin else "not told apart"
        verdict = "does not hold" if max(gaps) < margin else verdict
        return Finding(claim=claim, verdict=verdict, figures="an arm diverged")
    mean, deviation = spread(gaps)
    half = math.inf
    if len(gaps) > 1:
        quantile = _T_QUANTILES[min(len(gaps) - 1, len(_T_QUANTILES)) - 1]
        half = quantile * deviation / math.sqrt(len(gaps))
    verdict = "not told apart"
    if mean >= margin and mean - half > min(margin, 0.0):
        verdict = "holds"
    elif mean + half < margin:
        verdict = "does not hold"
    figures = f"gap {mean:.4g}, 95 % {mean - half:.4g} to {mean + half:.4g}"
    return Finding(claim=claim, verdict=verdict, figures=figures)


def is_optimum_inside(
    results: Results, column: str, *, arms: Sequence[str], inside: Sequence[str], claim: str
) -> Finding:
    """Whether the least mean of `column` among `arms` is one of `inside`, told from the others."""
    outside = [arm for arm in arms if arm not in inside]
    best, rival = lowest(results, column, inside), lowest(results, column, outside)
    found = is_lower(results, column, low=best, high=rival)
    figures = f"{best} against {rival}: {found.figures}"
    return Finding(claim=claim, verdict=found.verdict, figures=figures)


def lowest(results: Results, column: str, arms: Sequence[str]) -> str:
    """The arm with the least mean of `column`; one with a NaN comes last."""

    def mean(arm: str) -> float:
        value = spread(values(results, arm, column))[0]
        return math.inf if math.isnan(value) else value

    return min(arms, key=mean)


def is_within(
    results: Results,
    arm: str,
    column: str,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    claim: str,
) -> Finding:
    """Whether `column` of `arm` lies in [least, most] with every seed; holds not if with none."""
    found = values(results, arm, column)
    inside = [least <= value <= most for value in found]
    verdict: Verdict = "not told apart"
    if all(inside):
        verdict = "holds"
    elif not any(inside):
        verdict = "does not hold"
    figures = f"{min(found):.4g} to {max(found):.4g} over {len(found)} seeds"
    return Finding(claim=claim, verdict=verdict, figures=figures)


def _gap(low: float, high: float) -> float:
    """high - low, where what is not finite lies above everything finite."""
    if math.isfinite(low) and math.isfinite(high):
        return high - low
    if math.isfinite(low) or math.isfinite(high):
        return math.inf if math.isfinite(low) else -math.inf
    return 0.0
