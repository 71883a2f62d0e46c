"""What a run writes down: JSON lines always, TensorBoard when it is installed, one line to watch.

Every line of `metrics.jsonl` is an object with `kind` and `step`:

    step      flat numbers by `room/thing_unit`
    inspect   expert loads by layer, largest logits by mixer and head as last measured
    eval      held-out bits per byte, by domain
    baseline  the bigram's, fitted on the same tokens
    probe     decay half-lives, residual weights, output sizes (`train.probe`)
    sample    a prompt and how the model went on; of a picture, its file in the folder, and how its
              document goes on
    alarm     its name, where, and what happened
    rewind    back to this step from step `from`, and why; what lies between happens anew
    resume    this process continues from the checkpoint of this step
"""

import importlib
import importlib.util
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

Value = str | float | int | None | list[Any] | Mapping[str, Any]


class MetricsLog:
    """Appends to the files of a run."""

    def __init__(self, path: Path, *, tensorboard: Path | None = None) -> None:
        """`tensorboard` is a folder for its events; it is used if the package is there.

        A last line that a kill cut short is taken out of the file first.
        """
        if path.exists():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._file = path.open("ab", buffering=0)
        self._board: Any = None
        if tensorboard is not None and importlib.util.find_spec("tensorboard") is not None:
            writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
            self._board = writer(str(tensorboard))

    def write(self, kind: str, step: int, values: Mapping[str, Value]) -> None:
        """One line, on disk when this returns as far as the system's cache.

        Raises `OSError` on a full disk; no part of the line is left then.
        """
        line = {"kind": kind, "step": step} | dict(values)
        text = (json.dumps(_finite(line), allow_nan=False) + "\n").encode()
        end = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(text):
                written += self._file.write(text[written:])
        except OSError:
            self._file.truncate(end)
            raise
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a log in the order of their steps' last telling.

    A run that was resumed or that went back tells the steps behind its checkpoint twice; the later
    telling counts. A resumed run knows nothing of going back to the checkpoint it resumes from: it
    comes to the same loss again, and tells it again. A last line cut short by a kill is left out.
    Raises `ValueError` for any other line that is no JSON.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) - 1:
                break
            raise ValueError(f"{path}: line {number + 1} is not JSON ({error})") from error
        if entry["kind"] in ("resume", "rewind"):
            found = [old for old in found if old["step"] <= entry["step"]]
        if entry["kind"] == "resume":
            at = entry["step"]
            found = [old for old in found if (old["kind"], old["step"]) != ("rewind", at)]
        found.append(entry)
    yield from found


class ProgressLine:
    """One line that changes in a terminal; elsewhere a line now and then."""

    def __init__(self, console: Console, *, every: int) -> None:
        """Outside a terminal, `every` so many updates are printed."""
        self.console = console
        self.every = every
        self.count = 0
        self._live: Live | None = None

    def __enter__(self) -> "ProgressLine":
        if self.console.is_terminal:
            self._live = Live(Text(), console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, text: str) -> None:
        """Show how things stand."""
        if self._live is not None:
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif self.count % self.every == 0:
            self.note(text)
        self.count += 1

    def note(self, text: str) -> None:
        """Print something that stays."""
        self.console.print(Text(text), soft_wrap=True)


def duration(seconds: float) -> str:
    """`41 s`, `3 min 20 s`, `2 h 05 min`."""
    if not math.isfinite(seconds):
        return "unknown"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _finite(value: Any) -> Any:
    """JSON has no NaN: such numbers become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
