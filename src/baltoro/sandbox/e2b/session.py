"""One sandbox of the server: awake while it is used, stored when paused, with its commands.

To a client a sandbox runs until it is paused, killed or over its time. Beneath that the keeper may
freeze or store an idle one in which no command runs; the next call wakes it, and the client does
not notice.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from baltoro.sandbox.e2b.commands import Commands, Running
from baltoro.sandbox.e2b.connect import RpcError
from baltoro.sandbox.e2b.files import Watcher
from baltoro.sandbox.e2b.records import Record, Records, Started
from baltoro.sandbox.keeper import Keeper
from baltoro.sandbox.protocol import Command, Sandbox, SandboxError


class NotRunningError(RpcError):
    """The sandbox is paused, killed or over its time. Clients look for these words."""

    def __init__(self, sandbox_id: str, reason: str):
        super().__init__("unavailable", f"The sandbox {sandbox_id} was not found: it is {reason}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    """Where commands and relative paths start."""

    path: str
    env: dict[str, str]  # of every command


class Session:
    """A sandbox and all that clients started in it."""

    def __init__(self, record: Record, keeper: Keeper, records: Records, home: Home):
        self.id = record.id
        self.home = home
        self.commands = Commands()
        self.watchers: dict[str, Watcher] = {}
        self._keeper = keeper
        self._records = records
        self._turn = asyncio.Lock()  # pause and resume do not overlap

    @property
    def record(self) -> Record:
        """What is known of it. `NotRunningError` if it was killed meanwhile."""
        record = self._records.get(self.id)
        if record is None:
            raise NotRunningError(self.id, "gone")
        return record

    @contextlib.asynccontextmanager
    async def awake(self) -> AsyncIterator[Sandbox]:
        """The running sandbox. `NotRunningError` if it is paused and does not wake itself."""
        await self._ensure_running()
        try:
            async with self._keeper.use(self.id) as sandbox:
                if self.record.is_paused:  # while this call waited
                    raise NotRunningError(self.id, "being paused")
                yield sandbox
        except SandboxError:
            if self._records.get(self.id) is None:
                raise NotRunningError(self.id, "gone") from None
            raise

    async def start(self, command: Command, started: Started) -> Running:
        """Start a command; its id replaces that of `started`."""
        async with contextlib.AsyncExitStack() as stack:
            sandbox = await stack.enter_async_context(self.awake())
            process = await sandbox.start(command)
            named = replace(started, id=process.id)
            return self.commands.add(named, process, command.timeout_s, stack.pop_all())

    async def pause(self) -> bool:
        """Store it until a client resumes it; False if it is. Listeners hear that it is gone."""
        async with self._turn:
            if self.record.is_paused:
                return False
            self._records.change(self.id, is_paused=True)
            try:
                await self._store()
            except SandboxError:
                self._records.change(self.id, is_paused=False)
                raise
            return True

    async def store(self) -> None:
        """Store it as it is; the next call wakes it."""
        async with self._turn:
            await self._store()

    async def resume(self) -> bool:
        """Wake it; False if it is awake. Commands that the driver kept go on under their ids."""
        async with self._turn:
            was_paused = self.record.is_paused
            if not was_paused and not self.record.commands:
                return False
            async with self._keeper.use(self.id) as sandbox:
                for started in self.record.commands:
                    with contextlib.suppress(SandboxError):  # a driver that keeps files only
                        process = await sandbox.attach(started.id)
                        hold = contextlib.AsyncExitStack()
                        await hold.enter_async_context(self._keeper.use(self.id))
                        self.commands.add(started, process, None, hold)
            self._records.change(self.id, is_paused=False, commands=())
            return was_paused

    async def kill(self) -> None:
        """End it for good."""
        self._records.remove(self.id)
        await self._keeper.destroy(self.id)
        await self.commands.drain()

    async def make_home(self) -> None:
        """The folder where commands start."""
        async with self.awake() as sandbox:
            path = self.home.path.lstrip("/")
            result = await sandbox.exec(Command(argv=("mkdir", "-p", f"./{path}")))
        if result.exit_code != 0:
            raise SandboxError(f"{self.home.path}: {result.stderr.decode(errors='replace')}")

    def check_running(self) -> None:
        """`NotRunningError` unless a call would find it running."""
        record = self.record
        if record.is_paused and not record.wakes_itself:
            raise NotRunningError(self.id, "paused; connect to it first")
        if time.time() >= record.end_at:
            raise NotRunningError(self.id, "over its time")

    async def _ensure_running(self) -> None:
        self.check_running()
        if self.record.is_paused or self.record.commands:
            await self.resume()

    async def _store(self) -> None:
        if not self.record.commands:  # else it was not woken since it was stored
            self._records.change(self.id, commands=self.commands.started())
            try:
                await self._keeper.store_away(self.id)
            except SandboxError:
                self._records.change(self.id, commands=())
                raise
            self._records.change(self.id, commands=await self.commands.drain())
