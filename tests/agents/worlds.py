"""Shared by the tests of agents: a broken repository as a task, a keeper, and a runner."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baltoro.agents.harness import Harness
from baltoro.agents.policy import Line
from baltoro.agents.rollout import Runner
from baltoro.agents.styles import style
from baltoro.agents.task import Check, Task, TaskFile
from baltoro.sandbox.install import default_prefix
from baltoro.sandbox.keeper import Keeper, KeeperPolicy
from baltoro.sandbox.machine import MachineDriver
from baltoro.sandbox.process import ProcessDriver
from baltoro.sandbox.protocol import Driver, DriverUnavailableError, Image, Limits
from baltoro.sandbox.selftest import machine_drivers
from baltoro.sandbox.store import Store

BROKEN = b"def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return a + a\n"
TEST = b"import sums\nassert sums.add(2, 3) == 5\nassert sums.double(4) == 8\nprint('fine')\n"
POLICY = KeeperPolicy(freeze_after_s=5, store_after_s=60, ttl_s=None, min_available_bytes=1)
# python -S: seconds matter, and site packages do not
PYTHON = ("python3", "-S", "-B")


def repair_task(**changes: object) -> Task:
    """A subtraction where an addition should be; the test is hidden."""
    fields: dict[str, object] = {
        "id": "repair",
        "prompt": "add() in sums.py is wrong. Repair it.",
        "checks": (
            Check(
                name="tests",
                argv=(*PYTHON, "check_sums.py"),
                files=(TaskFile(path="check_sums.py", data=TEST),),
            ),
        ),
        "files": (TaskFile(path="sums.py", data=BROKEN), TaskFile(path="README", data=b"sums\n")),
        "limits": Limits(memory_bytes=2 << 30),
    }
    return Task(**(fields | changes))  # type: ignore[arg-type]


def sh(command: str) -> Line:
    """A line that calls the shell."""
    return Line(think="let me see", calls=(("shell", {"command": command}),))


REPAIR = Line(calls=(("edit", {"path": "sums.py", "old": "a - b", "new": "a + b"}),))
DONE = Line(content="done")


@dataclass
class Clock:
    """Time as the keeper sees it; the test sets it."""

    now: float = 0.0


@dataclass
class World:
    """One keeper on one folder, as a process would have it."""

    folder: Path
    keeper: Keeper
    image: Image
    clock: Clock = field(default_factory=Clock)

    def runner(self, **fields: object) -> Runner:
        """A runner whose records lie in the folder."""
        return Runner(
            keeper=self.keeper,
            images={"default": self.image},
            folder=self.folder / "records",
            **fields,  # type: ignore[arg-type]
        )


@contextlib.asynccontextmanager
async def world(
    folder: Path,
    make_driver: Callable[[Path, Store], Driver] = ProcessDriver,
    image_root: Path | None = None,
) -> AsyncIterator[World]:
    """A keeper that adopts what lies in the folder, and stores what lives when it leaves."""
    root = image_root or folder / "image"
    root.mkdir(parents=True, exist_ok=True)
    store = Store(folder / "store", 1 << 30, is_durable=False)
    clock = Clock()
    keeper = Keeper(
        make_driver(folder / "boxes", store),
        store,
        folder / "journal",
        POLICY,
        clock=lambda: clock.now,
        available_bytes=lambda: 1 << 40,
    )
    try:
        await keeper.adopt()
        yield World(folder, keeper, Image(root=root), clock)
    finally:
        try:
            await keeper.close()
        finally:
            store.close()


def run_in_world(folder: Path, body: Callable[[World], Awaitable[None]]) -> None:
    """Run `body` with a world of the process driver; it must leave no sandbox running."""

    async def main() -> None:
        async with world(folder) as here:
            await body(here)
            assert list((folder / "boxes").iterdir()) == []

    asyncio.run(main())


def plain_harness() -> Harness:
    """Our own names of tools, no extras."""
    return Harness(style("plain"))


def machine_world(folder: Path, kind: str) -> contextlib.AbstractAsyncContextManager[World]:
    """A world of a driver that keeps memory; skips the test, with the reason, if it cannot run."""
    prefix = default_prefix()
    try:
        mechanism = machine_drivers(prefix, folder)[kind]()
    except DriverUnavailableError as error:
        pytest.skip(str(error))

    def driver(root: Path, store: Store) -> MachineDriver:
        return MachineDriver(mechanism, root, store)

    return world(folder, driver, prefix / "image/root")
