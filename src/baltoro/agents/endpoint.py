"""A policy behind any OpenAI-compatible chat endpoint, ours among them.

It gives messages and counts, no token ids: good for evaluation, synthesis and judges, not for
training on its own samples. The key stays in this process and never enters a sandbox or a record.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from baltoro.agents.failure import PolicyError
from baltoro.agents.policy import (
    FinishReason,
    PolicyReply,
    Prompt,
    assistant_message,
    call_id,
    estimated_tokens,
)

RETRIED = frozenset({408, 409, 429, 500, 502, 503, 504})
FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "tool_calls": "tool_calls",
    "length": "length",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointConfig:
    """Where and how to ask."""

    base_url: str  # up to and with "/v1"
    model: str
    api_key: str | None = field(default=None, repr=False)
    temperature: float | None = None  # None: the server's own
    top_p: float | None = None
    timeout_s: float = 600.0  # of one request
    max_tries: int = 5
    backoff_s: float = 1.0  # before the second try; doubles, up to a minute
    policy_version: int = 0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"endpoint.base_url={self.base_url!r}: must begin with http(s)://")
        if self.max_tries < 1:
            raise ValueError(f"endpoint.max_tries={self.max_tries!r}: must be at least 1")


class EndpointPolicy:
    """A `Policy` over HTTP; `async with` closes its connections."""

    def __init__(self, config: EndpointConfig, transport: httpx.AsyncBaseTransport | None = None):
        """`transport` replaces the network, for tests."""
        self.name = f"{config.model} at {config.base_url}"
        self._config = config
        headers = {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key}"}
        self._client = httpx.AsyncClient(
            base_url=config.base_url.rstrip("/") + "/",
            headers=headers,
            timeout=config.timeout_s,
            transport=transport,
        )

    async def __aenter__(self) -> "EndpointPolicy":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def reply(self, prompt: Prompt) -> PolicyReply:
        answer = await self._post(self._body(prompt))
        try:
            return self._read(answer, prompt)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise PolicyError(
                f"{self.name}: not a chat completion ({type(error).__name__}: {error}):"
                f" {str(answer)[:300]}"
            ) from error

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        config = self._config
        optional = {
            "tools": list(prompt.tools) or None,
            "reasoning_effort": prompt.effort,
            "max_tokens": prompt.max_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
        }
        body: dict[str, Any] = {
            "model": config.model,
            "messages": [dict(message) for message in prompt.messages],
            "seed": prompt.seed,
        }
        return body | {key: value for key, value in optional.items() if value is not None}

    async def _post(self, body: Mapping[str, Any]) -> Any:
        config = self._config
        problem = ""
        wait_s = config.backoff_s
        for attempt in range(config.max_tries):
            if attempt:
                await asyncio.sleep(min(wait_s, 60.0))
                wait_s *= 2
            try:
                response = await self._client.post("chat/completions", json=body)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == 200:
                try:
                    return response.json()
                except ValueError as error:
                    raise PolicyError(f"{self.name}: the answer is not JSON: {error}") from error
            problem = f"status {response.status_code}: {response.text[:500]}"
            if response.status_code not in RETRIED:
                raise PolicyError(f"{self.name}: {problem}")
            wait_s = max(wait_s, _retry_after(response))
        raise PolicyError(f"{self.name}: no answer in {config.max_tries} tries; last {problem}")

    def _read(self, answer: Any, prompt: Prompt) -> PolicyReply:
        choice = answer["choices"][0]
        given = choice["message"]
        calls = [
            {
                "id": call.get("id") or call_id(prompt, index),
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": _text(call["function"]["arguments"]),
                },
            }
            for index, call in enumerate(given.get("tool_calls") or [])
        ]
        reasoning = given.get("reasoning_content") or given.get("reasoning")
        content = given.get("content")
        message = assistant_message(_text(content or ""), _text(reasoning or ""), calls)
        usage = answer.get("usage") or {}
        reason = FINISH_REASONS.get(choice.get("finish_reason") or "stop", "stop")
        return PolicyReply(
            message=message,
            finish_reason="tool_calls" if calls and reason == "stop" else reason,
            num_prompt_tokens=usage.get("prompt_tokens") or estimated_tokens(prompt.messages),
            num_output_tokens=usage.get("completion_tokens") or estimated_tokens([message]),
            policy_version=self._config.policy_version,
        )


def _text(value: str) -> str:
    """JSON may spell half a surrogate pair, which no text can hold: it becomes a question mark."""
    return value.encode("utf-8", "replace").decode()


def _retry_after(response: httpx.Response) -> float:
    """Seconds the server asks for; dates are not read."""
    value = response.headers.get("retry-after", "")
    return float(value) if value.isdigit() else 0.0
