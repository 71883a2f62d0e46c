import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from hypothesis import example, given, settings
from hypothesis import strategies as st
from serve.api import Script, joined, made, post, script, streamed

from baltoro.model.model import Model
from baltoro.serve.form import Form, FormError, Tool
from baltoro.serve.grammar import Grammars, Matcher
from baltoro.serve.server import Server, create_app
from baltoro.text.channels import parse_ids
from baltoro.text.reply import Reply
from baltoro.text.tiktoken_file import TiktokenTokenizer
from baltoro.text.vocabulary import Tokenizer

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 6},
        "unit": {"enum": ['C"', "F/", None, 3]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "near": {"anyOf": [{"$ref": "#/$defs/Near"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "code": {"type": "string", "pattern": "^[a-c/]{2}\\d$"},
        "dry": {"type": "boolean"},
    },
    "$defs": {
        "Near": {
            "type": "object",
            "properties": {"km": {"enum": [1, 2.5]}},
            "required": ["km"],
            "additionalProperties": False,
        }
    },
    "required": ["city", "unit", "near", "code"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
PLACE = {
    "type": "object",
    "properties": {
        "name": {"enum": ["x", "yé"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name"],
    "additionalProperties": False,
}
STRICT = (Tool('get"w&', CITY, True), Tool("ping", NOTHING, True))
TYPES: dict[str, Any] = {
    "object": Mapping,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def holds(schema: Any, value: Any) -> bool:
    """Whether a value fits a schema of the keywords above, references apart."""
    if "$ref" in schema:
        schema = CITY["$defs"]["Near"]  # type: ignore[index]
    if "anyOf" in schema:
        return any(holds(branch, value) for branch in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if not isinstance(value, TYPES[schema["type"]]):
        return False
    if isinstance(value, str):
        return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 99)
    if isinstance(value, list):
        items = all(holds(schema["items"], item) for item in value)
        return items and len(value) <= schema["maxItems"]
    if isinstance(value, Mapping):
        known = schema["properties"]
        fits = all(key in known and holds(known[key], item) for key, item in value.items())
        return fits and set(schema.get("required", ())) <= value.keys()
    return value is None or schema.get("minimum", value) <= value <= schema.get("maximum", value)


@pytest.fixture(scope="module", params=["ours", "release"])
def tokenizer(request: pytest.FixtureRequest, nano: Model) -> Tokenizer:
    if request.param == "ours":
        return nano.processor.tokenizer
    merges = [b"th", b"in", b"thin", b"think", b'="', b"res", b"po", b"to", b"ol", b'{"', b'":']
    ranks = [bytes([byte]) for byte in range(256)]
    return TiktokenTokenizer({token: rank for rank, token in enumerate([*ranks, *merges])})


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


@pytest.fixture(scope="module")
def small(nano: Model) -> Grammars:
    return Grammars(nano.processor.tokenizer)


def allowed(matcher: Matcher, size: int) -> list[int]:
    logits_W = torch.zeros(size)
    assert matcher.mask(logits_W)
    return torch.isfinite(logits_W).nonzero().squeeze(-1).tolist()


def written(grammars: Grammars, tokenizer: Tokenizer, form: Form, seed: int) -> list[int]:
    """Tokens that someone who knows only the masks would write; markers a little likelier."""
    rng = random.Random(seed)
    matcher = grammars.compile(form).start()
    ids: list[int] = []
    first_special = min(tokenizer.special_ids.values())
    while not ids or ids[-1] != tokenizer.stop_ids[0]:
        choice = allowed(matcher, tokenizer.vocab_size)
        special = [token for token in choice if token >= first_special]
        ids.append(rng.choice(special if special and rng.random() < 0.3 else choice))
        assert matcher.accept(ids[-1])
        assert len(ids) < 3000
    return ids


def reply(grammars: Grammars, tokenizer: Tokenizer, form: Form, seed: int) -> Reply:
    ids = written(grammars, tokenizer, form, seed)
    got = parse_ids(ids, tokenizer, thinking=form.thinking)
    assert got.is_complete and not got.problems
    return got


@pytest.mark.parametrize("seed", range(12))
def test_forced_calls_hold_their_schemas(
    grammars: Grammars, tokenizer: Tokenizer, seed: int
) -> None:
    form = Form(thinking=bool(seed % 2), tools=STRICT, calls="forced")
    got = reply(grammars, tokenizer, form, seed)
    assert got.tool_calls and got.content is None
    for call in got.tool_calls:
        schema = {'get"w&': CITY, "ping": NOTHING}[call.name]
        assert holds(schema, json.loads(call.arguments)), call.arguments


@pytest.mark.parametrize("seed", range(6))
def test_a_response_holds_its_schema(grammars: Grammars, tokenizer: Tokenizer, seed: int) -> None:
    got = reply(grammars, tokenizer, Form(thinking=True, has_schema=True, schema=CITY), seed)
    assert got.content is not None and holds(CITY, json.loads(got.content))


def test_a_strict_tool_may_be_called_or_not(grammars: Grammars, tokenizer: Tokenizer) -> None:
    form = Form(thinking=False, tools=(Tool("ping", NOTHING, True),), is_single=True)
    replies = [reply(grammars, tokenizer, form, seed) for seed in range(8)]
    counts = {len(got.tool_calls) for got in replies}
    assert counts == {0, 1} and any(got.content for got in replies)


def test_a_schema_binds_the_response_or_a_call_takes_its_place(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    form = Form(thinking=False, has_schema=True, schema=PLACE, tools=(Tool("any", None),))
    replies = [reply(grammars, tokenizer, form, seed) for seed in range(8)]
    assert {bool(got.tool_calls) for got in replies} == {True, False}
    for got in replies:
        assert (got.content is None) == bool(got.tool_calls)
        assert got.content is None or holds(PLACE, json.loads(got.content))
        assert all(isinstance(json.loads(call.arguments), dict) for call in got.tool_calls)


def test_what_is_taken_back_leaves_no_trace(grammars: Grammars, tokenizer: Tokenizer) -> None:
    form = Form(thinking=True, tools=STRICT, calls="forced", is_single=True)
    ids = written(grammars, tokenizer, form, 5)
    straight, to_and_fro = (grammars.compile(form).start() for _ in range(2))
    rng = random.Random(1)
    for place, token in enumerate(ids):
        expected = allowed(straight, tokenizer.vocab_size)
        ahead = ids[place : place + rng.randrange(8)]
        assert all(to_and_fro.accept(other) for other in ahead)
        refused = tokenizer.eos_id
        assert not to_and_fro.accept(refused)
        to_and_fro.rollback(len(ahead))
        assert allowed(to_and_fro, tokenizer.vocab_size) == expected
        assert straight.accept(token) and to_and_fro.accept(token)


def test_rows_wider_than_the_vocabulary_are_masked_to_their_end(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    matcher = grammars.compile(Form(thinking=False, has_schema=True, schema=PLACE)).start()
    assert allowed(matcher, tokenizer.vocab_size + 40) == allowed(matcher, tokenizer.vocab_size)


def test_a_form_is_compiled_once(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer)
    first = grammars.compile(Form(thinking=True, tools=STRICT))
    assert grammars.compile(Form(thinking=True, tools=STRICT)) is first
    grammars.compile(Form(thinking=False, tools=STRICT))
    assert grammars.num_compiled == 2


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"type": "strin"}, "strin"),
        ({"type": "string", "format": "uri"}, "uri"),
        ({"type": "string", "pattern": "["}, "unclosed"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-a"),
        ({"type": "string", "pattern": "^a|b$"}, "brackets"),
        ({"type": "string", "minLength": 5, "maxLength": 1}, "above"),
        ({"type": "string", "minLength": -1}, "minLength"),
        ({"type": "string", "not": {}}, "not"),
        ({"oneOf": [{"const": "a"}, {"type": "string"}]}, "oneOf"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"$ref": "http://localhost/x"}, "inside"),
        ({"$ref": "#/properties/a"}, "circle"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum"),
        ({"enum": []}, "no value"),
        ({"const": "\ud800"}, "JSON"),
        (False, "no value"),
        (5, "schema"),
    ],
)
def test_a_schema_that_cannot_be_held_to_is_refused_by_field(
    grammars: Grammars, value: Any, reason: str
) -> None:
    tool = Tool("f", {"properties": {"a": value}}, True, "tools[3].function.parameters")
    with pytest.raises(FormError, match=reason) as caught:
        grammars.compile(Form(thinking=True, tools=(Tool("ping", NOTHING), tool)))
    assert caught.value.field == "tools[3].function.parameters"


NAMES = st.sampled_from(["a", "b", "string", "integer", "array", "object", "#", "#/properties/a"])
LEAVES = st.none() | st.booleans() | st.integers(-3, 9) | NAMES | st.text(max_size=3)
KEYWORDS = st.sampled_from(
    ("type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf", "not", "properties", "required")
) | st.sampled_from(
    ("items", "minLength", "maxLength", "pattern", "format", "minimum", "additionalProperties", "a")
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@example(schema={"$ref": ""}, is_strict=True)
@example(schema={"additionalProperties": {"format": []}}, is_strict=False)
@given(schema=st.dictionaries(KEYWORDS, SCHEMAS, max_size=4), is_strict=st.booleans())
def test_no_schema_breaks_the_compiler(small: Grammars, schema: Any, is_strict: bool) -> None:
    tool = Tool("f", schema, is_strict)
    for form in (
        Form(thinking=True, tools=(tool,), calls="forced"),
        Form(thinking=False, has_schema=True, schema=schema),
    ):
        try:
            matcher = small.compile(form).start()
        except FormError:
            continue
        assert matcher.mask(torch.zeros(600))


def test_objects_may_have_many_optional_members(small: Grammars, nano: Model) -> None:
    many = {f"k{n}": {"type": "integer", "maximum": 9} for n in range(1000)}
    schema = {"type": "object", "properties": many, "additionalProperties": False}
    matcher = small.compile(Form(thinking=False, has_schema=True, schema=schema)).start()
    for token in nano.processor.tokenizer.encode('{"k7":1,"k999":2}'):
        assert matcher.accept(token)
    assert allowed(matcher, 600) == [nano.processor.tokenizer.special_ids["<|close|>"]]


def test_a_string_argument_may_be_one_of_many(small: Grammars, nano: Model) -> None:
    many = {"properties": {"a": {"enum": [f"v{n}" for n in range(5000)] + [""]}}, "required": ["a"]}
    form = Form(thinking=False, tools=(Tool("f", many, True),), calls="forced", is_single=True)
    (call,) = reply(small, nano.processor.tokenizer, form, 0).tool_calls
    assert json.loads(call.arguments)["a"] in many["properties"]["a"]["enum"]


def test_a_tool_that_is_not_strict_is_bound_as_far_as_it_goes(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    loose = {"properties": {"a": {"type": "array", "uniqueItems": True, "items": {"const": 1}}}}
    form = Form(thinking=False, tools=(Tool("f", loose),), calls="forced", is_single=True)
    for seed in range(4):
        (call,) = reply(grammars, tokenizer, form, seed).tool_calls
        assert set(json.loads(call.arguments).get("a", ())) <= {1}


# the server


@pytest.fixture(scope="module")
def server(nano: Model) -> Server:
    return made(nano)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[TestClient]:
    with TestClient(create_app(server), raise_server_exceptions=False) as client:
        yield client


def function(name: str, schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **fields}}


def asked(**fields: Any) -> dict[str, Any]:
    """Fields of a request that a model of random weights answers before its limit."""
    return {"reasoning_effort": "none", "max_tokens": 600, **fields}


def test_a_response_format_is_kept_streamed_and_whole(client: TestClient) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    fields = asked(response_format=schema, n=3)
    whole = post(client, **fields).json()["choices"]
    chunks = streamed(client, **fields)
    for choice in whole:
        assert choice["finish_reason"] == "stop"
        assert holds(PLACE, json.loads(choice["message"]["content"]))
        assert joined(chunks, choice["index"])["content"] == choice["message"]["content"]


def test_any_json_object_will_do_where_no_schema_is_given(client: TestClient) -> None:
    for seed in range(2):
        fields = asked(response_format={"type": "json_object"}, seed=seed, max_tokens=30)
        choice = post(client, **fields).json()["choices"][0]
        content = choice["message"]["content"]
        # noise may write a string without an end, but never what no JSON can go on from
        assert choice["finish_reason"] == "length" or isinstance(json.loads(content), dict)
        assert content.startswith("{")


def test_a_forced_call_is_made_streamed_and_whole(client: TestClient) -> None:
    tools = [function("go", PLACE, strict=True), function("ping", NOTHING)]
    fields = asked(tools=tools, tool_choice="required", n=2, parallel_tool_calls=False)
    chunks = streamed(client, **fields)
    for whole in post(client, **fields).json()["choices"]:
        (call,) = whole["message"]["tool_calls"]
        assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] is None
        schema = {"go": PLACE, "ping": NOTHING}[call["function"]["name"]]
        assert holds(schema, json.loads(call["function"]["arguments"]))
        got = joined(chunks, whole["index"])
        assert [part["function"] for part in got["tool_calls"]] == [call["function"]]
        assert got["finish_reason"] == "tool_calls"


def test_a_tool_is_called_by_its_name(client: TestClient) -> None:
    tools = [function("go", PLACE, strict=True), function("ping", NOTHING)]
    choice = {"type": "function", "function": {"name": "ping"}}
    whole = post(client, **asked(tools=tools, tool_choice=choice)).json()["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "ping", "arguments": "{}"}


def test_log_probabilities_are_those_of_the_tokens_that_could_come(client: TestClient) -> None:
    fields = asked(tools=[function("ping", NOTHING)], tool_choice="required", logprobs=True)
    choice = post(client, **fields, top_logprobs=2).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert entries[0] == {
        "token": "<|close|>",
        "logprob": 0.0,
        "bytes": list(b"<|close|>"),
        "top_logprobs": [{"token": "<|close|>", "logprob": 0.0, "bytes": list(b"<|close|>")}],
    }


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "array", "uniqueItems": True}},
                }
            },
            "response_format.json_schema.schema",
        ),
        (
            {"tools": [function("ping", NOTHING), function("f", {"not": {}}, strict=True)]},
            "tools[1].function.parameters",
        ),
        (
            {"tools": [function("f", {"type": "array"})], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
    ],
)
def test_a_schema_without_a_grammar_is_a_400(
    client: TestClient, fields: dict[str, Any], param: str
) -> None:
    got = post(client, **fields)
    assert got.status_code == 400 and got.json()["error"]["param"] == param
    assert post(client).status_code == 200


def test_a_grammar_at_fault_ends_its_own_reply_alone(
    client: TestClient, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        script(server, patch, "x")
        patch.setattr(Script, "start", lambda _: _Dead())
        assert post(client).status_code == 500
    assert post(client).status_code == 200


class _Dead:
    def mask(self, logits_W: torch.Tensor) -> bool:
        logits_W.fill_(-np.inf)
        return False

    def accept(self, token_id: int) -> bool:
        return False

    def rollback(self, count: int) -> None:
        assert not count


EMPTY = " <|close|>message<|sep|>"
SPOILT = "<|open|>tools<|sep|>a call<|close|>tools<|sep|><|close|>message<|sep|>"
GOOD = "Good.<|close|>message<|sep|>"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_lost_reply_is_drawn_again_when_asked(
    client: TestClient, server: Server, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    before = server.metrics.num_retried
    script(server, monkeypatch, EMPTY, SPOILT, GOOD)
    fields = {"retries": 2, "max_tokens": 400, "tools": [function("ping", NOTHING)]}
    fields["reasoning_effort"] = "none"
    if is_streamed:
        message = joined(streamed(client, **fields))
    else:
        message = post(client, **fields).json()["choices"][0]["message"]
    assert message["content"] == "Good." and not message.get("tool_calls")
    assert server.metrics.num_retried == before + 2


def test_a_reply_is_not_drawn_again_more_often_than_asked(
    client: TestClient, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(server, monkeypatch, EMPTY, EMPTY, GOOD)
    got = post(client, **asked(retries=1)).json()["choices"][0]
    assert got["message"]["content"] == " " and got["finish_reason"] == "stop"


def test_lost_replies_are_counted_by_what_is_wrong_with_them(
    client: TestClient, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, spoilt = server.metrics.num_empty, server.metrics.problems["tools without a call"]
    script(server, monkeypatch, EMPTY, SPOILT)
    for _ in range(2):
        assert post(client, **asked(tools=[function("f", NOTHING)])).status_code == 200
    assert server.metrics.num_empty == empty + 2
    assert server.metrics.problems["tools without a call"] == spoilt + 1
    line = 'baltoro:malformed_replies_total{problem="tools without a call"}'
    assert line in client.get("/metrics").text


def test_a_reply_that_was_cut_is_not_lost(client: TestClient, server: Server) -> None:
    before = server.metrics.num_retried
    first = post(client, retries=3, max_tokens=1).json()
    assert first["choices"][0]["finish_reason"] == "length"
    assert server.metrics.num_retried == before
