"""JSON schemas to rules of a Lark grammar: values as JSON, strings as the bare text XTML has.

llguidance compiles the JSON part and refuses what it cannot hold to. Arguments of a tool call are
cut here, one level deep, since XTML writes each on its own with its type in front: `kinds` says
which types a schema allows, `narrowed` is the schema for one of them, `bare_text` the rule of a
string without quotes. A strict schema holds in full or is refused; a lenient one as far as it goes.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from baltoro.text.arguments import type_of

KINDS = ("string", "number", "boolean", "null", "object", "array")  # XTML's types of a value
MAX_DEPTH = 32  # of references and branches that a type is looked for through

# What says nothing about a value.
NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"$comment", "$schema", "$id", "$defs", "definitions"}
)
# As JSON by default, but for runs of blanks without an end, in which models get lost.
_BLANKS = r"( |\n {0,40}|\n\t{0,10})?"
_TEXT = "(?s:.{%s})"
_DATE = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:Z|[+-](?:0[0-9]|1[0-3]):[0-5][0-9])"
)
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": r"[A-Za-z0-9]{1,32}(?:\.[A-Za-z0-9]{1,16})?@[a-z0-9]{1,32}(?:\.[a-z]{2,16}){1,3}",
}


class SchemaError(ValueError):
    """A schema that cannot be held to; the message says what in it, the caller which one it is."""


class Rules:
    """A Lark grammar in the making. A rule that is asked for twice is written once."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def add(self, body: str) -> str:
        """The name of a rule with this body."""
        return self._names.setdefault(body, f"r{len(self._names)}")

    def terminal(self, regex: str) -> str:
        """The name of a terminal: a regular expression in Lark's syntax, slashes included."""
        return self._names.setdefault(regex, f"T{len(self._names)}")

    def json(self, schema: Any, *, is_strict: bool) -> str:
        """A rule for a value of `schema`, written as JSON."""
        options: dict[str, Any] = {"whitespace_pattern": _BLANKS}
        if not is_strict:
            options |= {"lenient": True, "coerce_one_of": True}
        if not isinstance(schema, Mapping):
            schema = {} if schema is True else {"enum": []}
        bare = {key: value for key, value in schema.items() if key not in ("$id", "$schema")}
        return self.add("%json " + dumped({**bare, "x-guidance": options}))

    def text(self, start: str) -> str:
        """The whole grammar, for replies of the shape `start`."""
        lines = [f"{name}: {body}" for body, name in self._names.items()]
        return "\n".join([f"start: {start}", *lines]) + "\n"


def dumped(value: Any) -> str:
    """JSON, which is also how Lark spells a string. Raises `SchemaError` for what is no JSON."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise SchemaError(f"is no JSON ({error})") from None
    return text


def with_definitions(root: Any, schema: Any) -> Any:
    """`schema`, a part of `root`, made whole on its own: references go to a copy of the root."""
    if "$ref" not in dumped(schema) or not isinstance(schema, Mapping):
        return schema
    return {**_moved(schema), "$defs": {"root": _moved(root)}}


def resolved(schema: Any, root: Any) -> Any:
    """`schema` with a reference at its top replaced by what it names in `root`, as in `kinds`."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        target = _target(schema["$ref"], root)
        schema = {**target, **siblings} if isinstance(target, Mapping) else target
    raise SchemaError("its references go in a circle")


def kinds(schema: Any, root: Any, depth: int = 0) -> set[str]:
    """The types that a value of `schema` may have."""
    if depth > MAX_DEPTH:
        raise SchemaError("its references go in a circle")
    if isinstance(schema, bool):
        return set(KINDS) if schema else set()
    if not isinstance(schema, Mapping):
        raise SchemaError(f"{schema!r} is no schema; it must be an object or a boolean")
    found = set(KINDS)
    if "type" in schema:
        found &= {_kind(name) for name in _list(schema["type"])}
    if "enum" in schema:
        found &= {type_of(value) for value in _list(schema["enum"])}
    if "const" in schema:
        found &= {type_of(schema["const"])}
    if "$ref" in schema:
        found &= kinds(_target(schema["$ref"], root), root, depth + 1)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            branches = [kinds(branch, root, depth + 1) for branch in _list(schema[key])]
            found &= set().union(*branches)
    for part in _list(schema.get("allOf", ())):
        found &= kinds(part, root, depth + 1)
    return found


def check_references(schema: Any, root: Any) -> None:
    """Raise `SchemaError` for a reference anywhere in `schema` to nothing, or only to itself."""
    if isinstance(schema, Mapping):
        if isinstance(schema.get("$ref"), str):
            kinds(schema, root)
        for value in schema.values():
            check_references(value, root)
    elif isinstance(schema, list):
        for value in schema:
            check_references(value, root)


def narrowed(schema: Any, kind: str, root: Any, depth: int = 0) -> Any:
    """`schema` for values of one of its `kinds` alone."""
    found = kinds(schema, root, depth)
    if found == {kind} or not isinstance(schema, Mapping):
        return {"type": kind} if schema is True else schema
    narrow = dict(schema)
    if "type" in narrow:
        narrow["type"] = [name for name in _list(narrow["type"]) if _kind(name) == kind]
    elif not {"enum", "const", "$ref", "anyOf", "oneOf", "allOf"} & narrow.keys():
        narrow["type"] = kind
    if "enum" in narrow:
        narrow["enum"] = [value for value in _list(narrow["enum"]) if type_of(value) == kind]
    if "$ref" in narrow:
        narrow = narrowed(resolved(narrow, root), kind, root, depth + 1)
    for key in ("anyOf", "oneOf"):
        if key in narrow:
            narrow[key] = [
                narrowed(branch, kind, root, depth + 1)
                for branch in _list(narrow[key])
                if kind in kinds(branch, root, depth + 1)
            ]
    return narrow


def bare_text(rules: Rules, schema: Any, root: Any, *, is_strict: bool) -> str:
    """An expression for a string of `schema`, which has this type alone, as text without quotes."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        schema = {}
    for key in ("anyOf", "oneOf"):
        if key in schema:
            rest = {name: value for name, value in schema.items() if name != key}
            branches = [resolved(branch, root) for branch in _list(schema[key])]
            if is_strict and key == "oneOf" and len(branches) > 1:
                raise SchemaError("oneOf of several strings cannot be held to; use anyOf")
            texts = [
                bare_text(
                    rules,
                    {**branch, **rest} if isinstance(branch, Mapping) else rest,
                    root,
                    is_strict=is_strict,
                )
                for branch in branches
                if "string" in kinds(branch, root)
            ]
            return "(" + " | ".join(texts) + ")"
    if is_strict:
        known = {"type", "enum", "const", "minLength", "maxLength", "pattern", "format"} | NOTES
        unknown = sorted(schema.keys() - known)
        if unknown:
            raise SchemaError(f"{', '.join(unknown)} cannot be held to in a string argument")
    if "enum" in schema or "const" in schema:
        return rules.terminal(_one_of(schema, is_strict=is_strict))
    return _pattern(rules, schema, is_strict=is_strict)


def _one_of(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    allowed = [schema["const"]] if "const" in schema else _list(schema["enum"])
    if is_strict and "pattern" in schema:
        raise SchemaError("pattern cannot be held to beside enum or const in an argument")
    low, high = _length(schema, "minLength") or 0, _length(schema, "maxLength")
    fitting = [
        value
        for value in allowed
        if isinstance(value, str) and low <= len(value) and (high is None or len(value) <= high)
    ]
    if not fitting:
        raise SchemaError("no string fits it")
    return " | ".join(dumped(value) for value in dict.fromkeys(fitting))


def _pattern(rules: Rules, schema: Mapping[str, Any], *, is_strict: bool) -> str:
    parts = []
    low, high = _length(schema, "minLength"), _length(schema, "maxLength")
    if low is not None or high is not None:
        if high is not None and high < (low or 0):
            raise SchemaError(f"minLength {low} is above maxLength {high}")
        parts.append(_TEXT % f"{low or 0},{'' if high is None else high}")
    if "pattern" in schema:
        parts.append(_anywhere(schema["pattern"]))
    name = schema.get("format")
    if isinstance(name, str) and name in FORMATS:
        parts.append(FORMATS[name])
    elif name is not None and is_strict:
        raise SchemaError(f"format {name!r} is not one of {', '.join(FORMATS)}")
    if not parts:
        parts = [_TEXT % "0,"]
    return rules.terminal(" & ".join(f"/{part}/" for part in parts))


def _anywhere(pattern: Any) -> str:
    """A search for `pattern` as a match of the whole text, in Lark's spelling."""
    if not isinstance(pattern, str):
        raise SchemaError(f"pattern {pattern!r} is no string")
    before = after = "(?s:.*)"
    inner = pattern
    if inner.startswith("^"):
        before, inner = "", inner[1:]
    if inner.endswith("$") and not inner.endswith("\\$"):
        after, inner = "", inner[:-1]
    if not (before and after) and _is_choice(inner):
        raise SchemaError(f"pattern {pattern!r}: put alternatives between anchors into brackets")
    spelled = _SPELLED.sub(lambda found: _SPELLINGS.get(found[0], found[0]), inner)
    return f"{before}(?:{spelled}){after}"


# What Lark, or Rust's regular expressions, read otherwise than ECMAScript's.
_SPELLED = re.compile(r"(?s)\\.|[/\n\r]")
_SPELLINGS = {
    "/": r"\x2F",
    r"\/": r"\x2F",
    "\n": r"\n",
    "\r": r"\r",
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
}


def _is_choice(pattern: str) -> bool:
    """Whether a regular expression has alternatives outside brackets."""
    outside = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", pattern)
    depth = 0
    for sign in outside:
        depth += (sign == "(") - (sign == ")")
        if sign == "|" and depth == 0:
            return True
    return False


def _length(schema: Mapping[str, Any], key: str) -> int | None:
    value = schema.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1_000_000:
        raise SchemaError(f"{key} {value!r} is not a number from 0 to 1000000")
    return value


def _target(reference: Any, root: Any) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise SchemaError(
            f"reference {reference!r}: only those inside the schema (#/…) can be used"
        )
    node = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, Mapping) or step not in node:
            raise SchemaError(f"reference {reference!r} leads nowhere")
        node = node[step]
    return node


def _moved(value: Any) -> Any:
    """A copy in which references to `#…` are references to `#/$defs/root…`."""
    if isinstance(value, Mapping):
        return {
            key: "#/$defs/root" + item[1:]
            if key == "$ref" and isinstance(item, str) and item.startswith("#")
            else _moved(item)
            for key, item in value.items()
        }
    return [_moved(item) for item in value] if isinstance(value, list) else value


def _kind(name: Any) -> str:
    kind = "number" if name == "integer" else name
    if kind not in KINDS:
        raise SchemaError(f"type {name!r} is not one of integer, {', '.join(KINDS)}")
    return str(kind)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
