"""What each driver can do here, found by doing it: a world of 20 MB goes round and is timed.

Create, write and read back, pause, snapshot alive, restore in a new machine, branch twice with
divergence, stop and come back. A flag of `Capabilities` is true only if that happened. A driver
that cannot run is reported with its reason, never left out.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from baltoro.sandbox.criu import Criu
from baltoro.sandbox.firecracker import Firecracker
from baltoro.sandbox.gvisor import Gvisor
from baltoro.sandbox.kvm import probe_kvm
from baltoro.sandbox.machine import MachineDriver, Mechanism
from baltoro.sandbox.process import ProcessDriver
from baltoro.sandbox.protocol import (
    Capabilities,
    Command,
    Driver,
    Image,
    Isolation,
    Limits,
    Net,
    Sandbox,
    SandboxError,
)
from baltoro.sandbox.qemu import Qemu
from baltoro.sandbox.store import Store
from baltoro.sandbox.workload import World

DRIVERS = ("process", "gvisor", "criu", "qemu", "firecracker")
MEGABYTES = 20
STORE_BYTES = 8 << 30
LIMITS = Limits(memory_bytes=512 << 20)


class Stopwatch:
    """Milliseconds by name."""

    def __init__(self) -> None:
        self.latency_ms: dict[str, float] = {}
        self._last = time.perf_counter()

    def start(self) -> None:
        """Begin a measurement."""
        self._last = time.perf_counter()

    def stop(self, name: str) -> None:
        """End it under a name."""
        self.latency_ms[name] = round((time.perf_counter() - self._last) * 1e3, 1)


def machine_drivers(prefix: Path, folder: Path) -> dict[str, Callable[[], Mechanism]]:
    """The mechanisms that keep memory, by name; calling one may raise `DriverUnavailableError`.

    `folder` is on the filesystem of the sandboxes.
    """
    templates = folder / "templates"
    return {
        "gvisor": lambda: Gvisor(prefix),
        "criu": lambda: Criu(prefix),
        "qemu": lambda: Qemu(
            prefix, prefix / "disks", "kvm" if probe_kvm()[0] else "tcg", templates=templates
        ),
        "firecracker": lambda: Firecracker(prefix, prefix / "disks"),
    }


async def selftest(
    prefix: Path, names: Sequence[str] | None = None, image: Path | None = None
) -> list[Capabilities]:
    """Run every named driver (None: all) once; `image` defaults to the prefix's own."""
    known = DRIVERS
    results = []
    for name in known if names is None else names:
        if name not in known:
            raise ValueError(f"driver={name!r}: unknown; choose from {', '.join(known)}")
        with tempfile.TemporaryDirectory(prefix="baltoro-selftest-", dir=_work_dir()) as folder:
            os.chmod(folder, 0o755)
            results.append(await _test_driver(name, prefix, image, Path(folder)))
    return results


async def _test_driver(name: str, prefix: Path, image: Path | None, folder: Path) -> Capabilities:
    store = Store(folder / "store", STORE_BYTES, is_durable=False)
    isolation: Isolation = "none"
    needs_root = False
    driver: Driver
    try:
        if name == "process":
            (folder / "empty").mkdir()
            driver = ProcessDriver(folder / "boxes", store)
            root = folder / "empty"
        else:
            mechanism = machine_drivers(prefix, folder)[name]()
            isolation, needs_root = mechanism.isolation, mechanism.needs_root
            driver = MachineDriver(mechanism, folder / "boxes", store)
            root = image or prefix / "image/root"
        try:
            watch = Stopwatch()
            flags = await _go_round(driver, Image(root=root), watch, has_memory=name != "process")
        finally:
            await driver.close()
    except (SandboxError, OSError) as error:
        return Capabilities(
            driver=name,
            isolation=isolation,
            is_available=False,
            reason=str(error),
            needs_root=needs_root,
        )
    finally:
        store.close()
    return Capabilities(
        driver=name,
        isolation=isolation,
        is_available=True,
        needs_root=needs_root,
        latency_ms=watch.latency_ms,
        has_memory_snapshot="memory" in flags,
        has_fork="fork" in flags,
        has_live_snapshot="live" in flags,
        has_many_processes="tree" in flags,
    )


async def _go_round(
    driver: Driver, image: Image, watch: Stopwatch, *, has_memory: bool
) -> set[str]:
    """Everything once; returns what was seen to work: memory, fork, live, tree."""
    watch.start()
    sandbox = await driver.create(image, LIMITS, Net())
    watch.stop("create")
    watch.start()
    await sandbox.exec(Command(argv=("true",)))
    watch.stop("exec")
    data = os.urandom(MEGABYTES << 20)
    watch.start()
    await sandbox.write("/work/data", data)
    if await sandbox.read("/work/data") != data:
        raise SandboxError("bytes changed on the way in or out")
    watch.stop("write_and_read_20_mb")
    world = await World.start(sandbox, MEGABYTES) if has_memory else None
    watch.start()
    await sandbox.pause()
    watch.stop("pause")
    watch.start()
    await sandbox.resume()
    watch.stop("resume_from_pause")
    if world is not None:
        await world.ask("x = 41")
    watch.start()
    snapshot = await sandbox.snapshot()
    watch.stop("snapshot_live")
    watch.start()
    (left,) = await driver.restore(snapshot)
    watch.stop("restore")
    if world is None:
        await _check_files(sandbox, left, data)
        return set()
    answer = await (await world.follow(left)).ask("x")
    watch.stop("restore_to_first_answer")
    watch.start()
    (right,) = await left.fork(1)
    watch.stop("fork")
    worlds = [await world.follow(branch) for branch in (left, right)]
    await worlds[0].ask("x += 1")
    await worlds[1].ask("x += 1000")
    await left.write("/work/side", b"left")
    answers = [await each.ask("x") for each in (world, *worlds)]
    seen = {
        "memory": answer == "41",
        "fork": answer == "41" and answers == ["41", "42", "1041"],
        "live": await world.ask("x") == "41",
        "tree": [await each.ask("whole()") for each in (world, *worlds)] == ["True"] * 3,
    }
    return {name for name, is_true in seen.items() if is_true}


async def _check_files(origin: Sandbox, branch: Sandbox, data: bytes) -> None:
    await branch.write("/work/data", b"changed")
    if await origin.read("/work/data") != data:
        raise SandboxError("a branch's write reached its origin")


def _work_dir() -> str | None:
    """Memory if the machine has it: the disk is not what is tested."""
    shm = Path("/dev/shm")
    if shm.is_dir() and os.access(shm, os.W_OK) and os.statvfs(shm).f_bavail * 4096 > STORE_BYTES:
        return str(shm)
    return None
