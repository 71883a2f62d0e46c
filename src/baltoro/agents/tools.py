"""Tools: named functions that a model calls with JSON.

`tool_of` turns a plain async function into one: the schema comes from its signature, the texts from
its docstring (first paragraph; then lines `name: what it is`). What the agent gets wrong comes back
as an observation it can read and mend. Only the machinery's own failures are raised.
"""

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from baltoro.config import nearest
from baltoro.sandbox.protocol import ImageError, LimitError

# What a tool raises because of its arguments: the agent reads it.
REFUSALS = (ValueError, OSError, LimitError, ImageError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What a call gives back to the model."""

    content: str
    is_error: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A named function."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    run: Callable[[dict[str, Any]], Awaitable[Observation]]
    is_concurrent: bool = False  # calls of one turn may run at the same time

    def declaration(self) -> dict[str, Any]:
        """As a chat request declares it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


def tool_of(
    function: Callable[..., Awaitable[str | Observation]],
    *,
    name: str | None = None,
    description: str | None = None,
    renamed: Mapping[str, str] | None = None,
    is_concurrent: bool = False,
) -> Tool:
    """A tool from an async function with annotated parameters.

    renamed: what the model calls a parameter, by the function's own name for it.

    `ValueError` for a function whose signature cannot be a schema, or an unknown name in `renamed`.
    """
    own_name = name or function.__name__
    summary, notes = _read_docstring(inspect.getdoc(function) or "")
    parameters = inspect.signature(function).parameters
    outer = dict(renamed or {})
    unknown = set(outer) - set(parameters)
    if unknown:
        raise ValueError(f"renamed={outer!r}: {own_name} has no parameter {sorted(unknown)}")
    model = _model(own_name, function, outer, notes)
    inner = {outer.get(key, key): key for key in parameters}

    async def run(arguments: dict[str, Any]) -> Observation:
        try:
            checked = model.model_validate(arguments)
        except ValidationError as error:
            return Observation(content=_complaint(error), is_error=True)
        given = {inner[key]: getattr(checked, key) for key in inner}
        try:
            result = await function(**given)
        except REFUSALS as error:
            return Observation(content=f"{type(error).__name__}: {error}", is_error=True)
        return result if isinstance(result, Observation) else Observation(content=result)

    return Tool(
        name=own_name,
        description=description or summary,
        parameters=_plain_schema(model),
        run=run,
        is_concurrent=is_concurrent,
    )


class Toolbox:
    """The tools of one agent."""

    def __init__(self, tools: Iterable[Tool]):
        """`ValueError` if two have the same name."""
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise ValueError(f"tools: two are named {tool.name!r}; rename one")
            self._tools[tool.name] = tool

    def declarations(self) -> tuple[dict[str, Any], ...]:
        """All of them, as a chat request declares them."""
        return tuple(tool.declaration() for tool in self._tools.values())

    def is_concurrent(self, name: str) -> bool:
        """Whether calls of this tool may run at the same time as one another."""
        return name in self._tools and self._tools[name].is_concurrent

    async def call(self, name: str, arguments: str) -> Observation:
        """Run a call as the model wrote it; an unknown name or bad JSON is an observation."""
        if name not in self._tools:
            hint = nearest(name, self._tools) if self._tools else "there are none"
            return Observation(content=f"no tool {name!r}; {hint}", is_error=True)
        try:
            decoded = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return Observation(content=f"arguments are not JSON: {error}", is_error=True)
        if not isinstance(decoded, dict):
            return Observation(
                content=f"arguments must be a JSON object, not {type(decoded).__name__}",
                is_error=True,
            )
        return await self._tools[name].run(decoded)


def shortened(text: str, max_chars: int) -> str:
    """`text`, its middle left out if it is longer than `max_chars`, and said so."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    num_cut = len(text) - 2 * half
    return f"{text[:half]}\n[... {num_cut} characters left out ...]\n{text[len(text) - half :]}"


def _model(
    name: str, function: Callable[..., Any], outer: Mapping[str, str], notes: Mapping[str, str]
) -> type[BaseModel]:
    hints = get_type_hints(function)
    fields: dict[str, Any] = {}
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"tool {name}: parameter *{key} cannot be described; name each one")
        if key not in hints:
            raise ValueError(f"tool {name}: parameter {key!r} has no annotation; add one")
        is_required = parameter.default is parameter.empty
        default = ... if is_required else parameter.default
        fields[outer.get(key, key)] = (hints[key], Field(default, description=notes.get(key)))
    config = ConfigDict(extra="forbid", strict=True)
    return create_model(f"{name}_arguments", __config__=config, **fields)


def _plain_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The model's schema without the titles that only repeat names."""
    schema = model.model_json_schema()
    schema.pop("title", None)
    for entry in schema.get("properties", {}).values():
        entry.pop("title", None)
    return schema


def _complaint(error: ValidationError) -> str:
    lines = []
    for item in error.errors(include_url=False, include_input=False):
        where = ".".join(str(part) for part in item["loc"])
        lines.append(f"argument {where!r}: {item['msg']}")
    return "\n".join(lines)


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Its first paragraph, and the lines `name: text` of the others."""
    first, _, rest = text.partition("\n\n")
    notes = dict(re.findall(r"^(\w+): (.+)$", rest, re.MULTILINE))
    return " ".join(first.split()), notes
