"""What is known about a snapshot, where that is kept, and whether it fits who wants it."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from baltoro.sandbox.protocol import Binding, Limits, SnapshotError
from baltoro.sandbox.tree import sync_path

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFile:
    """One file of the memory half."""

    name: str  # relative, inside memory/
    size: int  # bytes
    chunks: tuple[str, ...] | None = None  # sha256 of each piece in order; None: not packed


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything known about a snapshot."""

    version: int = FORMAT_VERSION
    id: str
    driver: str
    driver_version: str  # of the program that wrote the memory half
    host: str  # `host_fingerprint` of the machine it was taken on
    image_root: str
    limits: Limits  # branches get the same
    created_ns: int  # wall clock of the host, Unix
    parent: str | None  # snapshot this sandbox was restored from, or the one given
    layers: tuple[str, ...]  # ids whose files/ make the writable layers, oldest first
    memory: tuple[MemoryFile, ...]
    binding: Binding | None  # place in a trajectory
    notes: Mapping[str, str] = field(default_factory=dict)  # the driver's own


def host_fingerprint() -> str:
    """Kernel release and processor features: a memory half fits only where both are the same."""
    flags = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            flags = line
            break
    return f"{platform.release()} {hashlib.sha256(flags.encode()).hexdigest()[:16]}"


def check_fits(manifest: Manifest, driver: str, driver_version: str, *, is_same_host: bool) -> None:
    """Raise `SnapshotError` unless this driver on this host can restore the snapshot.

    `is_same_host` demands the same kernel and processor features; a machine emulator needs neither.
    """
    pairs = [
        ("driver", manifest.driver, driver),
        ("driver_version", manifest.driver_version, driver_version),
    ]
    if is_same_host:
        pairs.append(("kernel and processor", manifest.host, host_fingerprint()))
    for name, then, now in pairs:
        if then != now:
            raise SnapshotError(
                f"snapshot {manifest.id!r}: {name} was {then!r}, here it is {now!r};"
                " restore it where it was taken, or start anew from the image"
            )


def parse_manifest(data: dict[str, Any]) -> Manifest:
    """Read back `dataclasses.asdict`. `ValueError`, `KeyError`, `TypeError` if damaged."""
    if data.get("version") != FORMAT_VERSION:
        raise ValueError(f"version={data.get('version')!r}: this build reads {FORMAT_VERSION}")
    memory = tuple(
        MemoryFile(
            name=item["name"],
            size=item["size"],
            chunks=None if item["chunks"] is None else tuple(item["chunks"]),
        )
        for item in data["memory"]
    )
    binding = None if data["binding"] is None else Binding(**data["binding"])
    changed = {
        "memory": memory,
        "binding": binding,
        "limits": Limits(**data["limits"]),
        "layers": tuple(data["layers"]),
    }
    return Manifest(**{**data, **changed})


class Manifests:
    """The manifests below one folder: a file that is there is a snapshot that exists."""

    def __init__(self, root: Path, *, is_durable: bool):
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.is_durable = is_durable

    def write(self, manifest: Manifest) -> None:
        """Write it beside its place and rename it: from then on the snapshot is this."""
        path = self._path(manifest.id)
        work = path.with_suffix(".work")
        try:
            with work.open("w") as out:
                json.dump(asdict(manifest), out)
                out.flush()
                if self.is_durable:
                    os.fsync(out.fileno())
        except OSError:  # as on a full disk
            work.unlink()
            raise
        work.rename(path)
        if self.is_durable:
            sync_path(self.root)

    def read(self) -> tuple[list[Manifest], list[str]]:
        """All that can be read, and a line for each that was removed or set aside."""
        found, lines = [], []
        for path in sorted(self.root.iterdir()):
            if path.suffix != ".json":
                path.unlink()
                lines.append(f"manifest {path.name}: was not renamed")
                continue
            try:
                found.append(parse_manifest(json.loads(path.read_text())))
            except (ValueError, KeyError, TypeError) as error:
                lines.append(self.set_aside(path.stem, f"unreadable ({error})"))
        return found, lines

    def set_aside(self, snapshot_id: str, problem: str) -> str:
        """Make a snapshot not exist and keep its manifest to look at; returns the line for it."""
        path = self._path(snapshot_id)
        path.rename(path.with_suffix(".broken"))
        return f"manifest {path.name}: {problem}"

    def remove(self, snapshot_id: str) -> None:
        """Make a snapshot not exist."""
        self._path(snapshot_id).unlink()

    def touch(self, snapshot_id: str) -> None:
        """Mark it as used now."""
        os.utime(self._path(snapshot_id))

    def used_ns(self, snapshot_id: str) -> int:
        """When it was used last; Unix."""
        return self._path(snapshot_id).stat().st_mtime_ns

    def _path(self, snapshot_id: str) -> Path:
        return self.root / f"{snapshot_id}.json"
