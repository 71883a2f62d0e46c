"""Arguments of a tool call as XTML holds them: one (key, type, text) each, or a raw JSON block.

Two revisions of the official encoder differ in how they read an `arguments` string: A parses it
and serialises every value again; B cuts it one level deep and keeps the client's own text of every
value that is not a string.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from baltoro.text.messages import MessageError, MessageTypeError

Revision = Literal["A", "B"]


class Argument(NamedTuple):
    """One `<|open|>argument key=… type=…<|sep|>text<|close|>argument<|sep|>`."""

    key: str
    type: str  # boolean, null, number, string, object or array
    text: str  # a string as it is, any other value as JSON


class Arguments(NamedTuple):
    """What stands between call-open and call-close: arguments, or a block of raw JSON."""

    parts: list[Argument]
    raw_json: str | None  # text that is no JSON object; then `parts` is empty


def read_arguments(arguments: Any, revision: Revision) -> Arguments:
    """The XTML arguments for a call's `arguments`: a dict, a JSON object as text, or None.

    Text that holds no JSON object becomes a raw block, except that revision A takes blank text for
    no arguments and refuses valid JSON that is no object. Raises `MessageTypeError` for any other
    Python type, `MessageError` as said.
    """
    if arguments is None or arguments == "":
        return Arguments([], None)
    if isinstance(arguments, Mapping):
        return Arguments(_serialised(arguments), None)
    if not isinstance(arguments, str):
        raise MessageTypeError(
            f"function.arguments={arguments!r}: must be a dict or the text of a JSON object"
        )
    return _read_text_a(arguments) if revision == "A" else _read_text_b(arguments)


def split_object(text: str) -> list[Argument]:
    """The members of a JSON object, values that are no strings in their original spelling.

    Duplicate keys are all kept, control characters are allowed in strings, and what follows the
    closing brace is ignored. Raises `ValueError` if `text` does not start with a JSON object.
    """
    parts: list[Argument] = []
    at = _expect("{", text, 0)
    if text[at : at + 1] == "}":
        return parts
    while True:
        key, at = _decode(text, at)
        if not isinstance(key, str):
            raise ValueError(f"key {key!r} is no string")
        start = _expect(":", text, at)
        value, at = _decode(text, start)
        literal = value if isinstance(value, str) else text[start:at]
        parts.append(Argument(key, type_of(value), literal))
        at = _skip_blanks(text, at)
        if text[at : at + 1] == "}":
            return parts
        at = _expect(",", text, at)


def type_of(value: Any) -> str:
    """The `type` attribute of a value; all that is no scalar of JSON and no dict is `array`."""
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


# Types matter here, values do not: `float` has no limit on the digits of an integer.
_LENIENT = json.JSONDecoder(strict=False, parse_int=float)


def _read_text_a(text: str) -> Arguments:
    if not text.strip():
        return Arguments([], None)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return Arguments([], text)
    if not isinstance(value, dict):
        raise MessageError(f"function.arguments={text!r}: must be a JSON object in revision A")
    return Arguments(_serialised(value), None)


def _read_text_b(text: str) -> Arguments:
    try:
        return Arguments(split_object(text), None)
    except ValueError:
        return Arguments([], text)


def _serialised(arguments: Mapping[str, Any]) -> list[Argument]:
    return [Argument(str(key), type_of(value), _text(value)) for key, value in arguments.items()]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise MessageTypeError(f"function.arguments: {value!r} is not JSON ({error})") from error


def _decode(text: str, at: int) -> tuple[Any, int]:
    try:
        return _LENIENT.raw_decode(text, at)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _expect(sign: str, text: str, at: int) -> int:
    """The place after `sign` and the blanks around it."""
    at = _skip_blanks(text, at)
    if text[at : at + 1] != sign:
        raise ValueError(f"expected {sign!r} at {at}, got {text[at : at + 1]!r}")
    return _skip_blanks(text, at + 1)


def _skip_blanks(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t", "\n", "\r"):
        at += 1
    return at
