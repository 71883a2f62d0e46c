"""Kill a process that another program started, by the pid it wrote down, and never a stranger."""

import asyncio
import os
import signal
from pathlib import Path

from baltoro.sandbox.protocol import SandboxError


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
