import json
import random
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from serve.api import SCHEDULER, Script, joined, made, post, streamed

from baltoro.model.model import Model
from baltoro.serve.draft import SpeculationConfig
from baltoro.serve.engine import EngineConfig
from baltoro.serve.request import Constraint
from baltoro.serve.server import create_app
from baltoro.serve.thinking import BRIDGE, MAX_TAG, ThinkingCap
from baltoro.text.channels import parse_ids
from baltoro.text.vocabulary import Tokenizer

CAP = 20
PIECES = ("a", "think", "<|close|>", "<|open|>", "<|sep|>", "<|open|>response<|sep|>", " of it ")


@pytest.fixture
def tokenizer(nano: Model) -> Tokenizer:
    found: Tokenizer = nano.processor.tokenizer
    return found


def due(constraint: Constraint, size: int) -> list[int]:
    """The tokens that may come next."""
    logits_W = torch.zeros(size)
    assert constraint.mask(logits_W)
    return logits_W.isfinite().nonzero().flatten().tolist()


def test_a_reply_that_has_thought_enough_goes_on_to_its_response(nano: Model) -> None:
    server = made(nano, max_thinking={"low": CAP})
    with TestClient(create_app(server)) as client:
        fields = {"reasoning_effort": "low", "max_tokens": 80, "logprobs": True}
        got = post(client, **fields).json()
        (choice,) = got["choices"]
        entries, message = choice["logprobs"]["content"], choice["message"]
        bridge = server.processor.tokenizer.encode(BRIDGE, True)
        forced = entries[CAP : CAP + len(bridge)]
        assert "".join(entry["token"] for entry in forced) == BRIDGE
        assert all(entry["logprob"] == 0.0 for entry in forced)
        cut = post(client, reasoning_effort="low", max_tokens=CAP).json()["choices"][0]["message"]
        assert message["reasoning_content"] == cut["reasoning_content"] and message["content"]
        usage = got["usage"]
        assert usage["completion_tokens"] == 80
        assert usage["completion_tokens_details"]["reasoning_tokens"] >= CAP + len(bridge)
        stream = joined(streamed(client, **fields))
        assert stream["content"] == message["content"]
        assert stream["reasoning_content"] == message["reasoning_content"]
        free = post(client, **{**fields, "reasoning_effort": "high"}).json()["choices"][0]
        assert free["message"]["content"] is None
        assert free["message"]["reasoning_content"].startswith(message["reasoning_content"])


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_a_response_of_a_schema_follows_a_capped_thought(nano: Model, draft: Any) -> None:
    schema = {"type": "object", "properties": {"far": {"enum": [True, False, "a bit"]}}}
    schema |= {"required": ["far"], "additionalProperties": False}
    config = EngineConfig(
        pool_tokens=4096,
        scheduler=SCHEDULER,
        speculation=None if draft is None else SpeculationConfig(draft=draft),
    )
    with TestClient(create_app(made(nano, config, max_thinking={"low": CAP}))) as client:
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        got = post(client, reasoning_effort="low", max_tokens=200, response_format=wanted).json()
        (choice,) = got["choices"]
        assert choice["finish_reason"] == "stop"
        assert json.loads(choice["message"]["content"])["far"] in (True, False, "a bit")
        assert 0 < len(choice["message"]["reasoning_content"]) <= CAP


def test_drafts_change_nothing_of_a_capped_reply(nano: Model) -> None:
    replies = []
    for speculation in (None, SpeculationConfig(draft="ngram")):
        config = EngineConfig(pool_tokens=4096, scheduler=SCHEDULER, speculation=speculation)
        with TestClient(create_app(made(nano, config, max_thinking={"max": CAP}))) as client:
            replies.append(post(client, max_tokens=120, temperature=0).json()["choices"])
    assert replies[0] == replies[1]


@pytest.mark.parametrize(
    "written",
    [
        "<|close|>think<|sep|>",
        "<|close|>response<|sep|>",
        "<|open|>response<|sep|>",
        "<|open|>tools<|sep|>",
    ],
)
def test_who_stops_thinking_before_the_cap_is_left_alone(
    tokenizer: Tokenizer, written: str
) -> None:
    reply = ThinkingCap(tokenizer, CAP).start()
    for token_id in tokenizer.encode("plan" + written + "x" * 100, allow_special=True):
        assert len(due(reply, tokenizer.vocab_size)) == tokenizer.vocab_size
        assert reply.accept(token_id)
    assert reply.is_free(10**6)


def test_a_tag_that_was_begun_is_not_broken_off(tokenizer: Tokenizer) -> None:
    reply = ThinkingCap(tokenizer, 4).start()
    for token_id in tokenizer.encode("abc<|close|>think<|sep|>text", allow_special=True):
        assert len(due(reply, tokenizer.vocab_size)) == tokenizer.vocab_size
        assert reply.accept(token_id)


def test_a_tag_that_does_not_end_is_no_way_around_the_cap(tokenizer: Tokenizer) -> None:
    reply = ThinkingCap(tokenizer, 4).start()
    written = 0
    for token_id in tokenizer.encode("abc<|close|>" + "x" * 100, allow_special=True):
        if len(due(reply, tokenizer.vocab_size)) == 1:
            break
        assert reply.accept(token_id)
        written += 1
    assert written <= 4 + MAX_TAG


def test_an_opened_thought_is_still_a_thought(tokenizer: Tokenizer) -> None:
    text = "<|open|>think<|sep|>abcdefgh"
    ids = tokenizer.encode(text, allow_special=True)
    reply = ThinkingCap(tokenizer, len(ids)).start()
    assert all(map(reply.accept, ids))
    assert due(reply, tokenizer.vocab_size) == [tokenizer.special_ids["<|close|>"]]


def test_what_a_grammar_inside_excludes_stays_excluded(tokenizer: Tokenizer) -> None:
    script = tokenizer.encode("ab" + BRIDGE + "cd", allow_special=True)
    reply = ThinkingCap(tokenizer, 2, Script(script)).start()
    for token_id in script:
        assert due(reply, tokenizer.vocab_size) == [token_id] and not reply.is_free(1)
        assert not reply.accept(token_id + 1) and reply.accept(token_id)
    fault = ThinkingCap(tokenizer, 1, Script(script)).start()  # it must end and may not
    assert fault.accept(script[0]) and not fault.mask(torch.zeros(tokenizer.vocab_size))


def test_a_reply_knows_how_many_tokens_are_free(tokenizer: Tokenizer) -> None:
    reply = ThinkingCap(tokenizer, 3).start()
    (letter,) = tokenizer.encode("a")
    for left in (3, 2, 1):
        assert reply.is_free(left) and not reply.is_free(left + 1)
        assert reply.accept(letter)
    for token_id in ThinkingCap(tokenizer, 3).bridge:
        assert not reply.is_free(1)
        assert reply.accept(token_id)
    assert reply.is_free(10**6)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_written_and_taken_back_thinking_ends_at_the_cap(
    tokenizer: Tokenizer, seed: int
) -> None:
    rng = random.Random(seed)
    limit = rng.randint(1, 30)
    cap = ThinkingCap(tokenizer, limit)
    reply, ids = cap.start(), list[int]()
    for _ in range(120):
        for token_id in tokenizer.encode(rng.choice(PIECES), allow_special=True):
            allowed = due(reply, tokenizer.vocab_size)
            chosen = allowed[0] if len(allowed) == 1 else token_id
            assert reply.accept(chosen)
            ids.append(chosen)
        if rng.random() < 0.3:
            count = rng.randint(0, min(8, len(ids)))
            reply.rollback(count)
            ids = ids[: len(ids) - count]
            again = cap.start()
            assert all(map(again.accept, ids))
            assert due(again, tokenizer.vocab_size) == due(reply, tokenizer.vocab_size)
    fresh, num = cap.start(), 0
    while not fresh.is_free(10**6):
        assert fresh.accept(ids[num])
        num += 1
    assert num <= limit + MAX_TAG + len(cap.bridge)
    assert parse_ids(ids[:num], tokenizer).open_channel != "think"


@pytest.mark.parametrize("cap", range(1, 6))
def test_a_character_is_not_cut_in_half(tokenizer: Tokenizer, cap: int) -> None:
    constraint = ThinkingCap(tokenizer, cap).start()
    written, text = 0, tokenizer.encode("a\U0001f642b", allow_special=False)
    while written < len(text) and constraint.accept(text[written]):
        written += 1
    kept = tokenizer.decode_bytes(text[:written]).decode()  # whole characters
    assert cap <= written <= cap + 3 and kept
    constraint.rollback(written)
    assert all(constraint.accept(token) for token in text[:written])


def test_a_call_that_was_begun_while_thinking_is_not_broken_off(tokenizer: Tokenizer) -> None:
    call = tokenizer.encode('<|open|>call tool="f" index="1"<|sep|>', allow_special=True)
    constraint = ThinkingCap(tokenizer, 2).start()
    assert all(constraint.accept(token) for token in (*call, call[0], call[0]))
