"""What each driver can do here, found by doing it: a world of 20 MB goes round and is timed.

Create, write and read back, pause, snapshot alive, restore in a new machine, branch twice with
divergence, stop and come back. A flag of `Capabilities` is true only if that happened. A driver
that cannot run is reported with its reason, never left out. The zygote, which runs one program and
keeps nothing beyond it, goes round with a program of 20 MB.
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
    SnapshotError,
)
from baltoro.sandbox.qemu import Qemu
from baltoro.sandbox.store import Store
from baltoro.sandbox.workload import World
from baltoro.sandbox.zygote import REPL, ZygoteDriver

HOST_DRIVERS = {"process": ProcessDriver, "zygote": ZygoteDriver}
DRIVERS = (*HOST_DRIVERS, "gvisor", "criu", "qemu", "firecracker")
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
        "firecracker": lambda: Firecracker(prefix, prefix / "disks", templates=templates),
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
        if name in HOST_DRIVERS:
            (folder / "empty").mkdir()
            driver = HOST_DRIVERS[name](folder / "boxes", store)
            root = folder / "empty"
        else:
            mechanism = machine_drivers(prefix, folder)[name]()
            isolation, needs_root = mechanism.isolation, mechanism.needs_root
            driver = MachineDriver(mechanism, folder / "boxes", store)
            root = image or prefix / "image/root"
        try:
            watch = Stopwatch()
            go_round = _GO_ROUND.get(name, _go_round_with_memory)
            flags = await go_round(driver, Image(root=root), watch)
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


async def _begin(driver: Driver, image: Image, watch: Stopwatch, *argv: str) -> Sandbox:
    """What all can do: make a sandbox, run a command in it, move bytes."""
    watch.start()
    sandbox = await driver.create(image, LIMITS, Net())
    watch.stop("create")
    watch.start()
    await sandbox.exec(Command(argv=argv))
    watch.stop("exec")
    data = os.urandom(MEGABYTES << 20)
    watch.start()
    await sandbox.write("/work/data", data)
    if await sandbox.read("/work/data") != data:
        raise SandboxError("bytes changed on the way in or out")
    watch.stop("write_and_read_20_mb")
    return sandbox


async def _pause(sandbox: Sandbox, watch: Stopwatch) -> None:
    watch.start()
    await sandbox.pause()
    watch.stop("pause")
    watch.start()
    await sandbox.resume()
    watch.stop("resume_from_pause")


async def _snapshot(driver: Driver, sandbox: Sandbox, watch: Stopwatch) -> Sandbox:
    watch.start()
    snapshot = await sandbox.snapshot()
    watch.stop("snapshot_live")
    watch.start()
    (branch,) = await driver.restore(snapshot)
    watch.stop("restore")
    return branch


async def _go_round_with_memory(driver: Driver, image: Image, watch: Stopwatch) -> set[str]:
    """Everything once; returns what was seen to work: memory, fork, live, tree."""
    sandbox = await _begin(driver, image, watch, "true")
    world = await World.start(sandbox, MEGABYTES)
    await _pause(sandbox, watch)
    await world.ask("x = 41")
    left = await _snapshot(driver, sandbox, watch)
    answer = await (await world.follow(left)).ask("x")
    watch.stop("restore_to_first_answer")
    watch.start()
    (right,) = await left.fork(1)
    watch.stop("fork")
    worlds = [await world.follow(branch) for branch in (left, right)]
    await left.write("/work/side", b"left")
    answers = await _diverge(world, *worlds)
    seen = {
        "memory": answer == "41",
        "fork": answer == "41" and answers == ["41", "42", "1041"],
        "live": await world.ask("x") == "41",
        "tree": [await each.ask("whole()") for each in (world, *worlds)] == ["True"] * 3,
    }
    return {name for name, is_true in seen.items() if is_true}


async def _go_round_of_files(driver: Driver, image: Image, watch: Stopwatch) -> set[str]:
    """A driver that keeps files and no memory."""
    sandbox = await _begin(driver, image, watch, "true")
    await _pause(sandbox, watch)
    branch = await _snapshot(driver, sandbox, watch)
    await _check_files(sandbox, branch)
    return set()


async def _go_round_of_forks(driver: Driver, image: Image, watch: Stopwatch) -> set[str]:
    """A driver that forks one program and keeps no snapshot, which it must say."""
    sandbox = await _begin(driver, image, watch, "python3", "-c", "pass")
    argv = ("python3", "-c", REPL)
    world = World(await sandbox.start(Command(argv=argv, stdin=None, timeout_s=None)))
    await world.ask(f"x, memory = 41, os.urandom({MEGABYTES << 20})")
    await _pause(sandbox, watch)
    watch.start()
    left, right = await sandbox.fork(2)
    watch.stop("fork_twice")
    worlds = [await world.follow(branch) for branch in (left, right)]
    answers = await _diverge(world, *worlds)
    await _check_files(sandbox, left)
    try:
        await sandbox.snapshot()
    except SnapshotError:
        return {"fork"} if answers == ["41", "42", "1041"] else set()
    raise SandboxError("a driver without snapshots took one")


async def _diverge(origin: World, left: World, right: World) -> list[str]:
    """Two branches count on from what the origin has; what each then says."""
    await left.ask("x += 1")
    await right.ask("x += 1000")
    return [await each.ask("x") for each in (origin, left, right)]


async def _check_files(origin: Sandbox, branch: Sandbox) -> None:
    data = await origin.read("/work/data")
    await branch.write("/work/data", b"changed")
    if await origin.read("/work/data") != data:
        raise SandboxError("a branch's write reached its origin")


_GO_ROUND = {"process": _go_round_of_files, "zygote": _go_round_of_forks}


def _work_dir() -> str | None:
    """Memory if the machine has it: the disk is not what is tested."""
    shm = Path("/dev/shm")
    if shm.is_dir() and os.access(shm, os.W_OK) and os.statvfs(shm).f_bavail * 4096 > STORE_BYTES:
        return str(shm)
    return None
