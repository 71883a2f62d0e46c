"""Python programs that split in milliseconds: a fork server beside the process driver.

For tasks that are one REPL or one script, such as judging pure Python: a program starts without
the start of an interpreter, and a fork is a `fork()` of its process between two of its
instructions (`guest/zygote.py`), so that branches share memory until they write. Each branch goes
on in a copy of the sandbox's folder, taken while the program stood still; files of that folder
that were open are open in the copy at the same offset.

What a sandbox here can NOT do, and says so when asked: keep memory beyond its processes (no
snapshot, no restore: it does not survive its driver), run anything but Python, give a terminal,
fork while more than one program runs in it, or fork a program that has threads or child processes.
Pipes and sockets that a program opened itself are shared with its branches. A paused program runs
for a moment, up to its next instruction, when it is forked.

What it does NOT stop: anything, as the process driver, and the same per-process bounds hold. Its
isolation is labelled "none". It is slower to fork the more files the folder has.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from baltoro.sandbox.channel import Stream, open_pipes
from baltoro.sandbox.host_process import HostProcess
from baltoro.sandbox.process import MARK, ProcessDriver, ProcessSandbox
from baltoro.sandbox.protocol import (
    Binding,
    Command,
    Image,
    ImageError,
    Limits,
    SandboxError,
    SnapshotError,
    SnapshotMode,
    check_branches,
)
from baltoro.sandbox.store import Store
from baltoro.sandbox.tree import seal_tree

PROGRAM = Path(__file__).with_name("guest") / "zygote.py"
# Answers each line of its input with the value of the line, as one line.
REPL = """
import os, random, sys
names = globals()
for line in sys.stdin:
    try:
        print(repr(eval(line, names)))
    except SyntaxError:
        exec(line, names)
        print("None")
"""
PYTHON = ("python", "python3")
MAX_REQUEST_BYTES = 1 << 17
ANSWER_TIMEOUT_S = 10.0
SIGNAL_EVERY_S = 0.2  # a program that reads may not notice one
KILLED = -signal.SIGKILL
Stderr = tuple[asyncio.StreamReader, asyncio.BaseTransport]
Offer = tuple[socket.socket, list[int]]  # control; our ends of input, output and error


class ZygoteChild:
    """A program that the server or a program forked (`baltoro.sandbox.host_process.Child`)."""

    def __init__(self, pid: int, control: socket.socket, stream: Stream, stderr: Stderr):
        self.pid = pid
        self.returncode: int | None = None
        self.control = control
        self.stdin: asyncio.StreamWriter | None = stream.writer
        self.stdout: asyncio.StreamReader | None = stream.reader
        self.stderr: asyncio.StreamReader | None = stderr[0]
        self._transports = (*stream.transports, stderr[1])

    def signal(self, signo: int) -> None:
        """To it and what it forked, unless it ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signo)

    def close(self) -> None:
        """Let go of its ends. Twice is fine."""
        self.control.close()
        for transport in self._transports:
            transport.close()


class ZygoteProcess(HostProcess):
    """A program of a sandbox (`baltoro.sandbox.protocol.Process`)."""

    child: ZygoteChild

    async def kill(self, signal: int = 9) -> None:
        self.child.signal(signal)

    async def release(self) -> None:
        await super().release()
        self.child.close()


class ZygoteSandbox(ProcessSandbox):
    """A folder and a Python program that can split (`baltoro.sandbox.protocol.Sandbox`)."""

    _driver: "ZygoteDriver"
    _processes: dict[int, ZygoteProcess]  # type: ignore[assignment]

    async def start(self, command: Command) -> ZygoteProcess:
        """Run `python3 [-u] [-i | -c CODE ... | SCRIPT ...]`; without words it is a REPL."""
        self._check_running()
        if command.argv[0] not in PYTHON:
            raise ImageError(f"cannot run {command.argv[0]!r}: this driver runs python3 only")
        if command.use_pty:
            raise ValueError("command.use_pty=True: a zygote gives no terminal; leave it out")
        cwd = self._inside(command.cwd)
        if not cwd.is_dir():
            raise ImageError(f"command.cwd={command.cwd!r}: no such folder in the sandbox")
        env = {"PATH": os.defpath, "HOME": str(self.files), "LANG": "C.UTF-8", MARK: self.id}
        request = {
            "argv": command.argv[1:],
            "cwd": str(cwd),
            "root": str(self.files),
            "env": {**env, **command.env},
            "bounds": {
                "RLIMIT_AS": self.limits.memory_bytes,
                "RLIMIT_FSIZE": self.limits.disk_bytes,
                "RLIMIT_CORE": 0,
            },
        }
        child = await self._driver.spawn(request)
        process = self._adopt(next(self._ids), child, command)
        if command.stdin is not None:
            await process.write_stdin(command.stdin)
            await process.write_stdin(b"")
        return process

    async def snapshot(
        self, mode: SnapshotMode = "live", parent: str | None = None, binding: Binding | None = None
    ) -> str:
        raise SnapshotError(
            f"sandbox {self.id}: a zygote keeps no memory beyond its processes; fork it, or use"
            " gvisor, criu or qemu"
        )

    async def fork(self, num_branches: int) -> list["ZygoteSandbox"]:  # type: ignore[override]
        check_branches(num_branches)
        self._check_alive()
        live = [each for each in self._processes.values() if each.child.returncode is None]
        if len(live) > 1:
            raise SnapshotError(
                f"sandbox {self.id}: {len(live)} programs run, a zygote forks one; end the others"
            )
        start = time.monotonic()
        for process in live:
            process.child.signal(signal.SIGSTOP)
        branches: list[ZygoteSandbox] = []
        try:
            for _ in range(num_branches):
                branch = self._driver.new(self.image, self.limits)
                branches.append(branch)
                branch.home.mkdir()
                await asyncio.to_thread(seal_tree, self.files, branch.files)
            for process in live:
                await self._split(process, branches)
        except (SandboxError, OSError):
            for branch in branches:
                await branch.destroy()
            raise
        finally:
            for process in live:
                process.child.signal(signal.SIGCONT if self.state == "running" else signal.SIGSTOP)
            self.frozen_s = time.monotonic() - start
        return branches

    async def _split(self, process: ZygoteProcess, branches: Sequence["ZygoteSandbox"]) -> None:
        requests = [
            {"root": str(each.files), "env": {"HOME": str(each.files), MARK: each.id}}
            for each in branches
        ]
        children = await self._driver.split(process.child, requests)
        for branch, child in zip(branches, children, strict=True):
            branch._adopt(process.id, child, process.command)
            while next(branch._ids) < process.id:
                pass

    def _adopt(self, process_id: int, child: ZygoteChild, command: Command) -> ZygoteProcess:
        process = ZygoteProcess(process_id, child, command)
        process.begin(self.limits.max_output_bytes)
        self._processes[process_id] = process
        return process

    def _signal(self, signo: int) -> None:
        for process in self._processes.values():
            process.child.signal(signo)
        super()._signal(signo)  # programs that it started


class ZygoteDriver(ProcessDriver):
    """Sandboxes around one fork server (`baltoro.sandbox.protocol.Driver`)."""

    name = "zygote"

    def __init__(self, root: Path, store: Store):
        super().__init__(root, store)
        self._server: asyncio.subprocess.Process | None = None
        self._requests: socket.socket | None = None
        self._server_turn = asyncio.Lock()
        self._children: dict[int, ZygoteChild] = {}

    async def restore(self, snapshot_id: str, num_branches: int = 1) -> list[ProcessSandbox]:
        raise SnapshotError(f"snapshot {snapshot_id!r}: a zygote has none; fork a sandbox")

    async def close(self) -> None:
        await super().close()
        self._lose_server()
        if self._server is not None:
            await self._server.wait()

    def new(self, image: Image, limits: Limits) -> ZygoteSandbox:
        """A sandbox that has no folder yet."""
        sandbox = ZygoteSandbox(self, uuid.uuid4().hex[:12], image, limits)
        self._sandboxes[sandbox.id] = sandbox
        return sandbox

    async def spawn(self, request: Mapping[str, object]) -> ZygoteChild:
        """A new program."""
        async with self._server_turn:
            if self._requests is None:
                await self._start_server()
        assert self._requests is not None
        return await self._meet(_offer(self._requests, request))

    async def split(
        self, child: ZygoteChild, requests: Sequence[Mapping[str, object]]
    ) -> list[ZygoteChild]:
        """A branch per request of a program that stands still; it runs afterwards.

        Raises `SnapshotError` if it cannot be split.
        """
        offers: list[Offer] = []
        made: list[ZygoteChild] = []
        try:
            if len(os.listdir(f"/proc/{child.pid}/task")) > 1:
                raise SnapshotError(
                    f"program {child.pid}: it has threads, of which a branch would have one"
                )
            for index, request in enumerate(requests):
                is_last = index == len(requests) - 1
                offers.append(_offer(child.control, {**request, "is_last": is_last}))
            answer = await _answer(child)
            if answer != b"ok":
                raise SnapshotError(f"program {child.pid}: {answer.decode() or 'it ended'}")
            while offers:
                made.append(await self._meet(offers.pop(0)))
            return made
        except (OSError, SandboxError) as error:  # silence is a TimeoutError, an OSError
            for branch in made:
                branch.signal(signal.SIGKILL)
                branch.close()
            for control, ends in offers:
                control.close()
                for fd in ends:
                    os.close(fd)
            if isinstance(error, SnapshotError):
                raise
            child.control.close()  # an answer that comes late would be taken for the next one's
            raise SnapshotError(
                f"program {child.pid} cannot be forked ({error!r}): is it in one long call, or does"
                " it handle SIGUSR1 itself?"
            ) from error

    def _new(self, image: Image, limits: Limits) -> ZygoteSandbox:
        return self.new(image, limits)

    async def _meet(self, offer: Offer) -> ZygoteChild:
        """The program that took an offer, told that it is known."""
        control, (stdin, stdout, stderr) = offer
        stream = await open_pipes(stdout, stdin)
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(stderr, "rb", buffering=0)
        )
        child = ZygoteChild(0, control, stream, (reader, transport))
        try:
            child.pid = int(await _hear(control))
        except (OSError, ValueError) as error:
            child.close()
            raise SandboxError(f"the fork server did not make a program ({error!r})") from error
        self._children[child.pid] = child
        control.send(b"1")
        return child

    async def _start_server(self) -> None:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far:
            self._server = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", str(PROGRAM), str(far.fileno())),
                pass_fds=[far.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        near.setblocking(False)
        self._requests = near
        asyncio.get_running_loop().add_reader(near, self._hear_ends, near)

    def _hear_ends(self, near: socket.socket) -> None:
        """`PID STATUS` of a program that ended; nothing if the server did."""
        try:
            words = near.recv(64).split()
        except ConnectionError:
            words = []
        if not words:
            self._lose_server()
            return
        child = self._children.pop(int(words[0]), None)
        if child is not None:  # else an orphan that a program left
            child.returncode = os.waitstatus_to_exitcode(int(words[1]))

    def _lose_server(self) -> None:
        """Its programs die with it."""
        if self._requests is not None:
            asyncio.get_running_loop().remove_reader(self._requests)
            self._requests.close()
            self._requests = None
        for child in self._children.values():
            child.returncode = KILLED
        self._children.clear()


def _offer(to: socket.socket, request: Mapping[str, object]) -> Offer:
    """Ask a server or a program for a new one. Raises `OSError` if that is gone."""
    data = json.dumps(request).encode()
    if len(data) > MAX_REQUEST_BYTES:
        raise ValueError(
            f"command: {len(data)} bytes of words, at most {MAX_REQUEST_BYTES}; write the program"
            " to a file"
        )
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    near.setblocking(False)
    pipes = [os.pipe() for _ in range(3)]
    theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
    ours = [pipes[0][1], pipes[1][0], pipes[2][0]]
    try:
        socket.send_fds(to, [data], [*theirs, far.fileno()])
    except OSError:
        near.close()
        for fd in ours:
            os.close(fd)
        raise
    finally:
        far.close()
        for fd in theirs:
            os.close(fd)
    return near, ours


async def _answer(child: ZygoteChild) -> bytes:
    """What a program says once it is split, woken until it does; `TimeoutError` if it does not."""
    for _ in range(round(ANSWER_TIMEOUT_S / SIGNAL_EVERY_S)):
        os.kill(child.pid, signal.SIGUSR1)
        child.signal(signal.SIGCONT)
        with contextlib.suppress(TimeoutError):
            return await _hear(child.control, SIGNAL_EVERY_S)
    raise TimeoutError


async def _hear(control: socket.socket, timeout_s: float = ANSWER_TIMEOUT_S) -> bytes:
    """One message; empty if the program ended. `TimeoutError` if none comes."""
    loop = asyncio.get_running_loop()
    return await asyncio.wait_for(loop.sock_recv(control, 4096), timeout_s)
