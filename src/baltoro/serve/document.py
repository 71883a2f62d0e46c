"""Fields of requests that take several forms, and the bodies for the OpenAPI document.

Messages, tools and formats are checked by who understands them and not by pydantic; here stands
what they look like, so that clients and tests are told.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

# strings, and characters of one: each is looked for in every reply
MAX_STOPS, MAX_STOP = 64, 1024
MAX_REPLIES = 1024  # of all prompts of a request

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_IMAGE_PART = {
    "type": "object",
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "type": "object",
            "properties": {"url": {"type": "string", "pattern": "^data:image/"}},
            "required": ["url"],
        },
    },
    "required": ["type", "image_url"],
}
_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"anyOf": [_TEXT_PART, _IMAGE_PART]}},
        {"type": "null"},
    ]
}
_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
            "required": ["name", "arguments"],
        },
    },
    "required": ["id", "type", "function"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": _CONTENT,
        "reasoning_content": {"type": "string"},
        "tool_calls": {"type": "array", "items": _CALL},
        "tool_call_id": {"type": "string"},
    },
    "required": ["role", "content"],
}
_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
                "strict": {"type": "boolean"},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
        },
    ]
}
_FORMAT = {
    "anyOf": [
        {"type": "null"},
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object"]}},
            "required": ["type"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "schema": {"type": "object"}},
                    "required": ["schema"],
                },
            },
            "required": ["type", "json_schema"],
        },
    ]
}
_FIELDS: dict[str, Any] = {
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "tools": {"anyOf": [{"type": "array", "items": _TOOL}, {"type": "null"}]},
    "tool_choice": _CHOICE,
    "response_format": _FORMAT,
}


def _stops(value: Any) -> Any:
    strings = value if isinstance(value, list) else [value]
    if value is not None and not all(isinstance(string, str) for string in strings):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    if len(strings) > MAX_STOPS or any(len(string or "") > MAX_STOP for string in strings):
        raise PydanticCustomError(
            "stop", f"at most {MAX_STOPS} strings of at most {MAX_STOP} characters are looked for"
        )
    return value


def _prompts(value: Any) -> Any:
    is_several = isinstance(value, list) and value and not isinstance(value[0], int)
    several = value if is_several else [value]
    if len(several) > MAX_REPLIES:
        raise PydanticCustomError("prompt", f"at most {MAX_REPLIES} prompts are continued")
    is_text = all(isinstance(prompt, str) for prompt in several)
    if not (is_text or all(map(_is_ids, several))):
        raise PydanticCustomError(
            "prompt", "must be a string, a list of token ids, or a list of such, all of one kind"
        )
    return value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token_id) is int for token_id in value)


def _with_developers(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A developer's message, as newer models of OpenAI call it, is one of the system."""
    return [m | {"role": "system"} if m.get("role") == "developer" else m for m in messages]


Stops = Annotated[str | list[str] | None, BeforeValidator(_stops)]
# Checked by us alone: a union would try each of its forms on each element.
Prompts = Annotated[
    Any,
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"items": {"type": "integer"}, "type": "array"},
                {"items": {"type": "string"}, "type": "array"},
                {"items": {"items": {"type": "integer"}, "type": "array"}, "type": "array"},
            ]
        }
    ),
]
# Only the first thing that is wrong is told, and a list may hold millions.
Dicts = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Messages = Annotated[Dicts, AfterValidator(_with_developers)]

ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "an error as OpenAI's: message, type, param, code",
        "content": {"application/json": {}},
    },
}
# Of a completion: whole, as events, or refused.
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the answer, or with `stream` its chunks as server-sent events",
        "content": {"application/json": {}, "text/event-stream": {}},
    },
    **ERRORS,
}


def request_body(body_type: type[BaseModel], model_name: str | None = None) -> dict[str, Any]:
    """The part of an OpenAPI operation that says what it takes, without references."""
    schema = body_type.model_json_schema()
    schema = _inlined(schema, schema.pop("$defs", {}))
    if model_name is not None:
        schema["properties"]["model"] = {"enum": [model_name, None]}
    if "messages" in schema["properties"]:
        schema["properties"] |= {k: v for k, v in _FIELDS.items() if k in schema["properties"]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(value: Any, parts: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        if "$ref" in value:
            return _inlined(parts[value["$ref"].rpartition("/")[2]], parts)
        return {key: _inlined(item, parts) for key, item in value.items()}
    return [_inlined(item, parts) for item in value] if isinstance(value, list) else value
