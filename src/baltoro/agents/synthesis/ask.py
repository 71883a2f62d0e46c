"""Asking a policy for JSON."""

from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from baltoro.agents.failure import PolicyError
from baltoro.agents.policy import Policy, Prompt

T = TypeVar("T")
NUM_TRIES = 3


async def ask_text(policy: Policy, question: str, *, seed: int = 0) -> str:
    """A policy's answer to a question without tools."""
    messages = ({"role": "user", "content": question},)
    reply = await policy.reply(Prompt(messages=messages, seed=seed))
    return str(reply.message["content"])


async def ask_json(policy: Policy, question: str, kind: TypeAdapter[T], *, seed: int = 0) -> T:
    """An answer of the form `kind`; asked again with other seeds if it is not of that form.

    Raises `PolicyError` after three tries.
    """
    problem: Any = None
    for attempt in range(NUM_TRIES):
        text = await ask_text(policy, question, seed=seed + attempt)
        try:
            return kind.validate_json(_json_part(text))
        except ValidationError as error:
            problem = error
    raise PolicyError(f"{policy.name}: no usable answer in {NUM_TRIES} tries: {problem}")


def _json_part(text: str) -> str:
    """From the first bracket to the last: models like to say something around it."""
    starts = [at for at in (text.find("["), text.find("{")) if at >= 0]
    end = max(text.rfind("]"), text.rfind("}"))
    return text[min(starts) : end + 1] if starts else text
