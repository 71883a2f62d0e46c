import asyncio
import gc
import threading
import weakref
from functools import partial

import pytest

from baltoro.model.model import Model
from baltoro.serve.background import BackgroundEngine, EngineStopped
from baltoro.serve.engine import Engine, EngineConfig


class Pictures:
    """Stands for what a request has decoded."""


def refuse(pictures: Pictures, engine: Engine) -> None:
    raise ValueError("too many")


async def called(background: BackgroundEngine) -> "weakref.ref[Pictures]":
    pictures = Pictures()
    seen = weakref.ref(pictures)
    with pytest.raises(ValueError, match="too many"):
        await background.call(partial(refuse, pictures))
    return seen


def fail(engine: Engine) -> None:
    raise AssertionError("a mistake of ours")


def test_a_call_that_ends_the_thread_is_answered_and_so_are_later_ones(
    nano: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    background = BackgroundEngine(Engine(nano, EngineConfig(pool_tokens=2000)))

    async def run() -> None:
        for function in (fail, lambda engine: None):
            with pytest.raises(EngineStopped):
                await asyncio.wait_for(background.call(function), 20)

    asyncio.run(run())
    assert not background.is_alive


def test_a_refused_request_keeps_nothing_alive(nano: Model) -> None:
    background = BackgroundEngine(Engine(nano, EngineConfig(pool_tokens=2000)))

    async def run() -> bool:
        seen = await called(background)
        await asyncio.sleep(0)
        is_gone = seen() is None
        await background.drain(1.0)
        return is_gone

    gc.collect()
    gc.disable()  # pictures are large and few: a collector that counts objects comes too late
    try:
        assert asyncio.run(run())
    finally:
        gc.enable()
