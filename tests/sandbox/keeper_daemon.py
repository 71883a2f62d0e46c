"""A keeper on real sandboxes, started by `test_keeper_death.py` to be killed at any moment.

    python keeper_daemon.py DRIVER FOLDER STEP

It prints what it is about to do and what it has done, a line each, and never ends by itself. With
STEP above 0 it kills itself right before that change: a file made, moved or removed, or a program
started, counted from when it stands. Each sandbox holds one value twice, in a file and in the
memory of a program, so that halves of two moments are told from a snapshot.
"""

import asyncio
import itertools
import os
import signal
import sys
import time
from pathlib import Path

from baltoro.sandbox.install import default_prefix
from baltoro.sandbox.keeper import Keeper, KeeperPolicy
from baltoro.sandbox.machine import MachineDriver
from baltoro.sandbox.process import ProcessDriver
from baltoro.sandbox.protocol import Command, Driver, Image, Limits, Net, Sandbox
from baltoro.sandbox.selftest import machine_drivers
from baltoro.sandbox.store import Store
from baltoro.sandbox.workload import World

LIMITS = Limits(memory_bytes=256 << 20, max_processes=64)
POLICY = KeeperPolicy(freeze_after_s=0.0, store_after_s=1e6, min_available_bytes=1)
MEMORY = 'x=0; while read -r word; do [ "$word" = ask ] || x=$word; echo "$x"; done'
CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "subprocess.Popen"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
MAX_NAMES = 3


def make_keeper(name: str, folder: Path) -> tuple[Driver, Store, Keeper]:
    """The driver of that name, its store and its keeper, all below one folder."""
    store = Store(folder / "store", 2 << 30, is_durable=False)
    driver: Driver
    if name == "process":
        driver = ProcessDriver(folder / "boxes", store)
    else:
        mechanism = machine_drivers(default_prefix(), folder)[name]()
        driver = MachineDriver(mechanism, folder / "boxes", store)
    return driver, store, Keeper(driver, store, folder / "journal", POLICY)


async def remembered(sandbox: Sandbox) -> tuple[int, int]:
    """The value in the sandbox's file and the one in its memory, where it keeps any."""
    text, process_id = (await sandbox.read("/work/value")).split()
    if process_id == b"0":
        return int(text), int(text)
    return int(text), int(await World(await sandbox.attach(int(process_id))).ask("ask"))


async def remember(sandbox: Sandbox, value: int, has_memory: bool, is_new: bool) -> None:
    """Put a value into both halves; without memory, leave a process to be found."""
    process_id = 0
    if not has_memory:
        await sandbox.start(Command(argv=("sleep", "1000"), timeout_s=None))
    if has_memory:
        if is_new:
            command = Command(argv=("sh", "-c", MEMORY), stdin=None, timeout_s=None)
            process_id = (await sandbox.start(command)).id
        else:
            process_id = int((await sandbox.read("/work/value")).split()[1])
        await World(await sandbox.attach(process_id)).ask(str(value))
    await sandbox.write("/work/value", f"{value} {process_id}".encode())


def say(*words: object) -> None:
    print(*words, flush=True)


async def live(keeper: Keeper, image: Image) -> None:
    """Everything a keeper does, over and over."""
    has_memory = keeper.driver.name != "process"
    names = await keeper.adopt()
    say("adopted")
    for turn in itertools.count():
        while len(names) >= MAX_NAMES or (turn % 3 == 2 and names):
            say("destroys", names[0])
            await keeper.destroy(names[0])
            say("gone", names.pop(0))
        is_new = not names
        if is_new:
            names.append(await keeper.create(image, LIMITS, Net()))
        name, value = names[-1], time.time_ns()
        say("writes", value)
        async with keeper.use(name) as sandbox:
            await remember(sandbox, value, has_memory, is_new)
        await keeper.checkpoint(name)
        say("committed", name, value)
        names[:0] = await keeper.fork(name, 2)
        await keeper.store_away(names[0])
        await keeper.tick()
        await keeper.store_away(name)
        async with keeper.use(name) as sandbox:
            assert await remembered(sandbox) == (value, value)


def kill_at(step: int) -> None:
    """Arrange this process's death right before its change of that number."""
    left = step

    def look(event: str, args: tuple[object, ...]) -> None:
        nonlocal left
        is_written = event == "open" and isinstance(args[2], int) and args[2] & WRITING
        if event in CHANGES or is_written:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def main(name: str, folder: Path, step: int) -> None:
    say("stands")
    if step:
        kill_at(step)
    _, _, keeper = make_keeper(name, folder)
    root = folder / "image" if name == "process" else default_prefix() / "image/root"
    asyncio.run(live(keeper, Image(root=root)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
