"""A server over a tiny model, and what tests ask of it."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import uvicorn
from fastapi.testclient import TestClient
from torch import Tensor

from baltoro.model.model import Model
from baltoro.serve.engine import Engine, EngineConfig
from baltoro.serve.listen import Listener
from baltoro.serve.request import Request, Sequence
from baltoro.serve.scheduler import SchedulerConfig
from baltoro.serve.server import Server, ServerConfig, create_app

SCHEDULER = SchedulerConfig(max_running=4, max_step_tokens=512)
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 12,
    "seed": 3,
}
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]


def made(model: Model, config: EngineConfig | None = None, **changes: Any) -> Server:
    engine = Engine(model, config or EngineConfig(pool_tokens=4096, scheduler=SCHEDULER))
    settings = replace(ServerConfig(model_name="nano", drain_s=5.0), **changes)
    return Server(engine, model.processor, settings)


@contextmanager
def listening(server: Server) -> Iterator[str]:
    """The address at which a server answers, on a port of its own."""
    settings = uvicorn.Config(create_app(server), port=0, log_level="error", ws="none")
    running = Listener(settings, server.background, server.config.drain_s)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.05)
    host, port = running.servers[0].sockets[0].getsockname()
    yield f"http://{host}:{port}/"
    running.should_exit = True
    thread.join(30)


def wait_until(is_met: Callable[[], bool]) -> None:
    """Wait for what another thread is about to bring about."""
    deadline = time.monotonic() + 60
    while not is_met():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Script:
    """A grammar that lets a model write one text and nothing else."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def start(self) -> "ScriptedReply":
        return ScriptedReply(self.ids)


class ScriptedReply:
    def __init__(self, ids: list[int]) -> None:
        self.ids, self.place = ids, 0

    def mask(self, logits_W: Tensor) -> bool:
        if self.place == len(self.ids):
            return False  # the reader has seen the end of the message, the engine not yet
        kept = logits_W[self.ids[self.place]].clone()
        logits_W.fill_(-torch.inf)
        logits_W[self.ids[self.place]] = kept
        return True

    def accept(self, token_id: int) -> bool:
        is_right = self.place < len(self.ids) and token_id == self.ids[self.place]
        self.place += is_right
        return is_right

    def rollback(self, count: int) -> None:
        self.place -= count

    def is_free(self, count: int) -> bool:
        return False


def script(server: Server, monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
    """Let the model write these texts, reply after reply, the last one from then on."""
    engine = server.background.engine
    submit = type(engine).submit
    encode = server.processor.tokenizer.encode
    left = [Script(encode(text, allow_special=True)) for text in texts]

    def scripted(request: Request) -> Sequence:
        grammar = left.pop(0) if len(left) > 1 else left[0]
        return submit(engine, replace(request, grammar=grammar))

    monkeypatch.setattr(engine, "submit", scripted)


def post(client: TestClient, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    body = {**CHAT, **fields} if path.endswith("chat/completions") else fields
    return client.post(path, json=body)


def streamed(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that came to its end."""
    text = post(client, stream=True, **fields).text
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that the chunks of a choice add up to."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                for key in ("content", "reasoning_content"):
                    message[key] += choice["delta"].get(key) or ""
                for part in choice["delta"].get("tool_calls") or ():
                    if "id" in part:
                        assert part["index"] == len(message["tool_calls"])
                        message["tool_calls"].append(part)
                    else:
                        called = message["tool_calls"][part["index"]]["function"]
                        called["arguments"] += part["function"]["arguments"]
                message["finish_reason"] = choice["finish_reason"]
    return message
