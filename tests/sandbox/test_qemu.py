"""QEMU against the contract of machine drivers. Slow: each case boots real sandboxes."""

import tempfile
from functools import partial
from pathlib import Path

import pytest
from sandbox import contract

from baltoro.sandbox.install import default_prefix
from baltoro.sandbox.machine import MachineDriver
from baltoro.sandbox.qemu import Qemu

CACHE = default_prefix() / "disks"


@pytest.mark.slow
def test_a_dead_owners_machine_leaves_no_process_and_no_socket(tmp_path):
    """Its process, its folder and the short path of its sockets, which lies elsewhere."""

    async def body(driver, sandbox):
        runtime = Path((driver.root / sandbox.id / "runtime").read_text())
        assert list(runtime.iterdir())
        other = MachineDriver(driver.mechanism, driver.root, driver.store)  # knows of nothing
        assert await other.gc() == [f"sandbox {sandbox.id}: left behind by an earlier driver"]
        assert not runtime.exists()
        (driver.root / sandbox.id).mkdir()  # for the end of the first

    contract.run(partial(Qemu, default_prefix(), CACHE), tmp_path, body)


@pytest.mark.slow
@pytest.mark.parametrize("case", contract.CASES, ids=lambda case: case.__name__)
def test_qemu(tmp_path, case):
    templates = Path(tempfile.gettempdir(), "baltoro-test-templates")
    make = partial(Qemu, default_prefix(), CACHE, templates=templates)
    contract.run(make, tmp_path, case)
