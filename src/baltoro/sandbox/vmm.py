"""One Firecracker process: requests over its control socket, the end of its console, its agent.

The control socket speaks HTTP/1.1 with JSON, as `qmp.py` is for QEMU. What the calls mean and in
which order they come is `firecracker.py`'s.
"""

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from baltoro.sandbox.channel import HEAD, Stream
from baltoro.sandbox.host import TAIL_CHARACTERS, connect_when_open
from baltoro.sandbox.protocol import (
    DriverUnavailableError,
    ImageError,
    LimitError,
    SandboxError,
    SnapshotError,
)

PORT = 52  # of the guest's vsock, where the agent listens
CALL_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 10.0
DIAL_S = 0.005
CONSOLE_BYTES = 4096

# What a refused call means and what to do, by its path.
ADVICE: Mapping[str, tuple[type[SandboxError], str]] = {
    "/machine-config": (LimitError, "lower limits.memory_bytes or limits.cpus"),
    "/boot-source": (DriverUnavailableError, "is the kernel an uncompressed vmlinux, readable?"),
    "/drives/image": (ImageError, "delete the disk in the cache, it is made anew"),
    "/vsock": (DriverUnavailableError, "is the folder of temporary files writable?"),
    "/actions": (DriverUnavailableError, "may this user open /dev/kvm, has the host memory left?"),
    "/vm": (SandboxError, "destroy the sandbox"),
    "/snapshot/create": (SnapshotError, "is there room for the whole memory in the store?"),
    "/snapshot/load": (SnapshotError, "restore it where it was taken, by the same release"),
}


class Vmm:
    """A running Firecracker."""

    def __init__(self, process: asyncio.subprocess.Process, runtime: Path):
        self._process = process
        self._runtime = runtime
        self._console = b""
        self._drain = asyncio.create_task(self._keep_console())

    @classmethod
    async def start(cls, binary: Path, sandbox_id: str, home: Path, disk: Path) -> "Vmm":
        """A fresh process in a folder of its own, where `disk` is that of the image."""
        runtime = Path(tempfile.mkdtemp(prefix="bf-"))  # socket paths must be short
        (home / "runtime").write_text(str(runtime))
        (runtime / "disk").symlink_to(disk)
        process = await asyncio.create_subprocess_exec(
            *(str(binary), "--id", sandbox_id, "--api-sock", "api"),
            cwd=runtime,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        (home / "pid").write_text(str(process.pid))
        return cls(process, runtime)

    async def call(self, method: str, path: str, body: Mapping[str, object]) -> None:
        """One request. Raises what `ADVICE` says of its path if Firecracker refuses it."""
        try:
            status, reply = await asyncio.wait_for(
                self._exchange(method, path, json.dumps(body).encode()), CALL_TIMEOUT_S
            )
        except (asyncio.IncompleteReadError, OSError) as error:  # a timeout is an OSError
            raise SandboxError(
                f"firecracker did not answer {method} {path} ({error!r}): {self.last_words()}"
            ) from error
        if status >= 300:
            kind, advice = ADVICE[path]
            fault = json.loads(reply or b"{}").get("fault_message", f"status {status}")
            raise kind(f"firecracker refused {method} {path}: {fault}; {advice}")

    async def dial(self) -> Stream:
        """A connection to the agent, as soon as it listens. The caller bounds the time."""
        while True:
            reader, writer = await connect_when_open(
                self._runtime / "vsock", self._process, self.last_words
            )
            with contextlib.suppress(ConnectionError):
                writer.write(f"CONNECT {PORT}\n".encode())
                if (await reader.readline()).startswith(b"OK "):
                    return Stream(reader, writer, (writer.transport,))
            writer.close()
            await asyncio.sleep(DIAL_S)

    async def dial_again(self, token: bytes) -> Stream:
        """A connection to an agent that was quiet when a snapshot was taken of it.

        The guest may still cut a connection that came before it had handled the reset, so one
        counts only when the agent has answered on it, in a frame with the token of its channel.
        """
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                while True:
                    stream = await self.dial()
                    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                        stream.writer.write(HEAD.pack(0, ord("Q"), 0))
                        answer = await stream.reader.readexactly(HEAD.size + len(token))
                        if answer.endswith(token):
                            return stream
                    stream.writer.close()
        except TimeoutError:
            raise SandboxError(
                f"the agent did not answer within {ANSWER_TIMEOUT_S} s of a snapshot; destroy the"
                f" sandbox: {self.last_words()}"
            ) from None

    def last_words(self) -> str:
        """The end of its console and log."""
        return self._console.decode(errors="replace").strip()[-TAIL_CHARACTERS:] or "no console"

    async def end(self) -> None:
        """Kill it. Twice is fine."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._drain
        shutil.rmtree(self._runtime, ignore_errors=True)

    async def _exchange(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """A request on a connection of its own, so that one given up leaves no reply behind."""
        reader, writer = await connect_when_open(
            self._runtime / "api", self._process, self.last_words
        )
        try:
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            sizes = [int(line[15:]) for line in lines if line.startswith("content-length:")]
            return int(lines[0].split()[1]), await reader.readexactly(sizes[0] if sizes else 0)
        finally:
            writer.close()

    async def _keep_console(self) -> None:
        """Read what guest and process write, however much, and keep the end."""
        assert self._process.stdout is not None
        while data := await self._process.stdout.read(CONSOLE_BYTES):
            self._console = (self._console + data)[-CONSOLE_BYTES:]
