"""Episodes on our own engine: over HTTP like any endpoint, and token by token in the process.

The weights are random; a grammar makes the model write a given repair, all else is the real path.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from agents.worlds import World, repair_task, run_in_world
from serve.api import SCHEDULER, Script, listening, made, script

from baltoro.agents.endpoint import EndpointConfig, EndpointPolicy
from baltoro.agents.harness import Harness, PromptConfig
from baltoro.agents.policy import Policy
from baltoro.agents.sampled import Sampled, SampledPolicy
from baltoro.agents.styles import style
from baltoro.agents.trace import Trace, TurnRecord
from baltoro.checkpoint.fixture import fixture
from baltoro.checkpoint.load import load
from baltoro.model.model import Model
from baltoro.serve.engine import Engine, EngineConfig
from baltoro.serve.request import Request
from baltoro.serve.request import Sequence as Served

CONFIG = EngineConfig(pool_tokens=16384, scheduler=SCHEDULER)


def written(tool: str, think: str, **arguments: str) -> str:
    """A model's message with one call."""
    inner = "".join(
        f'<|open|>argument key="{key}" type="string"<|sep|>{value}<|close|>argument<|sep|>'
        for key, value in arguments.items()
    )
    return (
        f"{think}<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>"
        f'<|open|>tools<|sep|><|open|>call tool="{tool}" index="1"<|sep|>{inner}'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )


REPLIES = [
    written("shell", "look", command="cat sums.py"),
    written("edit", "repair", path="sums.py", old="a - b", new="a + b"),
    "<|close|>think<|sep|><|open|>response<|sep|>Done.<|close|>response<|sep|>"
    "<|close|>message<|sep|><|end_of_msg|>",
]


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    out = tmp_path_factory.mktemp("agents") / "nano"
    fixture(str(out), preset="nano")
    yield load(out)


def play(tmp_path: Path, make: Callable[[], AbstractAsyncContextManager[Policy]]) -> Trace:
    context = replace(style("plain").context, max_tokens=12000, compact_at_tokens=None)
    config = replace(
        style("plain"),
        interface={kind: style("plain").interface[kind] for kind in ("shell", "edit")},
        prompt=PromptConfig(sections=("place",)),
        context=context,
        max_reply_tokens=400,
    )
    traces: list[Trace] = []

    async def body(here: World) -> None:
        async with make() as policy:
            trace = await here.runner().run(
                repair_task(), Harness(config), policy, episode="e", group="g", seed=1
            )
        traces.append(trace)

    run_in_world(tmp_path, body)
    return traces[0]


def check(trace: Trace) -> None:
    assert trace.end is not None
    assert (trace.end.outcome, trace.end.reward) == ("judged", 1.0), trace.end
    turns = trace.of(TurnRecord)
    assert [turn.finish_reason for turn in turns] == ["tool_calls", "tool_calls", "stop"]
    assert turns[0].message["reasoning_content"] == "look"
    assert turns[2].message["content"] == "Done."


@pytest.mark.slow
def test_our_server_serves_an_agent_like_any_endpoint(tmp_path, nano, monkeypatch):
    server = made(nano, CONFIG)
    script(server, monkeypatch, *REPLIES)
    with listening(server) as address:
        config = EndpointConfig(base_url=f"{address}v1", model="nano")
        trace = play(tmp_path, lambda: EndpointPolicy(config))
    check(trace)
    assert trace.sequences() == []


class InProcess:
    """Our engine as a sampler, told what to write."""

    def __init__(self, model: Model, texts: Sequence[str]):
        self.engine = Engine(model, CONFIG)
        self.engine.weights_version = "7"
        self.tokenizer = model.processor.tokenizer
        self.left = list(texts)
        self.served: list[Served] = []

    async def sample(
        self, prompt_ids: Sequence[int], *, max_tokens: int | None, seed: int
    ) -> Sampled:
        assert max_tokens is not None
        ids = self.tokenizer.encode(self.left.pop(0), allow_special=True)
        request = Request(
            request_id=str(len(self.served)),
            prompt_ids=tuple(prompt_ids),
            max_new_tokens=max_tokens,
            stop_ids=frozenset(self.tokenizer.stop_ids),
            seed=seed,
            grammar=Script(ids),
        )
        (sequence,) = await asyncio.to_thread(self.engine.generate, [request])
        self.served.append(sequence)
        return Sampled(
            ids=tuple(token.id for token in sequence.new_tokens),
            logprobs=tuple(token.logprob for token in sequence.new_tokens),
            policy_versions=tuple(int(token.weights_version) for token in sequence.new_tokens),
            is_stopped=sequence.finish_reason == "stop",
        )


@pytest.mark.slow
def test_tokens_of_our_engine_are_recorded_and_its_cache_is_hit(tmp_path, nano):
    sampler = InProcess(nano, REPLIES)
    policy = SampledPolicy(sampler, sampler.tokenizer, name="nano")
    trace = play(tmp_path, lambda: contextlib.nullcontext(policy))
    check(trace)
    (sequence,) = trace.sequences()
    assert list(sequence.ids) == sampler.served[-1].tokens
    assert sum(sequence.is_sampled) == sum(len(each.new_tokens) for each in sampler.served)
    versions = {v for v, s in zip(sequence.policy_versions, sequence.is_sampled, strict=True) if s}
    assert versions == {7}
    first, *later = sampler.served
    assert first.num_cached == 0
    assert all(each.num_cached > 0.8 * len(first.tokens) for each in later)
