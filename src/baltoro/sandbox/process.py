"""The driver that is always there: plain processes of the host, in a folder of their own.

What it does NOT stop: anything. Programs run as the caller, see the host's files, processes and
network, can fill its disk and memory, fork without bound (a per-process memory and file-size
limit is set, no more), escape a kill by clearing their environment, and read what the caller may
read. Its isolation is labelled "none": for trusted tasks, for tests, and where nothing else runs.

What it does: `read` and `write` stay inside the folder whatever links say, output and time are
bounded, `pause` stops every process of the sandbox, a snapshot keeps the **files** and no memory.
"""

import asyncio
import contextlib
import itertools
import os
import pty
import shutil
import signal
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from baltoro.sandbox.host_process import HostProcess
from baltoro.sandbox.keyed import Keyed
from baltoro.sandbox.manifest import check_fits
from baltoro.sandbox.protocol import (
    MIB,
    Binding,
    Command,
    ExecResult,
    Image,
    ImageError,
    LimitError,
    Limits,
    Net,
    SandboxError,
    SnapshotMode,
    State,
    check_branches,
)
from baltoro.sandbox.store import Store
from baltoro.sandbox.tree import Sealed, open_inside, remove_tree, seal_tree

MARK = "BALTORO_SANDBOX"
VERSION = "1"
QUIET_SCANS = 3


class ProcessSandbox:
    """A folder and the processes started in it (`baltoro.sandbox.protocol.Sandbox`)."""

    def __init__(self, driver: "ProcessDriver", sandbox_id: str, image: Image, limits: Limits):
        self.id = sandbox_id
        self.state: State = "running"
        self.image = image
        self.limits = limits
        self.parent: str | None = None
        self.frozen_s = 0.0
        self.home = driver.root / sandbox_id
        self.files = self.home / "files"
        self._driver = driver
        self._ids = itertools.count(1)
        self._processes: dict[int, HostProcess] = {}
        self._sealed: Sealed | None = None

    async def start(self, command: Command) -> HostProcess:
        self._check_running()
        env = {"PATH": os.defpath, "HOME": str(self.files), "LANG": "C.UTF-8", MARK: self.id}
        env.update(command.env)
        cwd = self._inside(command.cwd)
        argv = _bounded(_program(command, cwd, env["PATH"]), command.argv[1:], self.limits)
        master = slave = None
        if command.use_pty:
            master, slave = pty.openpty()
        pipe = asyncio.subprocess.PIPE
        try:
            child = await asyncio.create_subprocess_exec(
                *argv,
                cwd=cwd,
                env=env,
                stdin=pipe if slave is None else slave,
                stdout=pipe if slave is None else slave,
                stderr=pipe if slave is None else slave,
                start_new_session=True,
            )
        except (FileNotFoundError, PermissionError, OSError) as error:
            if master is not None:
                os.close(master)
            raise ImageError(
                f"cannot run {command.argv[0]!r}: {error.strerror}; is there a working directory"
                f" {command.cwd!r}?"
            ) from error
        finally:
            if slave is not None:
                os.close(slave)
        process = HostProcess(next(self._ids), child, command)
        process.pty_fd = master
        process.begin(self.limits.max_output_bytes)
        self._processes[process.id] = process
        if command.stdin is not None and not command.use_pty:
            await process.write_stdin(command.stdin)
            await process.write_stdin(b"")
        return process

    async def exec(self, command: Command) -> ExecResult:
        process = await self.start(command)
        result = await process.wait()  # a command over its limits has been ended when this raises
        await process.release()
        self._processes.pop(process.id, None)
        return result

    async def attach(self, process_id: int) -> HostProcess:
        if process_id not in self._processes:
            raise SandboxError(
                f"process {process_id}: not in sandbox {self.id}; this driver keeps no process in a"
                " snapshot"
            )
        return self._processes[process_id]

    async def read(self, path: str, max_bytes: int = 64 * MIB) -> bytes:
        self._check_alive()
        with os.fdopen(open_inside(self.files, path, os.O_RDONLY), "rb") as source:
            data = source.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise LimitError(f"read: {path!r} is longer than max_bytes={max_bytes}; raise it")
        return data

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        self._check_alive()
        if len(data) > self.limits.disk_bytes:
            raise LimitError(
                f"write: {len(data)} bytes to {path!r}, limits.disk_bytes={self.limits.disk_bytes}"
            )
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with os.fdopen(open_inside(self.files, path, flags, mode), "wb") as target:
            target.write(data)
            os.fchmod(target.fileno(), mode)

    async def pause(self) -> None:
        self._check_alive()
        self._signal(signal.SIGSTOP)
        self.state = "paused"

    async def resume(self) -> None:
        self._check_alive()
        self._signal(signal.SIGCONT)
        self.state = "running"

    async def snapshot(
        self, mode: SnapshotMode = "live", parent: str | None = None, binding: Binding | None = None
    ) -> str:
        self._check_alive()
        store = self._driver.store
        was_running = self.state == "running"
        start = time.monotonic()
        await self.pause()
        draft = store.begin()
        try:
            sealed = await asyncio.to_thread(seal_tree, self.files, draft.files, self._sealed)
            self.frozen_s = time.monotonic() - start
            manifest = store.commit(
                draft,
                driver=self._driver.name,
                driver_version=VERSION,
                image_root=str(self.image.root),
                limits=self.limits,
                parent=parent or self.parent,
                binding=binding,
            )
        except (OSError, SandboxError) as error:
            named = store.named(error, f"sandbox {self.id}: snapshot")
            store.abandon(draft)
            if was_running:
                await self.resume()
            raise named from error
        self._sealed = sealed
        if mode == "stop":
            await self.destroy()
        elif was_running:
            await self.resume()
        return manifest.id

    async def fork(self, num_branches: int) -> list["ProcessSandbox"]:
        check_branches(num_branches)
        return await self._driver.restore(await self.snapshot(), num_branches)

    async def destroy(self) -> None:
        if self.state == "destroyed":
            return
        self.state = "destroyed"
        for process in self._processes.values():
            await process.end()
        self._processes.clear()
        _kill_marked(self.id)
        await asyncio.to_thread(remove_tree, self.home)
        self._driver.forget(self.id)

    def pids(self) -> list[int]:
        """Its processes now, those that hide their environment excepted."""
        return _marked(self.id)

    def _inside(self, cwd: str) -> Path:
        path = self.files / cwd.lstrip("/")
        if not path.resolve().is_relative_to(self.files.resolve()):
            raise PermissionError(f"cwd={cwd!r}: outside the sandbox's folder")
        return path

    def _check_alive(self) -> None:
        if self.state == "destroyed":
            raise SandboxError(f"sandbox {self.id}: destroyed")

    def _check_running(self) -> None:
        self._check_alive()
        if self.state == "paused":
            raise SandboxError(f"sandbox {self.id}: paused; resume it first")

    def _signal(self, signo: int) -> None:
        for pid in _marked(self.id):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signo)


class ProcessDriver:
    """Sandboxes of isolation "none" below one folder (`baltoro.sandbox.protocol.Driver`)."""

    name = "process"

    def __init__(self, root: Path, store: Store):
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.store = store
        self._sandboxes: dict[str, ProcessSandbox] = {}
        self._keys: Keyed[ProcessSandbox] = Keyed()

    async def create(
        self, image: Image, limits: Limits, net: Net, key: str | None = None
    ) -> ProcessSandbox:
        if (made := self._keys.get(key)) is not None:
            return await asyncio.shield(made)
        if net.allowed_hosts:
            raise ValueError(
                f"net.allowed_hosts={net.allowed_hosts!r}: this driver cannot restrict the network;"
                " use gvisor, criu or qemu"
            )
        if not image.root.is_dir():
            raise ImageError(f"image.root={str(image.root)!r}: no such folder")
        if key is None:
            return await asyncio.shield(self._make(image, limits))
        return await self._keys.make(key, self._make(image, limits))

    async def restore(self, snapshot_id: str, num_branches: int = 1) -> list[ProcessSandbox]:
        check_branches(num_branches)
        manifest = self.store.get(snapshot_id)
        check_fits(manifest, self.name, VERSION, is_same_host=False)
        branches: list[ProcessSandbox] = []
        self.store.lend(snapshot_id)
        try:
            for _ in range(num_branches):
                sandbox = self._new(Image(root=Path(manifest.image_root)), manifest.limits)
                branches.append(sandbox)
                sandbox.parent = snapshot_id
                sandbox.home.mkdir()
                source = self.store.layer_paths(snapshot_id)[-1]
                await asyncio.to_thread(seal_tree, source, sandbox.files)
        except (OSError, SandboxError) as error:
            named = self.store.named(error, f"snapshot {snapshot_id}: copying its files")
            for sandbox in branches:
                await sandbox.destroy()
            raise named from error
        finally:
            self.store.give_back(snapshot_id)
        return branches

    async def gc(self) -> list[str]:
        lines = []
        for home in sorted(self.root.iterdir()):
            if home.name not in self._sandboxes:
                _kill_marked(home.name)
                await asyncio.to_thread(remove_tree, home)
                lines.append(f"sandbox {home.name}: left behind by an earlier driver")
        return lines

    async def close(self) -> None:
        for sandbox in list(self._sandboxes.values()):
            await sandbox.destroy()

    def forget(self, sandbox_id: str) -> None:
        """Called by a sandbox that is gone."""
        self._sandboxes.pop(sandbox_id, None)
        self._keys.forget(sandbox_id)

    async def _make(self, image: Image, limits: Limits) -> ProcessSandbox:
        sandbox = self._new(image, limits)
        sandbox.home.mkdir()
        try:
            await asyncio.to_thread(seal_tree, image.root, sandbox.files)
        except (OSError, SandboxError) as error:
            named = self.store.named(error, f"sandbox {sandbox.id}: copying its image")
            await sandbox.destroy()
            raise named from error
        return sandbox

    def _new(self, image: Image, limits: Limits) -> ProcessSandbox:
        sandbox = ProcessSandbox(self, uuid.uuid4().hex[:12], image, limits)
        self._sandboxes[sandbox.id] = sandbox
        return sandbox


def _program(command: Command, cwd: Path, path: str) -> str:
    """Where the command's program is. `ImageError` if the host lacks it."""
    name = command.argv[0]
    found = shutil.which(cwd / name if "/" in name else name, path=path)
    if found is None:
        raise ImageError(f"cannot run {name!r}: no such program; the host lacks it")
    return found


def _bounded(program: str, words: Sequence[str], limits: Limits) -> list[str]:
    """A command line under bounds that hold per process; there is no other without a cgroup.

    A shell sets them and becomes the program: set from outside they would miss an early child.
    """
    blocks = -(-limits.disk_bytes // 512)
    bounds = f"ulimit -v {limits.memory_bytes // 1024}; ulimit -f {blocks}; ulimit -c 0"
    return ["/bin/sh", "-c", f'{bounds}; exec "$0" "$@"', program, *words]


def _marked(sandbox_id: str) -> list[int]:
    """Processes that carry the sandbox's mark in their environment."""
    mark = f"{MARK}={sandbox_id}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            environ = Path("/proc", entry, "environ").read_bytes()
        except OSError:  # gone meanwhile, or another user's
            continue
        if mark in environ.split(b"\0"):
            found.append(int(entry))
    return found


def _kill_marked(sandbox_id: str) -> None:
    """Kill until scans stay empty: a program just being executed shows no mark."""
    quiet_scans = 0
    while quiet_scans < QUIET_SCANS:
        pids = [pid for pid in _marked(sandbox_id) if pid != os.getpid()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        quiet_scans = 0 if pids else quiet_scans + 1
        time.sleep(0.005)
