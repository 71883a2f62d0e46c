"""How many sandboxes fit: a keeper, memory that does not suffice, and touches in random order.

    python bench/sandbox_overcommit.py [--sandboxes 64] [--nominal-mb 256] [--resident-mb 160]
        [--budget-mb 8192] [--touches 192] [--driver criu] [--out FILE]

Every sandbox is allowed NOMINAL and holds the world of `baltoro.sandbox.workload` with RESIDENT of
random memory. The keeper sees a host of BUDGET: what is free is BUDGET less the control groups of
all sandboxes. Each touch asks a random world for a number that only it knows, checks that its
memory, thread, pipe, deleted file and TCP are whole, and changes the number. One wrong answer ends
the run. Reported: the peak of all control groups, sampled; nominal memory over that peak; and what
all hold when nobody stores them, each as it was once it stood, over that peak. K3's report says up
to 6.5x. Images lie on disk.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import tempfile
import time
from pathlib import Path

from provenance import commit_of

from baltoro.sandbox.cgroup import Cgroup
from baltoro.sandbox.install import default_prefix
from baltoro.sandbox.keeper import Keeper, KeeperPolicy
from baltoro.sandbox.machine import MachineDriver
from baltoro.sandbox.protocol import MIB, Image, Limits, Net
from baltoro.sandbox.selftest import machine_drivers
from baltoro.sandbox.store import Store
from baltoro.sandbox.workload import World

STORE_BYTES = 40 << 30


class Host:
    """The machine the keeper believes it has."""

    def __init__(self, driver: MachineDriver, budget_bytes: int):
        self.budget_bytes = budget_bytes
        self.peak_bytes = 0
        self._driver = driver

    def used_bytes(self) -> int:
        used = sum(Cgroup(home.name).memory_bytes() for home in self._driver.root.iterdir())
        self.peak_bytes = max(self.peak_bytes, used)
        return used

    def available_bytes(self) -> int:
        return self.budget_bytes - self.used_bytes()


async def touch(keeper: Keeper, name: str, world: World, number: int, change: int) -> World:
    """Ask, check, change; returns the world where it is now."""
    async with keeper.use(name) as sandbox:
        world = await world.follow(sandbox)
        answers = [await world.ask("x"), await world.ask("whole()")]
        if answers != [str(number), "True"]:
            raise SystemExit(f"sandbox {name} answered {answers}, not {number}: no numbers")
        await world.ask(f"x += {change}")
    return world


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    store = Store(folder / "store", STORE_BYTES, is_durable=False)
    mechanism = machine_drivers(options.prefix, folder)[options.driver]()
    driver = MachineDriver(mechanism, folder / "boxes", store)
    host = Host(driver, options.budget_mb * MIB)
    # Room for the largest sandbox that may wake at any moment.
    reserve = 2 * options.nominal_mb * MIB
    policy = KeeperPolicy(freeze_after_s=0.5, store_after_s=1e9, min_available_bytes=reserve)
    keeper = Keeper(driver, store, folder / "journal", policy, available_bytes=host.available_bytes)
    try:
        found = await create_and_touch(options, keeper, host)
    finally:
        await driver.close()
        left = sorted(home.name for home in driver.root.iterdir())
        usage = store.usage()
        store.close()
    nominal = options.sandboxes * options.nominal_mb * MIB
    return {
        "driver": options.driver,
        "sandboxes": options.sandboxes,
        "nominal_mb": options.nominal_mb,
        "resident_mb": options.resident_mb,
        "budget_mb": options.budget_mb,
        **found,
        "peak_mb": round(host.peak_bytes / MIB, 1),
        "nominal_over_peak": round(nominal / host.peak_bytes, 2),
        "nominal_over_budget": round(nominal / host.budget_bytes, 2),
        "stored_mb": round(usage.stored_bytes / MIB, 1),
        "folders_left": left,
    }


async def create_and_touch(
    options: argparse.Namespace, keeper: Keeper, host: Host
) -> dict[str, float]:
    """Make all worlds, then ask them in random order; returns what was counted on the way."""
    rng = random.Random(3)
    image = Image(root=options.prefix / "image/root")
    limits = Limits(memory_bytes=options.nominal_mb * MIB)
    worlds: dict[str, World] = {}
    numbers: dict[str, int] = {}
    awake_bytes = 0
    start = time.monotonic()
    for index in range(options.sandboxes):
        name = await keeper.create(image, limits, Net())
        async with keeper.use(name) as sandbox:
            worlds[name] = await World.start(sandbox, options.resident_mb)
            await worlds[name].ask(f"x = {index}")
            awake_bytes += Cgroup(sandbox.id).memory_bytes()
        numbers[name] = index
        await keeper.tick()
    created_s = time.monotonic() - start
    order = [*rng.sample(sorted(worlds), len(worlds))]  # each at least once
    order += rng.choices(sorted(worlds), k=max(0, options.touches - len(order)))
    num_stored = 0
    for name in order:
        num_stored += keeper.place(name) == "stored"
        change = rng.randrange(1, 100)
        worlds[name] = await touch(keeper, name, worlds[name], numbers[name], change)
        numbers[name] += change
        await keeper.tick()
        host.used_bytes()
    touched_s = time.monotonic() - start - created_s
    for name in list(worlds):
        await keeper.destroy(name)
    return {
        "touches": len(order),
        "touches_that_woke_a_stored_one": num_stored,
        "wrong_answers": 0,
        "all_awake_mb": round(awake_bytes / MIB, 1),
        "all_awake_over_peak": round(awake_bytes / host.peak_bytes, 2),
        "create_s": round(created_s, 1),
        "touch_s": round(touched_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--driver", default="criu", choices=("criu", "gvisor"))
    parser.add_argument("--sandboxes", type=int, default=64)
    parser.add_argument("--nominal-mb", type=int, default=256)
    parser.add_argument("--resident-mb", type=int, default=160)
    parser.add_argument("--budget-mb", type=int, default=8192)
    parser.add_argument("--touches", type=int, default=192)
    parser.add_argument("--commit", help="of the code, for a tree without its history")
    parser.add_argument("--prefix", type=Path, default=default_prefix())
    parser.add_argument("--out", type=Path, default=Path("bench/results/sandbox_overcommit.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        os.chmod(folder, 0o755)
        result = asyncio.run(measure(options, Path(folder)))
    report = {
        "commit": commit_of(options.commit),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        **result,
    }
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
