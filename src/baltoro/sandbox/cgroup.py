"""One sandbox's control group: its limits, its freezer, and an end that no process escapes.

Knows the split hierarchies (v1: memory, pids, cpu, freezer) and the unified one (v2). Root only; an
ordinary user gets no group and the driver's docstring says which limits then do not hold.
"""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from baltoro.sandbox.protocol import Limits, SandboxError

MOUNT = Path("/sys/fs/cgroup")
PARENT = "baltoro"
PERIOD_US = 100_000
SPLIT = ("memory", "pids", "cpu", "freezer")
END_TIMEOUT_S = 10.0


class Cgroup:
    """A group below `/sys/fs/cgroup/.../baltoro/`, made by `open` or found again by its name."""

    def __init__(self, name: str):
        self.name = name
        self.has_inner = False
        self.is_unified = (MOUNT / "cgroup.controllers").exists()
        if self.is_unified:
            self.folders = {"": MOUNT / PARENT / name}
        else:
            kinds = [kind for kind in SPLIT if (MOUNT / kind).is_dir()]
            self.folders = {kind: MOUNT / kind / PARENT / name for kind in kinds}

    def open(self, limits: Limits, *, has_inner: bool = False) -> None:
        """Make it with these limits.

        With `has_inner` only processes of a group inside it freeze (split hierarchies only).
        """
        if self.is_unified and not (MOUNT / PARENT).exists():
            (MOUNT / PARENT).mkdir()
            for folder in (MOUNT, MOUNT / PARENT):
                (folder / "cgroup.subtree_control").write_text("+cpu +memory +pids")
        for folder in self.folders.values():
            _make_folder(folder)
        self.has_inner = has_inner
        if has_inner:
            self.freezer.mkdir(exist_ok=True)
        quota_us = int(limits.cpus * PERIOD_US)
        if self.is_unified:
            self._set("", "memory.max", limits.memory_bytes)
            self._set("", "pids.max", limits.max_processes)
            self._set("", "cpu.max", f"{quota_us} {PERIOD_US}")
        else:
            self._set("memory", "memory.limit_in_bytes", limits.memory_bytes)
            self._set("pids", "pids.max", limits.max_processes)
            self._set("cpu", "cpu.cfs_period_us", PERIOD_US)
            self._set("cpu", "cpu.cfs_quota_us", quota_us)

    def entering(self, command: list[str]) -> list[str]:
        """The command line that runs `command` inside the group from its first instruction."""
        return self._entering(list(self.folders.values()), command)

    def entering_inner(self, command: list[str]) -> list[str]:
        """The same, inside the group that freezes."""
        folders = [path for kind, path in self.folders.items() if kind != "freezer"]
        return self._entering([*folders, self.freezer], command)

    @property
    def freezer(self) -> Path:
        """The folder whose state file freezes the group."""
        folder = self.folders["" if self.is_unified else "freezer"]
        return folder / "inner" if self.has_inner else folder

    @property
    def door(self) -> str:
        """The file of a folder to which a process of one thread writes 0 to enter it.

        In split hierarchies `cgroup.procs` takes a lock that waits for every processor, 10 ms and
        more; `tasks` does not.
        """
        return "cgroup.procs" if self.is_unified else "tasks"

    async def freeze(self) -> None:
        """Stop every process; returns when all stand."""
        await self._set_frozen(True)

    async def thaw(self) -> None:
        """Let them go on."""
        await self._set_frozen(False)

    def pids(self) -> list[int]:
        """Processes in the group now."""
        found: set[int] = set()
        for folder in self._all_folders():
            with contextlib.suppress(FileNotFoundError):
                found |= {int(pid) for pid in (folder / "cgroup.procs").read_text().split()}
        return sorted(found)

    def memory_bytes(self) -> int:
        """Memory charged to the group, page cache included."""
        name = "memory.current" if self.is_unified else "memory.usage_in_bytes"
        return int((self.folders["" if self.is_unified else "memory"] / name).read_text())

    def over_limit(self, limits: Limits) -> str | None:
        """Which limit the kernel enforced on it so far; None if none, or if it is gone."""
        if self._count("memory", "memory.events", "memory.oom_control", "oom_kill"):
            return f"it needed more memory than limits.memory_bytes={limits.memory_bytes}"
        if self._count("pids", "pids.events", "pids.events", "max"):
            return f"it needed more processes than limits.max_processes={limits.max_processes}"
        return None

    async def end(self) -> None:
        """Kill every process, frozen or not, and remove the group. Twice is fine."""
        waited_s = 0.0
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for state in self._all_folders():
                with contextlib.suppress(FileNotFoundError):
                    _write_existing(state / self._freezer_file, self._thawed)
            await asyncio.sleep(0.002)
            waited_s += 0.002
            if waited_s > END_TIMEOUT_S:
                raise SandboxError(f"cgroup {self.name}: processes {pids} do not die")
        for folder in self._all_folders():
            for _ in range(500):
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    break
                except OSError:  # the last process is still being taken apart
                    await asyncio.sleep(0.002)
                else:
                    break
        for parent in {folder.parent for folder in self.folders.values()}:
            with contextlib.suppress(OSError):  # others are in it
                parent.rmdir()

    def _all_folders(self) -> list[Path]:
        """Innermost first, also of a group that another process made."""
        return [path for folder in self.folders.values() for path in (folder / "inner", folder)]

    def _entering(self, folders: list[Path], command: list[str]) -> list[str]:
        joins = "; ".join(f"echo 0 > {folder / self.door}" for folder in folders)
        return ["/bin/sh", "-c", f'{joins}; exec "$@"', "sh", *command]

    def _count(self, kind: str, unified: str, split: str, event: str) -> int:
        folder = self.folders.get("" if self.is_unified else kind)
        if folder is None or not folder.exists():
            return 0
        words = (folder / (unified if self.is_unified else split)).read_text().split()
        return int(words[words.index(event) + 1])

    def _set(self, kind: str, name: str, value: int | str) -> None:
        if kind in self.folders:
            (self.folders[kind] / name).write_text(str(value))

    @property
    def _freezer_file(self) -> str:
        return "cgroup.freeze" if self.is_unified else "freezer.state"

    @property
    def _thawed(self) -> str:
        return "0" if self.is_unified else "THAWED"

    async def _set_frozen(self, is_frozen: bool) -> None:
        if self.is_unified:
            (self.freezer / "cgroup.freeze").write_text("1" if is_frozen else "0")
            wanted, state = f"frozen {int(is_frozen)}", self.freezer / "cgroup.events"
        else:
            wanted, state = "FROZEN" if is_frozen else "THAWED", self.freezer / "freezer.state"
            state.write_text(wanted)
        for _ in range(5000):
            if wanted in state.read_text():
                return
            await asyncio.sleep(0.001)
            if not self.is_unified:
                state.write_text(wanted)
        raise SandboxError(f"cgroup {self.name}: does not become {wanted}")


def _make_folder(folder: Path) -> None:
    """Make it even if another sandbox's end removes the empty parent at this moment."""
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            folder.mkdir(parents=True, exist_ok=True)
            return
    raise SandboxError(f"cannot make {folder}")


def _write_existing(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
