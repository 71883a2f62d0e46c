"""Tasks mined from the commits of a local repository.

    bug fix       the world is the commit's parent; the commit's tests are the hidden check, its
                  source part is the solution
    test writing  the world is the commit without its tests; a test file passes if it accepts the
                  commit's sources and notices the parent's

A commit is accepted only if running its suite twice on both states shows: tests that fail before
and pass after, tests that pass on both, and no more than half of the suite changing. Tests that do
not give one answer twice are dropped.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from baltoro.agents.failure import TaskError
from baltoro.agents.repository import (
    Change,
    Commit,
    Repository,
    UnusableCommitError,
    is_source,
    is_test,
)
from baltoro.agents.task import RESULT, Check, Task, TaskFile
from baltoro.agents.workspace import make_folder
from baltoro.sandbox.keeper import Keeper
from baltoro.sandbox.protocol import Command, Image, LimitError, Limits, Net

SUITE = Path(__file__).with_name("guest") / "suite.py"
FOLDER = ".verify"
PYTHON = ("python3", "-I", "-B")  # isolated: nothing beside the script is imported in its name
MAX_FLIPPED = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class MiningConfig:
    """How commits are tried."""

    image: str  # the name that tasks will carry
    limits: Limits
    workdir: str = "/work"
    timeout_s: float = 300.0  # of one run of the suite
    num_runs: int = 2  # on each state

    def __post_init__(self) -> None:
        if self.num_runs < 2:
            raise ValueError(f"mining.num_runs={self.num_runs!r}: flaky tests need at least 2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mined:
    """What a commit gave."""

    commit: str
    tasks: tuple[Task, ...] = ()
    reason: str = ""  # why it gave none


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """What running a commit's tests on both states showed."""

    files: tuple[str, ...]  # test files of the commit
    fixed: tuple[str, ...]  # ids that fail before and pass after
    kept: tuple[str, ...]  # ids that pass on both


async def mine(
    repository: Repository,
    commit_ids: Iterable[str],
    keeper: Keeper,
    image: Image,
    config: MiningConfig,
) -> list[Mined]:
    """Try commits one after another; what does not become a task comes with its reason."""
    found = []
    for commit_id in commit_ids:
        try:
            commit = repository.commit(commit_id)
            suite = await _suite(commit, keeper, image, config)
        except UnusableCommitError as error:
            found.append(Mined(commit=commit_id, reason=str(error)))
            continue
        tasks = (bug_fix(commit, suite, config), test_writing(commit, config))
        found.append(Mined(commit=commit_id, tasks=tasks))
    return found


def bug_fix(commit: Commit, suite: Suite, config: MiningConfig) -> Task:
    """The task to do what the commit did."""
    expected = {"files": suite.files, "tests": [*suite.fixed, *suite.kept]}
    tests = [file for path, file in commit.files.items() if is_test(path) or _serves_tests(path)]
    check = Check(
        name="suite",
        argv=(*PYTHON, f"{FOLDER}/suite.py", "judge", RESULT, f"{FOLDER}/expected.json"),
        files=(*_guest_files(expected), *tests),
        timeout_s=config.timeout_s,
    )
    return Task(
        id=f"fix-{commit.id[:12]}",
        prompt=(
            "Something in this repository is wrong or missing. This is how its repair was"
            f" described:\n\n{commit.message}\n\nChange the code accordingly. Hidden tests decide."
        ),
        checks=(check,),
        image=config.image,
        workdir=config.workdir,
        files=tuple(commit.parent_files.values()),
        solution=_after(_sources(commit)),
        judged_in="fresh",
        limits=config.limits,
        source={"commit": commit.id, "kind": "bug fix"},
    )


def test_writing(commit: Commit, config: MiningConfig) -> Task:
    """The task to write tests that would have noticed what the commit repaired."""
    path = "test_written.py"
    sources = _sources(commit)
    broken: dict[str, str | None] = {}
    copies = []
    for index, change in enumerate(sources):
        if change.after is None:
            continue
        if change.before is None:
            broken[change.path] = None
            continue
        copy = f"{FOLDER}/broken/{index}.py"
        broken[change.path] = copy
        copies.append(TaskFile(path=copy, data=change.before.data))
    check = Check(
        name="written",
        argv=(*PYTHON, f"{FOLDER}/suite.py", "written", RESULT, f"{FOLDER}/expected.json"),
        files=(
            *_guest_files({"file": path, "broken": broken}),
            *copies,
            *(file for file_path, file in commit.files.items() if is_source(file_path)),
        ),
        timeout_s=config.timeout_s,
    )
    changed_tests = {change.path for change in commit.changes if is_test(change.path)}
    files = [file for file_path, file in commit.files.items() if file_path not in changed_tests]
    return Task(
        id=f"tests-{commit.id[:12]}",
        prompt=(
            f"Write tests in {path} at the top of this repository, as unittest.TestCase classes,"
            " for the behaviour described below. The code is correct: your tests must pass on it,"
            f" and must fail on code that lacks this behaviour.\n\n{commit.message}"
        ),
        checks=(check,),
        image=config.image,
        workdir=config.workdir,
        files=tuple(files),
        judged_in="fresh",
        limits=config.limits,
        source={"commit": commit.id, "kind": "test writing"},
    )


async def _suite(commit: Commit, keeper: Keeper, image: Image, config: MiningConfig) -> Suite:
    changes = commit.changes
    if not any(is_test(change.path) and change.after for change in changes):
        raise UnusableCommitError("changes no test")
    if not any(change.after is not None for change in _sources(commit)):
        raise UnusableCommitError("changes no source")
    files = tuple(sorted(path for path in commit.files if is_test(path)))
    before = dict(commit.parent_files)
    before |= {p: file for p, file in commit.files.items() if is_test(p) or _serves_tests(p)}
    runs_before = await _runs(before, files, keeper, image, config)
    runs_after = await _runs(commit.files, files, keeper, image, config)
    names = sorted(set().union(*runs_before, *runs_after))
    fixed = tuple(name for name in names if _flips(name, runs_before, runs_after))
    kept = tuple(name for name in names if _all_pass(name, [*runs_before, *runs_after]))
    if not fixed:
        raise UnusableCommitError("no test fails before and passes after")
    if not kept:
        raise UnusableCommitError("no test passes both before and after")
    if len(fixed) > MAX_FLIPPED * (len(fixed) + len(kept)):
        raise UnusableCommitError(
            f"{len(fixed)} of {len(fixed) + len(kept)} tests change, more than {MAX_FLIPPED:.0%}"
        )
    return Suite(files=files, fixed=fixed, kept=kept)


async def _runs(
    files: Mapping[str, TaskFile],
    tests: tuple[str, ...],
    keeper: Keeper,
    image: Image,
    config: MiningConfig,
) -> list[dict[str, str]]:
    """Outcomes of the suite on one state, each run in a sandbox of its own."""
    found = []
    for _ in range(config.num_runs):
        name = await keeper.create(image, config.limits, Net())
        try:
            async with keeper.use(name) as sandbox:
                await make_folder(sandbox, config.workdir)
                for file in (*files.values(), *_guest_files({})):
                    await sandbox.write(f"{config.workdir}/{file.path}", file.data, file.mode)
                argv = (*PYTHON, f"{FOLDER}/suite.py", "run", *tests)
                command = Command(argv=argv, cwd=config.workdir, timeout_s=config.timeout_s)
                try:
                    ended = await sandbox.exec(command)
                except LimitError as error:
                    raise UnusableCommitError(f"the suite: {error}") from error
        finally:
            await keeper.destroy(name)
        if ended.exit_code:
            raise TaskError(f"the suite cannot be run: {ended.stderr.decode(errors='replace')}")
        found.append(json.loads(ended.stdout))
    return found


def _flips(name: str, before: list[dict[str, str]], after: list[dict[str, str]]) -> bool:
    return _all_pass(name, after) and all(run.get(name) in (None, "failed") for run in before)


def _all_pass(name: str, runs: list[dict[str, str]]) -> bool:
    return all(run.get(name) == "passed" for run in runs)


def _guest_files(expected: Mapping[str, object]) -> tuple[TaskFile, ...]:
    return (
        TaskFile(path=f"{FOLDER}/suite.py", data=SUITE.read_bytes()),
        TaskFile(path=f"{FOLDER}/expected.json", data=json.dumps(expected).encode()),
    )


def _sources(commit: Commit) -> list[Change]:
    return [change for change in commit.changes if is_source(change.path)]


def _serves_tests(path: str) -> bool:
    """Python files that are no tests but belong to them: conftest.py, helpers in a test folder."""
    return path.endswith(".py") and not is_source(path)


def _after(changes: Iterable[Change]) -> tuple[TaskFile, ...]:
    return tuple(change.after for change in changes if change.after is not None)
