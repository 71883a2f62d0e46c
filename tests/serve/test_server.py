import asyncio
import base64
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from PIL import Image
from serve.api import (
    CHAT,
    SCHEDULER,
    TOOLS,
    joined,
    listening,
    made,
    post,
    script,
    streamed,
    wait_until,
)

from baltoro.model.model import Model
from baltoro.serve.answer import ChatReader
from baltoro.serve.background import Stream
from baltoro.serve.draft import SpeculationConfig
from baltoro.serve.engine import Engine, EngineConfig
from baltoro.serve.kinds import ChatChoices
from baltoro.serve.request import NewToken, Request, Sequence
from baltoro.serve.scheduler import StepPlan
from baltoro.serve.server import Server, create_app
from baltoro.text.processor import Prompt

CALL = (
    "plan<|close|>think<|sep|><|open|>response<|sep|>Let me.<|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call tool="read" index="1"<|sep|>'
    '<|open|>argument key="path" type="string"<|sep|>a.txt<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
)


@pytest.fixture(scope="module")
def server(nano: Model) -> Server:
    return made(nano)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[TestClient]:
    with TestClient(create_app(server), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def scripted(server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets the model write a given text."""

    return partial(script, server, monkeypatch)


def test_a_stream_adds_up_to_the_whole_answer(client: TestClient) -> None:
    whole = post(client, n=3).json()
    chunks = streamed(client, n=3)
    said = [choice for chunk in chunks for choice in chunk["choices"]]
    assert all(choice["delta"] or choice["finish_reason"] for choice in said)  # vllm#54701
    for choice in whole["choices"]:
        got, message = joined(chunks, choice["index"]), choice["message"]
        assert got["content"] == (message["content"] or "")
        assert got["reasoning_content"] == message.get("reasoning_content", "")
        assert got["finish_reason"] == choice["finish_reason"]
    assert len({json.dumps(choice["message"]) for choice in whole["choices"]}) == 3


def test_a_stream_begins_with_the_role_and_ends_with_usage_if_asked(client: TestClient) -> None:
    chunks = streamed(client, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 12
    assert all("usage" not in chunk for chunk in chunks[:-1])
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


def test_an_answer_is_named_in_its_header_too(client: TestClient) -> None:
    whole, stream = post(client), post(client, stream=True)
    assert whole.headers["x-request-id"] == whole.json()["id"]
    assert f'"id": "{stream.headers["x-request-id"]}"' in stream.text


def test_usage_counts_what_came_from_the_cache(client: TestClient) -> None:
    prompt = [{"role": "user", "content": "again and again " * 20}]
    first, second = (post(client, messages=prompt).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]
    assert first["total_tokens"] == first["prompt_tokens"] + 12
    assert 0 < first["completion_tokens_details"]["reasoning_tokens"] <= 12


def test_equal_seeds_give_equal_text_with_others_beside_it(client: TestClient) -> None:
    alone = post(client).json()["choices"][0]["message"]
    together = post(client, n=2).json()["choices"][0]["message"]
    assert alone == together


def test_a_tool_is_called_the_same_streamed_and_whole(client: TestClient, scripted: Any) -> None:
    scripted(CALL)
    whole = post(client, tools=TOOLS, max_tokens=400).json()["choices"][0]
    call = whole["message"]["tool_calls"][0]
    assert call["function"] == {"name": "read", "arguments": '{"path": "a.txt"}'}
    assert whole["finish_reason"] == "tool_calls"
    chunks = streamed(client, tools=TOOLS, max_tokens=400)
    parts = [chunk["choices"][0]["delta"].get("tool_calls") for chunk in chunks]
    assert sum(map(bool, parts)) > 5  # as they are written
    got = joined(chunks)
    assert (got["content"], got["reasoning_content"]) == ("Let me.", "plan")
    assert got["tool_calls"][0]["function"] == call["function"]
    assert got["tool_calls"][0]["index"] == 0 and got["finish_reason"] == "tool_calls"


def test_a_tool_result_goes_back_with_its_call(client: TestClient) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "ok", "tool_call_id": "c1"}
    messages = [*CHAT["messages"], message, result]
    assert post(client, messages=messages, tools=TOOLS, max_tokens=2).status_code == 200
    refused = post(client, messages=[*CHAT["messages"], result])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[1].tool_call_id"


def test_log_probabilities_come_with_every_token(client: TestClient) -> None:
    content = post(client, logprobs=True, top_logprobs=3).json()["choices"][0]["logprobs"][
        "content"
    ]
    assert len(content) == 12
    for entry in content:
        assert entry["logprob"] <= 0.0 and 1 <= len(entry["top_logprobs"]) <= 3
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-6},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100.0, "frequency_penalty": 2.0, "presence_penalty": -2.0},
        {"top_p": 1e-300, "min_p": 1.0, "top_k": 1, "temperature": 100.0},
    ],
)
def test_settings_at_their_bounds_give_finite_probabilities(
    client: TestClient, fields: dict[str, Any]
) -> None:
    got = post(client, logprobs=True, **fields)
    assert got.status_code == 200
    logprobs = [entry["logprob"] for entry in got.json()["choices"][0]["logprobs"]["content"]]
    assert len(logprobs) == 12 and all(-1e9 < value <= 0.0 for value in logprobs)


def test_a_plain_text_is_continued(client: TestClient) -> None:
    got = post(client, "/v1/completions", prompt="Once", max_tokens=5, logprobs=1, seed=1).json()
    assert got["object"] == "text_completion" and got["choices"][0]["finish_reason"] == "length"
    assert len(got["choices"][0]["logprobs"]["tokens"]) == 5
    ids = post(client, "/tokenize", prompt="Once").json()["tokens"]
    by_ids = post(client, "/v1/completions", prompt=ids, max_tokens=5, seed=1)
    assert by_ids.json()["choices"][0]["text"] == got["choices"][0]["text"]


def test_a_plain_text_has_no_format_and_no_tools(client: TestClient) -> None:
    for name, value in (("response_format", {"type": "json_object"}), ("tools", TOOLS)):
        got = post(client, "/v1/completions", prompt="Once", **{name: value})
        assert got.status_code == 400 and got.json()["error"]["param"] == name


@contextmanager
def hung_up_on(server: Server, body: dict[str, Any]) -> Iterator[None]:
    """A client that leaves when the block ends, after its request and before the answer."""
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    with listening(server) as address:
        port = int(address.rstrip("/").rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head.encode() + data)
            yield
        wait_until(lambda: server.background.engine.is_idle)


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream": True, "retries": 1}])
def test_who_hangs_up_frees_the_sequences_within_a_step(
    nano: Model, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    server = made(nano)
    engine, background = server.background.engine, server.background
    script(server, monkeypatch, "on and on " * 300)
    has_run, has_left, is_told = (threading.Event() for _ in range(3))
    step, cancel = engine.step, background.cancel
    num_late = 0

    def stepped() -> Any:
        nonlocal num_late
        if has_left.is_set():
            assert is_told.wait(60)  # the news has come as far as the engine's thread
            num_late += 1
        events = step()
        if engine.stats.num_steps == 5:
            has_run.set()
            assert has_left.wait(60)
        return events

    def cancelled(streams: list[Stream]) -> None:
        cancel(streams)
        is_told.set()

    monkeypatch.setattr(engine, "step", stepped)
    monkeypatch.setattr(background, "cancel", cancelled)
    with hung_up_on(server, {**CHAT, "max_tokens": 2000, "n": 2, **fields}):
        assert has_run.wait(60)
        has_left.set()
    assert engine.stats.finished["abort"] == 2
    # the one that waited for the news, and steps of an idle engine
    assert engine.stats.num_steps <= 6 and num_late >= 1


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_who_hangs_up_in_the_middle_of_a_body_is_no_fault(
    nano: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    server = made(nano)
    has_begun, has_ended = threading.Event(), threading.Event()
    read = server._body

    async def watched(*arguments: Any) -> Any:
        has_begun.set()
        try:
            return await read(*arguments)
        finally:
            has_ended.set()

    monkeypatch.setattr(server, "_body", watched)
    with listening(server) as address:
        host, port = address.rstrip("/").rpartition("/")[2].split(":")
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
            connection.sendall(head.encode() + b"{")
            assert has_begun.wait(60)
            # it counts as on its way, so that an idle engine waits for it a little
            assert server.background._num_arriving == (path != "/tokenize")
        assert has_ended.wait(60)
        assert httpx.get(f"{address}health").status_code == 200  # after whatever was to be logged
        assert server.background._num_arriving == 0
    assert not caplog.records


def test_a_stream_that_runs_at_shutdown_comes_to_its_end(nano: Model) -> None:
    server = made(nano)
    lines: list[str] = []
    has_begun = threading.Event()

    def read(address: str) -> None:
        body = {**CHAT, "max_tokens": 200, "stream": True, "logprobs": True}
        with httpx.stream("POST", f"{address}v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                lines.append(line)
                has_begun.set()

    with listening(server) as address:
        reader = threading.Thread(target=read, args=[address])
        reader.start()
        assert has_begun.wait(30)
    reader.join(30)
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert sum('"logprob"' in line for line in lines) == 200
    assert not server.background.is_alive


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_that_is_prepared_at_shutdown_is_answered_whole(
    nano: Model, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    server = made(nano, drain_s=20.0)
    prompts, may_go_on = ChatChoices.prompts, threading.Event()

    def slow(choices: ChatChoices) -> list[Prompt]:
        assert may_go_on.wait(30)
        return prompts(choices)

    monkeypatch.setattr(ChatChoices, "prompts", slow)
    with ThreadPoolExecutor() as pool:
        with listening(server) as address:
            body = {**CHAT, "stream": is_streamed}
            path = f"{address}v1/chat/completions"
            answer = pool.submit(httpx.post, path, json=body, timeout=60)
            wait_until(lambda: server.background._num_arriving == 1)
            threading.Timer(0.5, may_go_on.set).start()  # by then it drains
        got = answer.result(30)
    assert got.status_code == 200 and '"finish_reason":"length"' in got.text.replace(" ", "")
    assert not server.background.is_alive


def test_a_reply_is_drawn_again_during_the_shutdown(
    nano: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = made(nano, drain_s=20.0)
    nothing = "plan<|close|>think<|sep|><|close|>message<|sep|><|end_of_msg|>"
    script(server, monkeypatch, nothing, CALL)
    retry = ChatChoices._retry

    async def late(choices: ChatChoices, index: int) -> None:
        server.background.is_draining = True
        await asyncio.sleep(0.5)  # nothing runs and nothing arrives
        await retry(choices, index)

    monkeypatch.setattr(ChatChoices, "_retry", late)
    with ThreadPoolExecutor() as pool:
        with listening(server) as address:
            body = {**CHAT, "max_tokens": 500, "retries": 1, "tools": TOOLS}
            answer = pool.submit(httpx.post, f"{address}v1/chat/completions", json=body, timeout=60)
            wait_until(lambda: server.background.is_draining)
        got = answer.result(30)
    assert got.json()["choices"][0]["message"]["content"] == "Let me."
    assert server.metrics.num_retried == 1


def test_what_comes_during_the_shutdown_is_sent_elsewhere(nano: Model) -> None:
    server = made(nano)
    with TestClient(create_app(server), raise_server_exceptions=False) as client:
        server.background.is_draining = True
        got = post(client)
        assert got.status_code == 503 and int(got.headers["retry-after"]) > 0
        assert "shutting down" in got.json()["error"]["message"]
        assert server.metrics.rejected["stopped"] == 1


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_fault_of_ours_ends_one_reply_with_an_error_and_no_more(
    client: TestClient, server: Server, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ChatReader, "feed", lambda *_: {}["/secret/path"])
        text = post(client, stream=is_streamed, max_tokens=500).text
    last = [line for line in text.splitlines() if line][-1].removeprefix("data: ")
    error = json.loads(last)["error"]
    assert error["type"] == "server_error" and "/secret" not in text
    wait_until(lambda: server.background.engine.is_idle)
    assert post(client).status_code == 200


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_reply_that_outlasts_the_shutdown_is_ended_with_an_answer(
    nano: Model, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    server = made(nano, drain_s=0.2)
    script(server, monkeypatch, "on and on " * 700)
    with ThreadPoolExecutor() as pool:
        with listening(server) as address:
            body = {**CHAT, "max_tokens": 7000, "stream": is_streamed}
            path = f"{address}v1/chat/completions"
            answer = pool.submit(httpx.post, path, json=body, timeout=60)
            wait_until(lambda: server.background.engine.stats.num_steps >= 5)
            began = time.monotonic()
        got = answer.result(30)
        assert time.monotonic() - began < 10.0
    if is_streamed:
        last = [line for line in got.text.splitlines() if line][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert got.status_code == 503 and int(got.headers["retry-after"]) > 0
        error = got.json()["error"]
    assert error["code"] == "unavailable" and "shutting down" in error["message"]


def test_a_stop_string_ends_a_reply_and_frees_its_sequence(
    client: TestClient, server: Server, scripted: Any
) -> None:
    scripted("x<|close|>think<|sep|><|open|>response<|sep|>one two three" + " four" * 200)
    got = post(client, stop=["three"], max_tokens=1000).json()["choices"][0]
    assert got["message"]["content"] == "one two " and got["finish_reason"] == "stop"
    post(client, "/tokenize", prompt="x")
    wait_idle(client, server)


def wait_idle(client: TestClient, server: Server) -> None:
    for _ in range(500):
        if "vllm:num_requests_running 0" in client.get("/metrics").text:
            break
    assert server.background.engine.is_idle
    device = server.background.engine.cache.device
    assert device.num_available == device.num_pages


@pytest.mark.parametrize("max_tokens", [400, 56, 57])
def test_a_step_that_gives_several_tokens_loses_none(
    nano: Model, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    text = "on and on and " * 6
    config = EngineConfig(
        pool_tokens=4096, scheduler=SCHEDULER, speculation=SpeculationConfig(draft="ngram")
    )
    server = made(nano, config)
    script(server, monkeypatch, text + "<|close|>message<|sep|><|end_of_msg|>")
    with TestClient(create_app(server)) as client:
        fields = {"reasoning_effort": "none", "max_tokens": max_tokens}
        got = post(client, **fields).json()
        choice = got["choices"][0]
        assert server.background.engine.stats.accepted_tokens > 20
        assert choice["message"]["content"] == text[:max_tokens]
        assert choice["finish_reason"] == ("length" if max_tokens < 100 else "stop")
        assert max_tokens > 100 or got["usage"]["completion_tokens"] == max_tokens
        assert joined(streamed(client, **fields))["content"] == text[:max_tokens]


def data_url(image: Image.Image | None = None) -> str:
    data = io.BytesIO()
    (image or Image.effect_noise((60, 40), 80).convert("RGB")).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def test_a_picture_is_seen_by_data_url_alone(client: TestClient) -> None:
    def ask(url: str) -> Any:
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
        return post(client, messages=[{"role": "user", "content": parts}])

    assert ask(data_url()).status_code == 200
    for url in ("/etc/passwd", "http://127.0.0.1/x.png", "data:image/png;base64,AAAA", ""):
        refused = ask(url)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages"


def test_a_picture_beyond_the_context_is_refused_before_it_costs_anything(
    client: TestClient, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked_at(*_: Any) -> None:
        raise AssertionError("a picture that cannot be served was looked at")

    picture = data_url(Image.new("1", (9_000, 9_000)))  # 1.4 kB, and more patches than fit
    monkeypatch.setattr(server.processor.images, "process", looked_at)
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", looked_at)
    parts = [{"type": "image_url", "image_url": {"url": picture}}]
    refused = post(client, messages=[{"role": "user", "content": parts}])
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages"
    assert "smaller pictures" in refused.json()["error"]["message"]


def test_pictures_are_not_encoded_for_a_reply_that_there_is_no_room_for(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked_at(*_: Any) -> None:
        raise AssertionError("a picture that cannot be served was encoded")

    monkeypatch.setattr("baltoro.serve.choices.image_features", looked_at)
    parts = [{"type": "image_url", "image_url": {"url": data_url()}}]
    refused = post(client, messages=[{"role": "user", "content": parts}], max_tokens=8190)
    assert refused.status_code == 400 and "exceed the context" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "data", [b"{", b"[1]", b"\xff\xfe", b"", b'{"messages": [{"role": "\\ud800"}]}']
)
def test_a_body_that_is_no_request_is_a_400(client: TestClient, data: bytes) -> None:
    got = client.post("/v1/chat/completions", content=data)
    assert got.status_code == 400 and "error" in got.json()


def test_the_effort_levels_are_named(client: TestClient) -> None:
    message = post(client, reasoning_effort="xhigh").json()["error"]["message"]
    assert all(level in message for level in ("none", "low", "high", "max"))  # X26
    assert post(client, reasoning_effort="none").status_code == 200


def test_unknown_routes_and_methods_answer_in_the_same_shape(client: TestClient) -> None:
    for got in (client.get("/nowhere"), client.get("/v1/chat/completions")):
        assert got.status_code in (404, 405) and got.json()["error"]["type"]


def test_models_health_and_tokenize(client: TestClient) -> None:
    model = client.get("/v1/models").json()["data"][0]
    assert model["id"] == "nano" and model["max_model_len"] == 8192
    assert client.get("/health").status_code == 200
    assert post(client, "/tokenize", prompt="Hi").json()["count"] == 2
    assert post(client, "/tokenize", messages=CHAT["messages"]).json()["count"] > 2
    assert post(client, "/tokenize").status_code == 400


def test_the_openapi_document_refers_to_nothing_that_is_not_in_it(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    schema = body["content"]["application/json"]["schema"]
    assert "include_usage" in json.dumps(schema["properties"]["stream_options"])
    assert "$defs" not in json.dumps(schema) and "$ref" not in json.dumps(schema)
    assert schema["properties"]["messages"]["items"]["properties"]["role"]["enum"][-1] == "tool"
    assert "application/json" not in document["paths"]["/health"]["get"]["responses"]["200"]


def test_the_metrics_split_hits_by_representation(client: TestClient) -> None:
    text = client.get("/metrics").text
    for name in (
        "vllm:num_requests_running",
        "vllm:prefix_cache_hits_total",
        "vllm:time_to_first_token_seconds_bucket",
        "baltoro:mla_hit_tokens_total",
        "baltoro:state_hit_tokens_total",
        "baltoro:agreed_hit_tokens_total",
        "baltoro:pages_without_state_total",
        "baltoro:minimum_useful_prefix_tokens",
    ):
        assert f"\n{name}" in text


def counted(client: TestClient, name: str) -> float:
    """A number of the metrics; 0 if it is not there yet."""
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(name)]
    return float(lines[0].rpartition(" ")[2]) if lines else 0.0


def test_the_metrics_part_the_time_of_a_reply(nano: Model) -> None:
    server = made(nano)
    with TestClient(create_app(server)) as client:
        post(client, n=2)
        parts = ("queue", "prefill", "decode", "inference")
        names = [f"vllm:request_{part}_time_seconds" for part in parts]
        names.append("vllm:request_time_per_output_token_seconds")
        assert [counted(client, f"{name}_count") for name in names] == [2.0] * 5
        _, prefill, decode, inference, gap = (counted(client, f"{name}_sum") for name in names)
        assert prefill > 0.0 and inference == pytest.approx(prefill + decode)
        assert gap == pytest.approx(decode / 11)
        whole = counted(client, "vllm:e2e_request_latency_seconds_sum")
        assert counted(client, f"{names[0]}_sum") + inference <= whole + 1.0


def test_the_metrics_count_every_token_gap_and_every_sequence(client: TestClient) -> None:
    names = (
        "vllm:inter_token_latency_seconds_count",
        "vllm:time_to_first_token_seconds_count",
        "baltoro:submitted_sequences_total",
        'baltoro:ended_sequences_total{reason="length"}',
    )
    before = [counted(client, name) for name in names]
    post(client, n=2)
    after = [counted(client, name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [22, 2, 2, 2]


def test_what_is_refused_does_not_count_as_a_prompt(client: TestClient) -> None:
    name = "vllm:request_prompt_tokens_count"
    before = counted(client, name)
    post(client, max_tokens=10**9)
    assert counted(client, name) == before


def test_replies_are_expected_to_be_as_long_as_others_of_their_effort(nano: Model) -> None:
    server = made(nano)
    submitted: list[int | None] = []
    with TestClient(create_app(server)) as client, pytest.MonkeyPatch.context() as patch:
        submit = server.background.engine.submit

        def watched(request: Request) -> Sequence:
            submitted.append(request.expected_new_tokens)
            return submit(request)

        patch.setattr(server.background.engine, "submit", watched)
        for n in (15, 1):
            post(client, max_tokens=3, n=n, reasoning_effort="low")
        post(client, max_tokens=5, reasoning_effort="low")
        post(client, max_tokens=5, reasoning_effort="high")
    assert submitted == [None] * 16 + [3, None]


def test_a_key_is_asked_for(nano: Model) -> None:
    server = made(nano, api_keys=("secret",))
    with TestClient(create_app(server)) as client:
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            assert client.post("/v1/chat/completions", json=CHAT, headers=header).status_code == 401
        good = {"authorization": "Bearer secret"}
        assert client.post("/v1/chat/completions", json=CHAT, headers=good).status_code == 200


@pytest.mark.parametrize(("ask", "retries"), [(post, 0), (streamed, 0), (streamed, 2)])
def test_who_aborts_a_request_gets_what_was_written(
    nano: Model, monkeypatch: pytest.MonkeyPatch, ask: Callable[..., Any], retries: int
) -> None:
    server = made(nano)
    engine = server.background.engine
    script(server, monkeypatch, "on and on " * 300)
    with TestClient(create_app(server)) as client, ThreadPoolExecutor() as pool:
        body = {"max_tokens": 2000, "n": 2, "request_id": "mine", "retries": retries}
        answer = pool.submit(ask, client, **body)
        wait_until(lambda: engine.stats.num_steps >= 5 or answer.done())
        assert post(client, "/abort", request_id="mine").json()["request_id"] == "mine"
        got = answer.result(60)
        if ask is streamed:
            replies = [joined(got, index) for index in range(2)]
        else:
            assert got.json()["id"] == "mine"
            choices = got.json()["choices"]
            replies = [{**c["message"], "finish_reason": c["finish_reason"]} for c in choices]
        for reply in replies:
            assert reply["reasoning_content"].startswith("on a")
            assert len(reply["reasoning_content"]) < 2000 and reply["finish_reason"] == "abort"
        assert engine.stats.finished == {"abort": 2} and server.metrics.num_retried == 0
        wait_idle(client, server)
        assert post(client, "/abort", request_id="mine").status_code == 404


def test_an_abort_of_nothing_and_a_second_request_of_one_name_are_refused(
    nano: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = made(nano)
    script(server, monkeypatch, "on and on " * 300)
    with TestClient(create_app(server)) as client, ThreadPoolExecutor() as pool:
        error = post(client, "/abort", request_id="nobody").json()["error"]
        assert (error["param"], error["code"]) == ("request_id", "not_found")
        assert post(client, "/abort").status_code == 400
        assert post(client, request_id="a b").json()["error"]["param"] == "request_id"
        first = pool.submit(post, client, max_tokens=2000, request_id="mine")
        wait_until(lambda: server.background.engine.stats.num_steps >= 1)
        second = post(client, request_id="mine")
        assert second.status_code == 400 and second.json()["error"]["param"] == "request_id"
        assert post(client, "/abort", request_id="mine").status_code == 200
        assert first.result(60).json()["choices"][0]["finish_reason"] == "abort"
        assert post(client, max_tokens=2, request_id="mine").status_code == 200


def test_an_aborted_request_that_never_ran_gives_its_place_back(nano: Model) -> None:
    server = made(nano, EngineConfig(pool_tokens=4096, scheduler=SCHEDULER))
    with TestClient(create_app(server)) as client, ThreadPoolExecutor() as pool:
        begun, going_on = threading.Event(), threading.Event()

        def hold(engine: Engine) -> None:
            begun.set()
            assert going_on.wait(60)

        held = client.portal.start_task_soon(server.background.call, hold)  # type: ignore[union-attr]
        assert begun.wait(60)
        answer = pool.submit(post, client, request_id="mine")
        wait_until(lambda: post(client, "/abort", request_id="mine").status_code == 200)
        going_on.set()
        held.result(60)
        choice = answer.result(60).json()["choices"][0]
        assert choice["finish_reason"] == "abort" and choice["message"]["content"] is None
        wait_idle(client, server)


def test_a_request_that_does_not_say_thinks_as_the_server_is_told(nano: Model) -> None:
    with TestClient(create_app(made(nano, default_effort="none"))) as client:
        default = post(client).json()
        assert default["choices"] == post(client, reasoning_effort="none").json()["choices"]
        assert "reasoning_content" not in default["choices"][0]["message"]
        num_prompt = default["usage"]["prompt_tokens"]
        assert post(client, "/tokenize", messages=CHAT["messages"]).json()["count"] == num_prompt
        thinking = post(client, reasoning_effort="low").json()
        assert thinking["choices"][0]["message"]["reasoning_content"]


@pytest.mark.parametrize("limit", [{"max_queued": 1}, {"max_queued_tokens": 40}])
def test_a_body_above_the_limit_and_a_full_queue_are_refused(
    nano: Model, limit: dict[str, int]
) -> None:
    limits = replace(SCHEDULER, **limit)
    server = made(nano, EngineConfig(pool_tokens=4096, scheduler=limits), max_body_bytes=2000)
    with TestClient(create_app(server)) as client:
        large = [{"role": "user", "content": "x" * 3000}]
        assert post(client, messages=large).status_code == 413
        may_go_on = threading.Event()
        server.background._calls.put(lambda: may_go_on.wait(30) and None)
        with ThreadPoolExecutor() as pool:
            both = [pool.submit(post, client) for _ in range(2)]
            wait_until(lambda: server.background._calls.qsize() == 2)
            may_go_on.set()
            answered, refused = sorted((one.result(30) for one in both), key=status)
        assert answered.status_code == 200
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert post(client).status_code == 200


def status(response: httpx.Response) -> int:
    return response.status_code


@pytest.mark.parametrize("limit", [{"max_queued": 2}, {"max_queued_tokens": 60}])
def test_what_the_empty_queue_has_no_room_for_is_no_matter_of_waiting(
    nano: Model, limit: dict[str, int]
) -> None:
    config = EngineConfig(pool_tokens=4096, scheduler=replace(SCHEDULER, **limit))
    server = made(nano, config)
    ((name, most),) = limit.items()
    with TestClient(create_app(server)) as client:
        several = {"prompt": ["Once"] * 3, "max_tokens": 30}
        for param, got in (
            ("n", post(client, n=3, max_tokens=30)),
            ("prompt", post(client, "/v1/completions", **several)),
        ):
            error = got.json()["error"]
            assert (got.status_code, error["param"]) == (400, param)
            assert error["message"].startswith(f"{param}: 3 replies")
            assert f"{name}={most}" in error["message"]
        assert server.background.engine.is_idle
        # a single one is served whatever its length
        assert post(client, max_tokens=200).status_code == 200


def test_a_step_that_fails_ends_its_requests_and_the_health(
    nano: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    server = made(nano)

    def broken(plan: StepPlan, version: str) -> list[NewToken | None]:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(server.background.engine.runner, "run", broken)
    with TestClient(create_app(server), raise_server_exceptions=False) as client:
        got = post(client)
        assert got.status_code == 500 and "secret" not in got.text
        assert client.get("/health").status_code == 503
        assert post(client).status_code == 503
