"""Sandboxes under the keys of those who asked: a caller that gave up finds its own by asking again.

A key is taken from the first moment, while its sandbox is still being made.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from baltoro.sandbox.protocol import Sandbox

T = TypeVar("T", bound=Sandbox)


class Keyed(Generic[T]):
    """The sandboxes of one driver that have a key, made or being made."""

    def __init__(self) -> None:
        self._made: dict[str, asyncio.Future[T]] = {}

    def get(self, key: str | None) -> asyncio.Future[T] | None:
        """What is made under a key; to be shielded from its caller's end."""
        return None if key is None else self._made.get(key)

    async def make(self, key: str, making: Coroutine[Any, Any, T]) -> T:
        """Make it under the key, which a failure gives back; goes on if the caller gives up."""
        made = asyncio.ensure_future(making)
        self._made[key] = made

        def drop_failed(done: asyncio.Future[T]) -> None:
            if done.cancelled() or done.exception() is not None:
                self._made.pop(key, None)

        made.add_done_callback(drop_failed)
        return await asyncio.shield(made)

    def forget(self, sandbox_id: str) -> None:
        """Give back the keys of a sandbox that is gone."""
        for key, made in list(self._made.items()):
            if made.done() and not made.exception() and made.result().id == sandbox_id:
                del self._made[key]

    async def settle(self) -> None:
        """Wait until nothing is being made any more."""
        for made in list(self._made.values()):
            await asyncio.wait([made])
