"""A program of the host with collected output, bounds and an end; what the process driver runs."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from typing import Protocol

from baltoro.sandbox.protocol import Command, ExecResult, LimitError, Output

PIECE_BYTES = 65536
EXIT_POLL_S = 0.005


class Child(Protocol):
    """What asyncio knows of a program that runs."""

    stdin: asyncio.StreamWriter | None
    stdout: asyncio.StreamReader | None
    stderr: asyncio.StreamReader | None

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """None while it runs; minus the signal that ended it."""


class HostProcess:
    """A running command (`baltoro.sandbox.protocol.Process`)."""

    def __init__(self, process_id: int, child: Child, command: Command):
        self.id = process_id
        self.child = child
        self.command = command
        self.exit_code: int | None = None
        self.room_bytes = 0
        self.max_output_bytes = 0
        self.pty_fd: int | None = None
        self._start = time.monotonic()
        self._queue: asyncio.Queue[Output | None] = asyncio.Queue(maxsize=64)
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, max_output_bytes: int) -> None:
        """Start collecting output."""
        self.room_bytes = self.max_output_bytes = max_output_bytes
        if self.pty_fd is not None:
            self._tasks = [asyncio.create_task(self._pump_pty(self.pty_fd))]
        else:
            out, err = self.child.stdout, self.child.stderr
            assert out is not None and err is not None
            self._tasks = [asyncio.create_task(self._pump(out, "stdout"))]
            self._tasks.append(asyncio.create_task(self._pump(err, "stderr")))
        self._tasks.append(asyncio.create_task(self._finish()))

    async def output(self) -> AsyncIterator[Output]:
        while self.exit_code is None:
            timeout_s = self.command.timeout_s
            left_s = None if timeout_s is None else self._start + timeout_s - time.monotonic()
            try:
                piece = await asyncio.wait_for(self._queue.get(), left_s)
            except TimeoutError:
                await self.end()
                raise LimitError(
                    f"command {self.id}: still running after timeout_s={timeout_s}; killed"
                ) from None
            if piece is None:
                self.exit_code = _shell_code(await self._exit())
                return
            self.room_bytes -= len(piece.data)
            if self.room_bytes < 0:
                await self.end()
                raise LimitError(
                    f"command {self.id}: wrote more than max_output_bytes="
                    f"{self.max_output_bytes}; killed"
                )
            yield piece

    async def write_stdin(self, data: bytes) -> None:
        if self.pty_fd is not None:
            await asyncio.to_thread(os.write, self.pty_fd, data or b"\x04")
            return
        stdin = self.child.stdin
        if stdin is None or stdin.is_closing():
            return
        if data:
            stdin.write(data)
            with contextlib.suppress(ConnectionError):
                await stdin.drain()
        else:
            stdin.close()

    async def kill(self, signal: int = 9) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal)

    async def wait(self) -> ExecResult:
        streams = {"stdout": bytearray(), "stderr": bytearray()}
        async for piece in self.output():
            streams[piece.stream] += piece.data
        return ExecResult(
            exit_code=255 if self.exit_code is None else self.exit_code,
            stdout=bytes(streams["stdout"]),
            stderr=bytes(streams["stderr"]),
            wall_s=time.monotonic() - self._start,
        )

    async def end(self) -> None:
        """Kill its group and let go of its pipes."""
        await self.kill()
        await self.release()

    async def release(self) -> None:
        """Let go of its pipes; a daemon it left behind lives on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._queue.full():
            self._queue.get_nowait()
        self._queue.put_nowait(None)  # whoever still reads its output hears of the end
        self.exit_code = self.exit_code if self.exit_code is not None else 137
        await self._exit()
        if self.child.stdin is not None:
            self.child.stdin.close()
        transport = getattr(self.child, "_transport", None)
        if transport is not None:
            transport.close()
        if self.pty_fd is not None:
            os.close(self.pty_fd)
            self.pty_fd = None

    async def _pump(self, stream: asyncio.StreamReader, name: str) -> None:
        while data := await stream.read(PIECE_BYTES):
            await self._queue.put(Output(stream=name, data=data))  # type: ignore[arg-type]

    async def _pump_pty(self, fd: int) -> None:
        while True:
            try:
                data = await asyncio.to_thread(os.read, fd, PIECE_BYTES)
            except OSError:  # EIO: the last user of the terminal is gone
                return
            if not data:
                return
            await self._queue.put(Output(stream="stdout", data=data))

    async def _finish(self) -> None:
        """End the stream with the command; a daemon holding its pipes gets 50 ms, no more."""
        await self._exit()
        await asyncio.wait(self._tasks[:-1], timeout=0.05)
        await self._queue.put(None)

    async def _exit(self) -> int:
        """The program's own end.

        asyncio's `wait` also waits for the pipes, which a daemon or a full buffer can hold open for
        ever.
        """
        while self.child.returncode is None:
            await asyncio.sleep(EXIT_POLL_S)
        return self.child.returncode


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code
