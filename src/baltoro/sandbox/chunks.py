"""Content-addressed pieces of memory images: each stored once, under its sha256.

An image is a row of pages, and one page more moves all that follow: pieces of a fixed size would
then share nothing with the image before. So a piece ends where the content of its last page says
so (one page in 8, by a hash of it), whatever came earlier, or after 64 pages.
"""

import contextlib
import hashlib
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from baltoro.sandbox.protocol import SnapshotError
from baltoro.sandbox.tree import sync_path

PAGE_BYTES = 4096
MAX_PAGES = 64
READ_BYTES = 8 << 20
MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, so that the top bits depend on all
LAST_PAGE = 5  # not 0: empty pages, of which there are many, end no piece


class Chunks:
    """The chunks below one folder. Which are needed is known by the caller's manifests."""

    def __init__(self, root: Path, *, is_durable: bool):
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.is_durable = is_durable
        self._turn = threading.Lock()  # a file is packed while others are deleted
        self._fresh: set[str] = set()  # of files being packed, which no manifest names yet

    def put(self, path: Path) -> tuple[tuple[str, ...], int]:
        """Store a file's pieces; returns their names in order and the bytes that were new.

        They stay until `settle`, whatever `keep_only` is told.
        """
        names = []
        new_bytes = 0
        with path.open("rb") as source:
            for piece in cut(source):
                name = hashlib.sha256(piece).hexdigest()
                names.append(name)
                with self._turn:
                    self._fresh.add(name)
                    is_new = not self._path(name).exists()
                if is_new:
                    self._write(name, piece)
                    new_bytes += len(piece)
        return tuple(names), new_bytes

    def settle(self) -> None:
        """From here on a manifest answers for what was put, or nobody does."""
        with self._turn:
            self._fresh.clear()

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
        with self._turn:
            unused = [path for path in self._files() if path.stem not in self._fresh]
            unused = [path for path in unused if path.name not in names]
            for path in unused:
                path.unlink()
        return len(unused)

    def usage(self) -> tuple[int, int]:
        """How many chunks, and their bytes."""
        sizes = []
        for path in self._files():
            with contextlib.suppress(FileNotFoundError):  # got its name, or went, meanwhile
                sizes.append(path.stat().st_size)
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


def cut(source: BinaryIO) -> Iterator[bytes]:
    """A file in pieces of 1 to 64 pages that depend on what is in them, not on where it lies."""
    piece = b""
    while block := source.read(READ_BYTES):
        data = piece + block
        start = 0
        for end in _ends(data):
            yield data[start:end]
            start = end
        piece = data[start:]
    if piece:
        yield piece


def _ends(data: bytes) -> list[int]:
    """Offsets after the last pages of pieces."""
    words = np.frombuffer(data, "<u8", len(data) // PAGE_BYTES * (PAGE_BYTES // 8))
    mixed = words.reshape(-1, PAGE_BYTES // 8).sum(axis=1, dtype=np.uint64) * MIX
    ends: list[int] = []
    start = 0
    for end in (np.flatnonzero(mixed >> np.uint64(61) == LAST_PAGE) + 1).tolist():
        ends += range(start + MAX_PAGES, end, MAX_PAGES)
        ends.append(end)
        start = end
    ends += range(start + MAX_PAGES, len(mixed) + 1, MAX_PAGES)
    return [end * PAGE_BYTES for end in ends]
