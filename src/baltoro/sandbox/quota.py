"""The disk limit of a sandbox whose writable layer is a folder of the host: it is watched.

A filesystem of its own would refuse the first byte too many, but costs every start a mount. So the
folder is measured when the disk it lies on has filled up by a part of the limit, at least every 30
seconds, and once more for each snapshot; a sandbox that is over its limit is ended. Until then, a
second at the most plus the time of measuring, it may write on.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from baltoro.sandbox.protocol import LimitError
from baltoro.sandbox.tree import stack_bytes, tree_bytes

INTERVAL_S = 1.0
LONGEST_S = 30.0
PART = 16  # of the limit, by which the disk fills up before the folder is measured again


class DiskWatch:
    """Watches the layers of one sandbox, in a task of its own, from `start` to `stop`."""

    def __init__(self, upper: Path, layers: Sequence[Path], limit_bytes: int):
        """`layers` lie below `upper`, oldest first; what is seen of them counts as well."""
        self.verdict: str | None = None  # once it was over its limit
        self._upper = upper
        self._layers = tuple(layers)
        self._limit_bytes = limit_bytes
        self._base_bytes: int | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, end: Callable[[], None]) -> None:
        """Begin; `end` is called once if the sandbox is to be ended."""
        self._task = asyncio.create_task(self._watch(end))

    def stop(self) -> None:
        """Watch no longer."""
        if self._task is not None:
            self._task.cancel()

    async def check(self) -> None:
        """Measure now. `LimitError` if there is too much, or what cannot be measured."""
        try:
            size = await asyncio.to_thread(self._measure)
        except (RecursionError, OSError) as error:
            self.verdict = f"its folders lie too deep in each other for limits.disk_bytes ({error})"
            raise LimitError(f"{self._upper}: {self.verdict}; remove some") from error
        if size > self._limit_bytes:
            self.verdict = f"it wrote {size} bytes of files, limits.disk_bytes={self._limit_bytes}"
            raise LimitError(f"{self._upper}: {self.verdict}; delete some or raise it")

    async def _watch(self, end: Callable[[], None]) -> None:
        measured_at, used_then = time.monotonic(), _used_bytes(self._upper)
        while self.verdict is None:
            await asyncio.sleep(INTERVAL_S)
            used = _used_bytes(self._upper)
            has_grown = used > used_then + self._limit_bytes // PART
            if not has_grown and time.monotonic() < measured_at + LONGEST_S:
                continue
            try:
                await self.check()
            except LimitError:
                end()
            measured_at, used_then = time.monotonic(), used

    def _measure(self) -> int:
        if self._base_bytes is None:
            self._base_bytes = sum(tree_bytes(layer) for layer in self._layers)
        at_most = self._base_bytes + tree_bytes(self._upper)
        if at_most <= self._limit_bytes or not self._layers:
            return at_most
        return stack_bytes([*self._layers, self._upper])


def _used_bytes(path: Path) -> int:
    disk = os.statvfs(path)
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize
