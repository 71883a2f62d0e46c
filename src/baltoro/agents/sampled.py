"""A policy over token ids: renders the chat format, samples, parses, and keeps every id.

The first prompt of a context is rendered whole. Later ones are the ids so far plus what came since
(results of tools, a user's message, the opening of the answer), so the model's own tokens come
back exactly as it sampled them, however another tokenization of the same text would have been.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baltoro.agents.failure import PolicyError
from baltoro.agents.policy import PolicyReply, Prompt, Tokens, call_id
from baltoro.text.markers import END_OF_MSG, Segment
from baltoro.text.vocabulary import Tokenizer
from baltoro.text.xtml import MessageError, parse_ids, render


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """Ids an engine sampled, the stop token among them if it came; aligned."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    is_stopped: bool  # else it was cut off


class Sampler(Protocol):
    """What an engine must offer."""

    async def sample(
        self, prompt_ids: Sequence[int], *, max_tokens: int | None, seed: int
    ) -> Sampled:
        """Continue the prompt up to a stop token. Raises `PolicyError`."""


class SampledPolicy:
    """A `Policy` that knows its tokens."""

    def __init__(
        self, sampler: Sampler, tokenizer: Tokenizer, *, name: str, uses_thinking: bool = True
    ):
        self.name = name
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._uses_thinking = uses_thinking

    async def reply(self, prompt: Prompt) -> PolicyReply:
        added = self.added_ids(prompt)
        before = () if prompt.prefix is None else prompt.prefix.ids
        sampled = await self._sampler.sample(
            [*before, *added], max_tokens=prompt.max_tokens, seed=prompt.seed
        )
        if not sampled.ids or not (
            len(sampled.ids) == len(sampled.logprobs) == len(sampled.policy_versions)
        ):
            raise PolicyError(
                f"{self.name}: {len(sampled.ids)} ids, {len(sampled.logprobs)} logprobs,"
                f" {len(sampled.policy_versions)} versions; an engine must give one each, not none"
            )
        parsed = parse_ids(
            sampled.ids,
            self._tokenizer,
            thinking=self._uses_thinking,
            tools_declared=bool(prompt.tools),
        )
        call_ids = [call_id(prompt, index) for index in range(len(parsed.tool_calls))]
        message = parsed.message(call_ids)
        message["content"] = message["content"] or ""
        return PolicyReply(
            message=message,
            finish_reason=parsed.finish_reason if sampled.is_stopped else "length",
            num_prompt_tokens=len(before) + len(added),
            num_output_tokens=len(sampled.ids),
            policy_version=sampled.policy_versions[0],
            tokens=Tokens(
                prompt_ids=tuple(added),
                ids=sampled.ids,
                logprobs=sampled.logprobs,
                policy_versions=sampled.policy_versions,
            ),
            problems=parsed.problems,
        )

    def added_ids(self, prompt: Prompt) -> list[int]:
        """Ids of the prompt beyond its prefix."""
        try:
            segments = self._segments(prompt)
        except MessageError as error:
            raise PolicyError(f"{self.name}: cannot render the conversation: {error}") from error
        added = self._tokenizer.encode_segments(segments)
        end = self._tokenizer.special_ids[END_OF_MSG]
        if prompt.prefix is not None and prompt.prefix.ids[-1] != end:
            return [end, *added]  # the model ended its message in another way
        return added

    def _segments(self, prompt: Prompt) -> list[Segment]:
        if prompt.prefix is None:
            return render(
                prompt.messages,
                prompt.tools,
                thinking=self._uses_thinking,
                thinking_effort=prompt.effort,
                literal_placeholders=False,
            )
        last = prompt.prefix.num_messages - 1
        answer = render(
            prompt.messages[last : last + 1],
            thinking=self._uses_thinking,
            add_generation_prompt=False,
        )
        onward = render(prompt.messages[last:], thinking=self._uses_thinking)
        assert onward[: len(answer)] == answer, "a message's text does not depend on later ones"
        return onward[len(answer) :]
