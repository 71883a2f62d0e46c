"""The host's end of the agent's byte stream: commands, files, quiet before a snapshot.

One reader task sorts frames by id (`guest/agent.c` lists them). A channel can be quieted, dropped
and replaced by another one to the same agent, or to its copy in a branch: commands keep their
ids, and `attach` continues to read one that was started before.
"""

import asyncio
import errno
import os
import secrets
import struct
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from baltoro.sandbox.protocol import (
    MIB,
    Command,
    ExecResult,
    ImageError,
    LimitError,
    Output,
    SandboxError,
)

HEAD = struct.Struct("<IBI")
PIECE_BYTES = 60000
REPLY_TIMEOUT_S = 30.0
TOKEN_BYTES = 8
OUTPUT = (ord("O"), ord("e"))
TOO_MUCH = ord(">")  # ours, in place of the output that a command had no room for
DEFAULT_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}
Frame = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class Stream:
    """Both directions to an agent."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    transports: tuple[asyncio.BaseTransport, ...]  # to close at the end


class Channel:
    """Frames to and from one agent."""

    def __init__(self, stream: Stream, first_id: int = 1):
        self._reader = stream.reader
        self._writer = stream.writer
        self._transports = stream.transports
        self.next_id = first_id  # the first one that a successor of this channel may use
        self._queues: dict[int, asyncio.Queue[Frame]] = {}
        self._room_bytes: dict[int, int] = {}  # of output, kept until somebody reads it
        self.token = b""  # in every frame of the agent from `secure` on, also after a snapshot
        self._is_forged = False
        self.over_limit: Callable[[], str | None] = lambda: None  # which limit ended it, if one did
        self._hello = asyncio.get_running_loop().create_future()
        self.lost_reason: str | None = None
        self._pidfd: int | None = None
        self._task = asyncio.create_task(self._sort())

    def watch(self, pid: int) -> None:
        """Count the agent as gone when this process ends; a FIFO alone never tells."""
        self._pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._lose, "its first process ended")

    async def hello(self, timeout_s: float) -> None:
        """Wait for a new agent's first frame. `SandboxError` if it does not come."""
        try:
            await asyncio.wait_for(asyncio.shield(self._hello), timeout_s)
        except TimeoutError:
            raise SandboxError(
                f"the agent did not answer within {timeout_s} s of its start"
            ) from None

    async def send(self, kind: str, process_id: int, payload: bytes = b"") -> None:
        """Write one frame."""
        if self.lost_reason is not None:
            raise self._gone()
        self._writer.write(HEAD.pack(len(payload), ord(kind), process_id) + payload)
        try:
            await self._writer.drain()
        except OSError as error:
            raise SandboxError(f"the sandbox is gone: {error}") from error

    def subscribe(self, process_id: int) -> asyncio.Queue[Frame]:
        """The queue of frames for one id, made on first use."""
        return self._queues.setdefault(process_id, asyncio.Queue())

    def forget(self, process_id: int) -> None:
        """Stop keeping frames for an id."""
        self._queues.pop(process_id, None)
        self._room_bytes.pop(process_id, None)

    def bound(self, process_id: int, max_bytes: int) -> None:
        """Keep no more output of a command than this: one that writes more is killed."""
        self._room_bytes[process_id] = max_bytes

    def new_id(self) -> int:
        """A fresh id."""
        self.next_id += 1
        return self.next_id - 1

    async def receive(self, queue: asyncio.Queue[Frame]) -> Frame:
        """The next frame of a queue. `SandboxError` once the agent is gone and it is empty."""
        is_over = self.lost_reason is not None and queue.empty()
        frame = (ord("!"), b"") if is_over else await queue.get()
        if frame[0] == ord("!"):
            raise self._gone()
        return frame

    async def reply(self, queue: asyncio.Queue[Frame]) -> Frame:
        """What the agent itself answers. `SandboxError` if it does not: its machine is swamped."""
        try:
            return await asyncio.wait_for(self.receive(queue), REPLY_TIMEOUT_S)
        except TimeoutError:
            raise SandboxError(
                f"the agent did not answer within {REPLY_TIMEOUT_S} s; destroy the sandbox"
            ) from None

    async def secure(self) -> None:
        """Agree on a token that no other program of the sandbox knows; once in an agent's life."""
        token = secrets.token_bytes(TOKEN_BYTES)
        await self._ask("T", token)
        self.token = token

    async def quiet(self) -> None:
        """Make the agent send nothing until `go_on`; on return the stream is empty."""
        await self._ask("Q")

    async def go_on(self) -> None:
        """End `quiet`, in the agent or in its restored copy."""
        await self.send("G", 0)

    async def reseed(self) -> None:
        """Mix in host randomness, so that branches draw different numbers, and set its clock."""
        await self._ask("S", struct.pack("<Q", time.time_ns()) + secrets.token_bytes(64))

    async def _ask(self, kind: str, payload: bytes = b"") -> None:
        """Send a frame that the agent itself answers."""
        process_id = self.new_id()
        queue = self.subscribe(process_id)
        await self.send(kind, process_id, payload)
        await self.reply(queue)
        self.forget(process_id)

    async def start(self, command: Command, max_output_bytes: int) -> "AgentProcess":
        """Start a command. `ImageError` if it cannot be run, `LimitError` if too many run."""
        flags = (1 if command.use_pty else 0) | 2
        env = {**DEFAULT_ENV, **command.env}
        words = [command.cwd, str(len(command.argv)), *command.argv]
        words += [f"{key}={value}" for key, value in env.items()]
        payload = bytes([flags]) + b"".join(word.encode() + b"\0" for word in words)
        if len(payload) > MIB:
            raise ValueError(f"command: {len(payload)} bytes of words, at most {MIB}")
        process = AgentProcess(self, self.new_id(), command.timeout_s, max_output_bytes)
        await self.send("X", process.id, payload)
        if command.stdin is not None:
            await process.write_stdin(command.stdin)
            if command.stdin:
                await process.write_stdin(b"")
        return process

    async def read(self, path: str, max_bytes: int) -> bytes:
        """A file's bytes, read by the agent, which stops at `max_bytes`."""
        process_id = self.new_id()
        queue = self.subscribe(process_id)
        await self.send("R", process_id, f"{path}\0{max_bytes}".encode())
        data = bytearray()
        while True:
            kind, payload = await self.reply(queue)
            if kind == ord("E"):
                break
            if len(data) <= max_bytes:
                data += payload
        self.forget(process_id)
        if struct.unpack("<I", payload)[0] == errno.EFBIG or len(data) > max_bytes:
            raise LimitError(f"read: {path!r} is longer than max_bytes={max_bytes}; raise it")
        _raise_errno(payload, path)
        return bytes(data)

    async def write(self, path: str, data: bytes, mode: int) -> None:
        """Replace a file's bytes through the agent."""
        process_id = self.new_id()
        queue = self.subscribe(process_id)
        await self.send("W", process_id, f"{mode:o}\0{path}".encode())
        for start in range(0, len(data), PIECE_BYTES):
            await self.send("D", process_id, data[start : start + PIECE_BYTES])
        await self.send("D", process_id)
        _, payload = await self.reply(queue)
        self.forget(process_id)
        _raise_errno(payload, path)

    async def detach(self) -> None:
        """Let go of the stream of a quiet agent; commands wait for `reattach`."""
        self._task.cancel()
        for transport in self._transports:
            transport.close()
        await asyncio.gather(self._task, return_exceptions=True)

    def reattach(self, stream: Stream) -> None:
        """Go on with another stream to the same agent."""
        self._reader, self._writer, self._transports = (
            stream.reader,
            stream.writer,
            stream.transports,
        )
        self._task = asyncio.create_task(self._sort())

    async def close(self) -> None:
        """Let go of the stream for good; the agent goes on."""
        self.lost_reason = self.lost_reason or "closed"
        self._unwatch()
        await self.detach()
        self._wake()

    def _lose(self, reason: str) -> None:
        self.lost_reason = self.lost_reason or reason
        self._unwatch()
        self._wake()

    def _gone(self) -> SandboxError:
        limit = self.over_limit()
        if self._is_forged:
            limit = "a program in it wrote into its agent's stream"
        if limit is not None:
            return LimitError(f"the sandbox is gone: {limit}")
        return SandboxError(f"the sandbox is gone: {self.lost_reason}")

    def _unwatch(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _wake(self) -> None:
        for queue in self._queues.values():
            queue.put_nowait((ord("!"), b""))
        if not self._hello.done():
            self._hello.set_exception(SandboxError(f"the sandbox is gone: {self.lost_reason}"))
            self._hello.exception()  # retrieved: nobody may be waiting

    async def _sort(self) -> None:
        try:
            while True:
                size, kind, process_id = HEAD.unpack(await self._reader.readexactly(HEAD.size))
                self._is_forged = self.token != await self._reader.readexactly(len(self.token))
                if size > MIB or self._is_forged:
                    raise ValueError(f"a frame of {size} bytes")
                payload = await self._reader.readexactly(size)
                if kind == ord("h"):
                    if not self._hello.done():
                        self._hello.set_result(None)
                elif process_id in self._queues and self._has_room(kind, process_id, payload):
                    self._queues[process_id].put_nowait((kind, payload))
        except (asyncio.IncompleteReadError, OSError, ValueError) as error:
            self._lose(f"its stream ended ({error})")

    def _has_room(self, kind: int, process_id: int, payload: bytes) -> bool:
        """Whether a frame may be kept; the first that may not ends its command."""
        if kind not in OUTPUT or process_id not in self._room_bytes:
            return True
        had_room = self._room_bytes[process_id] >= 0
        self._room_bytes[process_id] -= len(payload)
        if self._room_bytes[process_id] >= 0:
            return True
        if had_room:
            self._queues[process_id].put_nowait((TOO_MUCH, b""))
            self._writer.write(HEAD.pack(4, ord("K"), process_id) + struct.pack("<I", 9))
        return False


class AgentProcess:
    """A command run by the agent (`baltoro.sandbox.protocol.Process`)."""

    def __init__(
        self, channel: Channel, process_id: int, timeout_s: float | None, max_output_bytes: int
    ):
        self.id = process_id
        self._channel = channel
        self._queue = channel.subscribe(process_id)
        channel.bound(process_id, max_output_bytes)
        self._start = time.monotonic()
        self._deadline = None if timeout_s is None else self._start + timeout_s
        self._timeout_s = timeout_s
        self._max_output_bytes = max_output_bytes
        self.exit_code: int | None = None

    async def output(self) -> AsyncIterator[Output]:
        while self.exit_code is None:
            try:
                left_s = None if self._deadline is None else self._deadline - time.monotonic()
                kind, payload = await asyncio.wait_for(self._channel.receive(self._queue), left_s)
            except TimeoutError:
                await self._give_up()
                raise LimitError(
                    f"command {self.id}: still running after timeout_s={self._timeout_s}; killed"
                ) from None
            if kind == ord("Z"):
                self.exit_code = _exit_code(payload)
                self._channel.forget(self.id)
            elif kind == ord("E"):
                self._channel.forget(self.id)
                self.exit_code = 127
                _raise_start(payload)
            elif kind == TOO_MUCH:
                await self._give_up()
                raise LimitError(
                    f"command {self.id}: wrote more than max_output_bytes="
                    f"{self._max_output_bytes}; killed"
                )
            else:
                yield Output(stream="stdout" if kind == ord("O") else "stderr", data=payload)

    async def write_stdin(self, data: bytes) -> None:
        if not data:
            await self._channel.send("I", self.id)
        for start in range(0, len(data), PIECE_BYTES):
            await self._channel.send("I", self.id, data[start : start + PIECE_BYTES])

    async def kill(self, signal: int = 9) -> None:
        await self._channel.send("K", self.id, struct.pack("<I", signal))

    async def wait(self) -> ExecResult:
        streams = {"stdout": bytearray(), "stderr": bytearray()}
        async for piece in self.output():
            streams[piece.stream] += piece.data
        return ExecResult(
            exit_code=self.exit_code if self.exit_code is not None else 255,
            stdout=bytes(streams["stdout"]),
            stderr=bytes(streams["stderr"]),
            wall_s=time.monotonic() - self._start,
        )

    async def _give_up(self) -> None:
        """Kill and drain until the agent confirms, so that nothing runs on after the error."""
        await self.kill()
        while True:
            kind, _ = await self._channel.reply(self._queue)
            if kind in (ord("Z"), ord("E")):
                self.exit_code = 137
                self._channel.forget(self.id)
                return


def _exit_code(payload: bytes) -> int:
    code = os.waitstatus_to_exitcode(struct.unpack("<I", payload)[0])
    return code if code >= 0 else 128 - code


def _raise_start(payload: bytes) -> None:
    code = struct.unpack("<I", payload)[0]
    if code in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR):
        raise ImageError(
            f"cannot run the program: {os.strerror(code)}; the image lacks it, its interpreter or"
            " the working directory"
        )
    raise LimitError(
        f"cannot start the command: {os.strerror(code)}; processes or memory are used up: end some"
        " or raise limits.max_processes or limits.memory_bytes"
    )


def _raise_errno(payload: bytes, path: str) -> None:
    code = struct.unpack("<I", payload)[0]
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE):
        raise LimitError(
            f"{path!r}: {os.strerror(code)}; delete files, or raise limits.disk_bytes or, where"
            " files lie in memory, limits.memory_bytes"
        )
    if code:
        raise OSError(code, os.strerror(code), path)


async def open_pipes(read_fd: int, write_fd: int) -> Stream:
    """A stream over two pipe or FIFO ends, which it owns from here on."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=4 * MIB)
    protocol = asyncio.StreamReaderProtocol(reader)
    read_transport, _ = await loop.connect_read_pipe(
        lambda: protocol, os.fdopen(read_fd, "rb", buffering=0)
    )
    write_transport, write_protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(write_fd, "wb", buffering=0)
    )
    writer = asyncio.StreamWriter(write_transport, write_protocol, None, loop)
    return Stream(reader, writer, (read_transport, write_transport))
