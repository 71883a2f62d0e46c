"""CRIU: plain processes in namespaces of their own, dumped and restored by the host's kernel.

The fastest of the drivers, and root only. A small `cell` makes the namespaces and the overlay
root; CRIU is run inside them, beside the tree, so that it has processes to dump and no namespaces
(the same dump across namespaces takes twice as long). Restoring is lazy: programs run before
their memory is there, and fetch it on first touch.

Stops: other processes, the host's files and its network are out of sight, but for listed hosts
through `egress.py`; mounts, device nodes, ptrace of the host, writes to /proc/sys and raw sockets
need capabilities the cell has dropped; a filter of system calls refuses user namespaces, keyrings,
io_uring and sockets such as vsock; a control group bounds memory, processes and CPU. Does NOT stop:
an exploit of the host's kernel, most of whose calls a sandbox may make; files beyond
`Limits.disk_bytes` for a second or so, after which the sandbox is ended (`quota.py`); reading
global facts in /proc. For code you half trust.

Order of a snapshot: freeze, copy the writable layer (files unchanged since the last time are hard
links), dump memory, thaw, commit. External connections do not exist; loopback TCP survives.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from baltoro.sandbox.cell import AGENT_PID, BOOT_TIMEOUT_S, connect, highest_pid, make_upper
from baltoro.sandbox.cgroup import Cgroup
from baltoro.sandbox.channel import Channel
from baltoro.sandbox.host import log_tail, run_output
from baltoro.sandbox.install import find_tool
from baltoro.sandbox.manifest import Manifest
from baltoro.sandbox.protocol import (
    DriverUnavailableError,
    Image,
    ImageError,
    Isolation,
    Limits,
    SandboxError,
    SnapshotError,
)
from baltoro.sandbox.quota import DiskWatch
from baltoro.sandbox.store import Draft
from baltoro.sandbox.tree import Sealed, merge_layers, seal_tree

CALL_TIMEOUT_S = 120.0
MIN_VERSION = (4, 2)
MAX_LAYERS = 12
DUMP_FLAGS = (
    f"--tree={AGENT_PID}",
    "--tcp-established",
    "--network-lock=skip",  # every peer is inside and frozen
    "--file-locks",
    "--manage-cgroups=ignore",
    "--ghost-limit=1073741824",
    "--verbosity=1",
)


class CriuMachine:
    """One cell (`baltoro.sandbox.machine.Machine`)."""

    def __init__(
        self,
        mechanism: "Criu",
        sandbox_id: str,
        home: Path,
        limits: Limits,
        pid: int,
        channel: Channel,
        layers: Sequence[Path] = (),
    ):
        self.channel = channel
        self.base_layers: tuple[str, ...] = ()
        self.group = Cgroup(sandbox_id)
        self.group.has_inner = True
        self.lazy: asyncio.subprocess.Process | None = None
        self._disk = DiskWatch(home / "upper", layers, limits.disk_bytes)
        self._disk.start(self._kill)
        channel.over_limit = lambda: self._disk.verdict or self.group.over_limit(limits)
        self._mechanism = mechanism
        self._id = sandbox_id
        self._home = home
        self._pid = pid
        self._sealed: Sealed | None = None

    async def freeze(self) -> None:
        await self.group.freeze()

    async def thaw(self) -> None:
        await self.group.thaw()

    async def dump(self, draft: Draft, *, is_frozen: bool, is_last: bool) -> Mapping[str, str]:
        await self._finish_lazy()
        if not is_frozen:
            await self.freeze()
        try:
            await self._disk.check()
            sealed = await asyncio.to_thread(
                seal_tree, self._home / "upper", draft.files, self._sealed
            )
            last_pid = highest_pid(self.group)
            await self._mechanism.dump(self._pid, self.group.freezer, draft.memory)
        except (OSError, SandboxError) as error:
            if not is_frozen:
                await self.thaw()
            if isinstance(error, OSError):
                raise SnapshotError(f"sandbox {self._id}: {error}") from error
            raise
        self._sealed = sealed
        if not is_frozen and not is_last:
            await self.thaw()
        return {"last_pid": str(last_pid)}

    async def end(self) -> None:
        self._disk.stop()
        await self.channel.close()
        await self._mechanism.sweep(self._id, self._home)
        if self.lazy is not None:
            await self.lazy.wait()

    def _kill(self) -> None:
        """All of it ends with its process 1."""
        if self.channel.lost_reason is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    async def _finish_lazy(self) -> None:
        """All memory must be here before it can be dumped again."""
        if self.lazy is not None:
            await asyncio.wait_for(self.lazy.wait(), CALL_TIMEOUT_S)
            self.lazy = None


class Criu:
    """Machines dumped by `criu` (`baltoro.sandbox.machine.Mechanism`)."""

    name = "criu"
    isolation: Isolation = "namespaces"
    needs_root = True
    is_bound_to_host = True

    def __init__(self, prefix: Path):
        if os.geteuid() != 0:
            raise DriverUnavailableError("criu: needs root; use gvisor or qemu as an ordinary user")
        self._prefix = prefix
        self._criu = find_tool(prefix, "criu")
        self._agent = find_tool(prefix, "agent")[0]
        self._cell = find_tool(prefix, "cell")[0]
        self._version: str | None = None
        self._kdat: Path | None = None

    async def version(self) -> str:
        if self._version is None:
            out = await run_output([*self._criu, "--version"])
            version = out.split("Version:")[-1].split()[0]
            if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
                raise DriverUnavailableError(
                    f"criu: version {version}, at least 4.2 is needed;"
                    " run `baltoro sandbox install`"
                )
            self._version = version
        return self._version

    async def boot(self, sandbox_id: str, home: Path, image: Image, limits: Limits) -> CriuMachine:
        await self.version()
        make_upper(home)
        group = Cgroup(sandbox_id)
        group.open(limits, has_inner=True)
        pid = await self._make_cell(group, home, [image.root], last_pid=0)
        channel = await connect(pid, first_id=1)
        try:
            await channel.hello(BOOT_TIMEOUT_S)
        except SandboxError as error:
            await channel.close()
            raise ImageError(f"sandbox {sandbox_id}: {error}") from error
        return CriuMachine(self, sandbox_id, home, limits, pid, channel)

    async def revive(
        self, sandbox_id: str, home: Path, manifest: Manifest, memory: Path, layers: list[Path]
    ) -> CriuMachine:
        (home / "upper").mkdir()
        if len(layers) > MAX_LAYERS:
            await asyncio.to_thread(merge_layers, layers, home / "merged")
            layers = [home / "merged"]
        lowers = [*reversed(layers), Path(manifest.image_root)]
        last_pid = int(manifest.notes["last_pid"]) + 100
        (home / "criu").mkdir()
        group = Cgroup(sandbox_id)
        group.open(manifest.limits, has_inner=True)
        lazy = await self._start_lazy(group, memory, home / "criu")
        try:
            pid = await self._make_cell(group, home, lowers, last_pid)
            await self._restore(group, pid, home, memory, lazy)
        except (SandboxError, OSError):
            with contextlib.suppress(ProcessLookupError):
                lazy.kill()
            await lazy.wait()
            raise
        channel = await connect(pid, int(manifest.notes["next_id"]))
        machine = CriuMachine(self, sandbox_id, home, manifest.limits, pid, channel, layers)
        machine.base_layers = manifest.layers
        machine.lazy = lazy
        return machine

    async def sweep(self, sandbox_id: str, home: Path) -> None:
        await Cgroup(sandbox_id).end()

    async def close(self) -> None:
        return

    async def dump(self, pid: int, freezer: Path, memory: Path) -> None:
        """Dump the tree of a cell whose tasks are frozen; they stay frozen."""
        await self._enter(
            pid, ["dump", *DUMP_FLAGS, "--leave-running"], memory, memory, freezer=freezer
        )

    async def _restore(
        self,
        group: Cgroup,
        pid: int,
        home: Path,
        memory: Path,
        lazy: asyncio.subprocess.Process,
    ) -> None:
        words = ["restore", "--restore-detached", "--tcp-established", "--file-locks"]
        words += ["--manage-cgroups=ignore", "--verbosity=1", "--lazy-pages"]
        await _await_lazy(lazy, home / "criu")
        await self._enter(pid, words, memory, home / "criu", group=group)

    async def _start_lazy(
        self, group: Cgroup, memory: Path, work: Path
    ) -> asyncio.subprocess.Process:
        """Start what hands out pages on first touch; it ends when all are there.

        It is in the sandbox's control group, outside the part that freezes, to end with it.
        """
        opened = [os.open(path, os.O_RDONLY) for path in (memory, work)]
        images, logs = (f"/proc/self/fd/{fd}" for fd in opened)
        script = 'mount -t tmpfs tmpfs /run && cp "$0" /run/criu.kdat && exec "$@"'
        command = ["unshare", "-m", "sh", "-c", script, str(await self._kernel_data()), *self._criu]
        command += ["lazy-pages", f"--images-dir={images}", f"--work-dir={logs}"]
        command += ["--status-fd=1", "--verbosity=1", "--log-file=lazy.log"]
        try:
            return await asyncio.create_subprocess_exec(
                *group.entering(command),
                pass_fds=opened,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
        finally:
            for fd in opened:
                os.close(fd)

    async def _enter(
        self,
        pid: int,
        words: list[str],
        memory: Path,
        work: Path,
        *,
        freezer: Path | None = None,
        group: Cgroup | None = None,
    ) -> None:
        """Run CRIU inside a cell's namespaces; host folders are reached through descriptors."""
        opened = [os.open(path, os.O_RDONLY) for path in (self._prefix / "criu", memory, work)]
        tool, images, logs = (f"/proc/self/fd/{fd}" for fd in opened)
        command = [word.replace(str(self._prefix / "criu"), tool) for word in self._criu]
        command += [*words, f"--images-dir={images}", f"--work-dir={logs}", "--log-file=criu.log"]
        if freezer is not None:
            opened.append(os.open(freezer, os.O_RDONLY))
            command.append(f"--freeze-cgroup=/proc/self/fd/{opened[-1]}")
        command = ["nsenter", f"--target={pid}", "-m", "-p", "-n", "-i", "-u", *command]
        if group is not None:
            command = group.entering_inner(command)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                pass_fds=opened,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )
        finally:
            for fd in opened:
                os.close(fd)
        try:
            code = await asyncio.wait_for(process.wait(), CALL_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise SnapshotError(f"criu {words[0]}: no end within {CALL_TIMEOUT_S} s") from None
        if code != 0:
            raise SnapshotError(f"criu {words[0]} failed ({code}): {log_tail(work / 'criu.log')}")
        (work / "criu.log").unlink(missing_ok=True)

    async def _make_cell(self, group: Cgroup, home: Path, lowers: list[Path], last_pid: int) -> int:
        """Namespaces and root, with an agent if `last_pid` is 0; returns the pid of process 1."""
        (home / "work").mkdir()
        (home / "root").mkdir()
        command = [self._cell, ":".join(map(str, lowers)), str(home / "upper"), str(home / "work")]
        command += [str(home / "root"), self._agent, str(group.freezer / group.door)]
        command += [str(last_pid), str(await self._kernel_data())]
        return int(await run_output(group.entering(command)))

    async def _kernel_data(self) -> Path:
        """What CRIU finds out about the kernel, kept: it would probe anew on every call.

        CRIU writes the file only to a /run that is a tmpfs, so it is given one for a moment.
        """
        if self._kdat is None:
            target = self._prefix / "criu.kdat"
            script = f'mount -t tmpfs tmpfs /run && "$@" && cp /run/criu.kdat {target}.new'
            await run_output(["unshare", "-m", "sh", "-c", script, "sh", *self._criu, "check"])
            Path(f"{target}.new").rename(target)
            self._kdat = target
        return self._kdat


async def _await_lazy(lazy: asyncio.subprocess.Process, work: Path) -> None:
    """Wait until the page server listens: it writes one byte."""
    assert lazy.stdout is not None
    if not await asyncio.wait_for(lazy.stdout.read(1), CALL_TIMEOUT_S):
        raise SnapshotError(f"criu lazy-pages: {log_tail(work / 'lazy.log')}")
