"""QEMU against the contract of machine drivers. Slow: each case boots real sandboxes."""

import hashlib
import itertools
import tempfile
from functools import partial
from pathlib import Path

import pytest
from sandbox import contract

from baltoro.sandbox import qemu
from baltoro.sandbox.install import default_prefix
from baltoro.sandbox.machine import MachineDriver
from baltoro.sandbox.protocol import SnapshotError
from baltoro.sandbox.qemu import Qemu
from baltoro.sandbox.qmp import Qmp

STEPS = ["stop", "migrate", "query-status", "cont"]  # asked of a QEMU to snapshot it
CACHE = default_prefix() / "disks"


@pytest.mark.slow
def test_a_dead_owners_machine_leaves_no_process(tmp_path):
    async def body(driver, sandbox):
        words = Path("/proc", (sandbox.home / "pid").read_text(), "cmdline")
        assert sandbox.id.encode() in words.read_bytes()
        other = MachineDriver(driver.mechanism, driver.root, driver.store)  # knows of nothing
        assert await other.gc() == [f"sandbox {sandbox.id}: left behind by an earlier driver"]
        assert not words.exists() or sandbox.id.encode() not in words.read_bytes()
        (driver.root / sandbox.id).mkdir()  # for the end of the first

    contract.run(partial(Qemu, default_prefix(), CACHE), tmp_path, body)


@pytest.mark.slow
def test_a_machine_that_booted_goes_on_in_its_own_qemu_over_memory_it_froze(tmp_path, monkeypatch):
    """No second QEMU, no copy, no status asked twice; and nothing reaches the frozen file."""
    asked = []
    send = Qmp.run

    async def recorded(self, command, **arguments):
        asked.append(command)
        return await send(self, command, **arguments)

    async def body(driver, sandbox):
        pid = (sandbox.home / "pid").read_text()
        await sandbox.write("/work/turn", b"one")
        asked.clear()
        first = await sandbox.snapshot()
        assert [command for command, _ in itertools.groupby(asked)] == STEPS
        assert (sandbox.home / "pid").read_text() == pid
        (layer,) = driver.store.layer_paths(first)
        frozen = layer / "ram"
        assert frozen.stat().st_ino == (sandbox.home / "ram").stat().st_ino
        before = hashlib.sha256(frozen.read_bytes()).digest()
        await sandbox.write("/work/turn", b"two")
        second = await sandbox.snapshot()
        assert hashlib.sha256(frozen.read_bytes()).digest() == before
        for snapshot, wanted in ((first, b"one"), (second, b"two")):
            (branch,) = await driver.restore(snapshot)
            assert await branch.read("/work/turn") == wanted

    monkeypatch.setattr(Qmp, "run", recorded)
    contract.run(partial(Qemu, default_prefix(), CACHE), tmp_path, body)


@pytest.mark.slow
def test_a_qemu_that_keeps_writing_to_its_memory_file_makes_no_snapshot(tmp_path, monkeypatch):
    async def body(driver, sandbox):
        monkeypatch.setattr(qemu, "FREEZE_SIGNAL", 0)  # is sent to nobody
        with pytest.raises(SnapshotError, match="still writes"):
            await sandbox.snapshot()
        assert driver.store.ids() == []
        assert (await sandbox.exec(contract.sh("echo on"))).stdout == b"on\n"
        monkeypatch.undo()
        await sandbox.snapshot()

    contract.run(partial(Qemu, default_prefix(), CACHE), tmp_path, body)


@pytest.mark.slow
@pytest.mark.parametrize("case", contract.CASES, ids=lambda case: case.__name__)
def test_qemu(tmp_path, case):
    templates = Path(tempfile.gettempdir(), "baltoro-test-templates")
    make = partial(Qemu, default_prefix(), CACHE, templates=templates)
    contract.run(make, tmp_path, case)
