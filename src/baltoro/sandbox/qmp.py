"""Talk to a QEMU over its control socket: one JSON command at a time, most events ignored."""

import asyncio
import json
import os
import socket
from typing import Any

from baltoro.sandbox.protocol import SandboxError

REPLY_TIMEOUT_S = 60.0


class Qmp:
    """The control connection of one QEMU."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer
        self._statuses: list[str] = []  # of the migration that runs, as its events tell

    async def negotiate(self) -> None:
        """Leave the greeting behind; the first thing to do."""
        await self._line()
        await self.run("qmp_capabilities")
        capabilities = [
            {"capability": name, "state": True} for name in ("events", "x-ignore-shared")
        ]
        await self.run("migrate-set-capabilities", capabilities=capabilities)

    async def migrate(self, command: str, fd: int) -> None:
        """Save (`migrate`) or load (`migrate-incoming`) all but memory, in a file that is closed.

        Returns when QEMU says that it is done.
        """
        with os.fdopen(fd, "rb"), self._writer.get_extra_info("socket").dup() as own:
            message = {"execute": "getfd", "arguments": {"fdname": "state"}}
            socket.send_fds(own, [json.dumps(message).encode() + b"\n"], [fd])
            await self._reply("getfd")
        self._statuses.clear()
        await self.run(command, uri="fd:state")
        while "completed" not in self._statuses:
            if "failed" in self._statuses:
                raise SandboxError(f"qemu {command} failed")
            await self._line()

    async def settle(self) -> None:
        """Wait for what was begun before: signals, and a `migrate` that has told its end.

        QEMU refuses to go on before the thread of the latter has let go, a moment later.
        """
        while (await self.run("query-status"))["status"] == "finish-migrate":
            await asyncio.sleep(0.001)  # else its main loop and we keep the lock from that thread

    async def run(self, command: str, **arguments: object) -> Any:
        """Run a command; returns its value. `SandboxError` with QEMU's words if it refuses."""
        message = {"execute": command, "arguments": arguments}
        self._writer.write(json.dumps(message).encode() + b"\n")
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise SandboxError(f"qemu is gone: {error}") from error
        return await self._reply(command)

    async def _reply(self, command: str) -> Any:
        while True:
            reply = await self._line()
            if "return" in reply:
                return reply["return"]
            if "error" in reply:
                raise SandboxError(f"qemu refused {command}: {reply['error']['desc']}")

    async def close(self) -> None:
        """Hang up; QEMU goes on."""
        self._writer.close()

    async def _line(self) -> dict[str, Any]:
        try:
            line = await asyncio.wait_for(self._reader.readline(), REPLY_TIMEOUT_S)
        except TimeoutError:
            raise SandboxError(
                f"qemu did not answer within {REPLY_TIMEOUT_S} s; destroy the sandbox"
            ) from None
        except ConnectionError:
            line = b""
        if not line:
            raise SandboxError("qemu is gone: it closed its control socket")
        reply: dict[str, Any] = json.loads(line)
        if reply.get("event") == "MIGRATION":
            self._statuses.append(reply["data"]["status"])
        return reply
