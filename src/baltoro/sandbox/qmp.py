"""Talk to a QEMU over its control socket: one JSON command at a time, events ignored."""

import asyncio
import json
from typing import Any

from baltoro.sandbox.protocol import SandboxError

REPLY_TIMEOUT_S = 60.0


class Qmp:
    """The control connection of one QEMU."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer

    async def negotiate(self) -> None:
        """Leave the greeting behind; the first thing to do."""
        await self._line()
        await self.run("qmp_capabilities")

    async def run(self, command: str, **arguments: object) -> Any:
        """Run a command; returns its value. `SandboxError` with QEMU's words if it refuses."""
        message = {"execute": command, "arguments": arguments}
        self._writer.write(json.dumps(message).encode() + b"\n")
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise SandboxError(f"qemu is gone: {error}") from error
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
        except ConnectionError:
            line = b""
        if not line:
            raise SandboxError("qemu is gone: it closed its control socket")
        reply: dict[str, Any] = json.loads(line)
        return reply
