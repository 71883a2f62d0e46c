"""A scripted agent repairs a small repository over 30 steps, with and without interruptions.

The interrupted run is frozen once, stored once, paused once and forked for judging once. It goes
on under a fresh keeper with a copy of all files in another folder, as on another host; the first
folder is gone. Its end state, its conversation and its reward are those of the plain run. On the
machine drivers a background process of the agent counts in its memory across all of it.
"""

import asyncio
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from agents.worlds import DONE, PYTHON, World, machine_world, plain_harness, sh, world

from baltoro.agents.policy import Line, PolicyReply, Prompt, ScriptedPolicy
from baltoro.agents.rollout import Runner
from baltoro.agents.task import Check, SubmissionBudget, Task, TaskFile
from baltoro.agents.trace import CommitRecord, SubmissionRecord, Trace, TurnRecord
from baltoro.sandbox.protocol import Command, Limits

NUM_STEPS = 30
FROZEN, SUBMITTED, STORED, MOVED = 6, 11, 16, 20  # turns

MODULES = {
    "shapes.py": "def area(w, h):\n    return w + h\n",
    "words.py": "def shout(text):\n    return text.lower() + '!'\n",
    "numbers_.py": "def mean(values):\n    return sum(values) / (len(values) + 1)\n",
}
TEST = """
import unittest
from kit import numbers_, shapes, words

class Kit(unittest.TestCase):
    def test_area(self):
        self.assertEqual(shapes.area(2, 5), 10)
    def test_shout(self):
        self.assertEqual(words.shout("hey"), "HEY!")
    def test_mean(self):
        self.assertEqual(numbers_.mean([2, 4]), 3)
"""
COUNTER = """
count = 0
while True:
    open("ask").read()
    count += 1
    with open("answer", "w") as out:
        out.write(f"{count}\\n")
"""
UNITTEST = " ".join((*PYTHON, "-m", "unittest", "-q", "test_kit.py"))


def task() -> Task:
    test = TaskFile(path="test_kit.py", data=TEST.encode())
    files = [TaskFile(path=f"kit/{name}", data=text.encode()) for name, text in MODULES.items()]
    argv = (*PYTHON, "-m", "unittest", "-q", "test_kit.py")
    return Task(
        id="kit",
        prompt="The tests of kit fail. Repair it.",
        files=(*files, TaskFile(path="kit/__init__.py", data=b""), test),
        checks=(
            Check(name="suite", argv=argv, files=(test,)),
            Check(name="area", argv=(*argv, "-k", "area"), files=(test,), is_hidden=False),
        ),
        submissions=SubmissionBudget(max_submissions=1, num_free=1),
        limits=Limits(memory_bytes=1 << 30),
    )


def edit(path: str, old: str, new: str) -> Line:
    return Line(calls=(("edit", {"path": path, "old": old, "new": new}),))


def script(has_memory: bool) -> list[Line]:
    """30 steps and the answer."""
    lines = [
        sh("ls"),
        sh("cat kit/*.py"),
        sh(f"{UNITTEST} 2>/dev/null; echo $?"),
        Line(calls=(("read", {"path": "kit/shapes.py"}),)),
        edit("kit/shapes.py", "w + h", "w * h"),
        sh("echo 'area repaired' >> LOG"),
        Line(calls=(("search", {"pattern": "lower", "path": "kit"}),)),
        edit("kit/words.py", "lower", "upper"),
        sh("echo 'shout repaired' >> LOG"),
        Line(calls=(("write", {"path": "docs/words.md", "content": "# shout\nlouder\n"}),)),
        sh("cp kit/words.py words.bak"),
        Line(calls=(("submit", {}),)),
        edit("kit/numbers_.py", "(len(values) + 1)", "len(values)"),
        sh("echo 'mean repaired' >> LOG; rm words.bak"),
        sh(f"{UNITTEST} 2>/dev/null; echo $?"),
    ]
    if has_memory:
        lines[2] = Line(calls=(("write", {"path": "counter.py", "content": COUNTER}),))
        lines[3] = sh("mkfifo ask answer; setsid python3 counter.py >/dev/null 2>&1 </dev/null & :")
    ask = sh("echo > ask; cat answer") if has_memory else sh("wc -l < LOG")
    while len(lines) < NUM_STEPS:
        lines.append(ask if len(lines) % 2 else sh(f"echo step {len(lines)} >> LOG"))
    if has_memory:
        lines[5] = lines[10] = ask
    return [*lines, DONE]


class Interrupted(ScriptedPolicy):
    """A policy during whose thinking other things happen, once each."""

    def __init__(self, lines: list[Line], events: dict[int, Callable[[], Awaitable[None]]]):
        super().__init__(lines)
        self.events = dict(events)

    async def reply(self, prompt: Prompt) -> PolicyReply:
        event = self.events.pop(prompt.turn, None)
        if event is not None:
            await event()
        return await super().reply(prompt)


async def play(runner: Runner, policy: ScriptedPolicy) -> Trace:
    return await runner.run(task(), plain_harness(), policy, episode="kit", group="g", seed=0)


async def end_state(here: World, trace: Trace) -> bytes:
    """Names and digests of all files that were judged."""
    assert trace.end is not None
    assert trace.end.snapshot is not None, trace.end
    name = here.keeper.take(trace.end.snapshot)
    listing = "find . -type f | LC_ALL=C sort | xargs sha256sum"
    async with here.keeper.use(name) as sandbox:
        result = await sandbox.exec(Command(argv=("sh", "-c", listing), cwd="/work"))
    await here.keeper.destroy(name)
    return result.stdout


def said(trace: Trace) -> list[tuple[str, str]]:
    """All observations, but for the seconds that a test run prints."""
    return [
        (r.tool, r.content) for r in trace.records if r.kind == "observation" if r.tool != "submit"
    ]


MakeWorld = Callable[[Path], AbstractAsyncContextManager[World]]


async def compare(folder: Path, make: MakeWorld, *, has_memory: bool) -> None:
    lines = script(has_memory)
    async with make(folder / "plain") as here:
        plain = await play(here.runner(commit_every=7), ScriptedPolicy(lines))
        plain_state = await end_state(here, plain)

    places: list[str] = []
    async with make(folder / "disturbed") as here:

        def idle(seconds: float) -> Callable[[], Awaitable[None]]:
            async def event() -> None:
                here.clock.now += seconds
                await here.keeper.tick()
                places.extend(here.keeper.place(name) for name in here.keeper._kept)

            return event

        runner = here.runner(commit_every=7)

        async def pause() -> None:
            runner.pause.set()

        events = {FROZEN: idle(6), STORED: idle(61), MOVED: pause}
        paused = await play(runner, Interrupted(lines, events))
        assert places == ["frozen", "stored"]
        assert paused.end is None
        assert paused.of(CommitRecord)[-1].is_pause
        assert len(paused.of(TurnRecord)) == MOVED + 1
    subprocess.run(["cp", "-a", folder / "disturbed", folder / "elsewhere"], check=True)
    shutil.rmtree(folder / "disturbed")
    async with make(folder / "elsewhere") as here:
        moved = await play(here.runner(commit_every=7), ScriptedPolicy(lines))
        moved_state = await end_state(here, moved)

    for trace in (plain, moved):
        assert trace.end is not None
        assert (trace.end.outcome, trace.end.reward) == ("judged", 1.0)
        assert len(trace.of(TurnRecord)) == NUM_STEPS + 1
        (submission,) = trace.of(SubmissionRecord)
        assert (submission.turn, submission.results[0].score) == (SUBMITTED, 1.0)
    assert moved_state == plain_state
    assert plain_state.count(b"\n") >= 7
    assert said(moved) == said(plain)
    if has_memory:
        asked = [r for r in moved.records if r.kind == "observation" and "> ask" in r.arguments]
        counts = [record.content for record in asked]
        assert [int(text) for text in counts] == list(range(1, len(counts) + 1))
        assert len(counts) >= 8


def test_thirty_steps_end_the_same_with_and_without_interruptions(tmp_path):
    asyncio.run(compare(tmp_path, world, has_memory=False))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gvisor", "criu", "qemu"])
def test_thirty_steps_in_a_machine_keep_a_process_counting(tmp_path, kind):
    def make(folder: Path) -> AbstractAsyncContextManager[World]:
        return machine_world(folder, kind)

    asyncio.run(asyncio.wait_for(compare(tmp_path, make, has_memory=True), 500))
