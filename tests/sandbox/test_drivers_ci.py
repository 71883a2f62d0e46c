"""What CI shows of the drivers that keep memory: each is installed and run, or refused by name.

A machine that refuses the tool itself (no root for CRIU, no system-call trap for gVisor, no archive
to fetch it from) is told apart from a driver of ours that fails: the first is a skip whose reason
the last line says, the second a failure. The packages come over the network the first time.
"""

import asyncio
import os
import subprocess
from pathlib import Path

import pytest
from sandbox import contract, deaths
from sandbox.e2b_http import Box, new, serve

from baltoro.sandbox.install import default_prefix, find_tool, install
from baltoro.sandbox.selftest import selftest

pytestmark = pytest.mark.drivers

DRIVERS = {  # and the tools that each needs
    "gvisor": ("runsc", "guest", "image"),
    "criu": ("criu", "guest", "image"),
    "qemu": ("qemu", "kernel", "squashfs", "guest", "image"),
}
NUM_DEATHS = 5
LOOP = "i=0; while true; do i=$((i+1)); echo $i > /new; mv /new /count; sleep 0.1; done"

ran: list[str] = []


@pytest.fixture(scope="module")
def prefix() -> Path:
    return default_prefix()


@pytest.fixture(scope="module")
def refusals(prefix, tmp_path_factory) -> dict[str, str]:
    """Why this machine cannot have or run a driver's tools, for each driver that it refuses."""
    outcomes = install(prefix)
    found = {}
    for driver, tools in DRIVERS.items():
        lacking = [f"{tool} {outcomes[tool].text}" for tool in tools if not outcomes[tool].is_there]
        reason = lacking[0] if lacking else refusal(prefix, driver, tmp_path_factory.mktemp(driver))
        if reason is not None:
            found[driver] = " ".join(reason.split())
    return found


def refusal(prefix: Path, driver: str, folder: Path) -> str | None:
    """Why this machine cannot run the driver's program, asked of it alone; None if it can."""
    if driver == "criu":
        if os.geteuid() != 0:
            return "it needs root"
        words = [*find_tool(prefix, "criu"), "check"]
    elif driver == "gvisor":
        flags = ("--network=none", "--ignore-cgroups", "--platform=systrap")
        words = [*find_tool(prefix, "runsc"), f"--root={folder}", *flags, "do", "true"]
        if os.geteuid() != 0:
            words = ["unshare", "-Urm", *words]
    else:
        words = [*find_tool(prefix, "qemu"), "--version"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    return None if done.returncode == 0 else (done.stderr or done.stdout).strip()[-300:]


def skip_if_refused(refusals: dict[str, str], driver: str) -> None:
    if driver in refusals:
        pytest.skip(f"this machine refuses {driver}: {refusals[driver]}")


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_driver_keeps_a_world_through_snapshot_and_branches(prefix, refusals, driver, capsys):
    skip_if_refused(refusals, driver)
    before = contract.leftovers()
    (result,) = asyncio.run(selftest(prefix, [driver]))
    assert result.is_available, result.reason
    flags = ("has_memory_snapshot", "has_fork", "has_live_snapshot", "has_many_processes")
    assert [getattr(result, flag) for flag in flags] == [True] * 4
    assert contract.leftovers() - before == set()
    with capsys.disabled():
        times = ", ".join(f"{name} {value:g}" for name, value in result.latency_ms.items())
        print(f"\n{driver} ran; ms: {times}")
    ran.append(driver)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_command_outlives_pause_server_and_fork(prefix, refusals, driver, tmp_path):
    """Started by a client, stored with its sandbox by one server, heard again from the next."""
    skip_if_refused(refusals, driver)
    kept = {}
    options = {"driver": driver, "prefix": prefix, "image": prefix / "image/root"}

    async def number(box: Box) -> int:
        """What the command counts now."""
        return int((await box.get("/count")).content)

    async def first(http, control):
        box = await new(http)
        start = {"process": {"cmd": "sh", "args": ["-c", LOOP]}, "tag": "count"}
        task = asyncio.create_task(box.stream("process.Process/Start", start))
        while (await box.get("/count")).status_code == 404:
            await asyncio.sleep(0.05)
        await http.post(f"/sandboxes/{box.id}/pause")
        _, error = await task
        assert error["code"] == "unavailable"
        await http.post(f"/sandboxes/{box.id}/connect")
        before = await number(box)
        while await number(box) == before:
            await asyncio.sleep(0.05)
        kept.update(box=box, count=await number(box))

    async def second(http, control):
        box = kept["box"]
        box.http = http
        branches = (await http.post(f"/sandboxes/{box.id}/fork", json={"count": 2})).json()
        for each in (box, *(Box(http, made["sandbox"]) for made in branches)):
            who = {"process": {"tag": "count"}}
            assert await number(each) >= kept["count"]
            assert len((await each.call("process.Process/List", {}))["processes"]) == 1
            await each.call("process.Process/SendSignal", who | {"signal": "SIGNAL_SIGKILL"})
            while (await each.call("process.Process/List", {}))["processes"]:
                await asyncio.sleep(0.05)
            stopped = await number(each)
            await asyncio.sleep(0.3)
            assert await number(each) == stopped

    serve(tmp_path, first, **options)
    serve(tmp_path, second, **options)


@pytest.mark.parametrize("driver", ["gvisor", "criu"])
def test_what_was_committed_outlives_a_killed_keeper(refusals, driver, tmp_path):
    """A few of the deaths of `test_keeper_death.py`."""
    skip_if_refused(refusals, driver)
    deaths.kill_keepers(driver, tmp_path, NUM_DEATHS)


def test_every_driver_ran_or_was_refused_by_name(refusals, capsys):
    lines = [f"{driver} ran" for driver in ran]
    lines += [f"{driver} REFUSED by this machine ({why})" for driver, why in refusals.items()]
    with capsys.disabled():
        print(f"\nsandbox drivers: {', '.join(lines)}")
    assert sorted([*ran, *refusals]) == sorted(DRIVERS)
