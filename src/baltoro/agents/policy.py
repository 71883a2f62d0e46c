"""A policy: anything that answers a conversation, if possible with the tokens it sampled.

An episode gives a `Prompt` and gets a `PolicyReply`. A policy that samples tokens itself also says
which ones, so that training sees exactly what was sampled: a conversation's ids are only ever
appended to (`TokenPrefix`), never rendered a second time. Everything a policy needs is in the
prompt, so one policy serves any number of episodes at once, and a resumed one.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from baltoro.agents.failure import PolicyError

FinishReason = Literal["stop", "tool_calls", "length"]
Purpose = Literal["turn", "summary"]
CHARS_PER_TOKEN = 4  # for policies that do not count


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPrefix:
    """The ids that a context consists of so far, up to the end of its last assistant message."""

    ids: tuple[int, ...]
    num_messages: int  # that these ids spell


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One question to a policy."""

    messages: tuple[Mapping[str, Any], ...]  # OpenAI-style, as `text/xtml.render` takes them
    tools: tuple[Mapping[str, Any], ...] = ()  # declarations
    effort: str | None = None  # low, high or max
    max_tokens: int | None = None  # of the reply
    seed: int = 0
    prefix: TokenPrefix | None = None  # None: a new context
    agent: str = "main"  # or the path of a sub-agent, "main/1"
    turn: int = 0  # of this agent in its episode, from 0
    purpose: Purpose = "turn"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """What was sampled; the last three are aligned."""

    prompt_ids: tuple[int, ...]  # new in the context: all of it, or what follows the prefix
    ids: tuple[int, ...]  # sampled
    logprobs: tuple[float, ...]  # natural log, under the policy that sampled
    policy_versions: tuple[int, ...]  # of the weights that made each


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyReply:
    """One message of a policy."""

    message: Mapping[str, Any]  # role assistant; calls carry ids
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    policy_version: int = 0  # of the weights that began it
    tokens: Tokens | None = None  # None: the policy does not tell
    problems: tuple[str, ...] = ()  # departures from the format


class Policy(Protocol):
    """What an agent thinks with."""

    name: str

    async def reply(self, prompt: Prompt) -> PolicyReply:
        """Answer. Raises `PolicyError` if there is no answer to be had."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One reply of a script."""

    content: str = ""
    think: str = ""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()  # tool name, arguments
    finish_reason: FinishReason | None = None  # None: by whether there are calls


class ScriptedPolicy:
    """A policy that says what it is told to; it keeps no state."""

    def __init__(self, script: Sequence[Line] | Callable[[Prompt], Line], name: str = "scripted"):
        """`script`: a line per turn of the main agent, or what answers any prompt."""
        self.name = name
        self._script = script

    async def reply(self, prompt: Prompt) -> PolicyReply:
        line = self._line(prompt)
        calls = [
            {
                "id": call_id(prompt, index),
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for index, (name, arguments) in enumerate(line.calls)
        ]
        message = assistant_message(line.content, line.think, calls)
        return PolicyReply(
            message=message,
            finish_reason=line.finish_reason or ("tool_calls" if calls else "stop"),
            num_prompt_tokens=estimated_tokens(prompt.messages),
            num_output_tokens=estimated_tokens([message]),
        )

    def _line(self, prompt: Prompt) -> Line:
        if callable(self._script):
            return self._script(prompt)
        if prompt.purpose != "turn" or prompt.agent != "main":
            raise PolicyError(
                f"a list of lines answers turns of the main agent, not {prompt.agent}'s"
                f" {prompt.purpose}; give a function"
            )
        if prompt.turn >= len(self._script):
            raise PolicyError(f"turn {prompt.turn}: the script has {len(self._script)} lines")
        return self._script[prompt.turn]


def assistant_message(
    content: str | None, reasoning: str | None, calls: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """An assistant's message for the history; parts that are empty are left out."""
    message: dict[str, Any] = {"role": "assistant", "content": content or ""}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def call_id(prompt: Prompt, index: int) -> str:
    """A call's id where the policy gives none: unique in its episode and the same when resumed."""
    return f"{prompt.agent}:{prompt.turn}:{index}"


def estimated_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
    """A guess for policies that do not count: a quarter of the characters of the JSON."""
    return sum(len(json.dumps(dict(message))) for message in messages) // CHARS_PER_TOKEN
