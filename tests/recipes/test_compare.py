"""`baltoro compare`: what runs, what is kept, what is judged and how it is told."""

import dataclasses
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from baltoro.cli import main
from baltoro.config import replace
from baltoro.data.build import build
from baltoro.data.recipes import tiny
from baltoro.recipes import compare
from baltoro.recipes.anchor_balance import HISTOGRAM
from baltoro.recipes.anchor_record import (
    Anchor,
    Arm,
    Finding,
    Study,
    is_lower,
    is_optimum_inside,
    is_within,
    spread,
    values,
)
from baltoro.recipes.anchor_runs import lock, run_tasks, tasks_of
from baltoro.recipes.anchor_trial import nano_config


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    build(tiny(), folder, report=lambda line: None)
    return folder


def sized_config(num_steps: int):
    return replace(nano_config(num_steps), {"model.hidden_size": 64})


class Measured:
    """A measurement that knows what it was asked, and may be interrupted."""

    def __init__(self, stop_at: int = -1) -> None:
        self.calls: list[tuple[str, int]] = []
        self.stop_at = stop_at

    def __call__(self, trial):
        if len(self.calls) == self.stop_at:
            raise KeyboardInterrupt
        self.calls.append((trial.arm.name, trial.seed))
        worse = 0.5 if trial.arm.name == "old" else 0.0
        size = trial.config.model.hidden_size
        return {"loss": 1.0 + worse + 0.01 * trial.seed, "size": float(size), "bad": math.nan}


def anchor(measure: Measured, name: str = "T1") -> Anchor:
    study = Study(
        name="trial",
        setting="two arms",
        arms=(
            Arm(name="new", what="the new way", changes={"model.hidden_size": 32}),
            Arm(name="old", what="the old way"),
        ),
        num_steps=4,
        seconds=1.0,
        base=sized_config,
        measure=measure,
    )
    return Anchor(
        name=name,
        study=study,
        question="is new better?",
        expected="new below old",
        columns=("loss", "size", "bad"),
        judge=lambda results: [is_lower(results, "loss", low="new", high="old", margin=0.1)],
    )


def run(measure: Measured, data: Path, out: Path, **changes):
    options = {"seeds": 3, "num_steps": None, "data": data, "out": out, "jobs": 1, **changes}
    return compare.run_anchors([anchor(measure)], console=Console(quiet=True), **options)


def test_every_arm_runs_with_every_seed_and_its_own_configuration(data, tmp_path):
    measure = Measured()
    (finding,) = run(measure, data, tmp_path)["T1"]
    assert measure.calls == [(arm, seed) for seed in range(3) for arm in ("new", "old")]
    assert finding.verdict == "holds" and finding.figures.startswith("gap 0.5")
    content = json.loads((tmp_path / "T1.json").read_text())
    assert [numbers["size"] for numbers in content["arms"]["new"]["numbers"]] == [32.0] * 3
    assert content["arms"]["old"]["numbers"][0]["size"] == 64.0
    assert content["arms"]["old"]["summary"]["loss"] == pytest.approx({"mean": 1.51, "std": 0.01})
    assert content["arms"]["old"]["numbers"][0]["bad"] is None
    assert content["verdict"] == "holds" and content["num_steps"] == 4


def test_a_comparison_that_was_stopped_goes_on_with_what_is_missing(data, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(Measured(stop_at=3), data, tmp_path)
    assert not (tmp_path / "T1.json").exists()
    measure = Measured()
    (finding,) = run(measure, data, tmp_path)["T1"]
    assert measure.calls == [("old", 1), ("new", 2), ("old", 2)]
    assert finding.verdict == "holds"
    again = Measured()
    run(again, data, tmp_path)
    run(again, data, tmp_path, seeds=4)
    assert again.calls == [("new", 3), ("old", 3)]


def test_results_of_other_settings_are_refused(data, tmp_path):
    run(Measured(), data, tmp_path)
    with pytest.raises(ValueError, match=r"other settings.*--out"):
        run(Measured(), data, tmp_path, num_steps=5)


def test_a_folder_has_one_writer(data, tmp_path):
    with lock(tmp_path), pytest.raises(ValueError, match="another comparison"):
        run(Measured(), data, tmp_path)


def test_anchors_of_one_study_share_its_trials(data, tmp_path):
    measure = Measured()
    first, second = anchor(measure), anchor(measure, "T2")
    second = dataclasses.replace(second, study=first.study)
    found = compare.run_anchors(
        [first, second],
        seeds=1,
        num_steps=None,
        data=data,
        out=tmp_path,
        jobs=1,
        console=Console(quiet=True),
    )
    assert found.keys() == {"T1", "T2"} and len(measure.calls) == 2


def test_the_table_tells_mean_spread_and_verdict(data, tmp_path):
    run(Measured(), data, tmp_path)
    text = (tmp_path / "T1.md").read_text()
    assert "| new | 1.01 ± 0.01 | 32 ± 0 | diverged ± diverged |" in text
    assert "**holds**" in text and "- old: the old way" in text
    assert "two arms; 3 seeds" in text
    run(Measured(), data, tmp_path / "short", num_steps=2)
    assert "two arms, but with 2 steps; 3 seeds" in (tmp_path / "short" / "T1.md").read_text()


def test_several_processes_measure_what_one_does(data, tmp_path):
    study = dataclasses.replace(HISTOGRAM, arms=HISTOGRAM.arms[1:])
    found = []
    for jobs in (1, 2):
        out = tmp_path / str(jobs)
        tasks = tasks_of(study, seeds=2, num_steps=1, data=data, out=out)
        assert {task.path for task, _ in run_tasks(tasks, jobs=jobs)} == {t.path for t in tasks}
        found.append([task.result() for task in tasks])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


SCRIPT = """
import dataclasses, os, pathlib, sys, time
from baltoro.recipes.anchor_runs import run_tasks, tasks_of
from baltoro.recipes.anchor_balance import HISTOGRAM

def measure(trial):
    pathlib.Path(OUT, f"pid{trial.seed}").write_text(str(os.getpid()))
    time.sleep(600)

DATA, OUT = map(pathlib.Path, sys.argv[1:])
if __name__ == "__main__":
    study = dataclasses.replace(HISTOGRAM, arms=HISTOGRAM.arms[1:], measure=measure)
    list(run_tasks(tasks_of(study, seeds=2, num_steps=1, data=DATA, out=OUT), jobs=2))
"""


def wait_until(is_true, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.slow
def test_workers_end_with_the_process_that_was_killed(data, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, str(script), str(data), str(tmp_path)])
    files = [tmp_path / f"pid{seed}" for seed in range(2)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    workers = [Path("/proc", file.read_text()) for file in files]
    assert all(worker.exists() for worker in workers)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(map(is_running, workers)), seconds=20.0)


def is_running(process: Path) -> bool:
    """Whether it exists and is more than an entry that nobody has collected yet."""
    try:
        return ") Z " not in (process / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_without_a_name_the_anchors_are_listed(capsys):
    assert main(["compare"]) == 0
    printed = capsys.readouterr().out
    assert main(["compare", "list"]) == 0
    assert capsys.readouterr().out == printed
    for name in ("A7", "A9", "A11", "A12", "A13", "A14", "A15", "A16"):
        assert f"{name}: {compare.ANCHORS[name].question}" in printed


def test_an_unknown_anchor_gets_the_nearest(capsys):
    assert main(["compare", "a16"]) == 2
    assert "did you mean 'A16'?" in capsys.readouterr().err
    assert main(["compare", "A7", "--seeds", "0"]) == 2
    assert "--seeds 0" in capsys.readouterr().err


def test_all_names_every_anchor_the_cheap_ones_first():
    every = compare.chosen(["all"])
    assert {item.name for item in every} == compare.ANCHORS.keys()
    costs = [item.study.seconds * len(item.study.arms) for item in every]
    assert costs == sorted(costs)
    assert [item.name for item in compare.chosen(["A9", "A7", "A9"])] == ["A9", "A7"]


def test_no_default_comparison_takes_more_than_160_core_minutes():
    for item in compare.ANCHORS.values():
        assert item.study.seconds * len(item.study.arms) * 3 <= 160 * 60, item.name


def test_time_left_follows_what_was_measured(data, tmp_path):
    study = anchor(Measured()).study  # a second expected of each
    tasks = tasks_of(study, seeds=3, num_steps=None, data=data, out=tmp_path)
    left = compare.TimeLeft(tasks, jobs=4)
    assert left.describe() == "2 s"
    left.add(tasks[0], 10.0)
    assert left.describe() == "12 s"  # five of ten seconds, four at once
    for task in tasks[1:4]:
        left.add(task, 10.0)
    assert left.describe() == "10 s"


def losses(**arms: list[float]):
    return {arm: [{"loss": value} for value in found] for arm, found in arms.items()}


@pytest.mark.parametrize(
    ("low", "high", "margin", "verdict"),
    [
        ([1.0, 1.1, 1.2], [1.3, 1.41, 1.49], 0.1, "holds"),
        ([1.0, 1.1, 1.2], [1.03, 1.14, 1.22], 0.1, "does not hold"),
        ([1.0, 1.1, 1.2], [0.9, 1.01, 1.11], 0.0, "does not hold"),
        ([1.0, 1.1, 1.2], [1.3, 0.9, 1.4], 0.0, "not told apart"),
        ([1.0], [2.0], 0.0, "not told apart"),
        ([1.0, 1.1, 1.2], [0.99, 1.1, 1.18], -0.05, "holds"),
        ([1.0, 1.1, 1.2], [0.9, 1.0, 1.11], -0.05, "does not hold"),
        ([1.0, 1.1, 1.2], [0.9, 1.1, 1.18], -0.05, "not told apart"),
        ([1.0, 1.1], [math.nan, math.nan], 0.0, "holds"),
        ([math.nan, 1.1], [1.0, math.nan], 0.0, "not told apart"),
        ([math.nan, math.nan], [1.0, 1.0], 0.0, "does not hold"),
    ],
)
def test_an_arm_is_lower_if_its_seeds_say_so(low, high, margin, verdict):
    found = is_lower(losses(a=low, b=high), "loss", low="a", high="b", margin=margin)
    assert found.verdict == verdict


def test_seeds_are_compared_in_pairs():
    results = losses(a=[1.0, 2.0, 3.0], b=[1.1, 2.1, 3.1])
    assert is_lower(results, "loss", low="a", high="b").verdict == "holds"


def test_a_bound_holds_only_with_every_seed():
    results = losses(a=[1.0, 2.0])
    verdicts = [
        is_within(results, "a", "loss", most=most, claim="").verdict for most in (2.0, 1.5, 0.5)
    ]
    assert verdicts == ["holds", "not told apart", "does not hold"]
    assert is_within(results, "a", "loss", least=1.5, claim="").verdict == "not told apart"


def test_an_optimum_is_inside_if_the_best_there_beats_the_best_elsewhere():
    results = losses(a=[3.0, 3.1], b=[1.0, 1.1], c=[2.0, 2.11], d=[math.nan, 1.0])
    arms = ("a", "b", "c", "d")
    found = is_optimum_inside(results, "loss", arms=arms, inside=("b",), claim="x")
    assert found.verdict == "holds" and found.figures.startswith("b against c")
    found = is_optimum_inside(results, "loss", arms=arms, inside=("a", "c"), claim="x")
    assert found.verdict == "does not hold" and found.figures.startswith("c against b")


def test_the_worst_claim_decides():
    def finding(verdict):
        return Finding(claim="", verdict=verdict, figures="")

    verdicts = ("holds", "not told apart", "does not hold")
    for count in (1, 2, 3):
        assert compare.overall([finding(item) for item in verdicts[:count]]) == verdicts[count - 1]


def test_lists_count_as_their_mean_and_single_values_have_no_spread():
    assert values({"a": [{"x": [1.0, 3.0]}, {"x": 5.0}]}, "a", "x") == [2.0, 5.0]
    assert spread([2.0]) == (2.0, 0.0)
    assert all(map(math.isnan, spread([2.0, math.nan])))
