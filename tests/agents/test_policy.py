"""Policies: scripts, endpoints over HTTP, and token ids that are only ever appended to."""

import asyncio
import json
from collections.abc import Callable, Sequence

import httpx
import pytest

from baltoro.agents.endpoint import EndpointConfig, EndpointPolicy
from baltoro.agents.failure import PolicyError
from baltoro.agents.policy import Line, PolicyReply, Prompt, ScriptedPolicy, TokenPrefix
from baltoro.agents.sampled import Sampled, SampledPolicy
from baltoro.text.tokenizer import train
from baltoro.text.xtml import render

USER = {"role": "user", "content": "Repair it."}
SHELL = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}
CALL = (
    "look first<|close|>think<|sep|><|open|>response<|sep|>on it<|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call tool="shell" index="1"<|sep|>'
    '<|open|>argument key="command" type="string"<|sep|>ls<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
)


def test_a_script_gives_its_lines_by_turn_and_names_calls():
    policy = ScriptedPolicy([Line(think="hm", calls=(("shell", {"command": "ls"}),)), Line()])
    first = asyncio.run(policy.reply(Prompt(messages=(USER,))))
    assert first.finish_reason == "tool_calls"
    assert first.message["reasoning_content"] == "hm"
    (call,) = first.message["tool_calls"]
    assert call["id"] == "main:0:0"
    assert json.loads(call["function"]["arguments"]) == {"command": "ls"}
    assert asyncio.run(policy.reply(Prompt(messages=(USER,), turn=1))).finish_reason == "stop"


def test_a_script_that_is_over_is_a_policy_failure():
    with pytest.raises(PolicyError, match="the script has 1 lines"):
        asyncio.run(ScriptedPolicy([Line()]).reply(Prompt(messages=(USER,), turn=1)))
    with pytest.raises(PolicyError, match="give a function"):
        asyncio.run(ScriptedPolicy([Line()]).reply(Prompt(messages=(USER,), agent="main/1")))


# --- endpoint


def ask(
    handler: Callable[[httpx.Request], httpx.Response], prompt: Prompt, **config: object
) -> PolicyReply:
    fields = {"base_url": "http://x/v1", "model": "k3", "backoff_s": 0.0} | config

    async def main() -> PolicyReply:
        transport = httpx.MockTransport(handler)
        async with EndpointPolicy(EndpointConfig(**fields), transport) as policy:  # type: ignore[arg-type]
            return await policy.reply(prompt)

    return asyncio.run(main())


def completion(message: dict[str, object], reason: str = "stop") -> httpx.Response:
    choice = {"message": message, "finish_reason": reason}
    usage = {"prompt_tokens": 11, "completion_tokens": 7}
    return httpx.Response(200, json={"choices": [choice], "usage": usage})


def test_an_endpoint_is_asked_as_openai_has_it_and_read_back():
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        function = {"name": "shell", "arguments": '{"command": "ls"}'}
        calls = [{"id": "c1", "type": "function", "function": function}]
        return completion({"content": None, "reasoning_content": "hm", "tool_calls": calls})

    prompt = Prompt(messages=(USER,), tools=(SHELL,), effort="low", max_tokens=9, seed=3)
    reply = ask(handler, prompt, api_key="secret", temperature=0.5)
    assert str(seen[0].url) == "http://x/v1/chat/completions"
    assert seen[0].headers["authorization"] == "Bearer secret"
    assert json.loads(seen[0].content) == {
        "model": "k3",
        "messages": [USER],
        "seed": 3,
        "tools": [SHELL],
        "reasoning_effort": "low",
        "max_tokens": 9,
        "temperature": 0.5,
    }
    assert (reply.num_prompt_tokens, reply.num_output_tokens) == (11, 7)
    assert reply.finish_reason == "tool_calls"
    assert reply.message["reasoning_content"] == "hm"
    assert reply.message["tool_calls"][0]["id"] == "c1"
    assert reply.tokens is None


def test_what_may_pass_is_tried_again():
    answers = [
        httpx.Response(503, text="busy"),
        httpx.Response(429, text="slow down"),
        completion({"content": "hi"}),
    ]
    assert ask(lambda request: answers.pop(0), Prompt(messages=(USER,))).message["content"] == "hi"


def test_a_refusal_is_not_tried_again():
    calls = []

    def handler(request: httpx.Request) -> httpx.Response:
        calls.append(request)
        return httpx.Response(400, text="context too long")

    with pytest.raises(PolicyError, match="status 400: context too long"):
        ask(handler, Prompt(messages=(USER,)))
    assert len(calls) == 1


def test_an_endpoint_that_stays_away_is_a_policy_failure():
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(PolicyError, match="no answer in 2 tries; last ConnectError: refused"):
        ask(handler, Prompt(messages=(USER,)), max_tries=2)


@pytest.mark.parametrize("body", [{"choices": []}, {"x": 1}, [], {"choices": [{"message": None}]}])
def test_an_answer_that_is_no_completion_is_a_policy_failure(body):
    with pytest.raises(PolicyError, match="not a chat completion"):
        ask(lambda request: httpx.Response(200, json=body), Prompt(messages=(USER,)))


def test_half_a_surrogate_pair_becomes_text():
    body = b'{"choices": [{"message": {"content": "a\\ud800b"}}]}'
    reply = ask(lambda request: httpx.Response(200, content=body), Prompt(messages=(USER,)))
    assert reply.message["content"] == "a?b"


def test_a_key_is_not_shown():
    config = EndpointConfig(base_url="http://x", model="m", api_key="secret")
    assert "secret" not in repr(config)
    with pytest.raises(ValueError, match="base_url='x'"):
        EndpointConfig(base_url="x", model="m")


# --- token ids

TOKENIZER = train(
    ["Repair it. look first on it ls command shell file.py"] * 3, 300, num_specials=16
)


class Tape:
    """An engine that says what it is told to and remembers the prompts."""

    def __init__(self, *texts: str, version: int = 4):
        self.texts = list(texts)
        self.version = version
        self.prompts: list[list[int]] = []

    async def sample(
        self, prompt_ids: Sequence[int], *, max_tokens: int | None, seed: int
    ) -> Sampled:
        self.prompts.append(list(prompt_ids))
        ids = tuple(TOKENIZER.encode(self.texts.pop(0), allow_special=True))
        return Sampled(
            ids=ids,
            logprobs=(-0.5,) * len(ids),
            policy_versions=(self.version,) * len(ids),
            is_stopped=ids[-1] in TOKENIZER.stop_ids,
        )


def policy_of(tape: Tape) -> SampledPolicy:
    return SampledPolicy(tape, TOKENIZER, name="tape")


def first_and_second(first_text: str) -> tuple[Tape, PolicyReply, PolicyReply, list[int]]:
    """Two turns with a tool result between them; also the ids the second began from."""
    tape = Tape(first_text, CALL)
    policy = policy_of(tape)
    start = Prompt(messages=(USER,), tools=(SHELL,))
    first = asyncio.run(policy.reply(start))
    assert first.tokens is not None
    ids = first.tokens.prompt_ids + first.tokens.ids
    result = {"role": "tool", "tool_call_id": "main:0:0", "content": "file.py"}
    onward = Prompt(
        messages=(USER, first.message, result),
        tools=(SHELL,),
        prefix=TokenPrefix(ids=ids, num_messages=2),
        turn=1,
    )
    return tape, first, asyncio.run(policy.reply(onward)), list(ids)


def test_a_sampled_reply_is_parsed_and_keeps_its_tokens():
    _, first, _, _ = first_and_second(CALL)
    assert first.finish_reason == "tool_calls"
    assert first.message["reasoning_content"] == "look first"
    assert first.message["content"] == "on it"
    assert first.message["tool_calls"][0]["function"]["name"] == "shell"
    assert first.tokens is not None
    assert first.tokens.ids == tuple(TOKENIZER.encode(CALL, allow_special=True))
    assert first.policy_version == 4


def test_the_second_prompt_is_the_first_one_continued():
    tape, first, second, ids = first_and_second(CALL)
    assert tape.prompts[1][: len(ids)] == ids
    assert second.tokens is not None
    assert tape.prompts[1] == ids + list(second.tokens.prompt_ids)
    assert second.num_prompt_tokens == len(tape.prompts[1])
    messages = (
        USER,
        first.message,
        {"role": "tool", "tool_call_id": "main:0:0", "content": "file.py"},
    )
    whole = TOKENIZER.encode_segments(render(messages, (SHELL,)))
    assert tape.prompts[1] == whole  # where the model wrote what the encoder would


def test_tokens_that_no_encoder_would_write_are_kept():
    """The text is the same, split into other tokens: a second rendering would lose that."""
    tape = Tape(CALL, CALL)
    plain = TOKENIZER.encode("look")
    spelled = [TOKENIZER.encode(letter)[0] for letter in "look"]
    assert spelled != plain
    policy = policy_of(tape)
    ids = (*TOKENIZER.encode("x"), *spelled, TOKENIZER.stop_ids[0])
    prefix = TokenPrefix(ids=ids, num_messages=2)
    messages = (USER, {"role": "assistant", "content": "look"}, USER)
    asyncio.run(policy.reply(Prompt(messages=messages, prefix=prefix)))
    assert tape.prompts[0][: len(ids)] == list(ids)


def test_an_end_the_model_left_out_is_added_to_the_prompt():
    end, eos = TOKENIZER.stop_ids
    text = CALL.removesuffix("<|end_of_msg|>") + "[EOS]"
    _, _, second, ids = first_and_second(text)
    assert ids[-1] == eos
    assert second.tokens is not None
    assert second.tokens.prompt_ids[0] == end


def test_a_reply_cut_off_says_so():
    tape = Tape("look first<|close|>think<|sep|>")
    reply = asyncio.run(policy_of(tape).reply(Prompt(messages=(USER,))))
    assert reply.finish_reason == "length"


def test_an_engine_that_loses_count_is_a_policy_failure():
    class Short(Tape):
        async def sample(
            self, prompt_ids: Sequence[int], *, max_tokens: int | None, seed: int
        ) -> Sampled:
            return Sampled(ids=(1, 2), logprobs=(0.0,), policy_versions=(0, 0), is_stopped=True)

    with pytest.raises(PolicyError, match="2 ids, 1 logprobs"):
        asyncio.run(policy_of(Short()).reply(Prompt(messages=(USER,))))


def test_a_conversation_that_cannot_be_rendered_is_a_policy_failure():
    with pytest.raises(PolicyError, match="cannot render"):
        asyncio.run(policy_of(Tape(CALL)).reply(Prompt(messages=({"content": "x"},))))
