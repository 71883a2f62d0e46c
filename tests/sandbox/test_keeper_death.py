"""kill -9 of the keeper at chosen and at random moments of its work (see `deaths`); many cycles.

The slow ones compare all that the host holds and want the machine for themselves.
"""

import asyncio
import os
from pathlib import Path

import pytest
from sandbox import contract, deaths, keeper_daemon

from baltoro.sandbox.install import default_prefix
from baltoro.sandbox.protocol import Command, Net, SandboxError
from baltoro.sandbox.selftest import machine_drivers

NUM_POINTS = 200
NUM_CYCLES = 200
STEPS = (5, 10, 19, 24, 31, 47, 60, 78, 86, 92, 112, 140)  # before these changes it dies
DRIVERS = ("process", "criu", "gvisor", "qemu")


@pytest.fixture
def folder(tmp_path) -> Path:
    """Where a keeper lives."""
    (tmp_path / "image").mkdir()
    return tmp_path


def skip_if_refused(driver: str, folder: Path) -> None:
    try:
        if driver != "process":
            machine_drivers(default_prefix(), folder)[driver]()
    except SandboxError as error:
        pytest.skip(str(error))


def test_a_keeper_that_dies_before_chosen_changes_loses_nothing_committed(folder):
    ledger = deaths.Ledger()
    for index, step in enumerate(STEPS):
        deaths.one_death("process", folder, ledger, step=step, after_s=0)
        if index % 3 != 1:  # else the next daemon finds what two have left
            deaths.adopt("process", folder, ledger)
            assert deaths.processes_of(folder) == set(), step
    assert ledger.committed
    assert ledger.gone


@pytest.mark.slow
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_keeper_killed_at_200_random_points_loses_nothing_committed(folder, driver):
    skip_if_refused(driver, folder)
    assert deaths.kill_keepers(driver, folder, NUM_POINTS) > 0


@pytest.mark.slow
@pytest.mark.parametrize("driver", DRIVERS)
def test_200_cycles_leave_the_host_as_it_was(folder, driver):
    """S09 tenfold, of create, snapshot now and then, and destroy."""
    skip_if_refused(driver, folder)

    async def main() -> set[str]:
        made, store, keeper = keeper_daemon.make_keeper(driver, folder)
        before: dict[str, str] = {}
        num_open = 0
        for cycle in range(NUM_CYCLES + 1):
            name = await keeper.create(deaths.image_of(driver, folder), keeper_daemon.LIMITS, Net())
            async with keeper.use(name) as sandbox:
                await sandbox.exec(Command(argv=("sh", "-c", "sleep 100 & echo x > x")))
            snapshot = await keeper.checkpoint(name) if cycle % 10 == 0 else None
            await keeper.destroy(name)
            if snapshot is not None:
                store.delete(snapshot)
            if cycle == 0:  # what is made once: templates, what CRIU knows of the kernel
                before, num_open = deaths.host(folder), len(os.listdir("/proc/self/fd"))
        left = set(deaths.left_since(before, folder))
        left |= {f"{len(os.listdir('/proc/self/fd')) - num_open} descriptors"} - {"0 descriptors"}
        left |= {
            f"{kind} {name}" for kind in ("boxes", "journal") for name in os.listdir(folder / kind)
        }
        left |= set(deaths.halves(store, folder / "journal"))
        left |= set(os.listdir(store.root / "payloads"))
        await made.close()
        store.close()
        return left

    before = contract.leftovers()
    assert asyncio.run(main()) == set()
    assert contract.leftovers() - before == set()
