"""kill -9 of the keeper, at chosen and at random moments of its work on real sandboxes.

A real keeper runs as a process of its own (`keeper_daemon.py`) and is killed. A fresh keeper then
adopts: every sandbox that had been committed is there and comes back with a value that its dead
keeper had written, the same in file and memory; what was destroyed stays gone; of everything else
nothing is left, no half snapshot, mount, process, namespace, control group or file. After some
deaths the next daemon, itself to be killed, does the adopting.
"""

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from sandbox import contract, keeper_daemon

from baltoro.sandbox.install import default_prefix
from baltoro.sandbox.protocol import Command, Image, Net, SandboxError
from baltoro.sandbox.selftest import machine_drivers
from baltoro.sandbox.store import Store

SOURCES = Path(__file__).parents[2] / "src"
NUM_POINTS = 200
NUM_CYCLES = 200
LONGEST_S = {"process": 0.4, "criu": 1.6, "gvisor": 3.0, "qemu": 4.0}  # of a life
STEPS = (5, 10, 19, 24, 31, 47, 60, 78, 86, 92, 112, 140)  # before these changes it dies
DRIVERS = ("process", "criu", "gvisor", "qemu")
NAMESPACES = ("mnt", "pid", "net", "ipc", "uts", "user")


class Ledger:
    """What the daemons said."""

    def __init__(self) -> None:
        self.written: set[int] = set()
        self.committed: dict[str, int] = {}
        self.gone: set[str] = set()

    def note(self, line: str) -> None:
        verb, *words = line.split()
        if verb == "writes":
            self.written.add(int(words[0]))
        elif verb == "committed":
            self.committed[words[0]] = int(words[1])
        elif verb == "destroys":
            self.committed.pop(words[0], None)
        elif verb == "gone":
            self.gone.add(words[0])


def one_death(driver: str, folder: Path, ledger: Ledger, *, step: int, after_s: float) -> bool:
    """Run a daemon until its change `step`, or for a time if 0; whether it had adopted by then."""
    command = [sys.executable, keeper_daemon.__file__, driver, str(folder), str(step)]
    environment = os.environ | {"PYTHONPATH": str(SOURCES)}
    with (
        (folder / "errors").open("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as daemon,
    ):
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == "stands\n", (folder / "errors").read_text()
        if not step:
            time.sleep(after_s)
            daemon.kill()
        lines = daemon.stdout.read().splitlines()
        code = daemon.wait()
    assert code == -9, (folder / "errors").read_text()[-3000:]
    for line in lines:
        ledger.note(line)
    return "adopted" in lines


def adopt(driver_name: str, folder: Path, ledger: Ledger) -> int:
    """Check all that a fresh keeper finds; the number of sandboxes."""

    async def main() -> int:
        driver, store, keeper = keeper_daemon.make_keeper(driver_name, folder)
        try:
            names = await keeper.adopt()
            assert ledger.committed.keys() <= set(names), "a committed sandbox was lost"
            assert not ledger.gone & set(names), "a destroyed sandbox came back"
            assert os.listdir(folder / "boxes") == []
            assert halves(store, folder / "journal") == []
            for name in names:
                entry = json.loads((folder / f"journal/{name}.json").read_text())
                (sandbox,) = await driver.restore(entry["snapshot"])
                in_file, in_memory = await keeper_daemon.remembered(sandbox)
                assert in_file == in_memory
                assert in_file in ledger.written
                assert in_file >= ledger.committed.get(name, 0)
                await sandbox.destroy()
            return len(names)
        finally:
            await driver.close()
            store.close()

    return asyncio.run(main())


def halves(store: Store, journal: Path) -> list[str]:
    """Files of the store and the journal that belong to no committed snapshot."""
    ids = store.ids()
    layers = {layer for snapshot in ids for layer in store.get(snapshot).layers}
    found = [path.name for path in (store.root / "payloads").iterdir()]
    found = [name for name in found if name not in layers.union(ids)]
    found += [str(path) for path in [*store.root.rglob("*.work"), *journal.glob("*.work")]]
    for snapshot in ids:
        folder = store.root / "payloads" / snapshot / "memory"
        for item in store.get(snapshot).memory:
            if item.chunks is None and (folder / item.name).stat().st_size != item.size:
                found.append(f"{snapshot} {item.name}")
    return found


def processes_of(folder: Path) -> set[str]:
    """Processes of sandboxes that the process driver keeps in a folder: it is their home."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if str(folder / "boxes").encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.add(f"process {pid} of {folder}")
    return found


def host(folder: Path) -> dict[str, str]:
    """All that a sandbox could leave: mounts, control groups, processes, namespaces, files.

    The value says who holds it, where that is worth knowing.
    """
    found = dict.fromkeys(contract.leftovers() | processes_of(folder), "")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for kind in NAMESPACES:
            with contextlib.suppress(OSError):
                found[os.readlink(f"/proc/{pid}/ns/{kind}")] = Path(f"/proc/{pid}/stat").read_text()
    for place in (Path(tempfile.gettempdir()), Path("/dev/shm")):
        found |= {str(path): "" for path in (*place.glob("b[qf]-*"), *place.glob("baltoro*"))}
    for place in (folder / "templates", default_prefix() / "disks"):
        found |= {str(path): "" for path in place.glob("*.work")}
    return found


def left_since(before: dict[str, str], folder: Path) -> dict[str, str]:
    """What is there that was not, once the kernel has had time to take the dead apart."""
    left: dict[str, str] = {}
    for _ in range(100):
        left = {what: who for what, who in host(folder).items() if what not in before}
        if not left:
            break
        time.sleep(0.02)
    return left


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


async def make_what_is_made_once(name: str, folder: Path) -> None:
    """A disk and a booted template of QEMU, what CRIU knows of the kernel."""
    driver, store, keeper = keeper_daemon.make_keeper(name, folder)
    await keeper.create(image_of(name, folder), keeper_daemon.LIMITS, Net())
    await driver.close()
    store.close()


def image_of(driver: str, folder: Path) -> Image:
    return Image(root=folder / "image" if driver == "process" else default_prefix() / "image/root")


def test_a_keeper_that_dies_before_chosen_changes_loses_nothing_committed(folder):
    ledger = Ledger()
    for index, step in enumerate(STEPS):
        one_death("process", folder, ledger, step=step, after_s=0)
        if index % 3 != 2:  # else the next daemon finds what two have left
            adopt("process", folder, ledger)
            assert processes_of(folder) == set(), step
    assert ledger.committed
    assert ledger.gone


@pytest.mark.slow
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_keeper_killed_at_200_random_points_loses_nothing_committed(folder, driver):
    skip_if_refused(driver, folder)
    rng = random.Random(5)
    ledger = Ledger()
    asyncio.run(make_what_is_made_once(driver, folder))
    before = host(folder)
    num_adopted = num_daemons_that_adopted = 0
    for point in range(NUM_POINTS):
        after_s = rng.uniform(0.0, LONGEST_S[driver])
        num_daemons_that_adopted += one_death(driver, folder, ledger, step=0, after_s=after_s)
        if point == NUM_POINTS - 1 or rng.random() < 0.7:
            num_adopted += adopt(driver, folder, ledger)
            assert left_since(before, folder) == {}, f"left at point {point}"
    print(
        f"{driver}: {NUM_POINTS} deaths, {num_daemons_that_adopted} of them after adoption;"
        f" {len(ledger.written)} values written, {num_adopted} sandboxes found again"
    )
    assert num_adopted > 0


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
            name = await keeper.create(image_of(driver, folder), keeper_daemon.LIMITS, Net())
            async with keeper.use(name) as sandbox:
                await sandbox.exec(Command(argv=("sh", "-c", "sleep 100 & echo x > x")))
            snapshot = await keeper.checkpoint(name) if cycle % 10 == 0 else None
            await keeper.destroy(name)
            if snapshot is not None:
                store.delete(snapshot)
            if cycle == 0:  # what is made once: templates, what CRIU knows of the kernel
                before, num_open = host(folder), len(os.listdir("/proc/self/fd"))
        left = set(left_since(before, folder))
        left |= {f"{len(os.listdir('/proc/self/fd')) - num_open} descriptors"} - {"0 descriptors"}
        left |= {
            f"{kind} {name}" for kind in ("boxes", "journal") for name in os.listdir(folder / kind)
        }
        left |= set(halves(store, folder / "journal"))
        left |= set(os.listdir(store.root / "payloads"))
        await made.close()
        store.close()
        return left

    before = contract.leftovers()
    assert asyncio.run(main()) == set()
    assert contract.leftovers() - before == set()
