"""Messages of a conversation, OpenAI-style dicts: what is refused, tool results, image parts.

A refusal is a `MessageError`, so a caller has one class to catch; where the official encoder raises
`KeyError` or `TypeError`, ours is that as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

IMAGE_TYPES = ("image", "image_url")
ROLES = ("system", "user", "assistant", "tool")


class MessageError(ValueError):
    """A message, or a part of one, that cannot be rendered."""


class PromptTooLong(MessageError):
    """A conversation whose prompt is above a given number of tokens."""


class MessageKeyError(MessageError, KeyError):
    """A field that must be there is missing."""

    def __str__(self) -> str:
        return str(self.args[0])


class MessageTypeError(MessageError, TypeError):
    """A field holds a value of the wrong Python type."""


def field(record: Any, key: str, where: str) -> Any:
    """`record[key]`, refusing a record that is no dict or lacks the field; `where` names it."""
    if not isinstance(record, Mapping):
        raise MessageTypeError(f"{where}={record!r}: must be a dict with {key!r}")
    if key not in record:
        raise MessageKeyError(f"{where}={dict(record)!r}: lacks {key!r}; add it")
    return record[key]


def function_of(call: Any, where: str) -> Mapping[str, Any]:
    """The record that holds `name` and `arguments`: the call's `function`, else the call itself."""
    if not isinstance(call, Mapping):
        raise MessageTypeError(f"{where}={call!r}: must be a dict with a function")
    function = call.get("function", call)
    field(function, "name", f"{where}.function")
    return function


def order_tool_results(messages: Sequence[Any]) -> list[Any]:
    """Tool results in the order of the calls they answer (as the release's encoder does).

    Each run of consecutive tool messages is matched by `tool_call_id` (else `id`) with the calls of
    the last assistant turn. A run that matches whole is sorted into call order, and the function
    name of each call overwrites `tool` (and `name`, where there is one); any other run stays as it
    came. Duplicate call ids: the first counts. Nothing is mutated; a second pass changes nothing.
    Raises `MessageTypeError` if `messages` is no list.
    """
    if not isinstance(messages, (list, tuple)):
        raise MessageTypeError(f"messages={messages!r}: must be a list of dicts")
    ordered: list[Any] = []
    run: list[Any] = []
    calls: dict[str, tuple[int, Any]] = {}
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role == "tool":
            run.append(message)
            continue
        ordered += _order_run(run, calls)
        run = []
        ordered.append(message)
        if role == "assistant":
            calls = _calls_by_id(message.get("tool_calls"))
    return ordered + _order_run(run, calls)


def image_parts(messages: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """Image parts of all roles, in the order in which `xtml.render` asks for their prompts."""
    for message in order_tool_results(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            continue
        if message["role"] == "system" and message.get("tools"):
            continue  # rendered as a declaration; its content is dropped
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            for part in content:
                if isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES:
                    yield part


def _calls_by_id(tool_calls: Any) -> dict[str, tuple[int, Any]]:
    """Call id to (position, function name); a call without an id still takes a position."""
    found: dict[str, tuple[int, Any]] = {}
    if not isinstance(tool_calls, (list, tuple)):
        return found
    for position, call in enumerate(tool_calls):
        if not isinstance(call, Mapping) or call.get("id") is None:
            continue
        function = call.get("function")
        name = function.get("name") if isinstance(function, Mapping) else call.get("name")
        found.setdefault(str(call["id"]), (position, name))
    return found


def _order_run(run: list[Any], calls: dict[str, tuple[int, Any]]) -> list[Any]:
    placed = []
    for message in run:
        result_id = message.get("tool_call_id", message.get("id"))
        if result_id is None or str(result_id) not in calls:
            return run
        position, name = calls[str(result_id)]
        placed.append((position, _renamed(message, name)))
    return [message for _, message in sorted(placed, key=lambda pair: pair[0])]


def _renamed(message: Mapping[str, Any], name: Any) -> Mapping[str, Any]:
    if name is None:
        return message
    renamed = {**message, "tool": name}
    if "name" in renamed:
        renamed["name"] = name
    return renamed
