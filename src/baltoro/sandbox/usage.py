"""What a sandbox uses of the host now: its processes' time and memory, its folder's bytes."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baltoro.sandbox.cgroup import Cgroup
from baltoro.sandbox.machine import MachineSandbox
from baltoro.sandbox.process import ProcessSandbox
from baltoro.sandbox.protocol import Sandbox
from baltoro.sandbox.tree import tree_bytes

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Of one sandbox, as the host sees it."""

    cpu_s: float  # of the processes that live now, since their starts
    memory_bytes: int  # resident; pages that branches share count in each
    disk_bytes: int  # of its folder: files, and what its mechanism keeps beside them


def sample(sandbox: Sandbox) -> Usage | None:
    """Measure it, or None if its processes cannot be told from others (a user without groups)."""
    if isinstance(sandbox, ProcessSandbox):
        pids: Sequence[int] = sandbox.pids()
    elif isinstance(sandbox, MachineSandbox):
        pids = Cgroup(sandbox.id).pids()
        if not pids:
            return None
    else:
        return None
    cpu_ticks = resident_pages = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended meanwhile
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            cpu_ticks += int(words[11]) + int(words[12])
            resident_pages += int(words[21])
    return Usage(
        cpu_s=cpu_ticks / TICKS_PER_S,
        memory_bytes=resident_pages * PAGE_BYTES,
        disk_bytes=tree_bytes(sandbox.home),
    )
