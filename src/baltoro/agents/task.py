"""Tasks: what an agent is asked, the world it starts in, and how the end of that world is judged.

A task is data. On disk it is a folder, so that it can be read, diffed and shared:

    task.json       everything but file contents, with the version of this format
    files/          what is laid over the image before the agent starts
    checks/<name>/  what is laid over the agent's final state before that check runs

Paths of files are relative to the working folder, or absolute inside the sandbox.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from baltoro.config import from_dict, to_dict
from baltoro.sandbox.protocol import Limits, Net

FORMAT_VERSION = 1
RESULT = "{result}"
Scoring = Literal["all", "mean"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFile:
    """A file of a task."""

    path: str  # relative to the working folder, or absolute inside the sandbox
    data: bytes
    mode: int = 0o644

    def __post_init__(self) -> None:
        pure = PurePosixPath(self.path)
        if not self.path or self.path.endswith("/") or ".." in pure.parts or "\0" in self.path:
            raise ValueError(f"path={self.path!r}: must name a file, without '..'")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One verifier: a command that runs on a copy of the final state, after the agent is gone.

    Its score is 1 for exit code 0, else 0. A check that mentions `{result}` among its words is
    scored by the number in 0..1 that it writes to the file of that name, which the verifier makes
    after the agent's processes are dead. `result_path` is for foreign tasks that write a number
    to a fixed place; whatever lay there is removed first.
    """

    name: str
    argv: tuple[str, ...]
    files: tuple[TaskFile, ...] = ()  # replace what the agent left there
    cwd: str | None = None  # None: the working folder
    timeout_s: float = 60.0
    weight: float = 1.0
    is_hidden: bool = True  # a public one also runs when the agent submits
    result_path: str | None = None  # absolute inside the sandbox

    def __post_init__(self) -> None:
        if not self.name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"check.name={self.name!r}: use letters, digits, '-' and '_'")
        if not self.argv:
            raise ValueError(f"check {self.name!r}: argv={self.argv!r}: needs a program")
        if not self.weight > 0:
            raise ValueError(f"check {self.name!r}: weight={self.weight!r}: must be positive")
        if self.result_path is not None and not self.result_path.startswith("/"):
            raise ValueError(
                f"check {self.name!r}: result_path={self.result_path!r}: must be absolute"
            )

    @property
    def writes_result(self) -> bool:
        """Whether a number decides, and not the exit code."""
        return self.result_path is not None or any(RESULT in word for word in self.argv)


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmissionBudget:
    """How often an agent may have the public checks run, and what that costs."""

    max_submissions: int = 3
    num_free: int = 1
    penalty: float = 0.05  # of reward, for each beyond the free ones

    def __post_init__(self) -> None:
        if not 0 <= self.num_free <= self.max_submissions:
            raise ValueError(
                f"submissions.num_free={self.num_free!r}: must be between 0 and"
                f" max_submissions={self.max_submissions}"
            )
        if not 0 <= self.penalty <= 1:
            raise ValueError(f"submissions.penalty={self.penalty!r}: must be between 0 and 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Data plus how it is judged."""

    id: str
    prompt: str
    checks: tuple[Check, ...]
    image: str = "default"  # a name; the runner knows where it lies
    workdir: str = "/work"
    files: tuple[TaskFile, ...] = ()
    solution: tuple[TaskFile, ...] = ()  # one that passes, if known; the agent never sees it
    scoring: Scoring = "all"  # every hidden check, or their weighted mean
    # a fork has all that the agent left; a fresh sandbox only its working folder, and programs that
    # the agent cannot have replaced
    judged_in: Literal["fork", "fresh"] = "fork"
    submissions: SubmissionBudget | None = None  # None: the agent cannot submit
    limits: Limits = field(default_factory=Limits)
    net: Net = field(default_factory=Net)
    needs_isolation: bool = False  # commands name absolute paths: not for the process driver
    source: dict[str, str] = field(default_factory=dict)  # where it came from

    def __post_init__(self) -> None:
        if not self.id or "/" in self.id:
            raise ValueError(f"task.id={self.id!r}: must be a non-empty name without '/'")
        if not self.prompt.strip():
            raise ValueError(f"task {self.id!r}: prompt is empty")
        if not self.workdir.startswith("/"):
            raise ValueError(f"task {self.id!r}: workdir={self.workdir!r}: must be absolute")
        names = [check.name for check in self.checks]
        if len(set(names)) < len(names):
            raise ValueError(f"task {self.id!r}: checks={names!r}: names must differ")
        if not self.hidden_checks:
            raise ValueError(f"task {self.id!r}: checks={names!r}: at least one must be hidden")
        if not self.needs_isolation and any(check.result_path for check in self.checks):
            raise ValueError(f"task {self.id!r}: a check has a result_path: set needs_isolation")
        if self.submissions is not None and not self.public_checks:
            raise ValueError(f"task {self.id!r}: submissions need a public check; there is none")

    @property
    def hidden_checks(self) -> tuple[Check, ...]:
        """The ones that give the reward."""
        return tuple(check for check in self.checks if check.is_hidden)

    @property
    def public_checks(self) -> tuple[Check, ...]:
        """The ones whose results an agent may see."""
        return tuple(check for check in self.checks if not check.is_hidden)

    def place(self, path: str) -> str:
        """A path of a file as an absolute one inside the sandbox."""
        return str(PurePosixPath(self.workdir) / path)


def task_digest(task: Task) -> str:
    """SHA-256 (64 hex digits) of a task, file contents included."""
    record = {**_document(task), "contents": _contents(task)}
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def save_task(task: Task, folder: Path) -> None:
    """Write a task as a new folder. `FileExistsError` if there is something."""
    folder.mkdir(parents=True)
    for where, files in _groups(task).items():
        for index, file in enumerate(files):
            _stored(folder, where, index, file).parent.mkdir(parents=True, exist_ok=True)
            _stored(folder, where, index, file).write_bytes(file.data)
    (folder / "task.json").write_text(json.dumps(_document(task), indent=2, sort_keys=True) + "\n")


def load_task(folder: Path) -> Task:
    """Read back `save_task`. `ValueError` for another version or a damaged description."""
    document = json.loads((folder / "task.json").read_text())
    version = document.pop("version", None)
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{folder}: task.json has version={version!r}, this build reads {FORMAT_VERSION}"
        )
    places = {"files": document.pop("files"), "solution": document.pop("solution")}
    for check in document["checks"]:
        places[f"checks/{check['name']}"] = check.pop("files")
    loaded: dict[str, tuple[TaskFile, ...]] = {}
    for where, entries in places.items():
        files = []
        for index, entry in enumerate(entries):
            empty = TaskFile(path=entry["path"], data=b"", mode=entry["mode"])
            data = _stored(folder, where, index, empty).read_bytes()
            files.append(replace(empty, data=data))
        loaded[where] = tuple(files)
    bare = from_dict(Task, document)
    checks = tuple(replace(check, files=loaded[f"checks/{check.name}"]) for check in bare.checks)
    return replace(bare, checks=checks, files=loaded["files"], solution=loaded["solution"])


def _groups(task: Task) -> dict[str, tuple[TaskFile, ...]]:
    groups = {"files": task.files, "solution": task.solution}
    return groups | {f"checks/{check.name}": check.files for check in task.checks}


def _stored(folder: Path, where: str, index: int, file: TaskFile) -> Path:
    """Relative files lie under their own names, absolute ones are numbered under `.root`."""
    if file.path.startswith("/"):
        return folder / where / ".root" / f"{index}-{PurePosixPath(file.path).name}"
    return folder / where / file.path


def _contents(task: Task) -> dict[str, list[str]]:
    return {
        where: [hashlib.sha256(file.data).hexdigest() for file in files]
        for where, files in _groups(task).items()
    }


def _document(task: Task) -> dict[str, Any]:
    bare = replace(
        task,
        files=(),
        solution=(),
        checks=tuple(replace(check, files=()) for check in task.checks),
    )
    document = {"version": FORMAT_VERSION, **to_dict(bare)}
    document["files"] = _entries(task.files)
    document["solution"] = _entries(task.solution)
    for entry, check in zip(document["checks"], task.checks, strict=True):
        entry["files"] = _entries(check.files)
    return document


def _entries(files: Iterable[TaskFile]) -> list[dict[str, Any]]:
    return [{"path": file.path, "mode": file.mode} for file in files]
