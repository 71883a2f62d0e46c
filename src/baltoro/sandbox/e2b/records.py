"""What the server knows of each sandbox beside the keeper: a file each, written by rename.

With the keeper's journal and the store it is all that a new server needs to go on.
"""

import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from baltoro.sandbox.protocol import Limits, SnapshotError

FORMAT_VERSION = 1
OnTimeout = Literal["kill", "pause"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A command that was running when its sandbox was stored; it comes back with its memory."""

    id: int
    config: Mapping[str, Any]  # cmd, args, envs, cwd: as the client gave them
    tag: str | None = None
    uses_pty: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One sandbox, as clients see it."""

    version: int = FORMAT_VERSION
    id: str  # the keeper's name
    template: str
    token: str  # of the calls into it
    limits: Limits
    metadata: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)  # of every command
    started_at: float  # Unix seconds
    end_at: float
    on_timeout: OnTimeout = "kill"
    wakes_itself: bool = False  # a call into a paused one resumes it
    is_paused: bool = False
    commands: tuple[Started, ...] = ()  # of a stored one, to be found again when it wakes


class Records:
    """All sandboxes of a server, and the snapshots that clients asked for."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._records: dict[str, Record] = {}
        for path in folder.glob("*.work"):
            path.unlink()
        for path in sorted(folder.glob("*.json")):
            if path.name != "snapshots.json":
                record = _parse(path)
                self._records[record.id] = record
        names = folder / "snapshots.json"
        self.snapshots: list[str] = json.loads(names.read_text()) if names.exists() else []

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._records.values()))

    def get(self, sandbox_id: str) -> Record | None:
        """The record of a sandbox, if there is one."""
        return self._records.get(sandbox_id)

    def put(self, record: Record) -> None:
        """Add or replace a record; on return it is on disk."""
        self._write(f"{record.id}.json", asdict(record))
        self._records[record.id] = record

    def change(self, sandbox_id: str, **changes: Any) -> Record:
        """Replace fields of a record; returns the new one."""
        record = replace(self._records[sandbox_id], **changes)
        self.put(record)
        return record

    def remove(self, sandbox_id: str) -> None:
        """Forget a sandbox."""
        self._records.pop(sandbox_id, None)
        (self._folder / f"{sandbox_id}.json").unlink(missing_ok=True)

    def set_snapshots(self, snapshots: list[str]) -> None:
        """Replace the list of snapshots."""
        self._write("snapshots.json", snapshots)
        self.snapshots = snapshots

    def _write(self, name: str, data: object) -> None:
        work = self._folder / f"{name}.{secrets.token_hex(4)}.work"
        work.touch(mode=0o600)  # it holds the token
        work.write_text(json.dumps(data))
        work.rename(self._folder / name)


def _parse(path: Path) -> Record:
    data = json.loads(path.read_text())
    if data.get("version") != FORMAT_VERSION:
        raise SnapshotError(
            f"{path}: version={data.get('version')!r}, this build reads {FORMAT_VERSION}"
        )
    commands = tuple(Started(**item) for item in data["commands"])
    return Record(**{**data, "limits": Limits(**data["limits"]), "commands": commands})
