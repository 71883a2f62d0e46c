"""`baltoro compare`: published directions (`k3-recipe` section 18) put to the test at nano's size.

Every anchor runs its arms with several seeds, prints mean and spread, and says of each claim
whether it holds, does not hold, or whether the seeds do not tell. What does not hold is printed as
it fell.
"""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from baltoro.config import nearest
from baltoro.data.build import build
from baltoro.data.recipes import recipe
from baltoro.recipes import anchor_balance, anchor_depth, anchor_optim, anchor_width
from baltoro.recipes.anchor_record import Anchor, Finding, Numbers, Results, Verdict, spread
from baltoro.recipes.anchor_runs import Task, json_numbers, lock, run_tasks, tasks_of
from baltoro.text.files import write_atomically
from baltoro.train.metrics import ProgressLine, duration

# the cheap ones first: a run that is cut short has answered most questions
ANCHORS: dict[str, Anchor] = {
    anchor.name: anchor
    for anchor in sorted(
        (
            *anchor_depth.ANCHORS,
            *anchor_width.ANCHORS,
            *anchor_balance.ANCHORS,
            *anchor_optim.ANCHORS,
        ),
        key=lambda anchor: anchor.study.seconds * len(anchor.study.arms),
    )
}


def compare(argv: Sequence[str]) -> int:
    """Compare what an anchor compares: `baltoro compare A7`; without a name, list the anchors."""
    parser = argparse.ArgumentParser(prog="baltoro compare", description=compare.__doc__)
    parser.add_argument("names", nargs="*", help="A7, A9, ... one after another, `all`, or `list`")
    parser.add_argument("--seeds", type=int, default=3, help="of every arm (3)")
    parser.add_argument("--steps", type=int, help="of every training run; without it the study's")
    parser.add_argument("--data", type=Path, help="data folder; without it `tiny` is built in OUT")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="folder of results")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    args = parser.parse_args(argv)
    if not args.names or args.names == ["list"]:
        print(listing(ANCHORS.values()))
        return 0
    for option in ("seeds", "steps", "jobs"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise ValueError(f"--{option} {value}: must be at least 1")
    run_anchors(
        chosen(args.names),
        seeds=args.seeds,
        num_steps=args.steps,
        data=args.data,
        out=args.out,
        jobs=args.jobs,
        console=Console(highlight=False),
    )
    return 0


def chosen(names: Sequence[str]) -> list[Anchor]:
    """The anchors called so, `all` in order of their cost; raises `ValueError` for an unknown."""
    if "all" in names:
        return list(ANCHORS.values())
    for name in names:
        if name not in ANCHORS:
            raise ValueError(f"anchor {name!r} is unknown; {nearest(name.upper(), ANCHORS)}")
    return [ANCHORS[name] for name in dict.fromkeys(names)]


def listing(anchors: Iterable[Anchor]) -> str:
    """Name, question and cost of each anchor."""
    lines = []
    for anchor in anchors:
        minutes = anchor.study.seconds * len(anchor.study.arms) * 3 / 60
        lines.append(f"{anchor.name}: {anchor.question}")
        lines.append(f"    expected: {anchor.expected}")
        lines.append(f"    {anchor.study.setting}; about {minutes:.0f} core-minutes with 3 seeds")
    return "\n".join(lines)


def run_anchors(
    anchors: Sequence[Anchor],
    *,
    seeds: int,
    num_steps: int | None,
    data: Path | None,
    out: Path,
    jobs: int,
    console: Console,
) -> dict[str, list[Finding]]:
    """Measure what is not in `out` yet, print each anchor's table as soon as it is complete.

    Anchors of one study share its trials. Returns the findings by anchor; OUT/NAME.json and
    OUT/NAME.md have them with all numbers. Raises `ValueError` for a folder in use or with results
    of other settings.
    """
    with lock(out):
        folder = out / "data" if data is None else data
        if data is None:
            report = partial(console.print, highlight=False, soft_wrap=True)
            build(recipe("tiny", None), folder, report=report)
        tasks: dict[str, list[Task]] = {}
        for anchor in anchors:
            study = anchor.study
            if study.name not in tasks:
                tasks[study.name] = tasks_of(
                    study, seeds=seeds, num_steps=num_steps, data=folder, out=out
                )
        pending = [task for group in tasks.values() for task in group if task.result() is None]
        findings: dict[str, list[Finding]] = {}
        missing = {task.path for task in pending}
        _conclude(anchors, tasks, missing, findings, out, console)
        left = TimeLeft(pending, jobs)
        with ProgressLine(console, every=1) as progress:
            if pending:
                progress.note(f"{len(pending)} trials to run with {jobs} jobs")
            with closing(run_tasks(pending, jobs=jobs)) as done:
                for task, seconds in done:
                    missing.discard(task.path)
                    left.add(task, seconds)
                    progress.update(
                        f"{len(pending) - len(missing)}/{len(pending)}  {task.study.name}: "
                        f"{task.trial.arm.name}, seed {task.trial.seed} in {duration(seconds)}  "
                        f"left {left.describe()}"
                    )
                    _conclude(anchors, tasks, missing, findings, out, console)
    return findings


class TimeLeft:
    """Expected seconds of what is left, corrected by what was measured."""

    def __init__(self, pending: Sequence[Task], jobs: int) -> None:
        self.jobs = jobs
        self.num_tasks = len(pending)
        self.expected = sum(map(_expected_seconds, pending))
        self.done = 0.0
        self.measured = 0.0

    def add(self, task: Task, seconds: float) -> None:
        """A task has taken so many seconds."""
        self.num_tasks -= 1
        self.done += _expected_seconds(task)
        self.measured += seconds

    def describe(self) -> str:
        """In words."""
        factor = self.measured / self.done if self.done else 1.0
        at_once = max(1, min(self.jobs, self.num_tasks))
        return duration((self.expected - self.done) * factor / at_once)


def table(anchor: Anchor, results: Results, findings: Sequence[Finding], *, num_steps: int) -> str:
    """The anchor as Markdown: its arms, mean and standard deviation over seeds, its claims."""
    num_seeds = len(next(iter(results.values())))
    setting = anchor.study.setting
    if num_steps != anchor.study.num_steps:
        setting += f", but with {num_steps} steps"
    lines = [
        f"### {anchor.name}: {anchor.question}",
        "",
        f"{setting}; {num_seeds} seeds, mean ± standard deviation; torch "
        f"{torch.__version__}. Expected: {anchor.expected}. **{overall(findings)}**",
        "",
        f"| arm | {' | '.join(anchor.columns)} |",
        "|---" * (len(anchor.columns) + 1) + "|",
    ]
    for arm in anchor.study.arms:
        cells = [_cell(results[arm.name], column) for column in anchor.columns]
        lines.append(f"| {arm.name} | {' | '.join(cells)} |")
    lines += ["", "| claim | verdict | figures |", "|---|---|---|"]
    lines += [f"| {item.claim} | {item.verdict} | {item.figures} |" for item in findings]
    lines += ["", *(f"- {arm.name}: {arm.what}" for arm in anchor.study.arms)]
    return "\n".join(lines) + "\n"


def overall(findings: Sequence[Finding]) -> Verdict:
    """Of all claims together: the worst."""
    verdicts = {item.verdict for item in findings}
    if "does not hold" in verdicts:
        return "does not hold"
    return "not told apart" if "not told apart" in verdicts else "holds"


def _conclude(
    anchors: Sequence[Anchor],
    tasks: dict[str, list[Task]],
    missing: set[Path],
    findings: dict[str, list[Finding]],
    out: Path,
    console: Console,
) -> None:
    """Judge, print and write down every anchor that is complete and was not before."""
    for anchor in anchors:
        group = tasks[anchor.study.name]
        if anchor.name in findings or any(task.path in missing for task in group):
            continue
        results: dict[str, list[Numbers]] = {arm.name: [] for arm in anchor.study.arms}
        for task in group:
            numbers = task.result()
            assert numbers is not None
            results[task.trial.arm.name].append(numbers)
        found = findings[anchor.name] = anchor.judge(results)
        num_steps = group[0].trial.config.schedule.num_steps
        text = table(anchor, results, found, num_steps=num_steps)
        write_atomically(out / f"{anchor.name}.md", text.encode())
        record = _record(anchor, results, found, group)
        content = json.dumps(record, indent=1, allow_nan=False) + "\n"
        write_atomically(out / f"{anchor.name}.json", content.encode())
        console.print(f"\n{text}", soft_wrap=True, markup=False)


def _record(
    anchor: Anchor, results: Results, findings: Sequence[Finding], group: Sequence[Task]
) -> dict[str, Any]:
    return {
        "anchor": anchor.name,
        "question": anchor.question,
        "expected": anchor.expected,
        "setting": anchor.study.setting,
        "num_steps": group[0].trial.config.schedule.num_steps,
        "torch": torch.__version__,
        "time": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "verdict": overall(findings),
        "findings": [
            {"claim": item.claim, "verdict": item.verdict, "figures": item.figures}
            for item in findings
        ],
        "arms": {
            arm.name: {
                "what": arm.what,
                "summary": _summary(anchor, results[arm.name]),
                "numbers": [json_numbers(numbers) for numbers in results[arm.name]],
            }
            for arm in anchor.study.arms
        },
    }


def _summary(anchor: Anchor, trials: Sequence[Numbers]) -> dict[str, Any]:
    """Mean and standard deviation of the numbers in the table."""
    found: dict[str, Any] = {}
    for column in anchor.columns:
        items = [numbers[column] for numbers in trials]
        scalars = [item for item in items if isinstance(item, float)]
        if len(scalars) == len(items):
            mean, deviation = spread(scalars)
            found[column] = json_numbers({"mean": mean, "std": deviation})
    return found


def _cell(trials: Sequence[Numbers], column: str) -> str:
    """Mean and standard deviation of a number; of a list, the means of its entries."""
    found = [numbers[column] for numbers in trials]
    if isinstance(found[0], list):
        rows = [item for item in found if isinstance(item, list)]
        return " ".join(_text(statistics.fmean(entries)) for entries in zip(*rows, strict=True))
    mean, deviation = spread([item for item in found if isinstance(item, float)])
    return f"{_text(mean)} ± {_text(deviation)}"


def _text(value: float) -> str:
    return "diverged" if math.isnan(value) else f"{value:.4g}"


def _expected_seconds(task: Task) -> float:
    study = task.study
    return study.seconds * task.trial.config.schedule.num_steps / study.num_steps
