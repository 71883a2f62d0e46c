"""Reading a local git repository without a checkout, through `git` itself."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from baltoro.agents.task import TaskFile

MODES = {b"100644": 0o644, b"100755": 0o755}


class UnusableCommitError(ValueError):
    """A commit that cannot become a task; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What a commit did to one file."""

    path: str
    before: TaskFile | None  # None: the commit added it
    after: TaskFile | None  # None: the commit deleted it


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A commit with one parent."""

    id: str
    message: str
    parent_files: dict[str, TaskFile]  # by path
    files: dict[str, TaskFile]

    @property
    def changes(self) -> list[Change]:
        """All files that differ, by path."""
        paths = sorted({*self.parent_files, *self.files})
        pairs = ((path, self.parent_files.get(path), self.files.get(path)) for path in paths)
        return [
            Change(path=path, before=before, after=after)
            for path, before, after in pairs
            if before != after
        ]


class Repository:
    """A local git repository."""

    def __init__(self, root: Path, *, max_files: int = 2000, max_bytes: int = 20 << 20):
        """The limits are of one commit's whole tree."""
        self.root = root
        self.max_files = max_files
        self.max_bytes = max_bytes

    def commit_ids(self, revision: str = "HEAD", max_commits: int = 1000) -> list[str]:
        """Commits reachable from `revision` that have exactly one parent, newest first."""
        out = self._git(
            "rev-list", "--min-parents=1", "--max-parents=1", f"-n{max_commits}", revision, "--"
        )
        return out.decode().split()

    def commit(self, commit_id: str) -> Commit:
        """A commit with both its trees. `UnusableCommitError` if they hold what a task cannot."""
        message = self._git("log", "-1", "--format=%B", commit_id, "--").decode(errors="replace")
        return Commit(
            id=commit_id,
            message=message.strip(),
            parent_files=self._files(f"{commit_id}^"),
            files=self._files(commit_id),
        )

    def _files(self, revision: str) -> dict[str, TaskFile]:
        entries = []
        for line in self._git("ls-tree", "-r", "-z", "--full-tree", revision).split(b"\0"):
            if not line:
                continue
            head, _, name = line.partition(b"\t")
            mode, _, blob = head.split(b" ")
            try:
                path = name.decode()
            except UnicodeDecodeError as error:
                raise UnusableCommitError(f"{revision}: {name!r} is no UTF-8 name") from error
            if mode not in MODES:
                raise UnusableCommitError(f"{revision}: {path} is a link or a submodule")
            entries.append((path, MODES[mode], blob))
        if len(entries) > self.max_files:
            raise UnusableCommitError(
                f"{revision}: {len(entries)} files, more than max_files={self.max_files}"
            )
        blobs = self._blobs([blob for _, _, blob in entries], revision)
        return {
            path: TaskFile(path=path, data=data, mode=mode)
            for (path, mode, _), data in zip(entries, blobs, strict=True)
        }

    def _blobs(self, names: Sequence[bytes], revision: str) -> list[bytes]:
        out = self._git("cat-file", "--batch", stdin=b"".join(name + b"\n" for name in names))
        found = []
        at = total = 0
        for _ in names:
            end = out.index(b"\n", at)
            size = int(out[at:end].rsplit(b" ", 1)[1])
            found.append(out[end + 1 : end + 1 + size])
            at = end + 1 + size + 1
            total += size
        if total > self.max_bytes:
            raise UnusableCommitError(
                f"{revision}: {total} bytes, more than max_bytes={self.max_bytes}"
            )
        return found

    def _git(self, *words: str, stdin: bytes | None = None) -> bytes:
        command = ["git", "-C", str(self.root), *words]
        done = subprocess.run(command, input=stdin, capture_output=True, check=False)
        if done.returncode:
            raise ValueError(f"{' '.join(command)}: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout


def is_test(path: str) -> bool:
    """Whether a path is a Python test by the usual names."""
    pure = PurePosixPath(path)
    return pure.suffix == ".py" and (pure.stem.startswith("test_") or pure.stem.endswith("_test"))


def is_source(path: str) -> bool:
    """Whether a path is Python code that is not a test nor part of a test folder."""
    pure = PurePosixPath(path)
    return pure.suffix == ".py" and not is_test(path) and not {"test", "tests"} & {*pure.parts[:-1]}
