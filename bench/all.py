"""Run the benches of operators and of a step on a GPU one after another, in a budget of seconds.

    PYTHONPATH=src python3 bench/all.py [--quick] [--only kda muon] [--fla FOLDER] [--out FOLDER]

Each section is a process, so that one that fails takes nothing with it, and keeps its JSON after
every row. It is stopped after the seconds that it should need, or that are left. At the end: every
time of every row that was kept, in milliseconds, over the floor and over ours. `--fla` is a folder
with fla's package (`pip install --target`), seen by the sections that measure it.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
OURS = ("ours", "triton")  # how benches call what this repository has for it


@dataclass(frozen=True, kw_only=True)
class Section:
    """One bench script."""

    name: str  # of the results too
    script: str
    arguments: tuple[str, ...]
    quick: tuple[str, ...] | None = None  # instead, where device time is short
    seconds: tuple[float, float]  # that it should need, whole and quick
    uses_fla: bool = False


SECTIONS = (
    Section(
        name="kda",
        script="kda.py",
        arguments=("--fla-seconds", "120"),
        quick=("--quick", "--fla-seconds", "45"),
        seconds=(300, 70),
        uses_fla=True,
    ),
    Section(
        name="train_step_8192",
        script="train_step.py",
        arguments=(
            *("--size", "small", "--positions", "8192", "--seq-len", "8192"),
            "--graph",
            *("--fla", "kda", "attn_res", "short_conv", "rms_norm"),
            *("--fla-impl", "situ=torch"),  # which fla lacks; experts and loss stay ours
        ),
        seconds=(150, 150),
        uses_fla=True,
    ),
    Section(
        name="decode",
        script="decode.py",
        arguments=("--only", "kda", "--budget", "60"),
        quick=("--only", "kda", "--budget", "14"),
        seconds=(80, 35),
        uses_fla=True,
    ),
    Section(
        name="mla",
        script="mla.py",
        arguments=("--budget", "90"),
        quick=("--quick", "--budget", "16"),
        seconds=(120, 40),
    ),
    Section(
        name="moe",
        script="moe.py",
        arguments=("--budget", "90"),
        quick=("--quick", "--budget", "16"),
        seconds=(120, 40),
    ),
    Section(
        name="ops_pointwise",
        script="ops_pointwise.py",
        arguments=("--budget", "180"),
        quick=("--ways", "triton", "fla", "--budget", "40"),
        seconds=(240, 70),
        uses_fla=True,
    ),
    Section(
        name="muon",
        script="muon.py",
        arguments=("--budget", "60"),
        quick=("--budget", "10"),
        seconds=(80, 30),
    ),
)


def run(
    section: Section, is_quick: bool, seconds: float, commit: str, fla: Path | None, out: Path
) -> str:
    """How the section ended, in a word or two."""
    arguments = section.arguments
    if is_quick and section.quick is not None:
        arguments = section.quick
    environment = dict(os.environ)
    if section.uses_fla and fla is not None:
        path = os.pathsep.join([environment.get("PYTHONPATH", ""), str(fla)])
        environment["PYTHONPATH"] = path
    command = [
        sys.executable, str(HERE / section.script), *arguments,
        "--commit", commit, "--out", str(out / f"{section.name}.json"),
    ]  # fmt: skip
    try:
        code = subprocess.run(command, env=environment, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        return "stopped"
    return "done" if code == 0 else f"failed ({code})"


def milliseconds(row: dict[str, object], prefix: str = "") -> dict[str, float]:
    """Every number of a row that is a time, by its path."""
    found = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= milliseconds(value, f"{prefix}{key}.")
        elif key.endswith("ms") and isinstance(value, (int, float)):
            found[prefix + key] = float(value)
    return found


def print_rows(path: Path) -> None:
    result = json.loads(path.read_text())
    ratios = result.get("ours_over_fla", {})
    for name, value in (result | {f"over fla, {way}": ratios[way] for way in ratios}).items():
        if name in ("tokens_per_s", "mfu") or name.startswith("over fla"):
            print(f"  {name:40s} {value:12.4f}")
    for row in result.get("rows", []):
        sizes = " ".join(f"{k}={v}" for k, v in row.items() if isinstance(v, (str, int, list)))
        print(f"  {sizes[:100]}")
        times = milliseconds(row)
        for name, value in times.items():
            print(f"    {name:40s} {value:10.4f}{over(times, name)}")


def over(times: dict[str, float], name: str) -> str:
    """A time as a multiple of its row's floor, and of ours."""
    way, _, what = name.partition(".")
    if not what or way == "floor":
        return ""
    bare = what.replace("eager_", "").replace("graph_", "")
    floor = times.get(f"floor.{bare}", times.get(f"floor_{bare}"))
    ours = next((times[f"{us}.{what}"] for us in OURS if f"{us}.{what}" in times), None)
    found = "" if floor is None else f"  {times[name] / floor:6.2f} x floor"
    if ours is not None and way not in OURS:
        found += f"  {times[name] / ours:6.2f} x ours"
    return found


def main() -> None:
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=1200.0, help="seconds for all")
    parser.add_argument("--quick", action="store_true", help="fewer shapes in every section")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--fla", type=Path, help="folder that holds fla's package")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--commit", required=True, help="that the tree is of")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.budget
    began = time.time()
    ends: dict[str, str] = {}
    for section in SECTIONS:
        if section.name not in arguments.only:
            continue
        left = end - time.monotonic()
        if left < 10:
            ends[section.name] = "left out, the budget is spent"
            continue
        print(f"== {section.name}, {left:.0f} s left", flush=True)
        start = time.monotonic()
        seconds = min(left, section.seconds[arguments.quick])
        result = run(
            section, arguments.quick, seconds, arguments.commit, arguments.fla, arguments.out
        )
        ends[section.name] = f"{result} after {time.monotonic() - start:.0f} s"
    for name, how in ends.items():
        print(f"== {name}: {how}", flush=True)
        path = arguments.out / f"{name}.json"
        if path.exists() and path.stat().st_mtime >= began:
            print_rows(path)


if __name__ == "__main__":
    main()
