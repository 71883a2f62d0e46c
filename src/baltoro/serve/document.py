"""The bodies of requests for the OpenAPI document, also where we read them by hand.

Messages, tools and formats are checked by who understands them and not by pydantic; here stands
what they look like, so that clients and tests are told.
"""

from typing import Any

from pydantic import BaseModel

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
        "role": {"enum": ["system", "user", "assistant", "tool"]},
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


def request_body(body_type: type[BaseModel]) -> dict[str, Any]:
    """The part of an OpenAPI operation that says what it takes, without references."""
    schema = body_type.model_json_schema()
    schema = _inlined(schema, schema.pop("$defs", {}))
    if "messages" in schema["properties"]:
        schema["properties"] |= {k: v for k, v in _FIELDS.items() if k in schema["properties"]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(value: Any, parts: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        if "$ref" in value:
            return _inlined(parts[value["$ref"].rpartition("/")[2]], parts)
        return {key: _inlined(item, parts) for key, item in value.items()}
    return [_inlined(item, parts) for item in value] if isinstance(value, list) else value
