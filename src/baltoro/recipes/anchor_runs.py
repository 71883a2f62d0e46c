"""Running trials in processes of one thread each, every result on disk as soon as it is there.

    OUT/STUDY/ARM.SEED.json    one arm with one seed; written whole, by the process that measured it

A comparison that was killed goes on with the pairs that have no file. A file says of which
configuration and data it is, not of which version of this code: after a change of the code give
another OUT. A worker ends with the process that started it, however that ends.
"""

import fcntl
import json
import math
import os
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from baltoro import config as plain
from baltoro.data.manifest import read_manifest
from baltoro.recipes.anchor_record import Arm, Number, Numbers, Study, Trial
from baltoro.text.files import read_json, write_atomically

VERSION = 1
LOCK_FILE = "lock"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One trial and where its result goes."""

    study: Study
    trial: Trial
    path: Path
    digest: str  # of configuration, arm and data: a result of others is not taken for it

    def result(self) -> Numbers | None:
        """The numbers on disk, or None.

        Raises `ValueError` for a file of other settings or another version.
        """
        if not self.path.exists():
            return None
        content = read_json(self.path)
        if content.get("version") != VERSION or content.get("digest") != self.digest:
            raise ValueError(
                f"{self.path}: is the result of other settings, data or another version; give "
                "another --out, or the same --steps and --data"
            )
        return {name: _number(value) for name, value in content["numbers"].items()}


def tasks_of(
    study: Study, *, seeds: int, num_steps: int | None, data: Path, out: Path
) -> list[Task]:
    """Every arm with every seed, seeds outermost: an early end leaves whole seeds."""
    manifest = plain.digest(read_manifest(data))
    return [
        _task(study, arm, seed, num_steps or study.num_steps, data, manifest, out)
        for seed in range(seeds)
        for arm in study.arms
    ]


def run_tasks(tasks: Sequence[Task], *, jobs: int) -> Generator[tuple[Task, float], None, None]:
    """Measure every task and write its result; yields each with its seconds when it is done.

    With one job they run in this process. Raises what a measurement raised, and `ChildProcessError`
    if a worker was killed; what was finished stays on disk.
    """
    if jobs == 1:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for task in tasks:
                yield task, run_task(task)
        finally:
            torch.set_num_threads(num_threads)
        return
    ours, theirs = Pipe()
    pool = ProcessPoolExecutor(
        min(jobs, max(1, len(tasks))),
        mp_context=get_context("spawn"),
        initializer=_start_worker,
        initargs=(theirs,),
    )
    try:
        futures = {pool.submit(run_task, task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()
        pool.shutdown()
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a worker was killed, for want of memory perhaps; call again with fewer --jobs to go on"
        ) from error
    finally:
        ours.close()  # ends the workers, in the middle of a trial too
        pool.shutdown(cancel_futures=True)
        theirs.close()


def run_task(task: Task) -> float:
    """Measure one task and write its result; returns the seconds it took."""
    start = time.perf_counter()
    numbers = task.study.measure(task.trial)
    seconds = time.perf_counter() - start
    content = {
        "version": VERSION,
        "digest": task.digest,
        "study": task.study.name,
        "arm": task.trial.arm.name,
        "seed": task.trial.seed,
        "num_steps": task.trial.config.schedule.num_steps,
        "seconds": seconds,
        "torch": torch.__version__,
        "numbers": json_numbers(numbers),
    }
    write_atomically(task.path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    return seconds


def json_numbers(numbers: Numbers) -> dict[str, Any]:
    """`numbers` for JSON, which has no NaN: one that is not finite is null."""
    return {name: _plain(value) for name, value in numbers.items()}


@contextmanager
def lock(out: Path) -> Iterator[None]:
    """Hold a folder of results, made if need be; raises `ValueError` if another process has it."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{out}: another comparison is writing there; wait for it, or give another --out"
            ) from error
        yield


def _task(
    study: Study, arm: Arm, seed: int, num_steps: int, data: Path, manifest: str, out: Path
) -> Task:
    trial = study.trial(arm, seed, num_steps, data)
    identity: Mapping[str, Any] = {
        "study": study.name,
        "config": plain.digest(trial.config),
        "matrices": arm.matrices,
        "data": manifest,
    }
    name = f"{arm.name.replace(' ', '-')}.{seed}.json"
    return Task(
        study=study,
        trial=trial,
        path=out / study.name / name,
        digest=json.dumps(identity, sort_keys=True),
    )


def _start_worker(parent: Connection) -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Connection) -> None:
    """Waits for the other end to close, which the end of its process does too."""
    parent.poll(None)
    os._exit(1)


def _plain(value: Number) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return float(value) if math.isfinite(value) else None


def _number(value: Any) -> Number:
    if isinstance(value, list):
        return [math.nan if item is None else float(item) for item in value]
    return math.nan if value is None else float(value)
