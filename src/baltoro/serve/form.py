"""What the reply to a conversation must look like, as a Lark grammar over markers and text.

It begins in the channel that the prompt leaves open and ends where the message does:

    [TEXT [C]think[S] [O]response[S]] BODY [C]response[S]
    [[O]tools[S] CALLS [C]tools[S]] [C]message[S]

Markers are single tokens that no text can contain, so free text ends only where the model closes
its channel. A response of a schema is JSON; the arguments of a call stand in the order of their
schema, each under its own type, once. Where a call is forced, the response before it stays empty.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from baltoro.serve.schema import (
    KINDS,
    NOTES,
    Rules,
    SchemaError,
    bare_text,
    check_references,
    dumped,
    kinds,
    narrowed,
    resolved,
    with_definitions,
)
from baltoro.text.markers import CLOSE, OPEN, SEP

ANYTHING = "/(?s:.{1,})/"
KEY = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"  # of an argument that no schema names
RESPONSE_FIELD = "response_format.json_schema.schema"
INDEX = "/[1-9][0-9]{0,3}/"  # of a call


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called."""

    name: str
    parameters: Any  # schema of its arguments; None: it takes any
    is_strict: bool = False  # whether the schema must hold in full
    field: str = "tools"  # of the request, for errors


class FormError(ValueError):
    """A form that cannot be had; `field` of the request is to blame."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a reply is bound."""

    thinking: bool
    has_schema: bool = False
    schema: Any = None  # of the response, with `has_schema`
    tools: tuple[Tool, ...] = ()
    calls: Literal["allowed", "forced"] = "allowed"
    is_single: bool = False  # at most one call

    def lark(self) -> str:
        """The grammar. Raises `FormError` for a schema that has none, by what we see in it."""
        rules = Rules()
        start = self._tag("response", CLOSE)
        tools = self._tools(rules) if self.tools else ""
        if self.calls == "forced":
            start += f" {tools}"
        elif self.has_schema:
            schema = self._response(rules)
            start = f"({schema} {start}" + (f" | {start} {tools})" if tools else ")")
        else:
            start = f"{rules.terminal(ANYTHING)}? {start}" + (f" {tools}?" if tools else "")
        if self.thinking:
            think = f"{rules.terminal(ANYTHING)}? {self._tag('think', CLOSE)}"
            start = f"{think} {self._tag('response', OPEN)} {start}"
        return rules.text(f"{start} {self._tag('message', CLOSE)}")

    def parts(self) -> "list[tuple[str, Form]]":
        """Each field that holds a schema, and a form with that schema alone."""
        found = [
            (tool.field, Form(thinking=False, tools=(tool,), calls="forced")) for tool in self.tools
        ]
        if self.has_schema:
            alone = Form(thinking=False, has_schema=True, schema=self.schema)
            found.append((RESPONSE_FIELD, alone))
        return found

    def _response(self, rules: Rules) -> str:
        try:
            dumped(self.schema)  # it is JSON, so it ends
            check_references(self.schema, self.schema)
            return rules.json(self.schema, is_strict=True)
        except SchemaError as error:
            raise FormError(RESPONSE_FIELD, str(error)) from None

    def _tools(self, rules: Rules) -> str:
        calls = []
        for tool in self.tools:
            try:
                arguments = _arguments(rules, tool)
            except SchemaError as error:
                raise FormError(tool.field, str(error)) from None
            head = dumped(f'call tool="{_escaped(tool.name)}" index="')
            index = rules.terminal(INDEX)
            calls.append(
                f'{OPEN} {head} {index} "\\"" {SEP} {arguments} {self._tag("call", CLOSE)}'
            )
        call = rules.add(" | ".join(calls))
        many = call if self.is_single else f"{call}+"
        tools = f"{self._tag('tools', OPEN)} {many} {self._tag('tools', CLOSE)}"
        return rules.add(tools)

    @staticmethod
    def _tag(name: str, marker: str) -> str:
        return f'{marker} "{name}" {SEP}'


def _arguments(rules: Rules, tool: Tool) -> str:
    """An expression for everything between the opening and the closing of a call."""
    root: Any = {} if tool.parameters is None else tool.parameters
    dumped(root)  # it is JSON, so it ends
    check_references(root, root)
    schema = resolved(root, root)
    if not isinstance(schema, Mapping):
        raise SchemaError("must be the schema of an object")
    if "object" not in kinds(schema, root):
        raise SchemaError("must be of type object")
    if tool.is_strict:
        known = {"type", "properties", "required", "additionalProperties"} | NOTES
        unknown = sorted(schema.keys() - known)
        if unknown:
            raise SchemaError(f"{', '.join(unknown)} cannot be held to in arguments of a call")
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise SchemaError("properties must be an object and required a list")
    others = schema.get("additionalProperties", True)
    asked = dict(properties)
    for key in required:
        if not isinstance(key, str):
            raise SchemaError(f"required: {key!r} is no name")
        asked.setdefault(key, others)
    if not asked:
        if others is False:
            return ""
        free = _argument(rules, root, None, others, tool.is_strict)
        return f"{rules.add(free)}*"
    parts = []
    for key, value in asked.items():
        rule = rules.add(_argument(rules, root, key, value, tool.is_strict))
        parts.append(rule if key in required else f"{rule}?")
    return " ".join(parts)


def _argument(rules: Rules, root: Any, key: str | None, schema: Any, is_strict: bool) -> str:
    """One argument, under each type that its schema allows; without a key, of any name."""
    found = kinds(schema, root)
    if not found:
        raise SchemaError(f"argument {key!r}: no value fits it")
    types = []
    for kind in (kind for kind in KINDS if kind in found):
        narrow = narrowed(schema, kind, root)
        if kind == "string":
            value = bare_text(rules, narrow, root, is_strict=is_strict)
        else:
            value = rules.json(with_definitions(root, narrow), is_strict=is_strict)
        if key is None:
            tail = dumped(f'" type="{kind}"')
            types.append(f"{rules.terminal(KEY)} {tail} {SEP} {value}")
        else:
            head = f'argument key="{_escaped(key)}" type="{kind}"'
            types.append(f"{dumped(head)} {SEP} {value}")
    head = dumped('argument key="') if key is None else ""
    return f'{OPEN} {head} ({" | ".join(types)}) {CLOSE} "argument" {SEP}'


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")
