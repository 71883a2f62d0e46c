"""From one API request to its engine requests, and from their streams to chunks and a whole answer.

`Choices` holds what a chat and a plain completion have in common; a subclass says how a prompt is
made, how a reply is read and what the JSON looks like.
"""

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from baltoro.model.config import VisionConfig
from baltoro.serve.answer import Answer, ChatReader, TextReader
from baltoro.serve.background import BackgroundEngine, Event, Stream
from baltoro.serve.engine import Engine
from baltoro.serve.generate import image_features
from baltoro.serve.metrics import Metrics
from baltoro.serve.prefix import MediaSpan
from baltoro.serve.protocol import (
    ApiError,
    ChatBody,
    CompletionBody,
    chat_delta,
    chat_message,
    logprob_entry,
    new_id,
    usage,
)
from baltoro.serve.request import NewToken, Request
from baltoro.text.processor import Processor, Prompt
from baltoro.text.reply import Delta

Reader = ChatReader | TextReader
JsonDict = dict[str, Any]


class Choices(ABC):
    """The `n` choices of one request."""

    kind: str  # of its id
    object: str
    chunk_object: str

    def __init__(
        self,
        body: ChatBody | CompletionBody,
        processor: Processor,
        background: BackgroundEngine,
        metrics: Metrics,
        model_name: str,
        max_new_tokens: int,
    ) -> None:
        self.body = body
        self.processor = processor
        self.id = new_id(self.kind)
        self._background = background
        self._metrics = metrics
        self._model_name = model_name
        self._max_new_tokens = max_new_tokens
        self._created = int(time.time())
        self._began = time.monotonic()
        self._streams: list[Stream] = []
        self._readers: list[Reader] = []
        self._call_ids: list[list[str]] = [[] for _ in range(body.n)]
        self._logprobs: list[list[JsonDict]] = [[] for _ in range(body.n)]
        self._num_tokens = [0] * body.n
        self._answers: list[Answer | None] = [None] * body.n

    async def start(self, prompt: Prompt) -> None:
        """Queue the choices. Raises what the engine raises."""
        self._readers = [self.reader() for _ in range(self.body.n)]
        self._streams = await self._background.submit(
            lambda engine: self._requests(engine, prompt), self.body.n
        )

    def cancel(self) -> None:
        """Free what still runs."""
        self._background.cancel(self._streams)

    async def chunks(self) -> AsyncIterator[JsonDict]:
        """What is streamed, in order, each choice's parts in its own."""
        for index in range(self.body.n):
            for first in self.first_parts():
                yield self._chunk(index, first, None)
        async for index, token, delta, answer in self._pieces():
            part = self.part(index, delta, token)
            if part:
                yield self._chunk(index, part, None)
            if answer is not None:
                yield self._chunk(index, self.last_part(), answer.finish_reason)
        options = self.body.stream_options
        if options is not None and options.include_usage:
            yield {**self._head(self.chunk_object), "choices": [], "usage": self._usage()}

    async def whole(self) -> JsonDict:
        """The answer in one piece, with the content that the chunks add up to."""
        async for index, token, delta, _ in self._pieces():
            self.part(index, delta, token)
        choices = []
        for index, answer in enumerate(self._answers):
            assert answer is not None
            entry = {"index": index, **self.choice(index, answer)}
            choices.append({**entry, "finish_reason": answer.finish_reason})
        return {**self._head(self.object), "choices": choices, "usage": self._usage()}

    @abstractmethod
    def prompt(self) -> Prompt:
        """The prompt; `ValueError` for one that cannot be made. Takes long for pictures."""

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
    def part(self, index: int, delta: Delta, token: NewToken | None) -> JsonDict:
        """A chunk's part of a choice; empty if there is nothing to send."""

    @abstractmethod
    def last_part(self) -> JsonDict:
        """What goes with the finish reason."""

    @abstractmethod
    def choice(self, index: int, answer: Answer) -> JsonDict:
        """A whole choice without index and finish reason."""

    async def _pieces(self) -> AsyncIterator[tuple[int, NewToken | None, Delta, Answer | None]]:
        """Deltas of all choices as they come; the last of each with its answer."""
        merged: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

        async def forward(index: int, stream: Stream) -> None:
            async for event in stream.events():
                await merged.put((index, event))

        tasks = [
            asyncio.create_task(forward(index, stream))
            for index, stream in enumerate(self._streams)
        ]
        try:
            while any(answer is None for answer in self._answers):
                index, event = await merged.get()
                if self._answers[index] is not None:
                    continue  # it ran a little beyond a stop string
                if event.finish_reason == "error":
                    raise ApiError(500, "the engine could not go on with this reply")
                if event.token is not None:
                    async for piece in self._take(index, event):
                        yield piece
        finally:
            for task in tasks:
                task.cancel()
            self.cancel()

    async def _take(
        self, index: int, event: Event
    ) -> AsyncIterator[tuple[int, NewToken | None, Delta, Answer | None]]:
        reader, token = self._readers[index], event.token
        assert token is not None
        self._count(index)
        if self.num_logprobs() is not None:
            self._logprobs[index].append(logprob_entry(self.processor.tokenizer, token))
        yield index, token, reader.feed(token.id), None
        if event.finish_reason is None and not reader.is_over:
            return
        delta, answer = reader.finish(event.finish_reason or "stop")
        self._answers[index] = answer
        self._metrics.finished[answer.finish_reason] += 1
        self._metrics.num_empty += answer.is_empty
        self._metrics.observe("vllm:request_generation_tokens", self._num_tokens[index])
        self._metrics.observe("vllm:e2e_request_latency_seconds", time.monotonic() - self._began)
        if event.finish_reason is None:
            self._background.cancel([self._streams[index]])
        yield index, None, delta, answer

    def _count(self, index: int) -> None:
        if not self._num_tokens[index]:
            since = time.monotonic() - self._began
            self._metrics.observe("vllm:time_to_first_token_seconds", since)
        self._num_tokens[index] += 1

    def _requests(self, engine: Engine, prompt: Prompt) -> list[Request]:
        body = self.body
        config = engine.model.config
        left = config.max_seq_len - len(prompt.ids)
        max_new = self._max_new_tokens
        asked = getattr(body, "max_completion_tokens", None) or body.max_tokens
        features = image_features(engine.model, prompt)
        media = _media(prompt, config.vision)
        self._metrics.observe("vllm:request_prompt_tokens", len(prompt.ids))
        return [
            Request(
                request_id=self.id,
                prompt_ids=tuple(prompt.ids),
                max_new_tokens=asked or max(1, min(left, max_new)),
                sampling=body.sampling,
                penalties=body.penalties,
                seed=body.first_seed() + index,
                stop_ids=frozenset(self.processor.tokenizer.stop_ids),
                num_logprobs=self.num_logprobs() or 0,
                priority=body.priority,
                cache_salt=body.cache_salt,
                media=media,
                image_features=features,
            )
            for index in range(body.n)
        ]

    def _head(self, name: str) -> JsonDict:
        head = {"id": self.id, "object": name, "created": self._created}
        return {**head, "model": self._model_name}

    def _chunk(self, index: int, part: JsonDict, reason: str | None) -> JsonDict:
        choice = {"index": index, **part, "finish_reason": reason}
        return {**self._head(self.chunk_object), "choices": [choice]}

    def _usage(self) -> JsonDict:
        first = self._streams[0].sequence
        assert first is not None
        reasoning = sum(a.num_reasoning_tokens for a in self._answers if a is not None)
        num_prompt = len(first.request.prompt_ids)
        return usage(num_prompt, first.num_cached, sum(self._num_tokens), reasoning)


class ChatChoices(Choices):
    """`POST /v1/chat/completions`."""

    kind, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    body: ChatBody

    @property
    def thinking(self) -> bool:
        """Whether the reply begins with reasoning."""
        return self.body.reasoning_effort != "none"

    def prompt(self) -> Prompt:
        body = self.body
        return self.processor.prompt(
            body.messages,
            body.tools,
            thinking=self.thinking,
            thinking_effort=(body.reasoning_effort or "max") if self.thinking else None,
            tool_choice=body.tool_choice,
        )

    def reader(self) -> Reader:
        has_tools = bool(self.body.tools) and self.body.tool_choice != "none"
        return ChatReader(
            self.processor.tokenizer,
            thinking=self.thinking,
            has_tools=has_tools,
            stop=self.body.stop_strings,
        )

    def num_logprobs(self) -> int | None:
        return (self.body.top_logprobs or 0) if self.body.logprobs else None

    def first_parts(self) -> list[JsonDict]:
        return [{"delta": {"role": "assistant", "content": ""}}]

    def part(self, index: int, delta: Delta, token: NewToken | None) -> JsonDict:
        call_ids = self._call_ids[index]
        fields = chat_delta(delta, len(call_ids), call_ids)
        if self.body.logprobs and token is not None:
            return {"delta": fields, "logprobs": {"content": self._logprobs[index][-1:]}}
        return {"delta": fields} if fields else {}

    def last_part(self) -> JsonDict:
        return {"delta": {}}

    def choice(self, index: int, answer: Answer) -> JsonDict:
        logprobs = {"content": self._logprobs[index]} if self.body.logprobs else None
        return {"message": chat_message(answer, self._call_ids[index]), "logprobs": logprobs}


class TextChoices(Choices):
    """`POST /v1/completions`."""

    kind, object, chunk_object = "cmpl", "text_completion", "text_completion"
    body: CompletionBody

    def prompt(self) -> Prompt:
        prompt = self.body.prompt
        return Prompt(
            self.processor.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        )

    def reader(self) -> Reader:
        return TextReader(self.processor.tokenizer, self.body.stop_strings)

    def num_logprobs(self) -> int | None:
        return self.body.logprobs

    def first_parts(self) -> list[JsonDict]:
        return []

    def part(self, index: int, delta: Delta, token: NewToken | None) -> JsonDict:
        if self.body.logprobs is not None and token is not None:
            return {"text": delta.content, "logprobs": _columns(self._logprobs[index][-1:])}
        return {"text": delta.content, "logprobs": None} if delta.content else {}

    def last_part(self) -> JsonDict:
        return {"text": "", "logprobs": None}

    def choice(self, index: int, answer: Answer) -> JsonDict:
        has_logprobs = self.body.logprobs is not None
        logprobs = _columns(self._logprobs[index]) if has_logprobs else None
        return {"text": answer.content, "logprobs": logprobs}


def _columns(entries: list[JsonDict]) -> JsonDict:
    """`logprobs` of a plain completion."""
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [
            {top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries
        ],
    }


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
