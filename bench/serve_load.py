"""Requests of many kinds, good and bad, and what a client makes of their answers.

A `Call` says what must come back. `Client.send` sends it and tallies what came; it may hang up at a
random moment, in the middle of the body as well.
"""

import asyncio
import base64
import io
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from PIL import Image

JsonDict = dict[str, Any]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WORDS = ("river", "stone", "light", "paper", "seven", "window", "green", "walk", "open", "near")
NUM_PREFIXES = 6
MAX_HISTORY = 12  # messages of a conversation before it begins anew
LEAVE_WITHIN_S = 1.5
TIMEOUT_S = 600.0
BODY_LIMIT = 32 << 20  # of the server
WEATHER: JsonDict = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Bari"]}, "days": {"enum": [1, 2, None]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
PLACE: JsonDict = {
    "type": "object",
    "properties": {"name": {"enum": ["Rome", "Bari"]}, "far": {"type": "boolean"}},
    "required": ["name", "far"],
    "additionalProperties": False,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One request and the answer that it must get."""

    kind: str
    path: str = CHAT
    body: JsonDict | bytes
    status: int = 200
    param: str | None = None  # of the error
    check: Callable[[JsonDict], bool] = lambda message: True  # of the message of each choice


Span = tuple[float, float]  # start and end, by `time.perf_counter`


@dataclass(slots=True)
class Tally:
    """What all clients saw."""

    outcomes: Counter[str] = field(default_factory=Counter)  # answered, refused, left, overloaded
    by_kind: Counter[str] = field(default_factory=Counter)
    choices_answered: int = 0
    choices_left: int = 0  # of requests that were hung up on
    first: list[Span] = field(default_factory=list)  # from sending to the first token
    gaps: list[Span] = field(default_factory=list)  # from one token to the next
    faults: list[str] = field(default_factory=list)

    def blame(self, call: Call, what: str) -> None:
        """Note what must not happen."""
        self.faults.append(f"{call.kind}: {what}"[:500])


class Client:
    """Sends calls one after the other."""

    def __init__(self, address: str, rng: random.Random, tally: Tally) -> None:
        self.rng = rng
        self.tally = tally
        self.history: list[JsonDict] = []
        self._port = int(address.rpartition(":")[2])
        self._http = httpx.AsyncClient(base_url=address, timeout=TIMEOUT_S)

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, call: Call, leave_after_s: float | None = None) -> None:
        """Send a call; hang up after so many seconds if it is not answered by then."""
        self.tally.by_kind[call.kind] += 1
        try:
            async with asyncio.timeout(leave_after_s):
                await self._exchange(call)
        except TimeoutError:
            self.tally.outcomes["left"] += 1
            self.tally.choices_left += _num_choices(call)
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            self.tally.blame(call, f"no whole answer: {error!r}")

    async def send_half(self, call: Call) -> None:
        """Hang up in the middle of the body."""
        assert isinstance(call.body, dict)
        body = json.dumps(call.body).encode()
        head = f"POST {call.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(head.encode() + body[: self.rng.randrange(len(body))])
        await writer.drain()
        await asyncio.sleep(self.rng.uniform(0.0, 0.2))
        writer.close()
        self.tally.by_kind["half a body"] += 1
        self.tally.outcomes["left"] += 1

    async def _exchange(self, call: Call) -> None:
        is_raw = isinstance(call.body, bytes)
        content = call.body if is_raw else json.dumps(call.body).encode()
        start = time.perf_counter()
        async with self._http.stream("POST", call.path, content=content) as response:
            if response.status_code == 503 and call.status == 200:
                self.tally.outcomes["overloaded"] += 1
                if "retry-after" not in response.headers:
                    self.tally.blame(call, "a 503 without Retry-After")
                return
            if response.status_code != call.status:
                text = (await response.aread())[:300]
                self.tally.blame(call, f"{response.status_code} instead of {call.status}: {text!r}")
                return
            if call.status != 200:
                self._take_refusal(call, json.loads(await response.aread()))
                return
            if not is_raw and call.body.get("stream"):  # type: ignore[union-attr]
                messages = await self._read_stream(call, response, start)
            else:
                answer = json.loads(await response.aread())
                messages = [c.get("message", c) for c in answer.get("choices", [])]
        self.tally.outcomes["answered"] += 1
        self.tally.choices_answered += _num_choices(call)
        if call.path in (CHAT, TEXT):
            if len(messages) != _num_choices(call):
                self.tally.blame(call, f"{len(messages)} choices")
            elif not all(map(call.check, messages)):
                self.tally.blame(call, f"an answer that must not be: {messages}")

    def _take_refusal(self, call: Call, body: JsonDict) -> None:
        self.tally.outcomes["refused"] += 1
        error = body.get("error", {})
        if set(error) != {"message", "type", "param", "code"}:
            self.tally.blame(call, f"an error in another shape: {body}")
        elif error["param"] != call.param:
            self.tally.blame(call, f"names {error['param']!r} instead of {call.param!r}")

    async def _read_stream(
        self, call: Call, response: httpx.Response, start: float
    ) -> list[JsonDict]:
        messages: dict[int, JsonDict] = {}
        reasons: dict[int, str] = {}
        last: dict[int, float] = {}
        is_done = False
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                is_done = True
                continue
            now = time.perf_counter()
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                self.tally.blame(call, f"an error in a stream: {chunk}")
                return []
            for choice in chunk["choices"]:
                index = choice["index"]
                message = messages.setdefault(index, {"content": "", "tool_calls": []})
                delta = choice.get("delta", {"content": choice.get("text")})
                message["content"] += delta.get("content") or ""
                for part in delta.get("tool_calls") or ():
                    if "id" in part:
                        message["tool_calls"].append(part)
                    else:
                        called = message["tool_calls"][part["index"]]["function"]
                        called["arguments"] += part["function"]["arguments"]
                if choice["finish_reason"]:
                    reasons[index] = choice["finish_reason"]
                if choice.get("logprobs") and not call.body.get("priority"):  # type: ignore[union-attr]
                    # then each token has a chunk, and nobody was let past
                    spans = self.tally.gaps if index in last else self.tally.first
                    spans.append((last.get(index, start), now))
                    last[index] = now
        if not is_done or len(reasons) != _num_choices(call):
            self.tally.blame(call, f"a stream without an end: {is_done}, {reasons}")
        return list(messages.values())


def _num_choices(call: Call) -> int:
    if call.path not in (CHAT, TEXT) or isinstance(call.body, bytes):
        return 0
    return int(call.body.get("n", 1))


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def prefix(number: int) -> str:
    """One of the texts that many prompts begin with, from a line to a page."""
    return words(random.Random(number), 4 * 2**number)


def data_url(image: Image.Image) -> str:
    data = io.BytesIO()
    image.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def shown(url: str) -> list[JsonDict]:
    """Messages with a picture."""
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    return [{"role": "user", "content": parts}]


def user(text: str) -> list[JsonDict]:
    return [{"role": "user", "content": text}]


class Mix:
    """Draws calls, three good ones for each bad one."""

    def __init__(self) -> None:
        noise = [Image.effect_noise(size, 80).convert("RGB") for size in ((60, 40), (150, 90))]
        self._pictures = [data_url(image) for image in noise]
        # a few kilobytes that would be 400 million pixels, and one just below the limit
        self._bombs = [data_url(Image.new("1", (side, side))) for side in (20_000, 11_000)]
        self._good = [
            (self._chat, 6),
            (self._turn, 6),
            (self._text, 3),
            (self._tool, 3),
            (self._schema, 3),
            (self._picture, 2),
            (self._many, 1),
            (self._tokenize, 1),
        ]
        self._bad = [
            self._malformed,
            self._no_request,
            self._unknown_role,
            self._stray_result,
            self._bad_schema,
            self._too_long,
            self._corrupt_picture,
            self._vast_picture,
            self._vast_body,
            self._out_of_range,
        ]

    def draw(self, client: Client) -> Call:
        """The next call of a client."""
        if client.rng.random() < 0.25:
            return client.rng.choice(self._bad)(client.rng)
        makers, weights = zip(*self._good, strict=True)
        (maker,) = client.rng.choices(makers, weights)
        return maker(client)

    def _fields(self, rng: random.Random, most: int = 48) -> JsonDict:
        """What any completion may ask for."""
        fields: JsonDict = {"max_tokens": rng.randint(1, most)}
        if rng.random() < 0.6:
            fields["stream"] = True
            fields["stream_options"] = {"include_usage": rng.random() < 0.5}
        if rng.random() < 0.3:
            fields["temperature"] = rng.choice([0.0, 0.7, 1.3])
        if rng.random() < 0.2:
            fields |= {"top_p": 0.9, "top_k": 40, "min_p": 0.01, "frequency_penalty": 0.5}
        if rng.random() < 0.2:
            fields["stop"] = ["e", "th"]
        if rng.random() < 0.1:
            fields["priority"] = rng.randint(-2, 2)
        if rng.random() < 0.1:
            fields["cache_salt"] = rng.choice("ab")
        return fields

    def _chat_fields(self, rng: random.Random, most: int = 48) -> JsonDict:
        fields = self._fields(rng, most)
        if rng.random() < 0.5:
            fields["logprobs"] = True
        if rng.random() < 0.6:
            fields["reasoning_effort"] = rng.choice(["none", "low", "high", "max"])
        return fields

    def _chat(self, client: Client) -> Call:
        rng = client.rng
        system = {"role": "system", "content": prefix(rng.randrange(NUM_PREFIXES))}
        messages = [system, *user(words(rng, rng.randint(1, 40)))]
        return Call(kind="chat", body={"messages": messages, **self._chat_fields(rng)})

    def _turn(self, client: Client) -> Call:
        """One more turn of this client's own conversation."""
        rng, history = client.rng, client.history
        if len(history) >= MAX_HISTORY:
            history.clear()
        history += user(words(rng, rng.randint(3, 20)))
        messages = list(history)
        history.append({"role": "assistant", "content": words(rng, 10)})
        return Call(kind="turn", body={"messages": messages, **self._chat_fields(rng)})

    def _text(self, client: Client) -> Call:
        rng = client.rng
        body = {"prompt": prefix(rng.randrange(4)) + words(rng, 3), **self._fields(rng)}
        return Call(kind="text", path=TEXT, body=body)

    def _tool(self, client: Client) -> Call:
        rng = client.rng
        fields = {**self._fields(rng), "max_tokens": 300, "stop": None, "reasoning_effort": "none"}
        body = {"messages": user(words(rng, 9)), "tools": [WEATHER], **fields}
        body |= {"tool_choice": "required", "parallel_tool_calls": False}
        return Call(kind="tool", body=body, check=_calls_weather)

    def _schema(self, client: Client) -> Call:
        rng = client.rng
        fields = {**self._fields(rng), "max_tokens": 300, "stop": None, "reasoning_effort": "none"}
        form = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
        body = {"messages": user(words(rng, 9)), "response_format": form, **fields}
        return Call(kind="schema", body=body, check=_is_place)

    def _picture(self, client: Client) -> Call:
        url = client.rng.choice(self._pictures)
        body = {"messages": shown(url), **self._chat_fields(client.rng, 12)}
        return Call(kind="picture", body=body)

    def _many(self, client: Client) -> Call:
        rng = client.rng
        body = {"messages": user(words(rng, 20)), **self._chat_fields(rng, 16)}
        return Call(kind="many choices", body={**body, "n": rng.randint(2, 4)})

    def _tokenize(self, client: Client) -> Call:
        return Call(kind="tokenize", path="/tokenize", body={"prompt": words(client.rng, 50)})

    def _malformed(self, rng: random.Random) -> Call:
        bodies = [b"{", b"", b"[1]", b"\xff\xfe", b'{"messages": [' + b"[" * 5000, b"null"]
        return Call(
            kind="malformed", path=rng.choice([CHAT, TEXT]), body=rng.choice(bodies), status=400
        )

    def _no_request(self, rng: random.Random) -> Call:
        body, param = rng.choice([({}, "messages"), ({"messages": 5}, "messages")])
        return Call(kind="no request", body=body, status=400, param=param)

    def _unknown_role(self, rng: random.Random) -> Call:
        body = {"messages": [{"role": "wizard", "content": words(rng, 3)}]}
        return Call(kind="unknown role", body=body, status=400, param="messages")

    def _stray_result(self, rng: random.Random) -> Call:
        result = {"role": "tool", "content": "18 C", "tool_call_id": words(rng, 1)}
        body = {"messages": [*user("Hi"), result]}
        return Call(kind="stray", body=body, status=400, param="messages[1].tool_call_id")

    def _bad_schema(self, rng: random.Random) -> Call:
        schema = rng.choice([{"type": "wish"}, {"$ref": "#/nowhere"}, {"not": {"type": "string"}}])
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"messages": user("Hi"), "response_format": form}
        param = "response_format.json_schema.schema"
        return Call(kind="bad schema", body=body, status=400, param=param)

    def _too_long(self, rng: random.Random) -> Call:
        body = {"messages": user(words(rng, rng.randint(4000, 40_000)))}
        return Call(kind="too long", body=body, status=400, param="messages")

    def _corrupt_picture(self, rng: random.Random) -> Call:
        head, _, data = self._pictures[0].partition(",")
        cut = data[: rng.randrange(4, len(data) // 2) // 4 * 4]
        body = {"messages": shown(f"{head},{cut}")}
        return Call(kind="corrupt picture", body=body, status=400, param="messages")

    def _vast_picture(self, rng: random.Random) -> Call:
        body = {"messages": shown(rng.choice(self._bombs)), "max_tokens": 4}
        return Call(kind="vast picture", body=body, status=400, param="messages")

    def _vast_body(self, rng: random.Random) -> Call:
        size = BODY_LIMIT + rng.randint(1, 100_000)
        return Call(kind="vast body", body=b" " * size, status=413)

    def _out_of_range(self, rng: random.Random) -> Call:
        name, value = rng.choice([("temperature", -1), ("top_p", 0), ("n", 0), ("max_tokens", 0)])
        body = {"messages": user("Hi"), name: value}
        return Call(kind="out of range", body=body, status=400, param=name)


def _calls_weather(message: JsonDict) -> bool:
    (call,) = message.get("tool_calls") or [{}]
    arguments = json.loads(call["function"]["arguments"])
    return arguments["city"] in ("Rome", "Bari") and arguments["days"] in (1, 2, None)


def _is_place(message: JsonDict) -> bool:
    return set(json.loads(message["content"])) == {"name", "far"}
