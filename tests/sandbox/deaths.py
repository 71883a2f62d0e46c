"""Deaths of a keeper: run one until it dies, let a fresh one adopt, look for what is left.

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

from sandbox import contract, keeper_daemon

from baltoro.sandbox.install import default_prefix
from baltoro.sandbox.protocol import Image, Net
from baltoro.sandbox.store import Store

SOURCES = Path(__file__).parents[2] / "src"
LONGEST_S = {"process": 0.4, "criu": 1.6, "gvisor": 3.0, "qemu": 4.0}  # of a life
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
        lines = daemon.stdout.read().rpartition("\n")[0].splitlines()  # no line cut short
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


async def make_what_is_made_once(name: str, folder: Path) -> None:
    """A disk and a booted template of QEMU, what CRIU knows of the kernel."""
    driver, store, keeper = keeper_daemon.make_keeper(name, folder)
    await keeper.create(image_of(name, folder), keeper_daemon.LIMITS, Net())
    await driver.close()
    store.close()


def image_of(driver: str, folder: Path) -> Image:
    return Image(root=folder / "image" if driver == "process" else default_prefix() / "image/root")


def kill_keepers(driver: str, folder: Path, num_points: int) -> int:
    """Kill so many keepers at random moments; returns how often a sandbox was found again."""
    rng = random.Random(5)
    ledger = Ledger()
    asyncio.run(make_what_is_made_once(driver, folder))
    before = host(folder)
    num_lives = num_found = 0
    for point in range(num_points):
        after_s = rng.uniform(0.0, LONGEST_S[driver])
        num_lives += one_death(driver, folder, ledger, step=0, after_s=after_s)
        if point == num_points - 1 or rng.random() < 0.7:
            num_found += adopt(driver, folder, ledger)
            assert left_since(before, folder) == {}, f"left at point {point}"
    print(
        f"{driver}: {num_points} keepers killed, {num_lives} of them after adoption;"
        f" {len(ledger.written)} values written, {num_found} sandboxes found again"
    )
    return num_found
