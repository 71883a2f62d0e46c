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
CASES = [
    contract.commands_work,
    contract.bytes_pass_unchanged,
    contract.an_image_without_a_shell_is_named,
    contract.attacks_are_denied,
    contract.hogs_are_stopped,
    contract.pauses_keep_files,
    contract.branches_diverge,
    contract.a_paused_sandbox_forks,
    contract.a_stopped_sandbox_comes_back,
    contract.a_lost_create_is_found_by_its_key,
    contract.twenty_cycles_leave_nothing,
    contract.sixteen_branches_answer,
    contract.a_copied_store_wakes_under_another_root,
    contract.a_full_disk_is_named,
    contract.only_listed_hosts_answer,
]


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
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_qemu(tmp_path, case):
    templates = Path(tempfile.gettempdir(), "baltoro-test-templates")
    make = partial(Qemu, default_prefix(), CACHE, templates=templates)
    contract.run(make, tmp_path, case)
