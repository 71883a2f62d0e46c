"""What happens inside an episode: agents taking turns with a policy and their tools.

An episode is used once. It appends to a record and to the conversation by the same calls, so that
what is rebuilt from the record is what was. It starts no sandbox and judges no end; `rollout.py`
does.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baltoro.agents.conversation import SUMMARY_REQUEST, Conversation
from baltoro.agents.harness import Harness
from baltoro.agents.policy import Policy, PolicyReply, Prompt, Purpose
from baltoro.agents.task import Task
from baltoro.agents.tools import Observation, Toolbox, shortened
from baltoro.agents.trace import (
    ContextRecord,
    How,
    ObservationRecord,
    SubmissionRecord,
    TraceWriter,
    TurnRecord,
)
from baltoro.agents.verify import judge
from baltoro.agents.workspace import Function, Workspace, workspace_functions
from baltoro.sandbox.protocol import Image

MAIN = "main"


@dataclass(frozen=True, kw_only=True, slots=True)
class Agent:
    """A context with its tools."""

    talk: Conversation
    toolbox: Toolbox
    max_turns: int


class Episode:
    """One task, harness and policy at work in one sandbox."""

    def __init__(
        self,
        *,
        task: Task,
        image: Image,
        harness: Harness,
        policy: Policy,
        workspace: Workspace,
        writer: TraceWriter,
        seed: int,
        started: float,
    ):
        """`started`: the moment, on the monotonic clock, at which the episode's own time began."""
        self.task = task
        self.image = image
        self.harness = harness
        self.policy = policy
        self.workspace = workspace
        self.writer = writer
        self.seed = seed
        self.started = started
        self._num_subagents = sum(
            record.reason == "opening" and record.agent != MAIN
            for record in writer.trace().of(ContextRecord)
        )

    @property
    def num_submissions(self) -> int:
        """How often the agent had the public checks run."""
        return len(self.writer.trace().of(SubmissionRecord))

    async def main_agent(self) -> Agent:
        """The main agent as the record has it, begun if it has none."""
        talk = Conversation(MAIN)
        for record in self.writer.records:
            talk.replay(record)
        if not talk.messages:
            self._begin(talk, self.harness.opening(self.task, await self._notes()))
        toolbox = self.harness.toolbox(self._main_functions(talk))
        return Agent(talk=talk, toolbox=toolbox, max_turns=self.harness.config.max_turns)

    async def turn(self, agent: Agent) -> How | None:
        """One turn: ask, run the calls, shorten the context. Returns how it ended, if it did."""
        talk, context = agent.talk, self.harness.config.context
        if talk.awaits_reply:
            if talk.turn >= agent.max_turns:
                return "turn_limit"
            if talk.num_tokens >= context.max_tokens:
                return "token_limit"
            await self._ask(agent, "turn")
        if talk.finish_reason == "length":
            return "cut_off"
        calls = talk.messages[-1].get("tool_calls")
        if not calls:
            return "answered"
        await self._run_calls(agent, calls)
        if talk.needs_compaction(context):
            await self._compact(agent)
        return None

    async def _ask(self, agent: Agent, purpose: Purpose) -> PolicyReply:
        talk, config = agent.talk, self.harness.config
        messages = list(talk.messages)
        if purpose == "summary":
            messages.append({"role": "user", "content": SUMMARY_REQUEST})
        room = max(1, config.context.max_tokens - talk.num_tokens)
        limit = config.max_reply_tokens
        key = f"{self.seed}/{talk.agent}/{talk.turn}/{purpose}"
        prompt = Prompt(
            messages=tuple(messages),
            tools=agent.toolbox.declarations(),
            effort=config.effort,
            max_tokens=room if limit is None else min(limit, room),
            seed=random.Random(key).getrandbits(31),
            prefix=talk.prefix,
            agent=talk.agent,
            turn=talk.turn,
            purpose=purpose,
        )
        began = time.monotonic()
        reply = await self.policy.reply(prompt)
        record = TurnRecord(
            agent=talk.agent,
            turn=talk.turn,
            purpose=purpose,
            message=dict(reply.message),
            finish_reason=reply.finish_reason,
            num_prompt_tokens=reply.num_prompt_tokens,
            num_output_tokens=reply.num_output_tokens,
            policy_version=reply.policy_version,
            tokens=reply.tokens,
            problems=reply.problems,
            started_s=began - self.started,
            wall_s=time.monotonic() - began,
        )
        self.writer.add(record)
        talk.add_turn(record)
        return reply

    async def _run_calls(self, agent: Agent, calls: Sequence[Mapping[str, Any]]) -> None:
        """Run a turn's calls: in order, or at once if every one of them allows it."""
        names = [call["function"]["name"] for call in calls]
        if len(calls) > 1 and all(agent.toolbox.is_concurrent(name) for name in names):
            seen = await asyncio.gather(
                *(self._call(agent, call) for call in calls), return_exceptions=True
            )
        else:
            seen = [await self._call(agent, call) for call in calls]
        for item in seen:
            if isinstance(item, BaseException):
                raise item
            self.writer.add(item)
            agent.talk.add_observation(item)

    async def _call(self, agent: Agent, call: Mapping[str, Any]) -> ObservationRecord:
        function = call["function"]
        began = time.monotonic()
        seen = await agent.toolbox.call(function["name"], function["arguments"])
        return ObservationRecord(
            agent=agent.talk.agent,
            turn=agent.talk.turn - 1,
            call_id=call["id"],
            tool=function["name"],
            arguments=function["arguments"],
            content=shortened(seen.content, self.harness.config.max_observation_chars),
            is_error=seen.is_error,
            started_s=began - self.started,
            wall_s=time.monotonic() - began,
        )

    async def _compact(self, agent: Agent) -> None:
        talk, context = agent.talk, self.harness.config.context
        if context.method == "clear":
            record = talk.cleared(context.keep_turns)
        else:
            reply = await self._ask(agent, "summary")
            opening = talk.messages[: talk.num_opening]
            if talk.agent == MAIN and self.harness.config.memory is not None:
                opening = list(self.harness.opening(self.task, await self._notes()))
            record = talk.summarised(opening, reply.message["content"], context.keep_turns)
        self.writer.add(record)
        talk.begin(record)

    def _begin(self, talk: Conversation, messages: Sequence[dict[str, Any]]) -> None:
        record = ContextRecord(
            agent=talk.agent, messages=tuple(messages), num_opening=len(messages), reason="opening"
        )
        self.writer.add(record)
        talk.begin(record)

    async def _notes(self) -> str | None:
        """What the memory file holds, if there is one."""
        memory = self.harness.config.memory
        if memory is None:
            return None
        try:
            return await self.workspace.read_text(memory.path)
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            return f"[{memory.path} cannot be read: {error}]"

    def _functions(self) -> dict[str, Function]:
        """What every agent may use."""
        functions = workspace_functions(self.workspace)
        if self.harness.config.skills == "on demand":
            functions["skill"] = self.harness.skill_function()
        return functions

    def _main_functions(self, talk: Conversation) -> dict[str, Function]:
        functions = self._functions()
        if self.harness.config.memory is not None:
            functions["remember"] = self._remember_function(self.harness.config.memory.path)
        if self.harness.config.subagents is not None:
            functions["delegate"] = self._delegate_function()
        if self.task.submissions is not None:
            most = self.task.submissions.max_submissions
            functions["submit"] = self._submit_function(talk, most)
        return functions

    def _remember_function(self, path: str) -> Function:
        async def remember(text: str) -> str:
            """Add a note to your memory, which you will see again when the conversation is cut.

            text: the note
            """
            notes = await self._notes() or ""
            await self.workspace.write_text(path, f"{notes}{text.rstrip()}\n")
            return f"noted in {path}"

        return remember

    def _delegate_function(self) -> Function:
        limits = self.harness.config.subagents
        assert limits is not None

        async def delegate(prompt: str) -> Observation:
            """Hand a part of the work to a helper that shares your files but not your conversation.

            prompt: everything the helper must know: what to do, where, and what to report
            """
            if self._num_subagents >= limits.max_agents:
                raise ValueError(f"there were {limits.max_agents} helpers already; do it yourself")
            self._num_subagents += 1
            talk = Conversation(f"{MAIN}/{self._num_subagents}")
            self._begin(talk, self.harness.sub_opening(self.task, prompt))
            toolbox = self.harness.toolbox(self._functions())
            agent = Agent(talk=talk, toolbox=toolbox, max_turns=limits.max_turns)
            while (how := await self.turn(agent)) is None:
                pass
            if how != "answered":
                return Observation(content=f"[the helper stopped early: {how}]", is_error=True)
            return Observation(content=talk.messages[-1]["content"] or "[no answer]")

        return delegate

    def _submit_function(self, talk: Conversation, max_submissions: int) -> Function:
        async def submit() -> str:
            """Have the public checks run on your work as it is now. You may do this a few times."""
            if self.num_submissions >= max_submissions:
                raise ValueError(f"you have submitted {max_submissions} times; no more are allowed")
            snapshot = await self.workspace.keeper.checkpoint(self.workspace.name)
            results = await judge(
                self.task, self.task.public_checks, self.workspace.keeper, self.image, snapshot
            )
            self.writer.add(SubmissionRecord(turn=talk.turn - 1, results=results))
            num_left = max_submissions - self.num_submissions
            lines = [f"{result.name}: {result.score:g}\n{result.detail}" for result in results]
            return "\n\n".join([*lines, f"[{num_left} submissions left]"])

        return submit
