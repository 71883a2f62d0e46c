"""Parsing of a model's message: one core for whole text, streamed text and token ids.

    REASONING [C]think[S] [O]response[S] ANSWER [C]response[S]
    [O]tools[S] calls [C]tools[S] [C]message[S] <|end_of_msg|>

Output starts inside the think channel, or inside the response channel when thinking is off; an
opening tag of the channel it is in already is skipped. Nothing that a model writes raises.

Engines differ on output that is not well-formed; this is what we do:

- Opening response or tools ends the reasoning, as does closing think without its `<|sep|>`.
- Closing response or message inside a think channel that nothing ended means that the channel was
  skipped: the text was the answer. Text streamed as reasoning until then is retracted.
- Text outside the channels is the answer if there is none yet; else it is dropped.
- A call counts once it is closed and named; a truncated one is dropped. A call outside the tools
  channel counts too, if it names a tool. Text between calls is dropped.
- A value runs to the next tag that closes its argument, its call, the tools or the message, or
  opens another argument or call; other markers in it are text. An argument without a key has the
  key "", one without a type is a string.
- A json block is read if it is an object; else its text is the call's `arguments`.
- A call comes in parts too (`Delta.call_parts`), one that will not close among them: its name at
  once, a string as it is written, any other value and a json block once it is whole.
- Half a marker at the end is dropped (no text of ours ends in `<|`), and so is half a tag.
- After the message is closed, or another one opened, nothing counts.
"""

from collections.abc import Iterable

from baltoro.text.arguments import Argument
from baltoro.text.markers import END_OF_MSG, MARKERS
from baltoro.text.reply import (
    CHANNELS,
    CallPart,
    Channel,
    Delta,
    Reply,
    ToolCall,
    arguments_json,
    quoted,
    read_json_block,
    value_json,
)
from baltoro.text.tags import Event, MarkerScanner, TagLexer
from baltoro.text.vocabulary import Tokenizer


def parse(text: str, *, thinking: bool = True, tools_declared: bool = True) -> Reply:
    """The reply in a model's whole output.

    thinking: whether the prompt ended inside the think channel, else inside the response channel.
    tools_declared: False puts calls among `undeclared_calls`, so that nobody runs them.

    Text cannot tell a marker from its spelling; `parse_ids` can.
    """
    parser = TextParser(thinking=thinking, tools_declared=tools_declared)
    parser.feed(text)
    return parser.finish()


def parse_ids(
    ids: Iterable[int],
    tokenizer: Tokenizer,
    *,
    thinking: bool = True,
    tools_declared: bool = True,
) -> Reply:
    """As `parse`, from token ids: markers spelled out in ordinary tokens stay text."""
    parser = IdParser(tokenizer, thinking=thinking, tools_declared=tools_declared)
    parser.feed(ids)
    return parser.finish()


class _Parser:
    """The core: events to channels. However the input was cut, the outcome is the same."""

    def __init__(self, *, thinking: bool = True, tools_declared: bool = True) -> None:
        self._lexer = TagLexer()
        self._tools_declared = tools_declared
        self._channel: Channel | None = "think" if thinking else "response"
        self._has_begun = False
        self._has_left_think = not thinking
        self._is_over = False
        self._call: _OpenCall | None = None
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._undeclared_calls: list[ToolCall] = []
        self._problems: list[str] = []
        self._call_parts: list[CallPart] = []  # not sent yet
        self._num_sent = (0, 0, 0)
        self._is_retracted = False

    @property
    def is_over(self) -> bool:
        """Whether the message is closed, so that nothing more is read."""
        return self._is_over

    @property
    def is_in_call(self) -> bool:
        """Whether a call is open that has a name."""
        return self._call is not None and bool(self._call.tool)

    def finish(self) -> Reply:
        """The reply, at the end of the output."""
        self._drop_call()
        return Reply(
            reasoning="".join(self._reasoning) or None,
            content="".join(self._content) or None,
            tool_calls=tuple(self._calls),
            undeclared_calls=tuple(self._undeclared_calls),
            is_complete=self._is_over,
            open_channel=None if self._is_over else self._channel,
            problems=tuple(self._problems),
        )

    def _delta(self) -> Delta:
        """What came in since the last one."""
        num_reasoning, num_content, num_calls = self._num_sent
        delta = Delta(
            reasoning="".join(self._reasoning[num_reasoning:]),
            content="".join(self._content[num_content:]),
            tool_calls=tuple(self._calls[num_calls:]),
            retracts_reasoning=self._is_retracted,
            call_parts=tuple(self._call_parts),
        )
        self._call_parts.clear()
        self._num_sent = (len(self._reasoning), len(self._content), len(self._calls))
        self._is_retracted = False
        return delta

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            if self._is_over:
                return
            if self._call is not None and self._call.takes_as_text(event):
                continue
            if event.kind == "text":
                self._take_text(event.raw)
            elif event.kind == "open":
                self._take_opening(event)
            elif event.kind == "close":
                self._take_closing(event.name)
            elif event.kind == "end":
                self._is_over = True
            self._has_begun = True

    def _take_text(self, text: str) -> None:
        if self._channel == "think":
            self._reasoning.append(text)
        elif self._channel == "response":
            self._content.append(text)
        elif text.isspace():
            return
        elif self._channel == "tools":
            self._note("text between calls")
        elif self._content:
            self._note("text outside channels")
        else:
            self._note("response not opened")
            self._enter("response")
            self._content.append(text.lstrip())

    def _take_opening(self, event: Event) -> None:
        name, attributes = event.name, event.attributes
        if name == "message" and self._has_begun:
            self._note("message not closed")
            self._is_over = True
        elif name in CHANNELS:
            self._enter(CHANNELS[name])
        elif name == "call":
            self._open_call(attributes.get("tool", ""))
        elif name == "argument" and self._call is not None:
            self._call.open_argument(attributes.get("key", ""), attributes.get("type", "string"))
        elif name == "json" and self._call is not None:
            self._call.open_json()

    def _take_closing(self, name: str) -> None:
        if name == "message":
            self._retract_reasoning()
            self._is_over = True
        elif name == "response" and self._channel == "think":
            self._retract_reasoning()
            self._leave()
        elif name == self._channel:
            self._leave()
        elif name == "call" and self._call is not None:
            self._close_call(self._call)
        elif self._call is not None:
            self._call.close_part()

    def _enter(self, channel: Channel) -> None:
        self._drop_call()
        if channel != "think":
            if self._channel == "think" and not self._has_left_think:
                self._note("think not closed")
            self._has_left_think = True
        self._channel = channel

    def _leave(self) -> None:
        self._drop_call()
        if self._channel == "tools" and not (self._calls or self._undeclared_calls):
            self._note("tools without a call")
        self._has_left_think = True
        self._channel = None

    def _retract_reasoning(self) -> None:
        """The think channel was skipped: what was in it is the answer."""
        if self._has_left_think or self._channel != "think":
            return
        self._note("think skipped")
        self._has_left_think = True
        self._content += self._reasoning
        self._reasoning = []
        self._is_retracted = self._num_sent[0] > 0
        self._num_sent = (0, *self._num_sent[1:])

    def _open_call(self, tool: str) -> None:
        if self._channel != "tools":
            if not tool:
                return
            self._note("call outside tools")
            self._enter("tools")
        self._drop_call()
        is_sent = bool(tool) and self._tools_declared
        self._call = _OpenCall(tool, self._call_parts if is_sent else [])

    def _close_call(self, call: "_OpenCall") -> None:
        self._call = None
        if not call.tool:
            self._note("call without a name")
            return
        closed, problem = call.close()
        if problem:
            self._note(problem)
        if self._tools_declared:
            self._calls.append(closed)
        else:
            self._note("call of an undeclared tool")
            self._undeclared_calls.append(closed)

    def _drop_call(self) -> None:
        if self._call is not None:
            self._note("call not closed")
            self._call = None

    def _note(self, problem: str) -> None:
        if problem not in self._problems:
            self._problems.append(problem)


class TextParser(_Parser):
    """Parses text that comes in pieces."""

    def __init__(self, *, thinking: bool = True, tools_declared: bool = True) -> None:
        super().__init__(thinking=thinking, tools_declared=tools_declared)
        self._scanner = MarkerScanner()

    def feed(self, text: str) -> Delta:
        """What the next piece of text adds; an end that may start a marker is held back."""
        for piece in self._scanner.feed(text):
            if piece in MARKERS:
                self._take(self._lexer.marker(piece))
            else:
                self._take(self._lexer.text(piece))
        return self._delta()


class IdParser(_Parser):
    """Parses token ids that come in pieces. Stop tokens end it; other special ones are skipped."""

    def __init__(
        self, tokenizer: Tokenizer, *, thinking: bool = True, tools_declared: bool = True
    ) -> None:
        super().__init__(thinking=thinking, tools_declared=tools_declared)
        self._tokenizer = tokenizer
        self._marker_of = {tokenizer.special_ids[marker]: marker for marker in MARKERS}
        self._marker_of |= dict.fromkeys(tokenizer.stop_ids, END_OF_MSG)
        self._text = tokenizer.text_stream(skip_special=True)

    def feed(self, ids: Iterable[int]) -> Delta:
        """What the next ids add; bytes of an unfinished character are held back.

        Raises `ValueError` for an id outside the vocabulary.
        """
        for token_id in ids:
            marker = self._marker_of.get(token_id)
            text = self._text.end() if marker else self._text.feed(token_id)
            if text:
                self._take(self._lexer.text(text))
            if marker:
                self._take(self._lexer.marker(marker))
        return self._delta()


class _OpenCall:
    """A call being read; its parts go to `parts` as they come."""

    def __init__(self, tool: str, parts: list[CallPart]) -> None:
        self.tool = tool
        self._parts = parts
        self._has_members = False  # whether a part of its object is out
        parts.append(CallPart(tool, ""))
        self._arguments: list[Argument] = []
        self._json_blocks: list[str] = []
        self._part: tuple[str, str, str] | None = None  # tag, key and type of the open part
        self._text: list[str] = []

    def takes_as_text(self, event: Event) -> bool:
        """Inside an argument or json block, everything that does not end it is its text."""
        if self._part is None:
            return False
        if event.kind == "end" or (event.kind == "open" and event.name in ("argument", "call")):
            return False
        closes_more = ("call", "tools", "message")
        if event.kind == "close" and event.name in (self._part[0], *closes_more):
            return False
        self._text.append(event.raw)
        if self._part[0] == "argument" and self._part[2] == "string":
            self._send(quoted(event.raw)[1:-1])
        return True

    def open_argument(self, key: str, kind: str) -> None:
        self.close_part()
        self._part = ("argument", key, kind)
        if kind == "string":
            self._begin_member(key)
            self._send('"')

    def open_json(self) -> None:
        self.close_part()
        self._part = ("json", "", "")

    def close_part(self) -> None:
        if self._part is None:
            return
        tag, key, kind = self._part
        text = "".join(self._text)
        self._part, self._text = None, []
        if tag == "json":
            self._json_blocks.append(text)
            for member in read_json_block(text) or ():
                self._send_member(member)
        else:
            self._arguments.append(Argument(key, kind, text))
            if kind == "string":
                self._send('"')
            else:
                self._send_member(self._arguments[-1])

    def close(self) -> tuple[ToolCall, str]:
        """The call, and what was wrong with it, if anything."""
        self.close_part()
        parts: list[Argument] = []
        for block in self._json_blocks:
            members = read_json_block(block)
            if members is None:
                if not self._has_members:
                    self._send(block)
                return ToolCall(self.tool, block, tuple(self._arguments)), "json block is no object"
            parts += members
        parts += self._arguments
        self._send("}" if self._has_members else "{}")
        return ToolCall(self.tool, arguments_json(parts), tuple(parts)), ""

    def _send_member(self, argument: Argument) -> None:
        self._begin_member(argument.key)
        self._send(value_json(argument))

    def _begin_member(self, key: str) -> None:
        self._send(f"{', ' if self._has_members else '{'}{quoted(key)}: ")
        self._has_members = True

    def _send(self, text: str) -> None:
        self._parts.append(CallPart(None, text))
