"""One agent's context as it grows, and what happens when it grows too long.

The same class runs an episode and rebuilds it from its record, so a resumed conversation is the
one that was interrupted. When a context passes `compact_at_tokens`, either old results of tools
are cleared, or the policy is asked for a summary that replaces all but the last turns; both begin
a new context with new tokens.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from baltoro.agents.policy import FinishReason, TokenPrefix, estimated_tokens
from baltoro.agents.trace import ContextRecord, ObservationRecord, TurnRecord
from baltoro.sandbox.protocol import Binding

CLEARED = "[This result was removed to save space. Call the tool again if you need it.]"
SUMMARY_REQUEST = (
    "The conversation has become too long. Write everything that is needed to go on without it: "
    "what was asked, what you found out, what you changed and where, what is still to be done, "
    "and what did not work. Answer with that text alone."
)
SUMMARY = "Earlier turns were removed. This is your own summary of them:\n\n{}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextPolicy:
    """How long a context may be and how it is shortened."""

    max_tokens: int = 131072  # the episode ends here
    compact_at_tokens: int | None = 98304  # None: never
    method: Literal["summary", "clear"] = "summary"
    keep_turns: int = 4  # the last ones stay as they are

    def __post_init__(self) -> None:
        if self.keep_turns < 0:
            raise ValueError(f"context.keep_turns={self.keep_turns!r}: must not be negative")
        if self.compact_at_tokens is not None and not (
            0 < self.compact_at_tokens <= self.max_tokens
        ):
            raise ValueError(
                f"context.compact_at_tokens={self.compact_at_tokens!r}: must be between 1 and"
                f" max_tokens={self.max_tokens}"
            )


class Conversation:
    """The live context of one agent."""

    def __init__(self, agent: str):
        self.agent = agent
        self.messages: list[Mapping[str, Any]] = []
        self.num_opening = 0
        self.turn = 0  # the next one
        self.num_output_tokens = 0  # over all contexts
        self.policy_version = 0  # of the last reply
        self.num_tokens = 0  # of this context; partly a guess if the policy does not count
        self.finish_reason: FinishReason = "stop"  # of the last reply
        self._ids: tuple[int, ...] | None = None
        self._num_spelled = 0  # messages that the ids spell

    def begin(self, record: ContextRecord) -> None:
        """Start a context."""
        self.messages = list(record.messages)
        self.num_opening = record.num_opening
        self.num_tokens = estimated_tokens(self.messages)
        self._ids = None

    def add_turn(self, record: TurnRecord) -> None:
        """Append a reply, except a summary, which only counts."""
        self.num_output_tokens += record.num_output_tokens
        self.policy_version = record.policy_version
        if record.purpose == "summary":
            return
        self.turn = record.turn + 1
        self.finish_reason = record.finish_reason
        self.messages.append(record.message)
        self.num_tokens = record.num_prompt_tokens + record.num_output_tokens
        if record.tokens is not None:
            self._ids = (*(self._ids or ()), *record.tokens.prompt_ids, *record.tokens.ids)
            self._num_spelled = len(self.messages)

    def add_observation(self, record: ObservationRecord) -> None:
        """Append a tool's result."""
        message = {"role": "tool", "tool_call_id": record.call_id, "content": record.content}
        self.messages.append(message)
        self.num_tokens += estimated_tokens([message])

    def replay(self, record: object) -> None:
        """Apply a record of this agent; others are passed over."""
        if getattr(record, "agent", None) != self.agent:
            return
        if isinstance(record, ContextRecord):
            self.begin(record)
        elif isinstance(record, TurnRecord):
            self.add_turn(record)
        elif isinstance(record, ObservationRecord):
            self.add_observation(record)

    @property
    def awaits_reply(self) -> bool:
        """Whether it is the policy's turn; if not, the last reply ended the conversation."""
        return self.messages[-1]["role"] != "assistant"

    @property
    def prefix(self) -> TokenPrefix | None:
        """What the policy continues from."""
        if self._ids is None:
            return None
        return TokenPrefix(ids=self._ids, num_messages=self._num_spelled)

    def binding(self) -> Binding:
        """This place of the conversation, for the snapshot that belongs to it."""
        text = json.dumps([dict(message) for message in self.messages], sort_keys=True)
        return Binding(
            token_position=self.num_tokens if self._ids is None else len(self._ids),
            prefix_hash=hashlib.sha256(f"{text}\n{self._ids}".encode()).hexdigest(),
            policy_version=self.policy_version,
        )

    def needs_compaction(self, policy: ContextPolicy) -> bool:
        """Whether it is too long and something could be left out."""
        if policy.compact_at_tokens is None or self.num_tokens < policy.compact_at_tokens:
            return False
        old = self.messages[self.num_opening : self._first_kept(policy.keep_turns)]
        if policy.method == "clear":
            return any(is_tool_result(message) for message in old)
        return any(message["role"] == "assistant" for message in old)

    def cleared(self, keep_turns: int) -> ContextRecord:
        """The next context: the same, old results of tools removed."""
        first_kept = self._first_kept(keep_turns)
        messages = [
            {**message, "content": CLEARED}
            if self.num_opening <= index < first_kept and is_tool_result(message)
            else dict(message)
            for index, message in enumerate(self.messages)
        ]
        return ContextRecord(
            agent=self.agent,
            messages=tuple(messages),
            num_opening=self.num_opening,
            reason="clear",
        )

    def summarised(
        self, opening: Sequence[Mapping[str, Any]], summary: str, keep_turns: int
    ) -> ContextRecord:
        """The next context: an opening, a summary, the last turns."""
        text = {"role": "user", "content": SUMMARY.format(summary)}
        kept = self.messages[self._first_kept(keep_turns) :]
        return ContextRecord(
            agent=self.agent,
            messages=tuple(dict(message) for message in (*opening, text, *kept)),
            num_opening=len(opening),
            reason="summary",
        )

    def _first_kept(self, keep_turns: int) -> int:
        """Index of the message with which the last `keep_turns` turns begin."""
        starts = [
            index for index, message in enumerate(self.messages) if message["role"] == "assistant"
        ]
        kept = starts[-keep_turns:] if keep_turns else []
        return kept[0] if kept else len(self.messages)


def is_tool_result(message: Mapping[str, Any]) -> bool:
    """Whether it is a result that has not been cleared yet."""
    return message["role"] == "tool" and message["content"] != CLEARED
