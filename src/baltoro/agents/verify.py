"""Judging the final state of an episode: on a copy, without the agent, out of its reach.

Order: take up the last snapshot under a new name; kill every process the agent left in it; lay the
check's own files over what is there; run the check; read its verdict from its exit code, or from a
file that is made only now, in a folder whose name the agent could not know. What the agent planted
is therefore never read as a result. The original goes on unharmed, so that a submission may be
judged in the middle of an episode.

A check that cannot run is attributed: if its program is missing from the agent's copy and present
in a fresh sandbox, the agent removed it and scores 0; if it is missing there too, the task is
broken. Too much time, output, memory, disk or processes is the agent's score of 0; anything else
that fails is the machine's.

What this does NOT stop: a check that imports files from the working folder runs whatever the agent
put there (a conftest.py, a module named like a library), so checks should run tests by name with
their own configuration; and in a fork, programs themselves may have been replaced, from which
`judged_in="fresh"` protects.
"""

import contextlib
import math
import posixpath
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import PurePosixPath

from baltoro.agents.failure import TaskError
from baltoro.agents.task import RESULT, Check, Task
from baltoro.agents.tools import shortened
from baltoro.agents.trace import CheckResult
from baltoro.agents.workspace import lay_files, make_folder
from baltoro.sandbox.keeper import Keeper
from baltoro.sandbox.protocol import (
    Command,
    Image,
    ImageError,
    LimitError,
    Sandbox,
    SandboxError,
)

MAX_DETAIL_CHARS = 4000
STOP_TIMEOUT_S = 20.0
WRONG_ROOT = 9
# Kills all but the first process, the sandbox's own agent (the parent) and this shell, until a scan
# finds none. Only builtins are used. The file proves that the shell sees the sandbox's own root and
# not the host's. Kernel threads (a flag) and zombies cannot be killed and are passed over.
STOP_ALL = """
test -e "$1" || exit 9
own=$$ above=$PPID left=1
while [ $left = 1 ]; do
  left=0
  for folder in /proc/[0-9]*; do
    pid=${folder#/proc/}
    case $pid in 1|$own|$above) continue;; esac
    read -r line 2>/dev/null < $folder/stat || continue
    set -- ${line##*) }
    [ "$1" = Z ] && continue
    [ $(( ${7:-0} & 2097152 )) -ne 0 ] && continue
    kill -9 $pid 2>/dev/null && left=1
  done
done
exit 0
"""


class _AgentsFault(Exception):
    """A check could not run because of what the agent left: it scores 0."""


async def judge(
    task: Task, checks: Sequence[Check], keeper: Keeper, image: Image, snapshot: str
) -> tuple[CheckResult, ...]:
    """Run checks, in order, on one copy of a snapshot.

    Raises `SandboxError` or `TaskError` if that fails through no fault of the agent.
    """
    check_driver(task, keeper)
    nonce = secrets.token_hex(8)
    async with contextlib.AsyncExitStack() as stack:
        try:
            sandbox = await stack.enter_async_context(
                _stage(task, keeper, image, snapshot, f"/.verify-{nonce}")
            )
        except _AgentsFault as fault:
            return tuple(_result(check, 0.0, str(fault), 0.0) for check in checks)
        results = []
        for check in checks:
            try:
                results.append(await _run(task, check, sandbox, f"/.verify-{nonce}"))
            except ImageError as error:
                await _blame(error, check, task, keeper, image)
                results.append(_result(check, 0.0, f"the agent removed a program: {error}", 0.0))
        return tuple(results)


def check_driver(task: Task, keeper: Keeper) -> None:
    """`TaskError` if the task needs more isolation than the keeper's driver has."""
    if task.needs_isolation and keeper.driver.name == "process":
        raise TaskError(
            f"task {task.id!r}: its commands name absolute paths, which the process driver does"
            " not confine; use gvisor, criu or qemu"
        )


def reward_of(task: Task, results: Sequence[CheckResult], num_submissions: int) -> float:
    """The reward in 0..1 from all hidden checks, less the penalty for submissions."""
    hidden = [result for result in results if result.is_hidden]
    assert hidden, "a task has a hidden check"
    if task.scoring == "all":
        reward = float(all(result.score == 1.0 for result in hidden))
    else:
        total = sum(result.weight for result in hidden)
        reward = sum(result.weight * result.score for result in hidden) / total
    if task.submissions is not None:
        num_paid = max(0, num_submissions - task.submissions.num_free)
        reward -= task.submissions.penalty * num_paid
    return max(0.0, reward)


async def stop_processes(sandbox: Sandbox, folder: str) -> None:
    """Kill every process in a sandbox but its own agent. `folder` is made as the proof of its root.

    Not for the process driver, whose copies have no processes.
    """
    proof = f"{folder}/.made"
    await sandbox.write(proof, b"")
    argv = ("sh", "-c", STOP_ALL, "stop", proof)
    result = await sandbox.exec(Command(argv=argv, timeout_s=STOP_TIMEOUT_S))
    if result.exit_code == WRONG_ROOT:
        raise SandboxError(f"sandbox {sandbox.id}: a command does not see the sandbox's own root")
    if result.exit_code:
        raise SandboxError(
            f"sandbox {sandbox.id}: the agent's processes could not be stopped:"
            f" {result.stderr.decode(errors='replace')[:300]}"
        )


@contextlib.asynccontextmanager
async def _stage(
    task: Task, keeper: Keeper, image: Image, snapshot: str, folder: str
) -> AsyncIterator[Sandbox]:
    """A sandbox with the final state in which checks may run; gone afterwards."""
    async with _copy(keeper, snapshot) as copy:
        if task.judged_in == "fork":
            if keeper.driver.name != "process":
                try:
                    await stop_processes(copy, folder)
                except (LimitError, ImageError) as error:
                    raise _AgentsFault(f"it left no room to judge in: {error}") from error
            yield copy
            return
        try:
            packed = await copy.exec(Command(argv=("tar", "-cf", "-", "."), cwd=task.workdir))
        except (LimitError, ImageError, PermissionError) as error:
            raise _AgentsFault(f"its working folder cannot be copied: {error}") from error
        if packed.exit_code > 1:  # 1: a file changed meanwhile
            reason = packed.stderr.decode(errors="replace")[:300]
            raise _AgentsFault(f"its working folder cannot be copied: {reason}")
    async with _fresh(task, keeper, image) as sandbox:
        await sandbox.write(f"{folder}/state.tar", packed.stdout)
        await make_folder(sandbox, task.workdir)
        inside = posixpath.relpath(f"{folder}/state.tar", task.workdir)
        argv = ("tar", "-xpf", inside)
        unpacked = await sandbox.exec(Command(argv=argv, cwd=task.workdir))
        if unpacked.exit_code:
            reason = unpacked.stderr.decode(errors="replace")[:300]
            raise _AgentsFault(f"its working folder cannot be copied: {reason}")
        yield sandbox


@contextlib.asynccontextmanager
async def _copy(keeper: Keeper, snapshot: str) -> AsyncIterator[Sandbox]:
    name = keeper.take(snapshot)
    try:
        async with keeper.use(name) as sandbox:
            yield sandbox
    finally:
        await keeper.destroy(name)


@contextlib.asynccontextmanager
async def _fresh(task: Task, keeper: Keeper, image: Image) -> AsyncIterator[Sandbox]:
    name = await keeper.create(image, task.limits, task.net)
    try:
        async with keeper.use(name) as sandbox:
            yield sandbox
    finally:
        await keeper.destroy(name)


async def _run(task: Task, check: Check, sandbox: Sandbox, folder: str) -> CheckResult:
    cwd = check.cwd or task.workdir
    result_path = check.result_path or f"{folder}/{check.name}"
    try:
        if check.result_path is not None:
            parent = str(PurePosixPath(check.result_path).parent)
            await _remove(sandbox, [parent])
            await make_folder(sandbox, parent)
        await sandbox.write(f"{folder}/.made", b"")
        await _replace_files(sandbox, task, check)
    except (LimitError, OSError) as error:
        return _result(check, 0.0, f"its files cannot be laid over the final state: {error}", 0.0)
    inside = posixpath.relpath(result_path, cwd)
    argv = tuple(word.replace(RESULT, inside) for word in check.argv)
    try:
        ended = await sandbox.exec(Command(argv=argv, cwd=cwd, timeout_s=check.timeout_s))
    except (LimitError, PermissionError) as error:  # a link in place of the working folder
        return _result(check, 0.0, str(error), check.timeout_s)
    output = (ended.stdout + ended.stderr).decode(errors="replace")
    detail = shortened(f"{output}\n[exit code {ended.exit_code}]", MAX_DETAIL_CHARS)
    if not check.writes_result:
        return _result(check, float(ended.exit_code == 0), detail, ended.wall_s)
    try:
        text = (await sandbox.read(result_path, 1000)).decode(errors="replace").strip()
    except (OSError, LimitError) as error:
        return _result(check, 0.0, f"no result was written: {error}\n{detail}", ended.wall_s)
    score = _number(text)
    if score is None:
        return _result(
            check, 0.0, f"the result {text[:80]!r} is no number in 0..1\n{detail}", ended.wall_s
        )
    return _result(check, score, detail, ended.wall_s)


async def _replace_files(sandbox: Sandbox, task: Task, check: Check) -> None:
    """Lay a check's files where nothing is left to swallow them, such as a link to a device.

    `OSError` if they are not there afterwards.
    """
    places = [task.place(file.path) for file in check.files]
    await _remove(sandbox, places)
    await lay_files(sandbox, task, check.files)
    for place, file in zip(places, check.files, strict=True):
        if await sandbox.read(place, len(file.data)) != file.data:
            raise OSError(f"{place!r} does not hold what was written to it")


async def _remove(sandbox: Sandbox, places: Sequence[str]) -> None:
    if places:
        inside = [place.lstrip("/") for place in places]
        await sandbox.exec(Command(argv=("rm", "-rf", "--", *inside), cwd="/"))


async def _blame(error: ImageError, check: Check, task: Task, keeper: Keeper, image: Image) -> None:
    """Raise `TaskError` unless a fresh sandbox can start the check's program."""
    async with _fresh(task, keeper, image) as sandbox:
        await make_folder(sandbox, check.cwd or task.workdir)
        await lay_files(sandbox, task, task.files)
        await lay_files(sandbox, task, check.files)
        try:
            process = await sandbox.start(
                Command(argv=check.argv, cwd=check.cwd or task.workdir, timeout_s=check.timeout_s)
            )
            await process.kill()
            await process.wait()
        except ImageError:
            raise TaskError(
                f"task {task.id!r}, check {check.name!r}: {error}; the image lacks it as well"
            ) from error


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and 0.0 <= value <= 1.0 else None


def _result(check: Check, score: float, detail: str, wall_s: float) -> CheckResult:
    return CheckResult(
        name=check.name,
        is_hidden=check.is_hidden,
        score=score,
        weight=check.weight,
        detail=detail,
        wall_s=wall_s,
    )
