"""The commands of one sandbox: started, listened to by any number of clients, found again.

Output goes to those who listen at that moment, as envd has it. A command outlives its client, and
the sandbox's stay on disk if the driver keeps memory: after `adopt` it goes on under the same id.
"""

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from baltoro.sandbox.e2b.connect import Message, RpcError, as_rpc_error
from baltoro.sandbox.e2b.records import Started
from baltoro.sandbox.protocol import Command, LimitError, Process, SandboxError

Event = Message | RpcError | None  # what happened; how it failed; the end


@dataclass(kw_only=True)
class Running:
    """One command."""

    started: Started
    process: Process
    timeout_s: float | None
    since: float
    listeners: set[asyncio.Queue[Event]] = field(default_factory=set)
    task: asyncio.Task[None] | None = None

    def tell(self, event: Event) -> None:
        """Pass an event to everybody who listens."""
        for queue in self.listeners:
            queue.put_nowait(event)


class Commands:
    """What runs in one sandbox."""

    def __init__(self) -> None:
        self._running: dict[int, Running] = {}
        self._cut_off: list[Started] = []  # whose sandbox went away before they ended

    def started(self) -> tuple[Started, ...]:
        """What runs now."""
        return tuple(each.started for each in self._running.values())

    def find(self, selector: Mapping[str, Any]) -> Running:
        """The command of a process.ProcessSelector. `RpcError` if there is none."""
        for running in self._running.values():
            if selector.get("pid") == running.started.id:
                return running
            if selector.get("tag") is not None and selector["tag"] == running.started.tag:
                return running
        raise RpcError("not_found", f"process {dict(selector)}: not running")

    def add(
        self,
        started: Started,
        process: Process,
        timeout_s: float | None,
        hold: contextlib.AsyncExitStack,
    ) -> Running:
        """Follow a command; `hold` keeps its sandbox awake and is closed when it ends."""
        running = Running(
            started=started, process=process, timeout_s=timeout_s, since=time.monotonic()
        )
        self._running[started.id] = running
        running.task = asyncio.create_task(self._follow(running, hold))
        return running

    async def drain(self) -> tuple[Started, ...]:
        """Follow a sandbox that is gone to the end; returns what had not ended by then."""
        await asyncio.gather(*(each.task for each in self._running.values() if each.task))
        cut_off, self._cut_off = tuple(self._cut_off), []
        return cut_off

    async def _follow(self, running: Running, hold: contextlib.AsyncExitStack) -> None:
        stream_names = {"stdout": "stdout", "stderr": "stderr"}
        if running.started.uses_pty:
            stream_names["stdout"] = "pty"
        try:
            async for piece in running.process.output():
                text = base64.b64encode(piece.data).decode()
                running.tell({"data": {stream_names[piece.stream]: text}})
            result = await running.process.wait()
            running.tell({"end": _end(result.exit_code)})
            running.tell(None)
        except LimitError as error:
            is_late = (
                running.timeout_s is not None
                and time.monotonic() - running.since >= running.timeout_s
            )
            code = "deadline_exceeded" if is_late else "resource_exhausted"
            running.tell(RpcError(code, str(error)))
        except SandboxError as error:
            self._cut_off.append(running.started)
            running.tell(as_rpc_error(error))
        finally:
            self._running.pop(running.started.id, None)
            await hold.aclose()


async def listen(running: Running, keepalive_s: float | None) -> AsyncIterator[Message]:
    """process.ProcessEvent as JSON, from now to the command's end. Leaving does not end it."""
    queue: asyncio.Queue[Event] = asyncio.Queue()
    running.listeners.add(queue)
    try:
        yield {"start": {"pid": running.started.id}}
        while True:
            try:
                event = await asyncio.wait_for(queue.get(), keepalive_s)
            except TimeoutError:
                yield {"keepalive": {}}
                continue
            if event is None:
                return
            if isinstance(event, RpcError):
                raise event
            yield event
    finally:
        running.listeners.discard(queue)


def parse_start(
    message: Message, env: Mapping[str, str], home: str, timeout_s: float | None
) -> tuple[Command, str | None]:
    """A process.StartRequest as a command and its tag. `RpcError` if a field is wrong."""
    config = message.get("process") or {}
    argv = (config.get("cmd", ""), *config.get("args", ()))
    size = (message.get("pty") or {}).get("size")
    if size:  # the terminal gets its size before the program looks
        rows, cols = int(size.get("rows", 24)), int(size.get("cols", 80))
        argv = ("sh", "-c", f'stty rows {rows} cols {cols}; exec "$@"', "sh", *argv)
    try:
        command = Command(
            argv=argv,
            cwd=config.get("cwd") or home,
            env={"HOME": home, **env, **config.get("envs", {})},
            stdin=None if message.get("stdin", True) or size else b"",
            timeout_s=timeout_s,
            use_pty="pty" in message,
        )
    except ValueError as error:
        raise RpcError("invalid_argument", str(error)) from None
    return command, message.get("tag")


def _end(exit_code: int) -> Message:
    end: Message = {"exitCode": exit_code, "exited": True, "status": f"exit status {exit_code}"}
    if exit_code:
        end["error"] = f"exit status {exit_code}"
    return end
