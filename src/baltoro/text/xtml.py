"""XTML, the chat format: messages to segments (`render`), the model's text to a reply (`parse`).

    <|open|>message role="user"<|sep|> body <|close|>message<|sep|><|end_of_msg|>

A prompt is, in this order: declared tools, thinking effort, the conversation, tool choice, response
format, and the opening of the assistant's answer. What changes per request comes after the history,
so the cached prefix stays valid. Source: the release's encoding_k3.py at revisions A (9f62e4e,
c5d1dd4) and B (a590ce09), as its public ports have it, and appendix F of the report.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from baltoro.text.arguments import Revision, read_arguments
from baltoro.text.channels import IdParser, TextParser, parse, parse_ids
from baltoro.text.markers import CLOSE, END_OF_MSG, IMAGE_PLACEHOLDER, OPEN, SEP, Segment
from baltoro.text.messages import (
    IMAGE_TYPES,
    MessageError,
    MessageKeyError,
    MessageTypeError,
    field,
    function_of,
    order_tool_results,
)
from baltoro.text.reply import Delta, Reply, ToolCall

__all__ = [
    "Delta",
    "IdParser",
    "MessageError",
    "MessageKeyError",
    "MessageTypeError",
    "Reply",
    "Segment",
    "TextParser",
    "ToolCall",
    "parse",
    "parse_ids",
    "render",
]

EFFORTS = ("low", "high", "max")

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_MORE_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\n"
    "You MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\n"
    "You MUST NOT call any tools in the next message.",
}
_RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\nYour response must be raw JSON data without "
    "markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


def render(
    messages: Sequence[Any],
    tools: Sequence[Any] | None = None,
    *,
    revision: Revision = "B",
    thinking: bool = True,
    thinking_effort: str | None = None,
    add_generation_prompt: bool = True,
    tool_choice: Any = None,
    response_format: Any = None,
    response_schema: Any = None,
    image_prompts: Sequence[str] | None = None,
    literal_placeholders: bool = True,
) -> list[Segment]:
    """Segments of a prompt; the prompt's text is the concatenation of theirs.

    `messages` are OpenAI-style dicts of the roles system, user, assistant and tool; they are not
    changed. `tools` are their declarations, with the `{"type": "function"}` wrapper.

    revision: encoder "A" or "B"; they differ in blank reasoning, in `arguments` given as text
        (`baltoro.text.arguments`) and in that A skips messages of unknown roles or types.
    thinking: whether assistant turns have a think channel and the answer starts inside it.
    thinking_effort: "low", "high" or "max"; None renders no effort message. Ignored when thinking
        is off.
    tool_choice: "required" and "none" are rendered; anything else ("auto", a named tool) is not.
    response_format: `{"type": "json_object"}`, `{"type": "json_schema", "json_schema": …}`, or the
        type alone; other types render nothing.
    response_schema: wins over the schema inside `response_format`.
    image_prompts: one text per image part in order (`ImageProcessor.image_prompt`); None renders
        the literal placeholder.
    literal_placeholders: with image prompts, whether a placeholder spelled out inside a text takes
        one, as the official encoder has it. Say False for text that is not your own.

    Raises `MessageError` (a `ValueError`) for what cannot be rendered.
    """
    if revision not in get_args(Revision):
        raise ValueError(f"revision={revision!r}: must be 'A' or 'B'")
    if thinking and thinking_effort is not None and thinking_effort not in EFFORTS:
        raise MessageError(
            f"thinking_effort={thinking_effort!r}: must be one of {', '.join(EFFORTS)}, or None; "
            "to think not at all, say thinking=False"
        )
    writer = _Writer(image_prompts, literal_placeholders)
    if tools:
        _declare_tools(writer, _TOOLS, tools)
    if thinking and thinking_effort is not None:
        _internal_message(writer, "thinking-effort", _EFFORT.format(thinking_effort))
    _Conversation(writer, revision, thinking).render(messages)
    if isinstance(tool_choice, str) and tool_choice in _TOOL_CHOICE:
        _internal_message(writer, "tool-choice", _TOOL_CHOICE[tool_choice])
    _response_format(writer, response_format, response_schema)
    if add_generation_prompt:
        writer.open("message", role="assistant")
        writer.open("think" if thinking else "response")
    writer.check_images()
    return writer.segments


class _Writer:
    """Appends tags and text to a list of segments."""

    def __init__(self, image_prompts: Sequence[str] | None, literal_placeholders: bool) -> None:
        self.segments: list[Segment] = []
        self._prompts = image_prompts
        self._literal_placeholders = literal_placeholders
        self._num_images = 0

    def open(self, tag: str, **attributes: Any) -> None:
        self._control(OPEN)
        self.plain(tag)
        for key, value in attributes.items():
            self.plain(f" {key}")
            self.plain('="')
            self.plain(str(value).replace("&", "&amp;").replace('"', "&quot;"))
            self.plain('"')
        self._control(SEP)

    def close(self, tag: str) -> None:
        self._control(CLOSE)
        self.plain(tag)
        self._control(SEP)

    def close_message(self) -> None:
        self.close("message")
        self._control(END_OF_MSG)

    def text(self, value: Any) -> None:
        """Body text; with image prompts, a placeholder spelled out in it is an image."""
        text = str(value)
        if self._prompts is None or not self._literal_placeholders:
            self.plain(text)
            return
        first, *rest = text.split(IMAGE_PLACEHOLDER)
        self.plain(first)
        for piece in rest:
            self.image()
            self.plain(piece)

    def plain(self, text: str) -> None:
        """Text in which nothing stands for an image."""
        if text:
            self.segments.append(Segment(text, False))

    def image(self) -> None:
        self._num_images += 1
        if self._prompts is None:
            self._control(IMAGE_PLACEHOLDER)
        elif self._num_images <= len(self._prompts):
            self._control(self._prompts[self._num_images - 1])

    def check_images(self) -> None:
        if self._prompts is not None and self._num_images != len(self._prompts):
            raise MessageError(
                f"image_prompts has {len(self._prompts)} entries for {self._num_images} images in "
                "the messages; give one per image"
            )

    def _control(self, text: str) -> None:
        if text:
            self.segments.append(Segment(text, True))


class _Conversation:
    """The messages themselves, in order; remembers the calls that tool results answer."""

    def __init__(self, writer: _Writer, revision: Revision, thinking: bool) -> None:
        self._writer = writer
        self._revision = revision
        self._thinking = thinking
        self._calls: Sequence[Any] = ()
        self._num_results = 0

    def render(self, messages: Sequence[Any]) -> None:
        renderers = {
            "system": self._system,
            "user": self._user,
            "assistant": self._assistant,
            "tool": self._tool,
        }
        for position, message in enumerate(order_tool_results(messages)):
            where = f"messages[{position}]"
            role = message.get("role") if isinstance(message, Mapping) else None
            if isinstance(role, str) and role in renderers:
                renderers[role](message, where)
            elif self._revision == "B":
                if not isinstance(message, Mapping):
                    raise MessageError(f"{where}={message!r}: must be a dict (no batches)")
                raise MessageError(f"{where}.role={role!r}: must be one of {', '.join(renderers)}")
            elif isinstance(message, Mapping):
                field(message, "role", where)

    def _system(self, message: Mapping[str, Any], where: str) -> None:
        if message.get("tools"):
            _declare_tools(self._writer, _MORE_TOOLS, message["tools"])
        else:
            self._plain_message("system", message, where)

    def _user(self, message: Mapping[str, Any], where: str) -> None:
        self._plain_message("user", message, where)

    def _plain_message(self, role: str, message: Mapping[str, Any], where: str) -> None:
        self._open_named(role, message)
        self._content(message.get("content"), where)
        self._writer.close_message()

    def _open_named(self, role: str, message: Mapping[str, Any]) -> None:
        name = {"name": message["name"]} if message.get("name") else {}
        self._writer.open("message", role=role, **name)

    def _tool(self, message: Mapping[str, Any], where: str) -> None:
        self._num_results += 1
        name = message.get("tool", message.get("name"))
        if name is None and self._num_results <= len(self._calls):
            call = self._calls[self._num_results - 1]
            name = function_of(call, f"the call before {where}")["name"]
        if name is None:
            raise MessageError(
                f"{where}: no call precedes this tool result; give `tool`, `name` or the "
                "`tool_call_id` of a call"
            )
        self._writer.open("message", role="tool", tool=name, index=self._num_results)
        self._content(message.get("content"), where)
        self._writer.close_message()

    def _assistant(self, message: Mapping[str, Any], where: str) -> None:
        calls = message.get("tool_calls") or ()
        if not isinstance(calls, (list, tuple)):
            raise MessageTypeError(f"{where}.tool_calls={calls!r}: must be a list")
        self._calls, self._num_results = calls, 0
        self._open_named("assistant", message)
        if self._thinking:
            self._writer.open("think")
            self._reasoning(message.get("reasoning_content") or message.get("reasoning"))
            self._writer.close("think")
        self._writer.open("response")
        self._content(message.get("content"), where)
        self._writer.close("response")
        if calls:
            self._writer.open("tools")
            for index, call in enumerate(calls, start=1):
                self._call(call, index, f"{where}.tool_calls[{index - 1}]")
            self._writer.close("tools")
        self._writer.close_message()

    def _reasoning(self, reasoning: Any) -> None:
        if reasoning is None or (self._revision == "A" and not str(reasoning).strip()):
            return
        self._writer.text(reasoning)

    def _call(self, call: Any, index: int, where: str) -> None:
        function = function_of(call, where)
        arguments = read_arguments(function.get("arguments"), self._revision)
        self._writer.open("call", tool=function["name"], index=index)
        if arguments.raw_json is not None:
            self._writer.open("json", type="object")
            self._writer.text(arguments.raw_json)
            self._writer.close("json")
        for argument in arguments.parts:
            self._writer.open("argument", key=argument.key, type=argument.type)
            self._writer.text(argument.text)
            self._writer.close("argument")
        self._writer.close("call")

    def _content(self, content: Any, where: str) -> None:
        if content is None:
            return
        if isinstance(content, str):
            self._writer.text(content)
            return
        if not isinstance(content, (list, tuple)):
            raise MessageTypeError(f"{where}.content={content!r}: must be a str, a list or None")
        for position, part in enumerate(content):
            place = f"{where}.content[{position}]"
            if field(part, "type", place) in IMAGE_TYPES:
                self._writer.image()
            else:
                self._writer.text(field(part, "text", place))


def _declare_tools(writer: _Writer, heading: str, tools: Any) -> None:
    writer.open("message", role="system", type="tool-declare")
    writer.plain(f"{heading}```json\n{_sorted_json(tools, 'tools')}\n```")
    writer.close_message()


def _internal_message(writer: _Writer, message_type: str, body: str) -> None:
    writer.open("message", role="system", type=message_type)
    writer.plain(body.strip())
    writer.close_message()


def _response_format(writer: _Writer, response_format: Any, response_schema: Any) -> None:
    is_record = isinstance(response_format, Mapping)
    kind = response_format.get("type") if is_record else response_format
    if kind not in ("json_object", "json_schema"):
        return
    body = _RESPONSE_FORMAT.format(kind)
    if kind == "json_schema":
        schema = response_schema
        if schema is None and is_record:
            schema = _schema_in(response_format)
        body += _SCHEMA.format(_sorted_json(schema, "response_schema"))
    _internal_message(writer, "response-format", body)


def _schema_in(response_format: Mapping[str, Any]) -> Any:
    outer = response_format.get("json_schema")
    if not isinstance(outer, Mapping):
        return outer
    return outer.get("schema", outer.get("json_schema", outer))


def _sorted_json(value: Any, where: str) -> str:
    """Compact JSON with the keys of every dict sorted, so a client's key order never matters."""
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise MessageTypeError(f"{where}={value!r}: is not JSON ({error})") from error
