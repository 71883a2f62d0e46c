"""What is known about a snapshot, and whether it fits the machine that wants it."""

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baltoro.sandbox.protocol import Binding, Limits, SnapshotError

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
