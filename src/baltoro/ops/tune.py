"""`baltoro bench`: measure launch shapes on this GPU and keep the faster ones in the launch table.

For every case (`tune_cases.py`, `tune_layers.py`: a kernel, a class of shapes, inputs of that
class, candidates) the pinned shape is timed, then each candidate whose results agree with the
pinned one's. The fastest replaces the pinned shape if it is faster by more than `MARGIN`, twice.
Times are medians of replays of a CUDA graph with the cache flushed before each.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .launch_table import TABLE, Launch, Table, launch, pinned, section_of, trying, write
from .tune_case import Case
from .tune_cases import KERNELS, cases

try:
    from triton import TritonError
except ModuleNotFoundError:  # where no kernel runs either
    TritonError = RuntimeError

MARGIN = 0.03
TOLERANCE = 1e-2  # of a result's norm, against the pinned shape's
REPEATS = 21

Timer = Callable[[Callable[[], object]], float]


class Outcome(NamedTuple):
    """What was found for one case."""

    kernel: str
    shape_class: str
    old: Launch
    new: Launch
    old_ms: float
    new_ms: float
    refused: list[str]  # candidates that erred or gave something else


def bench(argv: Sequence[str]) -> int:
    """Measure launch shapes of kernels on this GPU (`tune`), or list those that are pinned."""
    parser = argparse.ArgumentParser(prog="baltoro bench", description=bench.__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="tune|list")
    tuning = verbs.add_parser(
        "tune",
        help="try candidates for every class of shapes; keep what is over 3 %% faster",
        description=f"{__doc__.split('`: ', 1)[1]}\nKernels: {', '.join(KERNELS)}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tuning.add_argument("--only", nargs="+", choices=KERNELS, metavar="KERNEL", default=KERNELS)
    tuning.add_argument("--out", type=Path, default=TABLE, help=f"the table to write ({TABLE})")
    tuning.add_argument("--budget", type=float, default=900.0, help="seconds (900)")
    verbs.add_parser("list", help="print the pinned shapes")
    arguments = parser.parse_args(argv)
    if arguments.verb == "list":
        print_table(pinned())
        return 0
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise ValueError("bench tune: needs an NVIDIA GPU, and torch sees none here")
    device = torch.device("cuda", torch.cuda.current_device())
    tune(cases(arguments.only, device), device, arguments.out, arguments.budget)
    return 0


def print_table(table: Table) -> None:
    for section, kernels in table.items():
        for kernel, classes in kernels.items():
            for shape_class, shape in classes.items():
                print(f"{section}  {kernel}  {shape_class}  {words(shape)}")


def tune(
    work: Sequence[Callable[[], Case]],
    device: torch.device,
    out: Path,
    budget: float,
    timer: Timer | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Tune every case that begins within `budget` seconds; `out` is written after each change."""
    section = section_of(device)
    table = copy.deepcopy(pinned())
    start = clock()
    found: list[Outcome] = []
    for number, build in enumerate(work):
        spent = clock() - start
        if spent > budget:
            print(f"bench: {budget:.0f} s are over; {len(work) - number} cases keep their shapes")
            break
        outcome = best_of(
            build(), section, device, timer or graph_ms, lambda: clock() - start > budget
        )
        found.append(outcome)
        left = (clock() - start) / (number + 1) * (len(work) - number - 1)
        print(f"[{number + 1}/{len(work)}, {left:.0f} s left] {told(outcome)}", flush=True)
        if outcome.new != outcome.old:
            classes = table.setdefault(section, {}).setdefault(outcome.kernel, {})
            classes[outcome.shape_class] = outcome.new
            write(table, out)
    changed = sum(outcome.new != outcome.old for outcome in found)
    print(f"bench: {changed} of {len(found)} shapes changed" + (f" in {out}" if changed else ""))
    return found


def best_of(
    case: Case,
    section: str,
    device: torch.device,
    timer: Timer,
    is_over: Callable[[], bool] = lambda: False,
) -> Outcome:
    """The fastest candidate of a case, or its pinned shape where none is faster by `MARGIN`.

    Once `is_over`, no further candidate is tried.
    """
    old = launch(case.kernel, case.shape_class, device)
    expected = case.run()
    old_ms = timer(case.run)
    times: list[tuple[float, int]] = []
    refused: list[str] = []
    for index, shape in enumerate(case.candidates):
        if shape == old or is_over():
            continue
        with trying(case.kernel, case.shape_class, section, shape):
            why = why_refused(case.run, expected)
            if why is None:
                times.append((timer(case.run), index))
            else:
                refused.append(f"{words(shape)}: {why}")
    new_ms, index = min(times, default=(old_ms, -1))
    if index < 0 or new_ms >= (1 - MARGIN) * old_ms:
        return Outcome(case.kernel, case.shape_class, old, old, old_ms, old_ms, refused)
    new = case.candidates[index]
    again_ms = timer(case.run)
    with trying(case.kernel, case.shape_class, section, new):
        new_ms = timer(case.run)
    kept = new if new_ms < (1 - MARGIN) * again_ms else old
    return Outcome(case.kernel, case.shape_class, old, kept, again_ms, new_ms, refused)


def why_refused(run: Callable[[], Iterable[Tensor]], expected: Iterable[Tensor]) -> str | None:
    """What is wrong with a shape: it does not run, or does not give the expected results."""
    try:
        got = list(run())
    except (RuntimeError, TritonError) as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        off, size = float((a.float() - b.float()).norm()), float(b.float().norm())
        if not off <= TOLERANCE * size:
            return f"result {number} is off by {off:.1e} of {size:.1e}"
    return None


def graph_ms(run: Callable[[], object]) -> float:
    """Median of replays of a CUDA graph of `run`, the cache flushed before each."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(REPEATS):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def words(shape: Launch) -> str:
    return " ".join(f"{name}={value}" for name, value in shape.items())


def told(outcome: Outcome) -> str:
    """An outcome in a line."""
    case = f"{outcome.kernel} {outcome.shape_class}: {words(outcome.old)}"
    refused = f"; refused {'; '.join(outcome.refused)}" if outcome.refused else ""
    if outcome.new == outcome.old:
        return f"{case} stays, {outcome.old_ms:.4f} ms{refused}"
    ratio = outcome.new_ms / outcome.old_ms
    return (
        f"{case}, {outcome.old_ms:.4f} ms -> {words(outcome.new)}, {outcome.new_ms:.4f} ms "
        f"({ratio:.3f}){refused}"
    )
