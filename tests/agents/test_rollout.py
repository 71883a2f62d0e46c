"""Episodes from task to record: judged ends, agents' and machines' failures, pauses, resumes."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from agents.worlds import (
    DONE,
    REPAIR,
    World,
    plain_harness,
    repair_task,
    run_in_world,
    sh,
    world,
)

from baltoro.agents.failure import PolicyError
from baltoro.agents.harness import Harness
from baltoro.agents.policy import Line, PolicyReply, Prompt, ScriptedPolicy
from baltoro.agents.styles import style
from baltoro.agents.task import Check, SubmissionBudget
from baltoro.agents.trace import CommitRecord, ContextRecord, Trace, TurnRecord, read_trace
from baltoro.sandbox.protocol import Binding, Command, LimitError, Sandbox, SandboxError


async def play(
    here: World, script: list[Line] | Callable[[Prompt], Line], **changes: object
) -> Trace:
    harness = changes.pop("harness", None) or plain_harness()
    return await here.runner().run(
        repair_task(**changes),
        harness,  # type: ignore[arg-type]
        ScriptedPolicy(script),
        episode="e",
        group="g",
        seed=1,
    )


def observations(trace: Trace) -> list[str]:
    return [record.content for record in trace.records if record.kind == "observation"]


def test_a_repair_is_judged_and_paid(tmp_path):
    async def body(here: World) -> None:
        trace = await play(here, [sh("cat sums.py"), REPAIR, DONE])
        assert trace.end is not None
        assert (trace.end.how, trace.end.outcome, trace.end.reward) == ("answered", "judged", 1.0)
        assert "a - b" in observations(trace)[0]
        assert trace == read_trace(tmp_path / "records/e.jsonl")
        assert [record.kind for record in trace.records[:3]] == ["start", "context", "commit"]

    run_in_world(tmp_path, body)


def test_an_episode_without_the_repair_earns_nothing(tmp_path):
    async def body(here: World) -> None:
        trace = await play(here, [DONE])
        assert trace.end is not None
        assert (trace.end.outcome, trace.end.reward) == ("judged", 0.0)
        assert "AssertionError" in trace.end.results[0].detail

    run_in_world(tmp_path, body)


def test_running_out_of_turns_is_the_agents_failure_and_still_judged(tmp_path):
    async def body(here: World) -> None:
        harness = Harness(replace(style("plain"), max_turns=2))
        trace = await play(here, [REPAIR, sh("true"), DONE], harness=harness)
        assert trace.end is not None
        assert (trace.end.how, trace.end.outcome) == ("turn_limit", "agent failure")
        assert trace.end.reward == 1.0

    run_in_world(tmp_path, body)


def test_a_reply_cut_off_ends_the_episode(tmp_path):
    async def body(here: World) -> None:
        trace = await play(here, [Line(content="and so", finish_reason="length")])
        assert trace.end is not None
        assert (trace.end.how, trace.end.outcome) == ("cut_off", "agent failure")

    run_in_world(tmp_path, body)


def test_a_context_over_its_limit_ends_the_episode(tmp_path):
    async def body(here: World) -> None:
        context = replace(style("plain").context, max_tokens=3000, compact_at_tokens=None)
        harness = Harness(replace(style("plain"), context=context))
        trace = await play(here, lambda prompt: sh("seq 1 3000"), harness=harness)
        assert trace.end is not None
        assert trace.end.how == "token_limit"
        assert len(trace.of(TurnRecord)) == 1

    run_in_world(tmp_path, body)


def test_the_wrong_calls_of_an_agent_are_observations(tmp_path):
    async def body(here: World) -> None:
        calls = (
            ("shel", {"command": "ls"}),
            ("shell", {"cmd": "ls"}),
            ("read", {"path": "none"}),
            ("edit", {"path": "sums.py", "old": "a", "new": "b"}),
            ("search", {"pattern": "("}),
            ("shell", {"command": "exit 3"}),
            ("shell", {"command": "sleep 9", "timeout_s": 1}),
        )
        trace = await play(here, [Line(calls=calls), DONE])
        seen = observations(trace)
        assert all(record.is_error for record in trace.records if record.kind == "observation")
        for text, part in zip(
            seen,
            ("did you mean 'shell'", "'cmd'", "FileNotFoundError", "occurs", "(", "[exit code 3]"),
            strict=False,
        ):
            assert part in text
        assert "timeout_s=1" in seen[6]
        assert trace.end is not None
        assert trace.end.outcome == "judged"

    run_in_world(tmp_path, body)


def test_files_are_read_written_edited_and_searched(tmp_path):
    async def body(here: World) -> None:
        calls = (
            ("write", {"path": "a/b.txt", "content": "one\ntwo\nthree\n"}),
            ("read", {"path": "a/b.txt", "first_line": 2, "num_lines": 1}),
            ("edit", {"path": "a/b.txt", "old": "two", "new": "2"}),
            ("search", {"pattern": "^2$", "path": "a"}),
            ("search", {"pattern": "nothing"}),
        )
        seen = observations(await play(here, [Line(calls=calls), DONE]))
        assert seen == [
            "wrote 14 bytes to a/b.txt",
            "2\ttwo\n[1 more lines]",
            "replaced 1 in a/b.txt",
            "a/b.txt:2:2\n",
            "[no match]",
        ]

    run_in_world(tmp_path, body)


def test_a_long_observation_is_shortened(tmp_path):
    async def body(here: World) -> None:
        harness = Harness(replace(style("plain"), max_observation_chars=200))
        (seen,) = observations(await play(here, [sh("seq 1 2000"), DONE], harness=harness))
        assert "characters left out" in seen
        assert len(seen) < 260

    run_in_world(tmp_path, body)


def test_more_files_than_allowed_are_the_agents_failure(tmp_path):
    """A driver that finds out at the snapshot says so with a `LimitError`."""

    async def body(here: World) -> None:
        checkpoint = here.keeper.checkpoint

        async def full(name: str, binding: Binding | None = None) -> str:
            async with here.keeper.use(name) as sandbox:
                listed = await sandbox.exec(Command(argv=("ls", "work"), cwd="/"))
            if b"big" in listed.stdout:
                raise LimitError("40000000000 bytes of files, limits.disk_bytes=1073741824")
            return await checkpoint(name, binding)

        here.keeper.checkpoint = full  # type: ignore[method-assign]
        trace = await play(here, [sh("echo > big"), DONE])
        assert trace.end is not None
        assert (trace.end.how, trace.end.outcome) == ("sandbox_limit", "agent failure")
        assert trace.end.reward == 0.0

    run_in_world(tmp_path, body)


# --- machine failures


def test_a_policy_that_fails_is_the_machines_failure_and_can_be_gone_on_with(tmp_path):
    async def body(here: World) -> None:
        lines = [REPAIR, sh("true"), DONE]
        failed = await play(here, lines[:1])
        assert failed.end is not None
        assert failed.end.outcome == "machine failure"
        assert failed.end.failure is not None
        assert failed.end.failure.boundary == "policy"
        assert failed.end.reward is None
        again = await play(here, lines)
        assert again.end is not None
        assert again.end.reward == 1.0
        assert again.start == failed.start
        assert sum(record.kind == "end" for record in again.records) == 1

    run_in_world(tmp_path, body)


def test_a_task_whose_image_is_missing_is_the_tasks_failure(tmp_path):
    async def body(here: World) -> None:
        trace = await play(here, [DONE], image="none")
        assert trace.end is not None
        assert trace.end.failure is not None
        assert trace.end.failure.boundary == "task"

    run_in_world(tmp_path, body)


def test_a_task_with_absolute_paths_is_refused_by_a_driver_without_isolation(tmp_path):
    async def body(here: World) -> None:
        check = Check(name="t", argv=("/tests/test.sh",), result_path="/logs/verifier/reward.txt")
        trace = await play(here, [DONE], checks=(check,), needs_isolation=True)
        assert trace.end is not None
        assert trace.end.failure is not None
        assert "process driver" in trace.end.failure.message

    run_in_world(tmp_path, body)


def test_a_sandbox_whose_making_failed_late_is_adopted_and_not_leaked(tmp_path):
    """S07: the sandbox was made, the answer was an error."""

    async def body(here: World) -> None:
        create = here.keeper.driver.create
        made = []

        async def late(*arguments: object) -> Sandbox:
            made.append(await create(*arguments))  # type: ignore[arg-type]
            if len(made) == 1:
                raise SandboxError("the answer was lost")
            return made[-1]

        here.keeper.driver.create = late  # type: ignore[method-assign]
        failed = await play(here, [REPAIR, DONE])
        assert failed.end is not None
        assert failed.end.failure is not None
        assert failed.end.failure.boundary == "sandbox"
        trace = await play(here, [REPAIR, DONE])
        assert trace.end is not None
        assert trace.end.reward == 1.0
        assert made[0] is made[1]

    run_in_world(tmp_path, body)


def test_a_failed_sibling_does_not_disturb_a_group(tmp_path):
    class Moody(ScriptedPolicy):
        num_first_turns = 0

        async def reply(self, prompt: Prompt) -> PolicyReply:
            if prompt.turn == 0:
                self.num_first_turns += 1
                if self.num_first_turns == 2:
                    raise PolicyError("down")
            return await super().reply(prompt)

    async def body(here: World) -> None:
        traces = await here.runner().run_group(
            repair_task(), plain_harness(), Moody([REPAIR, DONE]), group="g", num_rollouts=3, seed=5
        )
        outcomes = sorted(trace.end.outcome for trace in traces if trace.end)
        assert outcomes == ["judged", "judged", "machine failure"]
        assert {trace.start.group for trace in traces} == {"g"}
        assert [trace.start.seed for trace in traces] == [5, 6, 7]

    run_in_world(tmp_path, body)


# --- resuming


def test_an_episode_that_is_over_is_not_run_again(tmp_path):
    async def body(here: World) -> None:
        first = await play(here, [REPAIR, DONE])
        assert await play(here, []) == first

    run_in_world(tmp_path, body)


def test_a_record_of_another_task_or_harness_is_refused(tmp_path):
    async def body(here: World) -> None:
        await play(here, [DONE])
        with pytest.raises(ValueError, match="was begun with task_digest="):
            await play(here, [DONE], prompt="Another.")
        with pytest.raises(ValueError, match="was begun with harness="):
            await play(here, [DONE], harness=Harness(style("codex")))

    run_in_world(tmp_path, body)


def test_a_paused_episode_goes_on_under_another_keeper(tmp_path):
    lines = [sh("echo 1 >> log"), REPAIR, sh("echo 2 >> log; cat log"), DONE]

    async def main() -> None:
        async with world(tmp_path) as here:
            runner = here.runner()
            runner.pause.set()
            paused = await runner.run(
                repair_task(),
                plain_harness(),
                ScriptedPolicy(lines),
                episode="e",
                group="g",
                seed=1,
            )
            assert paused.end is None
            assert paused.of(CommitRecord)[-1].is_pause
            assert len(paused.of(TurnRecord)) == 1
        async with world(tmp_path) as here:
            trace = await play(here, lines)
            assert trace.end is not None
            assert trace.end.reward == 1.0
            assert observations(trace)[-1] == "1\n2\n"
            assert [record.turn for record in trace.of(TurnRecord)] == [0, 1, 2, 3]
            assert here.keeper.lost == []

    asyncio.run(main())


def test_after_a_crash_the_world_is_taken_back_to_the_commit(tmp_path):
    """What was done after the last commit is done again, once."""
    lines = [sh("echo again >> log"), sh("cat log"), REPAIR, DONE]

    class Crash(BaseException):
        pass

    class Falling(ScriptedPolicy):
        async def reply(self, prompt: Prompt) -> PolicyReply:
            if prompt.turn == 2:
                raise Crash
            return await super().reply(prompt)

    async def main() -> None:
        async with world(tmp_path) as here:
            with pytest.raises(Crash):
                await here.runner().run(
                    repair_task(), plain_harness(), Falling(lines), episode="e", group="g", seed=1
                )
            assert len(read_trace(tmp_path / "records/e.jsonl").of(TurnRecord)) == 2
        async with world(tmp_path) as here:
            trace = await play(here, lines)
            assert observations(trace)[1] == "again\n"
            assert trace.end is not None
            assert trace.end.reward == 1.0

    asyncio.run(main())


def test_a_world_of_another_place_is_refused(tmp_path):
    async def main() -> None:
        async with world(tmp_path) as here:
            runner = here.runner()
            runner.pause.set()
            await runner.run(
                repair_task(),
                plain_harness(),
                ScriptedPolicy([sh("true"), DONE]),
                episode="e",
                group="g",
                seed=1,
            )
        path = tmp_path / "records/e.jsonl"
        lines = path.read_text().splitlines()
        commit = json.loads(lines[-1])
        commit["binding"]["prefix_hash"] = "0" * 64
        path.write_text("\n".join([*lines[:-1], json.dumps(commit)]) + "\n")
        async with world(tmp_path) as here:
            trace = await play(here, [sh("true"), sh("true"), DONE])
            assert trace.end is not None
            assert trace.end.failure is not None
            assert "restore the snapshot that belongs to this prefix" in trace.end.failure.message

    asyncio.run(main())


# --- modules of the harness


def test_submissions_are_answered_counted_and_paid_for(tmp_path):
    public = Check(name="smoke", argv=("grep", "-q", "a + b", "sums.py"), is_hidden=False)
    submit = Line(calls=(("submit", {}),))

    async def body(here: World) -> None:
        budget = SubmissionBudget(max_submissions=2, num_free=1, penalty=0.25)
        trace = await play(
            here,
            [submit, REPAIR, submit, submit, DONE],
            checks=(*repair_task().checks, public),
            submissions=budget,
        )
        seen = observations(trace)
        assert "smoke: 0" in seen[0]
        assert "[1 submissions left]" in seen[0]
        assert "smoke: 1" in seen[2]
        assert "no more are allowed" in seen[3]
        assert "AssertionError" not in "".join(seen)
        assert trace.end is not None
        assert trace.end.num_submissions == 2
        assert trace.end.reward == 0.75
        assert {result.name for result in trace.end.results} == {"tests", "smoke"}

    run_in_world(tmp_path, body)


def test_a_summary_takes_the_place_of_old_turns(tmp_path):
    def script(prompt: Prompt) -> Line:
        if prompt.purpose == "summary":
            return Line(content="sums.py was read")
        if prompt.turn == 4:
            return REPAIR
        return DONE if prompt.turn > 4 else sh("seq 1 400")

    async def body(here: World) -> None:
        context = replace(style("plain").context, compact_at_tokens=1500, keep_turns=1)
        trace = await play(here, script, harness=Harness(replace(style("plain"), context=context)))
        contexts = trace.of(ContextRecord)
        assert [context.reason for context in contexts][:2] == ["opening", "summary"]
        assert "sums.py was read" in contexts[1].messages[2]["content"]
        summaries = [turn for turn in trace.of(TurnRecord) if turn.purpose == "summary"]
        assert len(summaries) == len(contexts) - 1
        assert trace.end is not None
        assert trace.end.reward == 1.0

    run_in_world(tmp_path, body)


def test_notes_come_back_after_the_context_was_cut(tmp_path):
    def script(prompt: Prompt) -> Line:
        if prompt.purpose == "summary":
            return Line(content="nothing")
        if prompt.turn == 0:
            return Line(calls=(("memory", {"text": "the bug is in add"}),))
        return DONE if prompt.turn > 3 else Line(calls=(("terminal", {"command": "seq 1 400"}),))

    async def body(here: World) -> None:
        context = replace(style("hermes").context, compact_at_tokens=1200, keep_turns=1)
        trace = await play(here, script, harness=Harness(replace(style("hermes"), context=context)))
        first, second = trace.of(ContextRecord)[:2]
        assert "the bug is in add" not in first.messages[0]["content"]
        assert "the bug is in add" in second.messages[0]["content"]

    run_in_world(tmp_path, body)


def test_helpers_share_the_files_and_report(tmp_path):
    def script(prompt: Prompt) -> Line:
        if prompt.agent != "main":
            if prompt.turn == 0:
                name = "Shell" if "Shell" in str(prompt.tools) else "shell"
                return Line(calls=((name, {"command": f"echo {prompt.agent} >> log"}),))
            return Line(content=f"{prompt.agent} is done")
        if prompt.turn == 0:
            return Line(calls=(("Task", {"prompt": "one"}), ("Task", {"prompt": "two"})))
        if prompt.turn == 1:
            return Line(calls=(("Shell", {"command": "sort log"}),))
        return DONE

    async def body(here: World) -> None:
        trace = await play(here, script, harness=Harness(style("kimi-code")))
        main = [r.content for r in trace.records if r.kind == "observation" and r.agent == "main"]
        assert main == ["main/1 is done", "main/2 is done", "main/1\nmain/2\n"]
        sub = [r for r in trace.of(ContextRecord) if r.agent == "main/2"]
        assert sub[0].messages[-1]["content"] == "two"

    run_in_world(tmp_path, body)


def test_there_are_only_so_many_helpers(tmp_path):
    def script(prompt: Prompt) -> Line:
        if prompt.agent != "main":
            return Line(calls=(("read", {"path": "README"}),))  # never done
        if prompt.turn < 3:
            return Line(calls=(("sessions_spawn", {"task": "look"}),))
        return DONE

    async def body(here: World) -> None:
        trace = await play(here, script, harness=Harness(style("openclaw")))
        main = [r.content for r in trace.records if r.kind == "observation" and r.agent == "main"]
        assert main[:2] == ["[the helper stopped early: turn_limit]"] * 2
        assert "there were 2 helpers already" in main[2]

    run_in_world(tmp_path, body)


COUNTED = [sh(f"echo {number} >> log") for number in range(1, 9)]
CHILD = """
import asyncio, sys
from pathlib import Path
from agents.test_rollout import COUNTED
from agents.worlds import DONE, plain_harness, repair_task, world
from baltoro.agents.policy import ScriptedPolicy

class Slow(ScriptedPolicy):
    async def reply(self, prompt):
        await asyncio.sleep(0.2)
        return await super().reply(prompt)

async def main(folder):
    async with world(folder) as here:
        await here.runner(commit_every=3).run(
            repair_task(), plain_harness(), Slow([*COUNTED, DONE]), episode="e", group="g", seed=1
        )

asyncio.run(main(Path(sys.argv[1])))
"""


def test_an_episode_killed_with_its_keeper_goes_on_without_doing_anything_twice(tmp_path):
    path = tmp_path / "records/e.jsonl"
    places = str(Path(__file__).parents[1])
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], env={**os.environ, "PYTHONPATH": places}
    )
    deadline = time.monotonic() + 60
    while not path.exists() or b'"turn":4' not in path.read_bytes():
        assert child.poll() is None, "the child ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.kill()
    child.wait()
    before = read_trace(path)
    assert before.end is None
    assert len(before.resumable()) < len(before.records)

    async def main() -> None:
        async with world(tmp_path) as here:
            trace = await here.runner(commit_every=3).run(
                repair_task(),
                plain_harness(),
                ScriptedPolicy([*COUNTED, sh("cat log"), DONE]),
                episode="e",
                group="g",
                seed=1,
            )
            assert observations(trace)[-1] == "".join(f"{n}\n" for n in range(1, 9))
            assert [turn.turn for turn in trace.of(TurnRecord)] == list(range(10))
            assert list((tmp_path / "boxes").iterdir()) == []

    asyncio.run(main())
