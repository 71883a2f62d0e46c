"""OpenAI's requests as we read them. No engine here.

What we cannot honour is refused with a name, never ignored (`UNSUPPORTED`). Fields we do not know
are ignored. `ChatBody.form` says when a reply is bound by a grammar. Ours beside OpenAI's are
`top_k`, `min_p`, `repetition_penalty`, `priority`, `cache_salt`, `request_id`, by which a request
can be aborted, and `retries`: so many times a reply that is empty or has lost a call is thrown away
and drawn again; a stream then waits for a good one.
"""

import json
import secrets
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from baltoro.serve.document import MAX_REPLIES, Dicts, Messages, Prompts, Stops
from baltoro.serve.form import Form, Tool
from baltoro.serve.sampling import Penalties, Sampling
from baltoro.text.messages import IMAGE_TYPES

EFFORTS = ("none", "low", "high", "max")
UNSUPPORTED = (
    "logit_bias",
    "functions",
    "function_call",
    "audio",
    "prediction",
    "web_search_options",
    "best_of",
    "suffix",
    "echo",
    # of other engines, where they change what is written
    "bad_words",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "stop_token_ids",
    "structured_outputs",
)
# of these, the values that ask for nothing
HARMLESS: dict[str, tuple[Any, ...]] = {"best_of": (1,), "function_call": ("none", "auto")}
MAX_CHOICES = 64
MAX_RETRIES = 5
MIN_TEMPERATURE = 1e-6  # above 0; below it logits overflow
MAX_MESSAGE = 1000  # characters of an error
REQUEST_ID = r"^[A-Za-z0-9._:-]{1,128}$"


class ApiError(Exception):
    """An error as a client sees it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,  # seconds
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def headers(self) -> dict[str, str]:
        """What tells a client whether and when to try again."""
        if self.status == 501:
            return {"x-should-retry": "false"}  # OpenAI's client tries again after any 5xx
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}

    def body(self) -> dict[str, Any]:
        """The JSON that goes with the status."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        # what a client sent may come back in it, and half a surrogate pair is no UTF-8
        message = str(self)[:MAX_MESSAGE].encode("utf-8", "replace").decode()
        return {
            "error": {
                "message": message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


class StreamOptions(BaseModel):
    """`stream_options`."""

    include_usage: bool = False


class _Body(BaseModel):
    """What both kinds of completion take."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0.0, le=100.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100.0)
    seed: int | None = None
    stop: Stops = None
    priority: int = Field(0, ge=-100, le=100)
    cache_salt: str = ""
    retries: int = Field(0, ge=0, le=MAX_RETRIES)
    request_id: str | None = Field(None, pattern=REQUEST_ID)

    def check(self) -> None:
        """Raise `ApiError` for what is well-formed and cannot be served."""
        if self.temperature and self.temperature < MIN_TEMPERATURE:
            least = f"{self.temperature} must be 0 or at least {MIN_TEMPERATURE}"
            raise _refused("temperature", least)
        if self.retries and self.temperature == 0.0:
            message = "retries: at temperature 0 a second reply would be the first; raise it"
            raise ApiError(400, message, param="retries")

    @property
    def effort(self) -> str:
        """Of reasoning; replies of one effort are expected to be about as long."""
        return "none"

    @property
    def sampling(self) -> Sampling:
        """Absent fields take the sampler's own values; `top_k` 0 and -1 mean all."""
        default = Sampling()
        return Sampling(
            temperature=default.temperature if self.temperature is None else self.temperature,
            top_k=self.top_k if self.top_k and self.top_k > 0 else None,
            top_p=default.top_p if self.top_p is None else self.top_p,
            min_p=default.min_p if self.min_p is None else self.min_p,
        )

    @property
    def penalties(self) -> Penalties:
        return Penalties(
            presence=self.presence_penalty or 0.0,
            frequency=self.frequency_penalty or 0.0,
            repetition=1.0 if self.repetition_penalty is None else self.repetition_penalty,
        )

    @property
    def stop_strings(self) -> list[str]:
        if isinstance(self.stop, str):
            return [self.stop]
        return self.stop or []

    @property
    def num_prompts(self) -> int:
        return 1

    def first_seed(self) -> int:
        """The seed of the first choice; drawn if the request has none."""
        return secrets.randbits(63) if self.seed is None else self.seed


class ChatBody(_Body):
    """`POST /v1/chat/completions`."""

    messages: Messages = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: Dicts | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(None, json_schema_extra={"enum": [*EFFORTS, None]})
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def effort(self) -> str:
        """Of reasoning; replies of one effort are expected to be about as long."""
        return self.reasoning_effort or "max"

    @property
    def thinking(self) -> bool:
        """Whether the reply begins with reasoning."""
        return self.reasoning_effort != "none"

    def check(self) -> None:
        """Raise `ApiError` for what is well-formed and cannot be served."""
        super().check()
        if self.reasoning_effort not in (None, *EFFORTS):
            raise ApiError(
                400,
                f"reasoning_effort={self.reasoning_effort!r}: use one of {', '.join(EFFORTS)}",
                param="reasoning_effort",
            )
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs=true", param="top_logprobs")
        self._check_contents()
        self._check_tool_results()
        self.form()

    def form(self) -> Form | None:
        """How the reply is bound, if it is: by a response format, a forced or single call, or a
        strict tool. The schema of a tool that is not strict then holds as far as it can.

        Raises `ApiError` for a format, tools or a choice among them that cannot be.
        """
        has_schema, schema = self._response_schema()
        tools = self._declared_tools()
        choice = self._chosen_tool([tool.name for tool in tools])
        if choice == "none":
            tools = []
        elif choice == "named":
            tools = [tool for tool in tools if tool.name == self.tool_choice["function"]["name"]]
        is_forced = choice in ("required", "named")
        is_single = choice == "named" or self.parallel_tool_calls is False
        is_bound = is_forced or any(tool.is_strict for tool in tools)
        if not (has_schema or is_bound or (tools and is_single)):
            return None
        return Form(
            thinking=self.thinking,
            has_schema=has_schema,
            schema=schema,
            tools=tuple(tools),
            calls="forced" if is_forced else "allowed",
            is_single=is_single,
        )

    def _response_schema(self) -> tuple[bool, Any]:
        """Whether the response must be JSON, and its schema."""
        asked = self.response_format or {"type": "text"}
        kind = asked.get("type")
        if kind not in ("text", "json_object", "json_schema"):
            raise _refused(
                "response_format.type", f"{kind!r} is not one of text, json_object, json_schema"
            )
        if kind != "json_schema":
            return kind == "json_object", {"type": "object"}
        outer = asked.get("json_schema")
        schema = outer.get("schema") if isinstance(outer, Mapping) else None
        if not isinstance(schema, (Mapping, bool)):
            raise _refused("response_format.json_schema.schema", "must be a JSON schema")
        return True, schema

    def _declared_tools(self) -> list[Tool]:
        tools: list[Tool] = []
        names: set[str] = set()
        for number, tool in enumerate(self.tools or ()):
            where = f"tools[{number}]"
            if tool.get("type") != "function":
                raise _refused(f"{where}.type", f"{tool.get('type')!r} is not 'function'")
            function = tool.get("function")
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
                raise _refused(f"{where}.function.name", "a name is needed")
            if name in names:
                raise _refused(f"{where}.function.name", f"{name!r} is declared twice")
            names.add(name)
            parameters = function.get("parameters")
            if not isinstance(parameters, (Mapping, type(None))):
                raise _refused(f"{where}.function.parameters", "must be a JSON schema")
            is_strict = bool(function.get("strict"))
            tools.append(Tool(name, parameters, is_strict, f"{where}.function.parameters"))
        return tools

    def _chosen_tool(self, names: list[str]) -> str:
        """none, auto, required or named."""
        choice = "auto" if self.tool_choice is None else self.tool_choice
        if choice in ("none", "auto"):
            return str(choice)
        if choice == "required":
            if not names:
                raise _refused("tool_choice", "'required' needs tools")
            return "required"
        function = choice.get("function") if isinstance(choice, Mapping) else None
        if not isinstance(function, Mapping):
            raise _refused(
                "tool_choice", "must be 'none', 'auto', 'required' or a function by its name"
            )
        if function.get("name") not in names:
            raise _refused("tool_choice", f"{function.get('name')!r} is not among the tools")
        return "named"

    def _check_contents(self) -> None:
        for number, message in enumerate(self.messages):
            where = f"messages[{number}].content"
            content = message.get("content")
            is_needed = message.get("role") in ("system", "user") and not message.get("tools")
            if content is None and is_needed:  # a system message may declare tools instead
                raise _refused(where, "must be a string or a list of parts")
            for place, part in enumerate(content if isinstance(content, list) else ()):
                kind = part.get("type") if isinstance(part, Mapping) else None
                if kind not in ("text", *IMAGE_TYPES):
                    known = ", ".join(("text", *IMAGE_TYPES))
                    raise _refused(f"{where}[{place}].type", f"{kind!r} is not one of {known}")
                if kind == "text" and not isinstance(part.get("text"), str):
                    raise _refused(f"{where}[{place}].text", "must be a string")

    def _check_tool_results(self) -> None:
        known: set[str] = set()
        for number, message in enumerate(self.messages):
            calls = message.get("tool_calls")
            for call in calls if isinstance(calls, list) else ():
                if isinstance(call, Mapping) and call.get("id") is not None:
                    known.add(str(call["id"]))
            if message.get("role") == "tool" and str(message.get("tool_call_id")) not in known:
                raise ApiError(
                    400,
                    f"messages[{number}].tool_call_id: no earlier assistant message has this call",
                    param=f"messages[{number}].tool_call_id",
                )


class CompletionBody(_Body):
    """`POST /v1/completions`."""

    prompt: Prompts
    logprobs: int | None = Field(None, ge=0, le=20)
    response_format: Any = None
    tools: Any = None

    def check(self) -> None:
        """Raise `ApiError` for what only a conversation has."""
        super().check()
        for name in ("response_format", "tools"):
            if getattr(self, name):
                raise _refused(name, "plain completions have none; use /v1/chat/completions")
        if self.n * self.num_prompts > MAX_REPLIES:
            raise _refused("prompt", f"with n={self.n} at most {MAX_REPLIES} replies are written")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or more; an empty list is one without tokens."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        return prompt if prompt and not isinstance(prompt[0], int) else [prompt]

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)


class AbortBody(BaseModel):
    """`POST /abort`: the `id` of an answer, or the `request_id` that its request gave."""

    request_id: str


class TokenizeBody(BaseModel):
    """`POST /tokenize`: a text, or the messages of a conversation."""

    prompt: str | None = None
    messages: Messages | None = None
    tools: Dicts | None = None


def _refused(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param)


def invalid(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body, with its field."""
    first = error.errors(include_url=False, include_input=False)[0]
    field, *rest = first["loc"]
    param = str(field) + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in rest)
    return _refused(param, first["msg"])


def without_nulls(data: Mapping[str, Any]) -> dict[str, Any]:
    """A body's fields but those that are null, which is as good as absent; its options likewise."""
    kept = {name: value for name, value in data.items() if value is not None}
    options = kept.get("stream_options")
    if isinstance(options, dict):
        kept["stream_options"] = {k: v for k, v in options.items() if v is not None}
    return kept


def refuse_unsupported(data: Mapping[str, Any]) -> None:
    """Raise `ApiError` for a field that would be ignored in silence."""
    for name in UNSUPPORTED:
        if data.get(name) and data[name] not in HARMLESS.get(name, ()):
            raise ApiError(501, f"{name}: is not supported", param=name, code="unsupported")


def sse(data: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
