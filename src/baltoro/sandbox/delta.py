"""The pages a machine has changed since it began as a private mapping of a frozen RAM file.

The kernel knows them: in `/proc/PID/pagemap` a page still shared with the file has bit 61 set, one
that was written has become anonymous. Reading and writing them goes through `/proc/PID/mem`, so a
snapshot costs what changed, and any number of branches share the rest.

A delta file: u64 number of runs, then per run u64 first page and u64 pages, zeros to a whole page,
then the pages, which the store finds again in another delta only where they lie on page bounds.
"""

import os
import re
from pathlib import Path

import numpy as np

from baltoro.sandbox.protocol import SnapshotError

PAGE_BYTES = 4096
PRESENT, SWAPPED, SHARED_WITH_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))
PIECE_BYTES = 8 << 20


def write_delta(pid: int, ram: Path, target: Path) -> int:
    """Save the pages of a stopped process's private mapping of `ram` that differ; returns bytes."""
    start, size = find_mapping(pid, ram)
    runs = _changed_runs(pid, start, size)
    with target.open("wb") as out, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        head = np.uint64(len(runs)).tobytes() + runs.astype("<u8").tobytes()
        out.write(head + bytes(-len(head) % PAGE_BYTES))
        for first, count in runs.tolist():
            for offset in range(0, count * PAGE_BYTES, PIECE_BYTES):
                length = min(PIECE_BYTES, count * PAGE_BYTES - offset)
                out.write(
                    _read_exactly(memory.fileno(), start + first * PAGE_BYTES + offset, length)
                )
    return int(runs[:, 1].sum()) * PAGE_BYTES


def apply_delta(pid: int, ram: Path, source: Path) -> None:
    """Write saved pages into a process that maps the same `ram` and has not run yet."""
    start, size = find_mapping(pid, ram)
    fd = os.open(f"/proc/{pid}/mem", os.O_RDWR)
    try:
        with source.open("rb") as pages:
            num_runs = int(np.frombuffer(pages.read(8), "<u8")[0])
            runs = np.frombuffer(pages.read(16 * num_runs), "<u8").reshape(num_runs, 2)
            pages.seek(-(8 + 16 * num_runs) % PAGE_BYTES, os.SEEK_CUR)
            for first, count in runs.tolist():
                if (first + count) * PAGE_BYTES > size:
                    raise SnapshotError(f"{source}: holds page {first}, the machine has fewer")
                for offset in range(0, count * PAGE_BYTES, PIECE_BYTES):
                    piece = pages.read(min(PIECE_BYTES, count * PAGE_BYTES - offset))
                    _write_exactly(fd, start + first * PAGE_BYTES + offset, piece)
    finally:
        os.close(fd)


def find_mapping(pid: int, ram: Path) -> tuple[int, int]:
    """Address and size of a process's mapping of a file. `SnapshotError` if it has none."""
    mapping = _mapping(pid, ram)
    first, end = int(mapping[1], 16), int(mapping[2], 16)
    return first, end - first


def is_shared(pid: int, ram: Path) -> bool:
    """Whether what a process writes there reaches the file. `SnapshotError` as above."""
    return _mapping(pid, ram)[3] == "s"


def _mapping(pid: int, ram: Path) -> re.Match[str]:
    wanted = os.stat(ram)
    file = f"{os.major(wanted.st_dev):02x}:{os.minor(wanted.st_dev):02x} {wanted.st_ino}"
    pattern = rf"^([0-9a-f]+)-([0-9a-f]+) ...([sp]) \S+ {file}\b"
    if match := re.search(pattern, Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE):
        return match
    raise SnapshotError(f"process {pid} does not map {ram}; it ended, or the file was replaced")


def _changed_runs(pid: int, start: int, size: int) -> np.ndarray:
    """Rows of (first page, pages), of pages that are private to the process."""
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
        entries = np.frombuffer(
            _read_exactly(pagemap.fileno(), start // PAGE_BYTES * 8, size // PAGE_BYTES * 8), "<u8"
        )
    is_here = (entries & (PRESENT | SWAPPED)) != 0
    changed = np.flatnonzero(is_here & ((entries & SHARED_WITH_FILE) == 0))
    if len(changed) == 0:
        return np.zeros((0, 2), np.int64)
    breaks = np.flatnonzero(np.diff(changed) != 1)
    firsts = changed[np.concatenate(([0], breaks + 1))]
    lasts = changed[np.concatenate((breaks, [len(changed) - 1]))]
    return np.stack((firsts, lasts - firsts + 1), axis=1)


def _read_exactly(fd: int, offset: int, length: int) -> bytes:
    parts = []
    while length > 0:
        piece = os.pread(fd, length, offset)
        if not piece:
            raise SnapshotError(f"memory of the machine ends at {offset:#x}")
        parts.append(piece)
        offset += len(piece)
        length -= len(piece)
    return b"".join(parts)


def _write_exactly(fd: int, offset: int, piece: bytes) -> None:
    while piece:
        done = os.pwrite(fd, piece, offset)
        if done == 0:  # as the kernel answers for a process that was killed
            raise SnapshotError(f"memory of the machine ends at {offset:#x}")
        offset += done
        piece = piece[done:]
