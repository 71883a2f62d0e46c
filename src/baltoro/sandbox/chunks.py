"""Content-addressed pieces of memory images: each 64 KiB stored once, under its sha256."""

import hashlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from baltoro.sandbox.protocol import SnapshotError

CHUNK_BYTES = 65536


class Chunks:
    """The chunks below one folder. Which are needed is known by the caller's manifests."""

    def __init__(self, root: Path, *, is_durable: bool):
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.is_durable = is_durable

    def put(self, path: Path) -> tuple[tuple[str, ...], int]:
        """Store a file's pieces; returns their names in order and the bytes that were new."""
        names = []
        new_bytes = 0
        with path.open("rb") as source:
            while piece := source.read(CHUNK_BYTES):
                name = hashlib.sha256(piece).hexdigest()
                names.append(name)
                if not self._path(name).exists():
                    self._write(name, piece)
                    new_bytes += len(piece)
        return tuple(names), new_bytes

    def assemble(self, names: Collection[str], target: Path) -> None:
        """Write a file from its pieces. `SnapshotError` if one is damaged."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as out:
            for name in names:
                piece = self._path(name).read_bytes()
                if hashlib.sha256(piece).hexdigest() != name:
                    raise SnapshotError(
                        f"chunk {name} of {target.name} is damaged; delete its snapshots"
                    )
                out.write(piece)

    def has(self, names: Collection[str]) -> bool:
        """Whether all are here."""
        return all(self._path(name).exists() for name in names)

    def keep_only(self, names: Collection[str]) -> int:
        """Delete all others; returns how many."""
        unused = [path for path in self._files() if path.name not in names]
        for path in unused:
            path.unlink()
        return len(unused)

    def usage(self) -> tuple[int, int]:
        """How many chunks, and their bytes."""
        sizes = [path.stat().st_size for path in self._files()]
        return len(sizes), sum(sizes)

    def _write(self, name: str, piece: bytes) -> None:
        path = self._path(name)
        path.parent.mkdir(exist_ok=True)
        work = path.with_suffix(".work")
        work.write_bytes(piece)
        if self.is_durable:
            sync_path(work)
        work.rename(path)

    def _path(self, name: str) -> Path:
        return self.root / name[:2] / name

    def _files(self) -> Iterator[Path]:
        return (path for folder in self.root.iterdir() for path in folder.iterdir())


def sync_path(path: Path) -> None:
    """Force a file or a folder to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
