"""uvicorn, told to end replies in time: what runs at shutdown may finish for so long, no longer.

uvicorn itself waits for its connections first and tells the application afterwards; a reply that
takes longer is then cut off in its middle, without an answer that a client could read.
"""

import asyncio
import socket
import sys
from contextlib import suppress

import uvicorn

from baltoro.serve.background import BackgroundEngine

MARGIN_S = 10  # in which those whose replies were ended are told so


class Listener(uvicorn.Server):
    """A server whose engine drains from the moment at which it is told to stop."""

    def __init__(
        self, config: uvicorn.Config, background: BackgroundEngine, drain_s: float
    ) -> None:
        super().__init__(config)
        config.timeout_graceful_shutdown = int(drain_s) + MARGIN_S
        self._background = background
        self._drain_s = drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where: the port may be any that was free."""
        await super().startup(sockets)
        if self.started:
            host, port, *_ = self.servers[0].sockets[0].getsockname()
            shown = f"[{host}]" if ":" in host else host
            print(f"listening on http://{shown}:{port}/", file=sys.stderr)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take nothing new, let replies end or end them, close."""
        drain = asyncio.ensure_future(self._background.drain(self._drain_s))
        await super().shutdown(sockets)
        drain.cancel()  # not over only if somebody lost patience
        with suppress(asyncio.CancelledError):
            await drain
