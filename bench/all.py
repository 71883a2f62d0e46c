"""Run the benches of operators and of a step on a GPU one after another, in a budget of seconds.

    PYTHONPATH=src python3 bench/all.py --budget 200 [--only kda muon] [--fla FOLDER] [--out FOLDER]

Each section is a process, so that one that fails takes nothing with it, and keeps its JSON after
every row. It is stopped after the seconds that it should need, or that are left. At the end: floor,
ours and fla, in milliseconds, for every row that was kept. `--fla` is a folder with fla's package
(`pip install --target`), seen by the sections that measure it.
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


@dataclass(frozen=True, kw_only=True)
class Section:
    """One bench script."""

    name: str  # of the results too
    script: str
    arguments: tuple[str, ...] = ()
    seconds: float  # that it should need
    uses_fla: bool = False


SECTIONS = (
    Section(name="muon", script="muon.py", arguments=("--budget", "30"), seconds=50),
    Section(
        name="ops_pointwise_shapes_tried",
        script="ops_pointwise.py",
        arguments=("--tune", "--budget", "50"),
        seconds=75,
    ),
    Section(
        name="ops_pointwise",
        script="ops_pointwise.py",
        arguments=("--ways", "triton", "--budget", "40"),
        seconds=60,
    ),
    Section(name="decode", script="decode.py", seconds=60, uses_fla=True),
    Section(
        name="kda",
        script="kda.py",
        arguments=("--quick", "--fla-seconds", "80"),
        seconds=130,
        uses_fla=True,
    ),
    Section(
        name="train_step_8192",
        script="train_step.py",
        arguments=(
            *("--size", "small", "--positions", "8192", "--seq-len", "8192"),
            *("--fla", "kda", "attn_res", "short_conv", "rms_norm"),
            *("--fla-impl", "situ=torch"),  # which fla lacks; experts and loss stay ours
        ),
        seconds=150,
        uses_fla=True,
    ),
)


def run(section: Section, seconds: float, commit: str, fla: Path | None, out: Path) -> str:
    """How the section ended, in a word or two."""
    environment = dict(os.environ)
    if section.uses_fla and fla is not None:
        path = os.pathsep.join([environment.get("PYTHONPATH", ""), str(fla)])
        environment["PYTHONPATH"] = path
    command = [
        sys.executable, str(HERE / section.script), *section.arguments,
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
    for name in ("tokens_per_s", "mfu", "ours_over_fla"):
        if name in result:
            print(f"  {name:40s} {result[name]:12.4f}")
    for row in result.get("rows", []):
        sizes = " ".join(f"{k}={v}" for k, v in row.items() if isinstance(v, (str, int, list)))
        print(f"  {sizes[:100]}")
        times = milliseconds(row)
        for name, value in times.items():
            way = name.split(".")[0]
            floor = times.get("floor" + name.removeprefix(way).replace("_eager", "").replace(
                "_graph", ""))  # fmt: skip
            over = "" if floor is None or way == "floor" else f"  {value / floor:.2f} x floor"
            print(f"    {name:40s} {value:10.4f}{over}")


def main() -> None:
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for all")
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
        seconds = min(left, section.seconds)
        result = run(section, seconds, arguments.commit, arguments.fla, arguments.out)
        ends[section.name] = f"{result} after {time.monotonic() - start:.0f} s"
    for name, how in ends.items():
        print(f"== {name}: {how}", flush=True)
        path = arguments.out / f"{name}.json"
        if path.exists() and path.stat().st_mtime >= began:
            print_rows(path)


if __name__ == "__main__":
    main()
