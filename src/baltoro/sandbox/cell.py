"""What the host knows of a CRIU cell (`guest/cell.c`): first files, the agent's doors, pids."""

import asyncio
import contextlib
import os
import time
from pathlib import Path

from baltoro.sandbox.cgroup import Cgroup
from baltoro.sandbox.channel import Channel, open_pipes
from baltoro.sandbox.protocol import SandboxError

BOOT_TIMEOUT_S = 20.0
AGENT_PID = 2  # the first process that process 1 starts
DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9)}


async def connect(pid: int, first_id: int) -> Channel:
    """The host's end of the agent's FIFOs, once the agent has opened its own."""
    deadline = time.monotonic() + BOOT_TIMEOUT_S
    while (doors := _agent_doors(pid)) is None:
        if time.monotonic() > deadline:
            raise SandboxError("the agent did not open its doors")
        await asyncio.sleep(0.001)
    # Only to write: a reader of its own input would look like a hang-up.
    host_in = os.open(doors[0], os.O_WRONLY | os.O_NONBLOCK)
    host_out = os.open(doors[1], os.O_RDWR | os.O_NONBLOCK)
    channel = Channel(await open_pipes(host_out, host_in), first_id)
    try:
        channel.watch(pid)
    except OSError as error:
        await channel.close()
        raise SandboxError(f"its first process ended: {error}") from error
    return channel


def _agent_doors(pid: int) -> tuple[str, str] | None:
    """The agent's FIFOs, which have no names any more; None until it has opened them.

    `SandboxError` if the cell of process 1 `pid` is gone.
    """
    try:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found = {}
            for name in os.listdir(f"/proc/{child}/fd"):
                target = os.readlink(f"/proc/{child}/fd/{name}")
                for door in ("in", "out"):
                    if target.startswith(f"/.agent/{door}") and target.endswith("(deleted)"):
                        found[door] = f"/proc/{child}/fd/{name}"
            if len(found) == 2:
                return found["in"], found["out"]
    except FileNotFoundError as error:
        if not Path(f"/proc/{pid}").exists():
            raise SandboxError(f"its first process ended: {error}") from error
    return None


def make_upper(home: Path) -> None:
    """What a new sandbox's writable layer starts with: the agent's door and a few devices."""
    upper = home / "upper"
    for folder in ("dev/pts", "dev/shm", ".agent", "proc", "work", "tmp", "run"):
        (upper / folder).mkdir(parents=True)
    (upper / "dev/shm").chmod(0o1777)
    (upper / "tmp").chmod(0o1777)
    (upper / ".agent").chmod(0o700)
    (upper / ".agent/agent").touch()
    (upper / "run/criu.kdat").touch()
    for name in ("in", "out"):
        os.mkfifo(upper / ".agent" / name, 0o600)
    for name, (major, minor) in DEVICES.items():
        os.mknod(upper / "dev" / name, 0o020666, os.makedev(major, minor))
        (upper / "dev" / name).chmod(0o666)
    os.mknod(upper / "dev/tty", 0o020666, os.makedev(5, 0))
    (upper / "dev/tty").chmod(0o666)
    (upper / "dev/ptmx").symlink_to("pts/ptmx")
    (upper / "dev/fd").symlink_to("/proc/self/fd")


def highest_pid(group: Cgroup) -> int:
    """The highest pid, inside, that a process or thread of the group has."""
    highest = AGENT_PID
    for pid in group.pids():
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                for line in Path(f"/proc/{pid}/task/{thread}/status").read_text().splitlines():
                    if line.startswith(("NSpid:", "NSpgid:", "NSsid:")):
                        highest = max(highest, int(line.split()[-1]))
    return highest
