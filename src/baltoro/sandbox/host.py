"""Programs of the host that drivers start: connect, run to the end, read last words, kill."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from baltoro.sandbox.protocol import MIB, DriverUnavailableError, SandboxError

TAIL_CHARACTERS = 400
QUIET_SCANS = 3
OPEN_TRIES = 10_000
STREAM_BYTES = 4 * MIB


async def connect_when_open(
    path: Path, process: asyncio.subprocess.Process, last_words: Callable[[], str]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a socket that a process is about to open.

    Raises `DriverUnavailableError` with its last words if it ends, or does not within ten seconds.
    """
    for _ in range(OPEN_TRIES):
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return await asyncio.open_unix_connection(str(path), limit=STREAM_BYTES)
        if process.returncode is not None:
            break
        await asyncio.sleep(0.001)
    raise DriverUnavailableError(f"its process did not open {path.name}: {last_words()}")


async def kill_named(pid_file: Path, name: str) -> None:
    """Kill the process in `pid_file` if `name` is in its command line, and wait for its end.

    A pid is reused in time: one whose command line does not carry the sandbox's name is left alone.
    """
    try:
        pid = int(pid_file.read_text())
    except (FileNotFoundError, ValueError):  # never started
        return
    for _ in range(5000):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if name.encode() not in words:  # gone, a zombie, or somebody else
                return
            os.kill(pid, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            return
        await asyncio.sleep(0.002)
    raise SandboxError(f"process {pid} of sandbox {name} does not die")


async def kill_orphans(name: str) -> None:
    """Kill every process with the word `name` in its command line, until no new one shows up.

    For what a dead owner had started and not yet written down; no other sandbox has that name.
    """
    quiet_scans = 0
    while quiet_scans < QUIET_SCANS:
        found = _with_word(name.encode())
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        quiet_scans = 0 if found else quiet_scans + 1
        await asyncio.sleep(0.005)


def _with_word(word: bytes) -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if word in Path("/proc", pid, "cmdline").read_bytes().split(b"\0"):
                found.append(int(pid))
    return found


async def run_output(command: Sequence[str]) -> str:
    """Run a program to its end; returns what it printed. `SandboxError` with its last words."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    if process.returncode != 0:
        words = err.decode(errors="replace").strip()[-TAIL_CHARACTERS:]
        raise SandboxError(f"{words or command[0]} (exit {process.returncode})")
    return out.decode()


def log_tail(path: Path) -> str:
    """The end of a program's log, for an error message."""
    if not path.exists():
        return f"no {path.name}"
    return path.read_text(errors="replace").strip()[-TAIL_CHARACTERS:] or f"{path.name} is empty"
