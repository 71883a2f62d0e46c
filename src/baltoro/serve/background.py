"""The engine in a thread of its own, and its replies as asynchronous streams.

Only that thread touches the engine: what others want is called there between two steps. A stream
that its reader leaves is aborted before the next step.
"""

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch

from baltoro.serve.engine import Engine
from baltoro.serve.request import FinishReason, NewToken, Request, Sequence

T = TypeVar("T")
GATHER_S = 0.03  # that an idle engine waits at most for requests on their way in


class EngineStopped(RuntimeError):
    """The engine takes no more requests: it is being shut down, or a step failed."""


class Event(NamedTuple):
    """What happened to a sequence."""

    token: NewToken | None
    finish_reason: FinishReason | None  # with the last event


class Stream:
    """The tokens of one request; made in the event loop that reads it."""

    def __init__(self) -> None:
        self.sequence: Sequence | None = None  # once the engine has it
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    async def events(self) -> AsyncIterator[Event]:
        """Events up to the one with a finish reason."""
        while True:
            event = await self._events.get()
            yield event
            if event.finish_reason is not None:
                return

    def put(self, event: Event) -> None:
        """Hand over an event, from the engine's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


class BackgroundEngine:
    """Steps an engine as long as there is work."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_alive = True
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[Sequence, Stream] = {}
        self._num_arriving = 0  # written in the event loop alone
        self.retrying: WeakSet[Any] = WeakSet()  # who may submit once more when a reply is read
        self.is_draining = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """For as long as a request is on its way in: an idle engine waits for it a little.

        Raises `EngineStopped` for one that comes after `drain` has begun.
        """
        if self.is_draining:
            raise EngineStopped("the server is shutting down")
        self._num_arriving += 1
        try:
            yield
        finally:
            self._num_arriving -= 1
            self._calls.put(_nothing)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """The result of a function that runs in the engine's thread, between two steps.

        Its `ValueError` and `RuntimeError` are raised here. Raises `EngineStopped`.
        """
        future: Future[T] = Future()
        self._calls.put(partial(_settle, future, function, self))
        if not self.is_alive:
            raise EngineStopped("the engine has stopped")
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future  # as in `_settle`

    async def submit(self, requests: Callable[[Engine], list[Request]], count: int) -> list[Stream]:
        """Queue `count` requests made in the engine's thread, all or none.

        Raises `EngineStopped`, `QueueExceeded`, and what `requests` and `Engine.submit` raise.
        """
        streams = [Stream() for _ in range(count)]

        def submit(engine: Engine) -> None:
            engine.scheduler.check_together(count)  # before pictures are looked at
            made = requests(engine)
            engine.scheduler.check_together(count, sum(request.budget for request in made))
            try:
                for request, stream in zip(made, streams, strict=True):
                    stream.sequence = engine.submit(request)
                    self._streams[stream.sequence] = stream
            except (ValueError, RuntimeError):
                self._abort(streams)
                raise

        try:
            await self.call(submit)
        except asyncio.CancelledError:
            # the client left while its requests were on the way in
            self.cancel(streams)
            raise
        return streams

    def cancel(self, streams: list[Stream]) -> None:
        """Free the sequences of streams that nobody reads any more."""
        self._calls.put(lambda: self._abort(streams))

    def abort(self, streams: list[Stream]) -> None:
        """Free the sequences of streams, whose readers see them end."""
        self._calls.put(lambda: self._abort(streams, tells=True))

    async def drain(self, seconds: float) -> None:
        """Take nothing new, let what came before end for so long, then stop the thread."""
        self.is_draining = True
        deadline = asyncio.get_running_loop().time() + seconds
        while (self._streams or self._num_arriving or self.retrying) and self.is_alive:
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.02)
        self._is_stopping = True
        self._calls.put(_nothing)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def _run(self) -> None:
        device = self.engine.runner.device
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # of this thread; kernels and streams go there
            while not self._is_stopping:
                self._serve_calls()
                self._step()
        finally:
            # whatever ended the thread, nobody waits for it
            self.is_alive = False
            for stream in self._streams.values():
                stream.put(Event(None, "error"))
            self._streams.clear()
            # answered without the engine, so that none can fail and leave the next one waiting
            while not self._calls.empty():
                self._calls.get()()

    def _step(self) -> None:
        for sequence, token in self.engine.step():
            self._send(sequence, token)

    def _serve_calls(self) -> None:
        if self.engine.is_idle:
            self._calls.get()()
            # those that came at the same moment are computed together, and read undisturbed
            deadline = time.monotonic() + GATHER_S
            while self._num_arriving and (left := deadline - time.monotonic()) > 0.0:
                with suppress(queue.Empty):
                    self._calls.get(timeout=left)()
        while not self._calls.empty():
            self._calls.get()()

    def _send(self, sequence: Sequence, token: NewToken | None) -> None:
        stream = self._streams.get(sequence)
        if stream is None:
            return
        # of several tokens that one step gave, only the last ends the reply
        is_last = token is None or token is sequence.new_tokens[-1]
        reason = sequence.finish_reason if is_last else None
        stream.put(Event(token, reason))
        if reason is not None:
            del self._streams[sequence]

    def _abort(self, streams: list[Stream], *, tells: bool = False) -> None:
        for stream in streams:
            if self.is_alive and stream.sequence is not None:
                self.engine.abort(stream.sequence)
                if self._streams.pop(stream.sequence, None) is not None and tells:
                    stream.put(Event(None, "abort"))


def _nothing() -> None:
    """Wakes the thread."""


def _settle(
    future: "Future[T]", function: Callable[[Engine], T], background: BackgroundEngine
) -> None:
    try:
        # not for one who left meanwhile: an answer to a cancelled future would end the thread
        if future.set_running_or_notify_cancel():
            if not background.is_alive:
                raise EngineStopped("the engine has stopped")
            future.set_result(function(background.engine))
    except (ValueError, RuntimeError) as error:
        future.set_exception(error)
    finally:
        if not future.done():  # by an error of ours, which ends the thread
            future.set_exception(EngineStopped("the engine has stopped"))
        # an error's traceback would lead back to it, and keep alive what the callers hold
        del future
