"""What requests may hold, and what is refused by name."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel, ValidationError
from serve.api import CHAT, TOOLS, made, post

from baltoro.model.model import Model
from baltoro.serve.protocol import ChatBody, CompletionBody, TokenizeBody
from baltoro.serve.server import create_app


@pytest.fixture(scope="module")
def client(nano: Model) -> Iterator[TestClient]:
    with TestClient(create_app(made(nano)), raise_server_exceptions=False) as client:
        yield client


@pytest.mark.parametrize("seed", [1, None])
def test_several_plain_texts_are_continued_as_each_by_itself(
    client: TestClient, seed: int | None
) -> None:
    fields: dict[str, Any] = {"max_tokens": 5, "seed": seed, "n": 2, "temperature": 1.0}
    fields |= {} if seed else {"temperature": 0}
    ids = post(client, "/tokenize", prompt="Twice").json()["tokens"]
    for both in (
        ["Once", "Twice"],
        [post(client, "/tokenize", prompt="Once").json()["tokens"], ids],
    ):
        got = post(client, "/v1/completions", prompt=both, **fields).json()
        alone = [post(client, "/v1/completions", prompt=one, **fields).json() for one in both]
        texts = [choice["text"] for one in alone for choice in one["choices"]]
        assert [choice["text"] for choice in got["choices"]] == texts
        assert [choice["index"] for choice in got["choices"]] == [0, 1, 2, 3]
        for name in ("prompt_tokens", "completion_tokens"):
            assert got["usage"][name] == sum(one["usage"][name] for one in alone)
    stream = post(client, "/v1/completions", prompt=["Once", "Twice"], stream=True, **fields).text
    chunks = [json.loads(part[6:]) for part in stream.split("\n\n") if part.startswith("data: {")]
    for index, text in enumerate(texts):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(part["text"] for part in parts) == text


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (["a", 1], "prompt: must be a string"),
        ([True], "prompt: must be a string"),
        ([[1], "a", None], "prompt: must be a string"),
        (None, "prompt: Field required"),
        ([], "prompt: it has no tokens"),
        (["a", ""], "prompt: it has no tokens"),
        ([[1], []], "prompt: it has no tokens"),
        ([[1], [10**9]], "prompt: token id"),
        (["", [1]], "prompt: must be a string"),
        (["a"] * 1025, "prompt: at most 1024"),
    ],
)
def test_prompts_that_are_none_are_refused(client: TestClient, prompt: Any, message: str) -> None:
    error = post(client, "/v1/completions", prompt=prompt, max_tokens=2).json()["error"]
    assert error["message"].startswith(message) and error["param"] == "prompt"


def test_prompts_times_choices_are_bounded(client: TestClient) -> None:
    error = post(client, "/v1/completions", prompt=["a"] * 513, n=2).json()["error"]
    assert (
        error["message"].startswith("prompt: with n=2 at most 1024") and error["param"] == "prompt"
    )


@pytest.mark.parametrize(
    ("body_type", "field", "elements"),
    [
        (CompletionBody, "prompt", ["", *[[1]] * 300_000]),
        (CompletionBody, "prompt", [[1], *["a"] * 300_000]),
        (ChatBody, "messages", [1] * 300_000),
        (ChatBody, "tools", [1] * 300_000),
        (TokenizeBody, "messages", [1] * 300_000),
        (TokenizeBody, "tools", [1] * 300_000),
    ],
)
def test_a_long_list_of_what_is_wrong_is_refused_by_its_first(
    body_type: type[BaseModel], field: str, elements: list[Any]
) -> None:
    with pytest.raises(ValidationError) as error:
        body_type.model_validate({**CHAT, field: elements})
    assert error.value.error_count() == 1


def test_a_developer_speaks_as_the_system_does(client: TestClient) -> None:
    asked = [
        [{"role": role, "content": "Be brief."}, *CHAT["messages"]]
        for role in ("system", "developer")
    ]
    for path in ("/tokenize", "/v1/chat/completions"):
        system, developer = (post(client, path, messages=messages).json() for messages in asked)
        key = "tokens" if path == "/tokenize" else "choices"
        assert system[key] == developer[key]


def test_a_system_message_may_declare_tools_and_say_nothing(client: TestClient) -> None:
    messages = [{"role": "system", "tools": TOOLS}, *CHAT["messages"]]
    assert post(client, messages=messages, max_tokens=2).status_code == 200


def test_another_model_is_not_found(client: TestClient) -> None:
    for path, fields in (("/v1/chat/completions", {}), ("/v1/completions", {"prompt": "a"})):
        got = post(client, path, model="gpt", **fields)
        assert got.status_code == 404 and got.json()["error"]["code"] == "model_not_found"
        assert post(client, path, model="nano", max_tokens=1, **fields).status_code == 200
    assert client.get("/v1/models/nano").json()["id"] == "nano"
    assert client.get("/v1/models/a/b").json()["error"]["param"] == "model"


def test_what_is_too_long_is_told_by_a_code_that_clients_know(client: TestClient) -> None:
    words = "x" * 20_000
    got = [
        post(client, messages=[{"role": "user", "content": words}]),
        post(client, max_tokens=10**6),
        post(client, "/v1/completions", prompt=words),
    ]
    assert [one.json()["error"]["code"] for one in got] == ["context_length_exceeded"] * 3


def test_half_a_surrogate_pair_breaks_nothing(client: TestClient) -> None:
    message = {"role": "user", "content": "\ud800"}
    for fields in ({"cache_salt": "\ud800"}, {"messages": [message]}, {"stop": "\ud800"}):
        body = json.dumps({**CHAT, **fields, "max_tokens": 2})
        assert client.post("/v1/chat/completions", content=body).status_code == 200


def test_many_tools_do_not_hold_up_the_others(client: TestClient) -> None:
    tools = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(100_000)]
    began = time.monotonic()
    got = post(client, tools=tools, max_tokens=2)
    assert got.json()["error"]["code"] == "context_length_exceeded"
    assert time.monotonic() - began < 20.0  # by pairs it took hours


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_field_that_is_null_is_as_absent(client: TestClient, path: str) -> None:
    body_type = ChatBody if "chat" in path else CompletionBody
    needed = CHAT if "chat" in path else {"prompt": "Once", "max_tokens": 3, "seed": 3}
    nulls = dict.fromkeys(body_type.model_fields) | {"logit_bias": None}
    asked = nulls | {"stream_options": {"include_usage": None}} | needed
    got, plain = (client.post(path, json=body).json() for body in (asked, needed))
    assert got["choices"] == plain["choices"] and got["usage"] == plain["usage"]


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_what_would_change_nothing_is_taken(client: TestClient, choice: str) -> None:
    got = post(client, best_of=1, function_call=choice)
    assert got.json()["choices"] == post(client).json()["choices"]


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/chat/completions", "messages"), ("/v1/completions", "prompt"), ("/abort", "request_id")],
)
def test_a_field_that_is_needed_is_not_null(client: TestClient, path: str, field: str) -> None:
    got = client.post(path, json={field: None})
    assert got.status_code == 400 and got.json()["error"]["param"] == field


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def content(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": "hi"}, 400, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages"),
        ({"messages": [{"content": "x"}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 20_000}]}, 400, "messages"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "warm"}, 400, "temperature"),
        ({"temperature": 1e-40}, 400, "temperature"),
        ({"repetition_penalty": 1e-189}, 400, "repetition_penalty"),
        ({"top_p": 0}, 400, "top_p"),
        ({"n": 0}, 400, "n"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 10**9}, 400, "messages"),
        ({"reasoning_effort": "medium"}, 400, "reasoning_effort"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, 400, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema.schema"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tool_choice": "always", "tools": TOOLS}, 400, "tool_choice"),
        ({"tool_choice": named("write"), "tools": TOOLS}, 400, "tool_choice"),
        ({"tools": [{"type": "retrieval"}]}, 400, "tools[0].type"),
        ({"tools": [*TOOLS, {"type": "function"}]}, 400, "tools[1].function.name"),
        ({"tools": [*TOOLS, *TOOLS]}, 400, "tools[1].function.name"),
        ({"retries": 1, "temperature": 0}, 400, "retries"),
        ({"logit_bias": {"5": 1}}, 501, "logit_bias"),
        ({"guided_json": {"type": "object"}}, 501, "guided_json"),
        ({"prompt_logprobs": 1}, 501, "prompt_logprobs"),
        ({"best_of": 2}, 501, "best_of"),
        ({"function_call": {"name": "f"}}, 501, "function_call"),
        ({"function_call": "auto", "functions": [{"name": "f"}]}, 501, "functions"),
        ({"stop": ["a"] * 65}, 400, "stop"),
        ({"stop": "a" * 1025}, 400, "stop"),
        ({"stop": [5]}, 400, "stop"),
        ({"stream_options": 5}, 400, "stream_options"),
        ({"stream_options": {"include_usage": 5}}, 400, "stream_options.include_usage"),
        ({"messages": [5]}, 400, "messages[0]"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, 400, "messages[0].content"),
        (content({"type": "input_audio"}), 400, "messages[0].content[0].type"),
        (content({"type": "text", "text": 5}), 400, "messages[0].content[0].text"),
        (content("x"), 400, "messages[0].content[0].type"),
    ],
)
def test_a_bad_request_is_refused_by_name(
    client: TestClient, fields: dict[str, Any], status: int, param: str
) -> None:
    got = post(client, **fields)
    assert got.status_code == status
    assert got.headers.get("x-should-retry") == ("false" if status == 501 else None)
    error = got.json()["error"]
    assert (
        error["param"] == param
        and error["message"]
        and set(error)
        == {
            "message",
            "type",
            "param",
            "code",
        }
    )
