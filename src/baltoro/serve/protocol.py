"""OpenAI's requests as we read them, and its answers as we write them. No engine here.

What we cannot honour is refused with a name, never ignored: constrained output (`response_format`,
strict tools, a forced tool) and the fields of `UNSUPPORTED`. Fields we do not know are ignored.
"""

import json
import secrets
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from baltoro.serve.answer import Answer
from baltoro.serve.request import NewToken
from baltoro.serve.sampling import Penalties, Sampling
from baltoro.text.reply import Delta
from baltoro.text.vocabulary import Tokenizer

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
)
MAX_CHOICES = 64
MAX_MESSAGE = 1000  # characters of an error


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
    repetition_penalty: float | None = Field(None, gt=0.0, le=100.0)
    seed: int | None = None
    stop: str | list[str] | None = None
    priority: int = Field(0, ge=-100, le=100)
    cache_salt: str = ""

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

    def first_seed(self) -> int:
        """The seed of the first choice; drawn if the request has none."""
        return secrets.randbits(63) if self.seed is None else self.seed


class ChatBody(_Body):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def check(self) -> None:
        """Raise `ApiError` for what is well-formed and cannot be served."""
        if self.reasoning_effort not in (None, *EFFORTS):
            raise ApiError(
                400,
                f"reasoning_effort={self.reasoning_effort!r}: use one of {', '.join(EFFORTS)}",
                param="reasoning_effort",
            )
        if self.response_format and self.response_format.get("type") != "text":
            raise ApiError(
                501,
                "response_format: constrained output is not available; leave it out",
                param="response_format",
                code="unsupported",
            )
        if self.tool_choice not in (None, "auto", "none"):
            raise ApiError(
                501,
                "tool_choice: a call cannot be forced; use 'auto' or 'none'",
                param="tool_choice",
                code="unsupported",
            )
        for number, tool in enumerate(self.tools or ()):
            function = tool.get("function")
            if isinstance(function, Mapping) and function.get("strict"):
                raise ApiError(
                    501,
                    f"tools[{number}].function.strict: constrained output is not available",
                    param=f"tools[{number}].function.strict",
                    code="unsupported",
                )
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs=true", param="top_logprobs")
        self._check_tool_results()

    def _check_tool_results(self) -> None:
        known: set[str] = set()
        for number, message in enumerate(self.messages):
            calls = message.get("tool_calls")
            for call in calls if isinstance(calls, list) else ():
                if isinstance(call, Mapping):
                    known.add(str(call.get("id")))
            if message.get("role") == "tool" and str(message.get("tool_call_id")) not in known:
                raise ApiError(
                    400,
                    f"messages[{number}].tool_call_id: no earlier assistant message has this call",
                    param=f"messages[{number}].tool_call_id",
                )


class CompletionBody(_Body):
    """`POST /v1/completions`."""

    prompt: str | list[int]
    logprobs: int | None = Field(None, ge=0, le=20)


class TokenizeBody(BaseModel):
    """`POST /tokenize`: a text, or the messages of a conversation."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


def refuse_unsupported(data: Mapping[str, Any]) -> None:
    """Raise `ApiError` for a field that would be ignored in silence."""
    for name in UNSUPPORTED:
        if data.get(name):
            raise ApiError(501, f"{name}: is not supported", param=name, code="unsupported")


def chat_delta(delta: Delta, num_calls_before: int, call_ids: list[str]) -> dict[str, Any]:
    """The `delta` of a chunk; empty if there is nothing to send. Appends the ids of new calls."""
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.content:
        fields["content"] = delta.content
    if delta.tool_calls:
        fields["tool_calls"] = []
        for index, call in enumerate(delta.tool_calls, num_calls_before):
            call_ids.append(new_id("call"))
            function = {"name": call.name, "arguments": call.arguments}
            fields["tool_calls"].append(
                {"index": index, "id": call_ids[-1], "type": "function", "function": function}
            )
    return fields


def chat_message(answer: Answer, call_ids: list[str]) -> dict[str, Any]:
    """The `message` of a whole choice."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call_id, call in zip(call_ids, answer.tool_calls, strict=True)
        ]
    return message


def logprob_entry(tokenizer: Tokenizer, token: NewToken) -> dict[str, Any]:
    """One token of `logprobs.content`, special tokens included."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        text = data.decode("utf-8", errors="replace")
        return {"token": text, "logprob": logprob, "bytes": list(data)}

    top = [entry(token_id, logprob) for token_id, logprob in token.top]
    return {**entry(token.id, token.logprob), "top_logprobs": top}


def usage(prompt: int, cached: int, completion: int, reasoning: int) -> dict[str, Any]:
    """`usage`, counted in tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def new_id(kind: str) -> str:
    """A name for a reply or a call that nobody else has."""
    return f"{kind}-{secrets.token_hex(12)}"


def sse(data: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
