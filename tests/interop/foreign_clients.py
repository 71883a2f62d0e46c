"""Talks to a server with clients that others wrote, and prints what they understood as JSON.

    python foreign_clients.py {openai,agents,agents-streamed} ADDRESS

Runs in the interop environment, where baltoro's own server is not needed.
"""

import asyncio
import json
import sys
from functools import partial
from typing import Any, Literal

import openai
from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from pydantic import BaseModel

ASK = [{"role": "user", "content": "What is the weather?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Bari"]}, "days": {"enum": [1, 2, None]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": PARAMETERS, "strict": True},
    }
]


class Place(BaseModel):
    """A typed answer."""

    name: Literal["Rome", "Bari"]
    is_far: bool


def with_openai(address: str) -> dict[str, Any]:
    """A call, its result, a stream, a typed answer, an error."""
    client = openai.OpenAI(base_url=f"{address}v1", api_key="unused", max_retries=0)
    model = client.models.list().data[0].id
    common: dict[str, Any] = {"model": model, "reasoning_effort": "none", "max_tokens": 300}
    first = client.chat.completions.create(
        messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **common
    )
    message = first.choices[0].message
    assert message.tool_calls
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 C"}
    history: list[Any] = [*ASK, message.model_dump(exclude_none=True), result]
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    parts = list(
        client.chat.completions.create(
            messages=history,
            tools=TOOLS,
            tool_choice=choice,
            stream=True,
            stream_options={"include_usage": True},
            **common,
        )
    )
    pieces = [c for p in parts for ch in p.choices for c in ch.delta.tool_calls or ()]
    streamed = "".join(piece.function.arguments or "" for piece in pieces)
    assert [piece.function.name for piece in pieces if piece.id] == ["weather"]
    typed = client.chat.completions.parse(messages=history, response_format=Place, **common)
    try:
        client.chat.completions.create(messages=[], **common)
        refusal = ""
    except openai.BadRequestError as error:
        refusal = str(error.param)
    assert parts[-1].usage
    return {
        "called": json.loads(message.tool_calls[0].function.arguments),
        "finish_reason": first.choices[0].finish_reason,
        "streamed": [json.loads(streamed)],
        "prompt_tokens": parts[-1].usage.prompt_tokens,
        "typed": typed.choices[0].message.parsed.model_dump(),  # type: ignore[union-attr]
        "refusal": refusal,
    }


def with_agents(address: str, *, is_streamed: bool = False) -> dict[str, Any]:
    """An agent that must use its tool, and then says something."""
    set_tracing_disabled(True)
    asked: list[str] = []

    @function_tool
    def weather(city: Literal["Rome", "Bari"]) -> str:
        """The weather in a city."""
        asked.append(city)
        return "18 C"

    client = openai.AsyncOpenAI(base_url=f"{address}v1", api_key="unused", max_retries=0)
    settings = ModelSettings(
        tool_choice="required", max_tokens=300, extra_body={"reasoning_effort": "none"}
    )
    model = OpenAIChatCompletionsModel(model="nano", openai_client=client)
    agent = Agent(name="forecaster", model=model, tools=[weather], model_settings=settings)

    async def run() -> dict[str, Any]:
        outcome: Any
        if is_streamed:
            outcome = Runner.run_streamed(agent, "Weather?", max_turns=4)
            async for _ in outcome.stream_events():
                pass
        else:
            outcome = await Runner.run(agent, "Weather?", max_turns=4)
        return {
            "asked": asked,
            "items": [item.type for item in outcome.new_items],
            "output": outcome.final_output,
        }

    return asyncio.run(run())


if __name__ == "__main__":
    streamed = partial(with_agents, is_streamed=True)
    ways = {"openai": with_openai, "agents": with_agents, "agents-streamed": streamed}
    talk = ways[sys.argv[1]]
    json.dump(talk(sys.argv[2]), sys.stdout)
