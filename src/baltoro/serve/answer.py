"""Token ids of one reply to what a client is sent, piece by piece. No torch.

The whole answer is the pieces put together, so streamed and whole replies cannot differ but in one
thing: reasoning that turns out to have been the answer (the channel was never closed) has been sent
as reasoning by then; a stream repeats it as content, a whole reply holds it as content alone.

A call is sent as it is written, so that nobody waits in silence for the end of a long one. One that
never ends is part of the answer as far as it came: its arguments are no JSON then.
"""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from baltoro.serve.request import FinishReason, NewToken
from baltoro.text.channels import IdParser
from baltoro.text.reply import Delta, ToolCall, call_records, join, join_calls
from baltoro.text.vocabulary import Tokenizer

# The problems after which a call is missing.
LOSSES = frozenset(
    {"call not closed", "call without a name", "json block is no object", "tools without a call"}
)


class StopStrings:
    """Ends a text before the first of some strings; holds back what may become one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [string for string in strings if string]
        self._held = ""
        self.is_met = False

    def feed(self, text: str) -> str:
        """The part of the text so far that is certain and not yet given."""
        if self.is_met:
            return ""
        text = self._held + text
        places = [
            (place + len(string), place)
            for string in self._strings
            if (place := text.find(string)) >= 0
        ]
        if places:
            self.is_met, self._held = True, ""
            return text[: min(places)[1]]  # of the one that ended first, as in smaller pieces
        held = max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """What was held back, since nothing follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that begins `string`."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if string.startswith(text[-length:]):
            return length
    return 0


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole reply."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]  # whole ones and begun ones
    finish_reason: str  # stop, length, tool_calls, abort or error
    num_reasoning_tokens: int
    problems: tuple[str, ...] = ()  # departures from the format, as the parser names them
    is_cut: bool = False  # whether it was ended from outside: by a stop string, a limit, a fault
    num_whole_calls: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that a client could use."""
        return not self.content.strip() and not self.num_whole_calls

    @property
    def is_lost(self) -> bool:
        """Whether the model came to its end and left nothing, or spoiled a call."""
        return not self.is_cut and (self.is_empty or not LOSSES.isdisjoint(self.problems))


class ChatReader:
    """Reads the reply to a conversation."""

    def __init__(
        self, tokenizer: Tokenizer, *, thinking: bool, has_tools: bool, stop: Sequence[str] = ()
    ) -> None:
        self._parser = IdParser(tokenizer, thinking=thinking, tools_declared=has_tools)
        self._stop = StopStrings(stop)
        self._pieces: list[Delta] = []
        self._num_raw = 0  # characters of content before the stop strings
        self._num_tokens = 0
        self._num_reasoning_tokens = 0
        self._thinking = thinking

    @property
    def is_over(self) -> bool:
        """Whether the rest of the reply is of no use."""
        return self._stop.is_met or self._parser.is_over

    def feed(self, token_id: int) -> Delta:
        """What one more token adds."""
        delta = self._parser.feed([token_id])
        self._num_tokens += 1
        if delta.content or delta.call_parts:
            self._thinking = False
        self._num_reasoning_tokens += self._thinking and not delta.retracts_reasoning
        self._num_raw += len(delta.content)
        return self._keep(delta, self._stop.feed(delta.content))

    def finish(self, reason: FinishReason) -> tuple[Delta, Answer]:
        """The last piece and the whole."""
        is_in_call = self._parser.is_in_call and reason == "length"
        reply = self._parser.finish()
        content = self._stop.feed((reply.content or "")[self._num_raw :])
        if not self._stop.is_met:
            for call in reply.undeclared_calls:
                shown = json.dumps({"name": call.name, "arguments": call.arguments})
                content += self._stop.feed(f"\n[asked for a tool that was not offered: {shown}]")
            content += self._stop.end()
        piece = self._keep(Delta(), content)
        reasoning, content, whole_calls = join(self._pieces)
        calls = join_calls(self._pieces)
        ends_well = (reason in ("stop", "length") and not is_in_call) or self.is_over
        finish_reason = "stop" if self._stop.is_met else str(reason)
        if whole_calls and ends_well:
            finish_reason = "tool_calls"
        elif self._parser.is_over and reason != "error":
            finish_reason = "stop"
        return piece, Answer(
            reasoning,
            content,
            calls,
            finish_reason,
            self._num_reasoning_tokens,
            reply.problems,
            is_cut=self._stop.is_met or not (reason == "stop" or self._parser.is_over),
            num_whole_calls=len(whole_calls),
        )

    def _keep(self, delta: Delta, content: str) -> Delta:
        piece = replace(delta, content=content)
        self._pieces.append(piece)
        return piece


class TextReader:
    """Reads the continuation of a plain text."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._stream = tokenizer.text_stream(skip_special=True)
        self._stop = StopStrings(stop)
        self._content: list[str] = []

    @property
    def is_over(self) -> bool:
        """Whether the rest of the reply is of no use."""
        return self._stop.is_met

    def feed(self, token_id: int) -> Delta:
        """What one more token adds."""
        return self._keep(self._stop.feed(self._stream.feed(token_id)))

    def finish(self, reason: FinishReason) -> tuple[Delta, Answer]:
        """The last piece and the whole."""
        rest = self._stop.feed(self._stream.end())
        piece = self._keep(rest + self._stop.end())
        finish_reason = "stop" if self._stop.is_met else str(reason)
        is_cut = self._stop.is_met or reason != "stop"
        return piece, Answer("", "".join(self._content), (), finish_reason, 0, is_cut=is_cut)

    def _keep(self, content: str) -> Delta:
        self._content.append(content)
        return Delta(content=content)


def chat_delta(delta: Delta, call_ids: list[str]) -> dict[str, Any]:
    """The `delta` of a chunk; empty if there is nothing to send.

    `call_ids` are those of the calls so far; appends the ids of new ones.
    """
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.content:
        fields["content"] = delta.content
    calls: list[dict[str, Any]] = []
    for part in delta.call_parts:
        if part.name is not None:
            call_ids.append(new_id("call"))
            (record,) = call_records(call_ids[-1:], [ToolCall(part.name, part.arguments)])
            calls.append({"index": len(call_ids) - 1} | record)
        elif calls:  # goes on with one that is in this chunk
            calls[-1]["function"]["arguments"] += part.arguments
        else:
            function = {"arguments": part.arguments}
            calls.append({"index": len(call_ids) - 1, "function": function})
    return fields | ({"tool_calls": calls} if calls else {})


def chat_message(answer: Answer, call_ids: list[str]) -> dict[str, Any]:
    """The `message` of a whole choice."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = call_records(call_ids, answer.tool_calls)
    return message


def logprob_entry(tokenizer: Tokenizer, token: NewToken) -> dict[str, Any]:
    """One token of `logprobs.content`, special tokens included."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        text = data.decode("utf-8", errors="replace")
        return {"token": text, "logprob": logprob, "bytes": list(data)}

    top = [entry(token_id, logprob) for token_id, logprob in token.top]
    return {**entry(token.id, token.logprob), "top_logprobs": top}


def text_logprobs(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """`logprobs` of a plain completion."""
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [
            {top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries
        ],
    }


def usage(prompt: int, cached: int, completion: int, reasoning: int) -> dict[str, Any]:
    """`usage`, counted in tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def new_id(kind: str) -> str:
    """A name for a reply or a call that nobody else has."""
    return f"{kind}-{secrets.token_hex(12)}"
