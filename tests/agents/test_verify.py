"""Judging: what an agent leaves behind cannot speak for it, and whose fault a failure is."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from agents.worlds import (
    DONE,
    PYTHON,
    World,
    machine_world,
    plain_harness,
    repair_task,
    run_in_world,
    sh,
)

from baltoro.agents.failure import TaskError
from baltoro.agents.policy import Line, ScriptedPolicy
from baltoro.agents.task import Check, SubmissionBudget, Task, TaskFile
from baltoro.agents.trace import CheckResult
from baltoro.agents.verify import judge, reward_of
from baltoro.agents.workspace import lay_files, make_folder
from baltoro.sandbox.protocol import Command, Limits

GOOD = b"def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return a + a\n"


async def left_behind(here: World, task: Task, attack: str, repaired: bytes | None = None) -> str:
    """The snapshot of a sandbox in which an agent ran `attack`."""
    name = await here.keeper.create(here.image, task.limits, task.net)
    async with here.keeper.use(name) as sandbox:
        await make_folder(sandbox, task.workdir)
        await lay_files(sandbox, task, task.files)
        if repaired is not None:
            await sandbox.write(task.place("sums.py"), repaired)
        if attack:
            done = await sandbox.exec(Command(argv=("sh", "-c", attack), cwd=task.workdir))
            assert done.exit_code == 0, done.stderr
        snapshot = await here.keeper.checkpoint(name)
        here.keeper.store.pin(snapshot)
    await here.keeper.destroy(name)
    return snapshot


def judged(
    tmp_path: Path, attack: str, *, repaired: bytes | None = None, **changes: object
) -> Sequence[CheckResult]:
    """The results of a repair task's checks after an attack, on the process driver."""
    found: list[CheckResult] = []
    task = repair_task(**changes)

    async def body(here: World) -> None:
        snapshot = await left_behind(here, task, attack, repaired)
        found.extend(await judge(task, task.checks, here.keeper, here.image, snapshot))

    run_in_world(tmp_path, body)
    return found


def numbered(script: str, **fields: object) -> tuple[Check, ...]:
    """A check that writes its result with a shell script that sees the file as $1."""
    argv = ("sh", "-c", script, "check", "{result}")
    return (Check(name="n", argv=argv, **fields),)  # type: ignore[arg-type]


def test_the_final_state_decides(tmp_path):
    (bad,) = judged(tmp_path / "bad", "")
    (good,) = judged(tmp_path / "good", "", repaired=GOOD)
    assert (bad.score, good.score) == (0.0, 1.0)
    assert "AssertionError" in bad.detail


@pytest.mark.parametrize(
    "attack",
    [
        "echo 'print(1)' > check_sums.py",
        "ln -s sums.py check_sums.py",
        "mkdir check_sums.py",
        "ln -s /dev/null check_sums.py; echo 'def double(a): return 8' > sums.py",
    ],
)
def test_a_check_that_the_agent_wrote_is_replaced(tmp_path, attack):
    (result,) = judged(tmp_path, attack)
    assert result.score == 0.0


def test_a_planted_reward_is_ignored(tmp_path):
    """S05. The check writes nothing; everything an agent could guess is there."""
    attack = (
        "for d in . .. ../.verify ../logs/verifier ../tmp; do mkdir -p $d;"
        " for f in n result reward reward.txt reward.json; do echo 1 > $d/$f; done; done"
    )
    (result,) = judged(tmp_path, attack, checks=numbered("true"))
    assert result.score == 0.0
    assert "no result was written" in result.detail


@pytest.mark.parametrize(
    ("script", "score"),
    [
        ("echo 0.25 > $1", 0.25),
        ("echo 1 > $1; exit 1", 1.0),
        ("echo 1.5 > $1", 0.0),
        ("echo nan > $1", 0.0),
        ("echo '1 1' > $1", 0.0),
        ("seq 1 9999 > $1", 0.0),
        ("mkdir $1", 0.0),
    ],
)
def test_a_result_is_a_number_between_0_and_1(tmp_path, script, score):
    (result,) = judged(tmp_path, "", checks=numbered(script))
    assert result.score == score


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        ("cd ..; rm -r work; echo > work", "work"),
        ("rm sums.py; ln -s sums.py sums.py", "exit code"),
        ("printf 'while 1: pass' > sums.py", "timeout_s"),
        ("printf 'while 1: print(\"x\" * 99999)' > sums.py", "max_output_bytes"),
    ],
)
def test_what_the_agent_broke_is_the_agents_score(tmp_path, attack, reason):
    (check,) = repair_task().checks
    limits = replace(repair_task().limits, max_output_bytes=1 << 20)
    (result,) = judged(tmp_path, attack, checks=(replace(check, timeout_s=1.0),), limits=limits)
    assert result.score == 0.0
    assert reason in result.detail


def test_a_program_that_the_agent_removed_is_its_own_fault_and_one_that_never_was_is_not(tmp_path):
    check = Check(name="own", argv=("./run.sh",))
    files = (TaskFile(path="run.sh", data=b"#!/bin/sh\nexit 0\n", mode=0o755),)
    (kept,) = judged(tmp_path / "kept", "", checks=(check,), files=files)
    (removed,) = judged(tmp_path / "removed", "rm run.sh", checks=(check,), files=files)
    assert (kept.score, removed.score) == (1.0, 0.0)
    assert "removed a program" in removed.detail
    with pytest.raises(TaskError, match="the image lacks it as well"):
        judged(tmp_path / "never", "", checks=(check,))


def test_the_original_and_the_snapshot_are_unharmed(tmp_path):
    async def body(here: World) -> None:
        task = repair_task()
        name = await here.keeper.create(here.image, task.limits, task.net)
        async with here.keeper.use(name) as sandbox:
            await lay_files(sandbox, task, task.files)
        snapshot = await here.keeper.checkpoint(name)
        for _ in range(2):
            await judge(task, task.checks, here.keeper, here.image, snapshot)
        async with here.keeper.use(name) as sandbox:
            listed = await sandbox.exec(Command(argv=("ls", "-A", "work", "."), cwd="/"))
            assert listed.stdout == b".:\nwork\n\nwork:\nREADME\nsums.py\n"
        await here.keeper.destroy(name)

    run_in_world(tmp_path, body)


def test_a_fresh_sandbox_has_the_working_folder_and_nothing_else(tmp_path):
    check = Check(name="c", argv=("sh", "-c", "test -x tool -a -e sums.py -a ! -e ../elsewhere"))
    attack = "echo x > ../elsewhere; echo > tool; chmod 755 tool"
    (fork,) = judged(tmp_path / "fork", attack, checks=(check,))
    (fresh,) = judged(tmp_path / "fresh", attack, checks=(check,), judged_in="fresh")
    assert (fork.score, fresh.score) == (0.0, 1.0)


def test_a_working_folder_that_is_gone_scores_nothing(tmp_path):
    (result,) = judged(
        tmp_path, "cd ..; rm -r work", checks=repair_task().checks, judged_in="fresh"
    )
    assert result.score == 0.0
    assert "cannot be copied" in result.detail


def test_rewards_are_all_or_the_mean_of_hidden_checks_less_submissions():
    def result(score: float, weight: float = 1.0, *, is_hidden: bool = True) -> CheckResult:
        return CheckResult(
            name="c", is_hidden=is_hidden, score=score, weight=weight, detail="", wall_s=0.0
        )

    results = [result(1.0, 3.0), result(0.5), result(0.0, is_hidden=False)]
    every, mean = repair_task(), repair_task(scoring="mean")
    assert reward_of(every, results, 0) == 0.0
    assert reward_of(every, results[:1], 0) == 1.0
    assert reward_of(mean, results, 0) == 0.875
    public = Check(name="p", argv=("true",), is_hidden=False)
    budget = SubmissionBudget(max_submissions=9, num_free=1, penalty=0.25)
    paid = repair_task(checks=(*every.checks, public), submissions=budget)
    assert [reward_of(paid, results[:1], n) for n in (0, 1, 2, 9)] == [1.0, 1.0, 0.75, 0.0]


# --- machines

KINDS = ("gvisor", "criu", "qemu")


def in_machine(kind: str, tmp_path: Path, attack: str, *checks: Check) -> list[CheckResult]:
    task = repair_task(checks=checks, needs_isolation=True)
    found: list[CheckResult] = []

    async def main() -> None:
        async with machine_world(tmp_path, kind) as here:
            snapshot = await left_behind(here, task, attack)
            found.extend(await judge(task, task.checks, here.keeper, here.image, snapshot))

    asyncio.run(asyncio.wait_for(main(), 300))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_processes_of_the_agent_are_gone_before_the_check(tmp_path, kind):
    """A writer that outlives its shell, and a child that ignores what can be ignored."""
    attack = (
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt;"
        " setsid sh -c 'while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt;"
        " done' </dev/null >/dev/null 2>&1 &"
        " setsid sh -c 'trap \"\" TERM HUP INT; sleep 1000' </dev/null >/dev/null 2>&1 & sleep 1"
    )
    count = "ls /proc | grep -c '^[0-9]'; sleep 1; echo 0.5 > /logs/verifier/reward.txt; sleep 1"
    check = Check(name="t", argv=("sh", "-c", count), result_path="/logs/verifier/reward.txt")
    (result,) = in_machine(kind, tmp_path, attack, check)
    assert result.score == 0.5
    if kind != "qemu":  # where kernel threads count as well
        assert int(result.detail.split()[0]) <= 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gvisor", "criu"])
def test_a_shell_that_the_agent_replaced_does_not_judge_in_a_fresh_sandbox(tmp_path, kind):
    check = Check(name="t", argv=(*PYTHON, "check_sums.py"), files=repair_task().checks[0].files)
    attack = (
        "p=$(readlink -f $(command -v python3)); rm $p; printf '#!/bin/sh\\n' > $p; chmod 755 $p"
    )

    async def main() -> None:
        async with machine_world(tmp_path, kind) as here:
            for place, score in (("fork", 1.0), ("fresh", 0.0)):  # what a fork does not stop
                task = repair_task(checks=(check,), judged_in=place)
                snapshot = await left_behind(here, task, attack)
                (result,) = await judge(task, task.checks, here.keeper, here.image, snapshot)
                assert result.score == score, (place, result)

    asyncio.run(asyncio.wait_for(main(), 300))


HOG = b"x = []\nwhile True:\n    x.append(b'x' * (64 << 20))\n"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_the_agent_eats_is_no_failure_of_the_machine(tmp_path, kind):
    """Its own command, after which its sandbox may be gone; and the check that runs its code."""
    limits = Limits(memory_bytes=256 << 20)
    task = repair_task(limits=limits, needs_isolation=True)
    lines = [Line(calls=(("write", {"path": "sums.py", "content": HOG.decode()}),))]

    async def main() -> None:
        async with machine_world(tmp_path, kind) as here:
            for name, more in (("check", [DONE]), ("command", [sh("python3 sums.py"), DONE])):
                policy = ScriptedPolicy([*lines, *more])
                words = {"episode": name, "group": "g", "seed": 0}
                trace = await here.runner().run(task, plain_harness(), policy, **words)
                assert trace.end is not None
                assert trace.end.outcome in ("judged", "agent failure"), trace.end
                assert trace.end.reward == 0.0

    asyncio.run(asyncio.wait_for(main(), 300))
