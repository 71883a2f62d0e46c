"""kill -9 of what a driver runs, at random moments of a sandbox's life.

Whatever dies (the machine, its agent, the program that dumps or restores), a snapshot that was
committed comes back with memory and files, none is half, the call that was running raises a named
error or has done its work, and nothing is left. The keeper's own death is in
`test_keeper_death.py`, the store's at 200 points in `test_store.py`. As many points as fit into the
time; the count is printed.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
from sandbox import contract

from baltoro.sandbox import channel, gvisor
from baltoro.sandbox.cgroup import Cgroup
from baltoro.sandbox.install import default_prefix
from baltoro.sandbox.machine import MachineDriver, MachineSandbox
from baltoro.sandbox.protocol import SandboxError
from baltoro.sandbox.selftest import machine_drivers
from baltoro.sandbox.workload import World

BUDGET_S = {"criu": 60, "gvisor": 75, "qemu": 75}
MAX_POINTS = 200
LONGEST_S = {"criu": 0.6, "gvisor": 1.2, "qemu": 1.0}  # of what is interrupted


def victims(driver: MachineDriver) -> list[int]:
    """Processes that run for any sandbox of the driver now, ours excepted."""
    ids = [home.name for home in driver.root.iterdir()]
    found = {pid for sandbox_id in ids for pid in Cgroup(sandbox_id).pids()}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path("/proc", pid, "cmdline").read_bytes()
            if any(sandbox_id.encode() in words for sandbox_id in ids):
                found.add(int(pid))
    return sorted(found - {os.getpid()})


async def strike(driver: MachineDriver, rng: random.Random, longest_s: float) -> None:
    """Wait a random moment, then kill one random process of the driver."""
    await asyncio.sleep(rng.uniform(0, longest_s))
    pids = victims(driver)
    if pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(pids), signal.SIGKILL)


async def live_on(driver: MachineDriver, sandbox: MachineSandbox, committed: list[str]) -> None:
    """What is interrupted: a change, a snapshot that goes on, a branch of it."""
    await sandbox.write("/work/turn", str(len(committed)).encode())
    committed.append(await sandbox.snapshot())
    (branch,) = await driver.restore(committed[-1])
    await branch.read("/work/turn")
    await branch.destroy()


async def one_point(driver: MachineDriver, base: str, world: World, rng: random.Random) -> None:
    """A life that is cut short, and the proof that what was committed in it comes back."""
    (sandbox,) = await driver.restore(base)
    committed: list[str] = []
    life = asyncio.ensure_future(live_on(driver, sandbox, committed))
    await strike(driver, rng, LONGEST_S[driver.name])
    with contextlib.suppress(SandboxError):
        await asyncio.wait_for(life, 60)
    assert set(committed) <= set(driver.store.ids())
    for each in list(driver._sandboxes.values()):
        await each.destroy()
    assert list(driver.root.iterdir()) == []
    for index, snapshot in enumerate(committed):
        (again,) = await driver.restore(snapshot)
        assert await (await world.follow(again)).ask("x") == "41"
        assert await again.read("/work/turn") == str(index).encode()
        await again.destroy()
        driver.store.delete(snapshot)
    assert driver.store.ids() == [base]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["criu", "gvisor", "qemu"])
def test_a_driver_killed_anywhere_keeps_what_was_committed(tmp_path, name, monkeypatch):
    monkeypatch.setattr(gvisor, "CALL_TIMEOUT_S", 8.0)  # a sentry that lost a task may never answer
    monkeypatch.setattr(channel, "REPLY_TIMEOUT_S", 8.0)
    points = 0

    async def body(driver: MachineDriver, sandbox: MachineSandbox) -> None:
        nonlocal points
        world = await World.start(sandbox, 4)
        await world.ask("x = 41")
        base = await sandbox.snapshot()
        await sandbox.destroy()
        rng = random.Random(7)
        end = time.monotonic() + BUDGET_S[name]
        while time.monotonic() < end and points < MAX_POINTS:
            await one_point(driver, base, world, rng)
            points += 1

    contract.run(machine_drivers(default_prefix(), tmp_path)[name], tmp_path, body)
    print(f"{name}: survived {points} deaths")
    assert points >= 5
