import asyncio
import gc
import threading
import weakref
from functools import partial

import pytest
import torch

from baltoro.model.model import Model
from baltoro.serve.background import BackgroundEngine, EngineStopped
from baltoro.serve.engine import Engine, EngineConfig
from baltoro.serve.request import Request
from baltoro.serve.runner import StepOutput
from baltoro.serve.scheduler import StepPlan


def one(engine: Engine) -> list[Request]:
    return [Request(request_id="r", prompt_ids=(1, 2, 3), max_new_tokens=2)]


def test_requests_that_come_together_begin_in_one_step(
    nano: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(nano, EngineConfig(pool_tokens=2000))
    run, sizes = engine.runner.run, list[int]()

    def watched(plan: StepPlan, version: str) -> StepOutput:
        sizes.append(len(plan.works))
        return run(plan, version)

    monkeypatch.setattr(engine.runner, "run", watched)
    monkeypatch.setattr("baltoro.serve.background.GATHER_S", 20.0)
    background = BackgroundEngine(engine)

    async def together() -> None:
        with background.arriving():
            await background.submit(one, 1)
            await asyncio.sleep(0.2)
            await background.submit(one, 1)
        await background.drain(20.0)

    asyncio.run(together())
    assert sizes[0] == 2


def test_one_that_is_long_on_its_way_in_holds_nobody_up(nano: Model) -> None:
    background = BackgroundEngine(Engine(nano, EngineConfig(pool_tokens=2000)))

    async def beside() -> None:
        with background.arriving():
            (stream,) = await background.submit(one, 1)
            async with asyncio.timeout(20.0):
                reasons = [event.finish_reason async for event in stream.events()]
        assert reasons == [None, "length"]
        await background.drain(1.0)

    asyncio.run(beside())


def test_the_thread_works_on_the_device_of_the_weights(
    nano: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(nano, EngineConfig(pool_tokens=2000))
    monkeypatch.setattr(engine.runner, "device", torch.device("cuda:1"))
    chosen = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda d: chosen.append((threading.current_thread().name, d))
    )
    asyncio.run(BackgroundEngine(engine).drain(1.0))
    assert chosen == [("engine", torch.device("cuda:1"))]


def long(engine: Engine) -> list[Request]:
    return [Request(request_id="r", prompt_ids=(1, 2, 3), max_new_tokens=1000)]


@pytest.mark.parametrize(("seconds", "reason"), [(60.0, "length"), (0.0, "error")])
def test_what_runs_at_the_end_is_finished_or_told(nano: Model, seconds: float, reason: str) -> None:
    background = BackgroundEngine(Engine(nano, EngineConfig(pool_tokens=2000)))

    async def ended() -> list[str | None]:
        (stream,) = await background.submit(one if seconds else long, 1)
        await background.drain(seconds)
        return [event.finish_reason async for event in stream.events()]

    assert asyncio.run(ended())[-1] == reason
    assert not background.is_alive


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
        is_held = threading.Event()
        holding = asyncio.create_task(background.call(lambda _: is_held.wait(20.0)))
        # two that fail are queued behind it, and one behind those
        waiting = [asyncio.create_task(background.call(f)) for f in (fail, fail, one)]
        await asyncio.sleep(0)
        is_held.set()
        assert await holding
        for call in (*waiting, background.call(lambda _: None)):
            with pytest.raises(EngineStopped):
                await asyncio.wait_for(call, 20.0)

    asyncio.run(run())
    assert not background.is_alive


def test_a_call_whose_caller_left_is_not_made_and_ends_nothing(nano: Model) -> None:
    background = BackgroundEngine(Engine(nano, EngineConfig(pool_tokens=2000)))
    is_held, made = threading.Event(), list[str]()

    async def run() -> None:
        holding = asyncio.create_task(background.call(lambda _: is_held.wait(20.0)))
        leaving = asyncio.create_task(background.call(lambda _: made.append("left")))
        await asyncio.sleep(0)  # both are queued
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        is_held.set()
        assert await asyncio.wait_for(holding, 20.0)
        await asyncio.wait_for(background.call(lambda _: made.append("stayed")), 20.0)
        await background.drain(1.0)

    asyncio.run(run())
    assert made == ["stayed"]


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
