"""The folder of a run: who may write it, its checkpoints, and which are kept.

    RUN/config.json                   the configuration it was started with
    RUN/metrics.jsonl                 everything it measured
    RUN/pictures/                     what samples were asked about, each once
    RUN/checkpoints/step-00000100/    state.safetensors, state.json: all that resumes
    RUN/checkpoints/step-00000100/model/   the weights in the official layout
    RUN/latest, RUN/best              links to the `model` of two of them

A checkpoint appears whole or not at all: it is written beside its place, synced and renamed. What a
kill left half written is removed by the next run, which alone holds the folder's lock.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baltoro.text.files import write_atomically

LOCK_FILE = "lock"
CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
PICTURES = "pictures"
MODEL = "model"  # inside a checkpoint, the official layout
_PREFIX = "step-"


class RunFolder:
    """Paths and upkeep of a run's folder; `open_run` gives one to its only writer."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.config_file = self.path / CONFIG_FILE
        self.metrics_file = self.path / METRICS_FILE

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint after `step` steps is, or would be."""
        return self.checkpoints / f"{_PREFIX}{step:08d}"

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, rising."""
        if not self.checkpoints.is_dir():
            return []
        names = [path.name for path in self.checkpoints.iterdir()]
        return sorted(int(name.removeprefix(_PREFIX)) for name in names if name.startswith(_PREFIX))

    def point(self, name: str, step: int) -> None:
        """Make the link `name` lead to the model of a checkpoint, in one move."""
        target = self.checkpoint(step) / MODEL
        fresh = self.path / f".{name}.new"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target.relative_to(self.path))
        fresh.replace(self.path / name)

    def keep_picture(self, picture: bytes) -> str:
        """Write a PNG file into the folder unless it is there; its path in the folder."""
        name = f"{PICTURES}/{hashlib.sha256(picture).hexdigest()[:16]}.png"
        path = self.path / name
        if not path.is_file():
            write_atomically(path, picture)
        return name

    def prune(self, *, keep_last: int, best: int | None) -> None:
        """Remove all checkpoints but the last `keep_last` and the `best`."""
        kept = {*self.steps()[-keep_last:], best}
        for step in self.steps():
            if step not in kept:
                # under another name first: a kill while files go must not leave half a checkpoint
                doomed = self.checkpoints / f".removed-{step}"
                self.checkpoint(step).rename(doomed)
                shutil.rmtree(doomed)

    def sweep(self) -> None:
        """Remove what a killed run left half written or half removed."""
        if self.checkpoints.is_dir():
            for path in self.checkpoints.iterdir():
                if path.name.startswith("."):
                    shutil.rmtree(path)


@contextmanager
def open_run(path: Path | str) -> Iterator[RunFolder]:
    """The folder at `path`, made if need be, for this process alone while the block lasts.

    Raises `ValueError` if another process has it, or if it holds something that is no run.
    """
    folder = RunFolder(path)
    _check_is_run(folder)
    folder.path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder.path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 64).decode(errors="replace").strip()
            raise ValueError(
                f"{folder.path}: process {owner or 'unknown'} is training in it; wait for it, or "
                "give another --out"
            ) from None
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        folder.sweep()
        yield folder
    finally:
        os.close(descriptor)  # which gives the lock back, as the end of the process does


def _check_is_run(folder: RunFolder) -> None:
    if not folder.path.exists():
        return
    if not folder.path.is_dir():
        raise ValueError(f"{folder.path}: is a file; give a folder as --out")
    names = {path.name for path in folder.path.iterdir()}
    if names and not names & {LOCK_FILE, CONFIG_FILE}:
        raise ValueError(
            f"{folder.path}: holds {sorted(names)[0]!r} and no run; give an empty or new folder"
        )
