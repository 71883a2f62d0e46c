"""The watch over a writable layer that no filesystem bounds."""

import asyncio
import os

import pytest

from baltoro.sandbox import quota
from baltoro.sandbox.protocol import LimitError
from baltoro.sandbox.quota import DiskWatch

LIMIT = 1 << 20


def test_a_sandbox_that_writes_on_is_ended_once_and_told_why(tmp_path, monkeypatch):
    monkeypatch.setattr(quota, "INTERVAL_S", 0.01)
    ended = []

    async def main() -> None:
        watch = DiskWatch(tmp_path, (), LIMIT)
        watch.start(lambda: ended.append(1))
        (tmp_path / "small").write_bytes(bytes(LIMIT // 2))
        await asyncio.sleep(0.2)
        assert (ended, watch.verdict) == ([], None)
        (tmp_path / "large").write_bytes(bytes(2 * LIMIT))
        async with asyncio.timeout(20):
            while not ended:
                await asyncio.sleep(0.01)
        assert f"limits.disk_bytes={LIMIT}" in str(watch.verdict)
        await asyncio.sleep(0.1)
        assert ended == [1]
        watch.stop()

    asyncio.run(main())


def test_files_too_deep_to_be_counted_end_it_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(20):
        os.mkdir("a" * 250)
        os.chdir("a" * 250)
    with pytest.raises(LimitError, match="too deep"):
        asyncio.run(DiskWatch(tmp_path, (), LIMIT).check())


def test_files_of_layers_count_unless_they_are_replaced(tmp_path):
    low, upper = tmp_path / "low", tmp_path / "upper"
    for folder in (low, upper):
        folder.mkdir()
        (folder / "same").write_bytes(bytes(LIMIT * 3 // 4))
    watch = DiskWatch(upper, (low,), LIMIT)
    asyncio.run(watch.check())
    (low / "other").write_bytes(bytes(LIMIT // 2))
    with pytest.raises(LimitError, match="delete some or raise it"):
        asyncio.run(watch.check())
