"""Time what sandboxes are for: create, pause, snapshot, resume to the first answer, fork.

    python bench/sandbox_latency.py [--megabytes 200 20] [--rounds 5] [--drivers ...] [--out FILE]

The world is `baltoro.sandbox.workload`: a Python REPL with a thread, a child on pipes, an open and
a deleted file, loopback TCP and MEGABYTES of random memory. Every round checks the branch
before a number counts; a wrong answer ends the run. Medians over rounds; images lie in /dev/shm, so
the disk is not measured. The load average is recorded: on a busy machine compare nothing.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from baltoro.sandbox.gvisor import Gvisor
from baltoro.sandbox.install import default_prefix
from baltoro.sandbox.machine import MachineDriver, MachineSandbox, Mechanism
from baltoro.sandbox.protocol import Command, Image, Limits, Net
from baltoro.sandbox.qemu import Qemu
from baltoro.sandbox.selftest import machine_drivers
from baltoro.sandbox.store import Store
from baltoro.sandbox.workload import World

STORE_BYTES = 16 << 30
NUM_OVERCOMMITTED = 12


def clock_ms() -> float:
    return time.perf_counter() * 1e3


class Rounds:
    """Milliseconds by name, one per round."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)

    def medians(self) -> dict[str, float]:
        return {name: round(statistics.median(all_), 1) for name, all_ in self.values.items()}

    def best(self) -> dict[str, float]:
        return {name: round(min(all_), 1) for name, all_ in self.values.items()}


async def check(world: World, wanted: str) -> None:
    if await world.ask("x") != wanted or await world.ask("whole()") != "True":
        raise SystemExit("the world was not the same: no numbers")


async def one_round(driver: MachineDriver, image: Image, megabytes: int, rounds: Rounds) -> None:
    start = clock_ms()
    sandbox = await driver.create(image, Limits(memory_bytes=1 << 30), Net())
    rounds.add("create", clock_ms() - start)
    world = await World.start(sandbox, megabytes)
    await world.ask("x = 41")
    start = clock_ms()
    await sandbox.pause()
    rounds.add("pause", clock_ms() - start)
    start = clock_ms()
    await sandbox.resume()
    rounds.add("resume_from_pause", clock_ms() - start)
    start = clock_ms()
    snapshot = await sandbox.snapshot()
    rounds.add("snapshot_live", clock_ms() - start)
    rounds.add("frozen", sandbox.frozen_s * 1e3)
    memory = driver.store.get(snapshot).memory
    rounds.add("memory_half_mb", sum(item.size for item in memory) / 2**20)
    start = clock_ms()
    (branch,) = await driver.restore(snapshot)
    rounds.add("restore_to_running", clock_ms() - start)
    answer = await (await world.follow(branch)).ask("x")
    rounds.add("restore_to_first_answer", clock_ms() - start)
    if answer != "41":
        raise SystemExit("the world was not the same: no numbers")
    start = clock_ms()
    (second,) = await driver.restore(snapshot)
    rounds.add("second_branch", clock_ms() - start)
    for each in (branch, second):
        await check(await world.follow(each), "41")
    await check(world, "41")
    start = clock_ms()
    await sandbox.destroy()
    rounds.add("destroy", clock_ms() - start)
    await branch.destroy()
    await second.destroy()
    driver.store.delete(snapshot)


async def measure(make: Mechanism, folder: Path, image: Image, megabytes: int, num: int) -> Rounds:
    store = Store(folder / "store", STORE_BYTES, is_durable=False)
    driver = MachineDriver(make, folder / "boxes", store)
    rounds = Rounds()
    try:
        warm = await driver.create(image, Limits(memory_bytes=1 << 30), Net())
        await warm.exec(Command(argv=("python3", "-c", "1")))
        await warm.destroy()
        for _ in range(num):
            await one_round(driver, image, megabytes, rounds)
    finally:
        await driver.close()
        store.close()
    return rounds


def memory_kb(machine: MachineSandbox, field: str) -> int:
    pid = int((machine.machine._home / "pid").read_text())  # type: ignore[attr-defined]
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise SystemExit(f"no {field} of process {pid}")


async def overcommit(prefix: Path, folder: Path, image: Image) -> dict[str, float]:
    """Twelve branches of one frozen machine: memory they would have alone, over what they use."""
    store = Store(folder / "store", STORE_BYTES, is_durable=False)
    driver = MachineDriver(Qemu(prefix, prefix / "disks"), folder / "boxes", store)
    try:
        sandbox = await driver.create(image, Limits(memory_bytes=512 << 20), Net())
        world = await World.start(sandbox, 200)
        await world.ask("x = 1")
        snapshot = await sandbox.snapshot(mode="stop")
        base_mb = store.usage().stored_bytes / 2**20
        start = clock_ms()
        branches = await driver.restore(snapshot, NUM_OVERCOMMITTED)
        up_ms = clock_ms() - start
        followers = [await world.follow(branch) for branch in branches]
        for index, follower in enumerate(followers):
            await follower.ask(f"x = {index}")
            if await follower.ask("x") != str(index):
                raise SystemExit("the branches are not independent: no numbers")
        answered_mb = sum(memory_kb(branch, "Private_Dirty") for branch in branches) / 1024
        for index, follower in enumerate(followers):
            await check(follower, str(index))
        private_mb = sum(memory_kb(branch, "Private_Dirty") for branch in branches) / 1024
        alone_mb = NUM_OVERCOMMITTED * base_mb
        return {
            "num_branches": NUM_OVERCOMMITTED,
            "all_up_ms": round(up_ms, 1),
            "base_resident_mb": round(base_mb, 1),
            "private_after_answer_mb": round(answered_mb, 1),
            "private_after_whole_check_mb": round(private_mb, 1),
            "factor_after_answer": round(alone_mb / (base_mb + answered_mb), 2),
            "factor_after_whole_check": round(alone_mb / (base_mb + private_mb), 2),
            "factor_against_configured": round(NUM_OVERCOMMITTED * 512 / (base_mb + private_mb), 2),
        }
    finally:
        await driver.close()
        store.close()


def save(report: dict[str, object], path: Path | None) -> None:
    """After every row: a run that is cut short keeps what it has."""
    if path is not None:
        path.write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefix", type=Path, default=default_prefix())
    parser.add_argument("--megabytes", type=int, nargs="+", default=[200, 20])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drivers", nargs="*", default=["gvisor", "criu", "qemu", "qemu-boot"])
    parser.add_argument("--overcommit", action="store_true")
    parser.add_argument("--note", default="", help="kept in the result: what else was running")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    image = Image(root=options.prefix / "image/root")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    report: dict[str, object] = {
        "commit": commit.stdout.strip(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "uid": os.geteuid(),
        "load_average_before": os.getloadavg(),
        "rounds": options.rounds,
        "note": options.note,
        "results": [],
    }
    results: list[object] = []
    report["results"] = results
    for name in options.drivers:
        for megabytes in options.megabytes:
            with tempfile.TemporaryDirectory(prefix="bench-", dir="/dev/shm") as folder:
                os.chmod(folder, 0o755)
                if name == "qemu-boot":  # each sandbox boots; its first snapshot copies nothing
                    mechanism: Mechanism = Qemu(options.prefix, options.prefix / "disks")
                elif name == "gvisor":
                    mechanism = Gvisor(options.prefix)
                else:
                    mechanism = machine_drivers(options.prefix, Path(folder))[name]()
                num = min(options.rounds, 3) if name == "qemu-boot" else options.rounds
                rounds = asyncio.run(measure(mechanism, Path(folder), image, megabytes, num))
            row = {"driver": name, "megabytes": megabytes, "load": round(os.getloadavg()[0], 1)}
            results.append({**row, "p50_ms": rounds.medians(), "best_ms": rounds.best()})
            print(json.dumps(results[-1]), flush=True)
            save(report, options.out)
    if options.overcommit:
        with tempfile.TemporaryDirectory(prefix="bench-", dir="/dev/shm") as folder:
            report["overcommit"] = asyncio.run(overcommit(options.prefix, Path(folder), image))
            print(json.dumps(report["overcommit"]))
    report["load_average_after"] = os.getloadavg()
    save(report, options.out)


if __name__ == "__main__":
    main()
