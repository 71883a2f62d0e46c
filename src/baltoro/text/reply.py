"""What a model's message holds once parsed, whole (`Reply`) or as it comes (`Delta`)."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from baltoro.text.arguments import Argument, split_object

Channel = Literal["think", "response", "tools"]
CHANNELS: dict[str, Channel] = {"think": "think", "response": "response", "tools": "tools"}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model closed."""

    name: str
    arguments: str  # JSON object as text; not an object only if the model wrote such a json block
    raw: tuple[Argument, ...] = ()  # key, declared type and text, exactly as the model wrote them


class CallPart(NamedTuple):
    """The beginning of a call, or what goes on with the one that was begun last."""

    name: str | None  # None: it goes on
    arguments: str  # a piece of the JSON object


@dataclass(frozen=True, slots=True)
class Delta:
    """What one piece of output adds to a reply."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    retracts_reasoning: bool = False  # all reasoning sent before was the answer; `content` has it
    # the same calls and those that never close, as they come; not compared, since it is how a call
    # comes and not what it is
    call_parts: tuple[CallPart, ...] = field(default=(), compare=False)

    def __bool__(self) -> bool:
        return bool(self.call_parts) or self != Delta()


@dataclass(frozen=True, slots=True)
class Reply:
    """One assistant message."""

    reasoning: str | None  # None when empty
    content: str | None  # None when empty
    tool_calls: tuple[ToolCall, ...] = ()
    undeclared_calls: tuple[ToolCall, ...] = ()  # made although no tool was declared: not to be run
    is_complete: bool = False  # the model closed its message
    open_channel: Channel | None = None  # where the output was cut off, if inside a channel
    problems: tuple[str, ...] = ()  # departures from the format, in the order they were met

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """`length` for a message that was cut off; an engine that knows better overrides it."""
        has_answer = self.content is not None or bool(self.tool_calls)
        if not self.is_complete and (self.open_channel is not None or not has_answer):
            return "length"
        return "tool_calls" if self.tool_calls else "stop"

    def message(self, call_ids: Sequence[str] = ()) -> dict[str, Any]:
        """The assistant message for the history, as `xtml.render` takes it.

        `call_ids` are the ids of the calls, one each, which tool results then name. Rendered by
        revision B with thinking on, a well-formed message gives the model's own text again.
        """
        if len(call_ids) != len(self.tool_calls):
            raise ValueError(
                f"call_ids={call_ids!r}: give one per call, there are {len(self.tool_calls)}"
            )
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = call_records(call_ids, self.tool_calls)
        return message


def call_records(call_ids: Sequence[str], calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """The `tool_calls` of a message in OpenAI's form; one id each."""
    return [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call_id, call in zip(call_ids, calls, strict=True)
    ]


def join(deltas: Iterable[Delta]) -> tuple[str, str, tuple[ToolCall, ...]]:
    """Reasoning, content and calls that deltas add up to."""
    reasoning, content = "", ""
    calls: tuple[ToolCall, ...] = ()
    for delta in deltas:
        reasoning = ("" if delta.retracts_reasoning else reasoning) + delta.reasoning
        content += delta.content
        calls += delta.tool_calls
    return reasoning, content, calls


def join_calls(deltas: Iterable[Delta]) -> tuple[ToolCall, ...]:
    """The calls that their parts add up to, begun ones among them; without `raw`."""
    calls: list[tuple[str, list[str]]] = []
    for part in (part for delta in deltas for part in delta.call_parts):
        if part.name is not None:
            calls.append((part.name, []))
        calls[-1][1].append(part.arguments)
    return tuple(ToolCall(name, "".join(pieces)) for name, pieces in calls)


def arguments_json(arguments: Iterable[Argument]) -> str:
    """The JSON object of a call's arguments; of a key given twice the last value counts.

    A value of type string stays text, also where it looks like JSON. Any other keeps the model's
    own spelling (`1e2` stays `1e2`) if that is JSON, else its text becomes a string.
    """
    members = {argument.key: value_json(argument) for argument in arguments}
    return "{" + ", ".join(f"{quoted(key)}: {value}" for key, value in members.items()) + "}"


def value_json(argument: Argument) -> str:
    """The value of one argument as `arguments_json` has it."""
    return argument.text if _is_json_value(argument) else quoted(argument.text)


def read_json_block(text: str) -> list[Argument] | None:
    """The arguments in a json block, or None if it is not one JSON object."""
    try:
        return split_object(text) if isinstance(_strict_json(text), dict) else None
    except (ValueError, RecursionError):
        return None


def _is_json_value(argument: Argument) -> bool:
    if argument.type == "string":
        return False
    try:
        _strict_json(argument.text)
    except (ValueError, RecursionError):
        return False
    return True


def _strict_json(text: str) -> Any:
    """Decoded JSON, without NaN and infinities; digits are not converted, so none are too many."""
    return json.loads(text, parse_int=float, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def quoted(text: str) -> str:
    """A string as JSON; one that is cut anywhere is quoted as its pieces are."""
    return json.dumps(text, ensure_ascii=False)
