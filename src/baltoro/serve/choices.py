"""From one API request to its engine requests, and from their streams to chunks and a whole answer.

`Choices` holds what a chat and a plain completion have in common; a subclass (`kinds`) says how a
prompt is made, how a reply is read and what the JSON looks like.
"""

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from baltoro.model.config import VisionConfig
from baltoro.serve.answer import (
    Answer,
    ChatReader,
    TextReader,
    logprob_entry,
    new_id,
    usage,
)
from baltoro.serve.background import BackgroundEngine, EngineStopped, Event, Stream
from baltoro.serve.engine import Engine, WeightsNotWhole
from baltoro.serve.form import FormError
from baltoro.serve.generate import image_features
from baltoro.serve.grammar import Grammars
from baltoro.serve.metrics import Metrics
from baltoro.serve.options import ServerConfig
from baltoro.serve.prefix import MediaSpan
from baltoro.serve.protocol import ApiError, ChatBody, CompletionBody
from baltoro.serve.request import Grammar, Request
from baltoro.serve.scheduler import ContextExceeded, Overloaded, QueueExceeded
from baltoro.text.messages import PromptTooLong
from baltoro.text.processor import Processor, Prompt
from baltoro.text.reply import Delta

Reader = ChatReader | TextReader
JsonDict = dict[str, Any]


class Piece(NamedTuple):
    """What a choice goes on by."""

    place: int  # of the choice
    delta: Delta
    logprob: JsonDict | None  # of the token, if asked for
    answer: Answer | None  # with the last piece


class Choices(ABC):
    """The choices of one request: `n` of each prompt, one prompt after the other."""

    kind: str  # of its id
    object: str
    chunk_object: str

    def __init__(
        self,
        body: ChatBody | CompletionBody,
        processor: Processor,
        background: BackgroundEngine,
        metrics: Metrics,
        config: ServerConfig,
        grammars: Grammars,
    ) -> None:
        self.body = body
        self.processor = processor
        self.id = body.request_id or new_id(self.kind)
        self._background = background
        self._metrics = metrics
        self._config = config
        self._grammars = grammars
        self._is_aborted = False
        self._grammar: Grammar | None = None
        self._seed = body.first_seed()
        self.count = body.n * body.num_prompts
        self._attempts = [0] * self.count
        self._held: list[list[Piece]] = [[] for _ in range(self.count)]  # until a reply is good
        self._created = int(time.time())
        self._began = time.monotonic()
        self._streams: list[Stream] = []
        self._readers: list[Reader] = []
        self._call_ids: list[list[str]] = [[] for _ in range(self.count)]
        self._logprobs: list[list[JsonDict]] = [[] for _ in range(self.count)]
        self._num_tokens = [0] * self.count
        self._last_at = [0.0] * self.count  # when the last token came, by the monotonic clock
        self._answers: list[Answer | None] = [None] * self.count

    async def start(self, prompts: list[Prompt]) -> None:
        """Queue the choices. Raises what the engine raises."""
        self._readers = [self.reader() for _ in range(self.count)]
        self._streams = await self._background.submit(
            lambda engine: [r for prompt in prompts for r in self._requests(engine, prompt)],
            self.count,
        )
        if self.body.retries:
            self._background.retrying.add(self)
        for prompt in prompts:
            self._metrics.observe("vllm:request_prompt_tokens", len(prompt.ids))
        if self._is_aborted:
            self.abort()

    def refusal(self, error: ValueError) -> ApiError:
        """What a client is told of an error of `prompts` or `start`."""
        if isinstance(error, FormError):
            return ApiError(400, str(error), param=error.field, code="invalid_schema")
        if isinstance(error, QueueExceeded):
            param = "n" if self.body.n > 1 else "prompt"
            return ApiError(400, f"{param}: {error}", param=param)
        param = "prompt" if isinstance(self.body, CompletionBody) else "messages"
        is_long = isinstance(error, (ContextExceeded, PromptTooLong))
        code = "context_length_exceeded" if is_long else None  # at which clients shorten it
        return ApiError(400, str(error), param=param, code=code)

    def cancel(self) -> None:
        """Free what still runs."""
        self._background.retrying.discard(self)
        self._background.cancel(self._streams)

    def abort(self) -> None:
        """End what still runs and answer with what there is."""
        self._is_aborted = True
        self._background.abort(self._streams)

    async def chunks(self) -> AsyncIterator[JsonDict]:
        """What is streamed, in order, each choice's parts in its own."""
        for index in range(self.count):
            for first in self.first_parts():
                yield self._chunk(index, first, None)
        async for index, delta, logprob, answer in self._pieces():
            part = self.part(index, delta, logprob)
            if part:
                yield self._chunk(index, part, None)
            if answer is not None:
                yield self._chunk(index, self.last_part(), answer.finish_reason)
        options = self.body.stream_options
        if options is not None and options.include_usage:
            yield {**self._head(self.chunk_object), "choices": [], "usage": self._usage()}

    async def whole(self) -> JsonDict:
        """The answer in one piece, with the content that the chunks add up to."""
        async for index, delta, logprob, _ in self._pieces():
            self.part(index, delta, logprob)
        choices = []
        for index, answer in enumerate(self._answers):
            assert answer is not None
            entry = {"index": index, **self.choice(index, answer)}
            choices.append({**entry, "finish_reason": answer.finish_reason})
        return {**self._head(self.object), "choices": choices, "usage": self._usage()}

    @abstractmethod
    def prompts(self) -> list[Prompt]:
        """The prompts; `ValueError` for one that cannot be made, `FormError` for a grammar.

        Takes long for pictures and large schemas.
        """

    @abstractmethod
    def reader(self) -> Reader:
        """A new reader of one reply."""

    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens to report; None for no log-probabilities at all."""

    @abstractmethod
    def first_parts(self) -> list[JsonDict]:
        """What a choice's chunks begin with."""

    @abstractmethod
    def part(self, index: int, delta: Delta, logprob: JsonDict | None) -> JsonDict:
        """A chunk's part of a choice; empty if there is nothing to send."""

    @abstractmethod
    def last_part(self) -> JsonDict:
        """What goes with the finish reason."""

    @abstractmethod
    def choice(self, index: int, answer: Answer) -> JsonDict:
        """A whole choice without index and finish reason."""

    async def _pieces(self) -> AsyncIterator[Piece]:
        """Deltas of all choices as they come; the last of each with its answer."""
        merged: asyncio.Queue[tuple[int, Stream, Event]] = asyncio.Queue()
        tasks: list[asyncio.Task[None]] = []

        async def forward(index: int, stream: Stream) -> None:
            async for event in stream.events():
                await merged.put((index, stream, event))

        def follow(index: int) -> None:
            tasks.append(asyncio.create_task(forward(index, self._streams[index])))

        for index in range(self.count):
            follow(index)
        try:
            while any(answer is None for answer in self._answers):
                index, stream, event = await merged.get()
                if self._answers[index] is not None or stream is not self._streams[index]:
                    continue  # it ran a little beyond a stop string
                if event.finish_reason == "error":
                    raise self._failed()
                pieces = self._take(index, event)
                answer = pieces[-1].answer
                if self._attempts[index] < self.body.retries:
                    self._held[index] += pieces
                    if answer is None:
                        continue
                    if answer.is_lost:
                        await self._retry(index)
                        follow(index)
                        continue
                    pieces, self._held[index] = self._held[index], []
                self._answers[index] = answer
                for piece in pieces:
                    yield piece
        finally:
            for task in tasks:
                task.cancel()
            self.cancel()

    def _failed(self) -> ApiError:
        if self._background.is_draining:
            shown = "the server is shutting down and could not wait for this reply"
            return ApiError(503, shown, code="unavailable", retry_after=5)
        return ApiError(500, "the engine could not go on with this reply")

    async def _retry(self, index: int) -> None:
        """Throw a reply away and queue another one, under a seed of its own."""
        self._attempts[index] += 1
        self._metrics.num_retried += 1
        self._readers[index] = self.reader()
        self._num_tokens[index] = 0
        self._held[index].clear()
        self._logprobs[index].clear()
        old = self._streams[index].sequence
        assert old is not None
        seed = old.request.seed + self.body.n
        again = [replace(old.request, seed=seed)]
        try:
            (self._streams[index],) = await self._background.submit(lambda _: again, 1)
        except (Overloaded, EngineStopped, WeightsNotWhole) as error:
            raise ApiError(503, str(error), code="unavailable", retry_after=5) from None
        if self._is_aborted:
            self.abort()

    def _take(self, index: int, event: Event) -> list[Piece]:
        """What an event adds; if it is the last one, the last piece has the answer."""
        reader, token = self._readers[index], event.token
        pieces = []
        if token is not None:
            self._count(index)
            logprob = None
            if self.num_logprobs() is not None:
                logprob = logprob_entry(self.processor.tokenizer, token)
                self._logprobs[index].append(logprob)
            pieces = [Piece(index, reader.feed(token.id), logprob, None)]
        if event.finish_reason is None and not reader.is_over:
            return pieces
        delta, answer = reader.finish(event.finish_reason or "stop")
        seconds = time.monotonic() - self._began
        self._metrics.finish(answer, self._num_tokens[index], seconds, self.body.effort)
        sequence = self._streams[index].sequence
        assert sequence is not None
        self._metrics.observe_times(sequence, time.monotonic())
        if event.finish_reason is None:
            self._background.cancel([self._streams[index]])
        return [*pieces, Piece(index, delta, None, answer)]

    def _count(self, index: int) -> None:
        now = time.monotonic()
        if self._num_tokens[index]:
            since = now - self._last_at[index]
            self._metrics.observe("vllm:inter_token_latency_seconds", since)
        elif not self._attempts[index]:
            self._metrics.observe("vllm:time_to_first_token_seconds", now - self._began)
        self._last_at[index] = now
        self._num_tokens[index] += 1

    def _requests(self, engine: Engine, prompt: Prompt) -> list[Request]:
        body = self.body
        config = engine.model.config
        room = max(1, config.max_seq_len - len(prompt.ids))
        asked = getattr(body, "max_completion_tokens", None) or body.max_tokens
        max_new = asked or min(self._config.max_new_tokens, room)
        # before the pictures are looked at: that can take minutes, and everybody else waits
        engine.check_length(len(prompt.ids), max_new)
        features = image_features(engine.model, prompt)
        media = _media(prompt, config.vision)
        return [
            Request(
                request_id=self.id,
                prompt_ids=tuple(prompt.ids),
                max_new_tokens=max_new,
                sampling=body.sampling,
                penalties=body.penalties,
                seed=self._seed + index,
                stop_ids=frozenset(self.processor.tokenizer.stop_ids),
                num_logprobs=self.num_logprobs() or 0,
                priority=body.priority,
                cache_salt=body.cache_salt,
                media=media,
                image_features=features,
                grammar=self._grammar,
                expected_new_tokens=self._metrics.expected_tokens(body.effort),
            )
            for index in range(body.n)
        ]

    def _head(self, name: str) -> JsonDict:
        head = {"id": self.id, "object": name, "created": self._created}
        return {**head, "model": self._config.model_name}

    def _chunk(self, index: int, part: JsonDict, reason: str | None) -> JsonDict:
        choice = {"index": index, **part, "finish_reason": reason}
        return {**self._head(self.chunk_object), "choices": [choice]}

    def _usage(self) -> JsonDict:
        firsts = [s.sequence for s in self._streams[:: self.body.n] if s.sequence is not None]
        return usage(
            sum(len(first.request.prompt_ids) for first in firsts),
            sum(first.num_cached for first in firsts),
            sum(self._num_tokens),
            sum(answer.num_reasoning_tokens for answer in self._answers if answer is not None),
        )


def _media(prompt: Prompt, vision: VisionConfig | None) -> tuple[MediaSpan, ...]:
    """The placeholders of each picture with a digest of that picture."""
    if vision is None or prompt.pixel_values is None or prompt.grid_thws is None:
        return ()
    places = [n for n, token_id in enumerate(prompt.ids) if token_id == vision.placeholder_token_id]
    spans: list[MediaSpan] = []
    first_patch = first_place = 0
    for frames, height, width in prompt.grid_thws.tolist():
        num_patches = frames * height * width
        patches = prompt.pixel_values[first_patch : first_patch + num_patches]
        digest = hashlib.blake2b(f"{frames} {height} {width}".encode(), digest_size=16)
        digest.update(np.ascontiguousarray(patches).tobytes())
        first_patch += num_patches
        num_rows = height * width // (vision.merge_height * vision.merge_width)
        own = places[first_place : first_place + num_rows]
        first_place += num_rows
        spans.append(MediaSpan(own[0], own[-1] + 1, digest.digest()))
    return tuple(spans)
