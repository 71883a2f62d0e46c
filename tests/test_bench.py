"""`bench/all.py` and what it runs: sections end as they are said to, times are printed over floors,
and operators are replaced by fla's where the model calls them."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[1] / "bench"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    return loaded("all")


def section(runner, tmp_path, program: str, monkeypatch):
    (tmp_path / "script.py").write_text(program)
    monkeypatch.setattr(runner, "HERE", tmp_path)
    return runner.Section(
        name="trial", script="script.py", arguments=("whole",), quick=("short",), seconds=(9, 9)
    )


def test_every_section_has_its_script_and_a_name_of_its_own(runner):
    assert all((BENCH / section.script).is_file() for section in runner.SECTIONS)
    assert len({section.name for section in runner.SECTIONS}) == len(runner.SECTIONS)


@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("pass", "done"),
        ("raise SystemExit('no times')", "failed (1)"),
        ("import time; time.sleep(60)", "stopped"),
    ],
)
def test_a_section_ends_by_itself_or_with_its_time(runner, tmp_path, monkeypatch, program, end):
    trial = section(runner, tmp_path, program, monkeypatch)
    seconds = 0.5 if end == "stopped" else 30.0
    assert runner.run(trial, False, seconds, "commit", None, tmp_path) == end


@pytest.mark.parametrize(("is_quick", "first"), [(False, "whole"), (True, "short")])
def test_a_section_gets_its_arguments(runner, tmp_path, monkeypatch, is_quick, first):
    program = "import pathlib, sys; pathlib.Path(sys.argv[-1]).write_text(' '.join(sys.argv[1:]))"
    trial = section(runner, tmp_path, program, monkeypatch)
    runner.run(trial, is_quick, 30.0, "abc", None, tmp_path)
    out = tmp_path / "trial.json"
    assert out.read_text() == f"{first} --commit abc --out {out}"


def test_times_are_printed_over_the_floor_and_over_ours(runner, tmp_path, capsys):
    row = {
        "op": "kda", "heads": 96, "floor": {"step_ms": 2.0}, "ours": {"step_graph_ms": 4.0},
        "fla": {"step_graph_ms": 12.0, "step_peak_gib": 3.0},
    }  # fmt: skip
    flat = {"op": "mla", "floor_ms": 1.0, "ours": {"eager_ms": 3.0}}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"ours_over_fla": {"graph": 1.5}, "rows": [row, flat]}))
    runner.print_rows(path)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["over", "fla,", "graph", "1.5000"] in lines and ["op=kda", "heads=96"] in lines
    assert ["ours.step_graph_ms", "4.0000", "2.00", "x", "floor"] in lines
    assert ["fla.step_graph_ms", "12.0000", "6.00", "x", "floor", "3.00", "x", "ours"] in lines
    assert ["ours.eager_ms", "3.0000", "3.00", "x", "floor"] in lines
    assert not any("step_peak_gib" in word for line in lines for word in line)


def test_fla_replaces_operators_where_the_model_finds_them():
    for places in loaded("fla_ops").REPLACED.values():
        for place, _ in places:
            module, _, name = place.rpartition(".")
            assert hasattr(importlib.import_module(module), name), place
