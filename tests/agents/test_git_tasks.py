"""Tasks mined from commits: what is accepted, what is refused and why, and that the tasks judge."""

import subprocess
from pathlib import Path

import pytest
from agents.worlds import DONE, World, plain_harness, run_in_world

from baltoro.agents.git_tasks import Mined, MiningConfig, mine
from baltoro.agents.policy import Line, ScriptedPolicy
from baltoro.agents.repository import Repository, UnusableCommitError, is_source, is_test
from baltoro.agents.task import Task, load_task, save_task
from baltoro.sandbox.protocol import Limits

CONFIG = MiningConfig(image="default", limits=Limits(memory_bytes=2 << 30), timeout_s=60.0)
KIT = "def area(w, h):\n    return w {sign} h\n\n\ndef name():\n    return 'kit'\n"
TESTS = """import unittest
import kit


class Kit(unittest.TestCase):
    def test_name(self):
        self.assertEqual(kit.name(), "kit")
"""
AREA = """
    def test_area(self):
        self.assertEqual(kit.area(2, 5), 10)
"""


def git(root: Path, *words: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@x")
    done = subprocess.run(
        ["git", "-C", str(root), *identity, *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit(root: Path, message: str, **files: str | None) -> str:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_py", ".py")
        if text is None:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(root, "add", "-A")
    git(root, "commit", "-qm", message)
    return git(root, "rev-parse", "HEAD")


def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repo"
    root.mkdir()
    git(root, "init", "-q")
    commit(root, "start", kit_py=KIT.format(sign="+"), test_kit_py=TESTS)
    return root


def mined(tmp_path: Path, root: Path, *commit_ids: str) -> list[Mined]:
    found: list[Mined] = []

    async def body(here: World) -> None:
        found.extend(await mine(Repository(root), commit_ids, here.keeper, here.image, CONFIG))

    run_in_world(tmp_path, body)
    return found


def reward(tmp_path: Path, task: Task, lines: list[Line]) -> float | None:
    rewards: list[float | None] = []

    async def body(here: World) -> None:
        trace = await here.runner().run(
            task, plain_harness(), ScriptedPolicy(lines), episode=task.id, group="g", seed=0
        )
        assert trace.end is not None
        assert trace.end.outcome == "judged", trace.end
        rewards.append(trace.end.reward)

    run_in_world(tmp_path, body)
    return rewards[0]


def write(path: str, content: str) -> Line:
    return Line(calls=(("write", {"path": path, "content": content}),))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Task, Task]:
    """The bug fix and the test writing of one good commit, once through the disk."""
    tmp_path = tmp_path_factory.mktemp("pair")
    root = repository(tmp_path)
    good = commit(root, "Areas are products", kit_py=KIT.format(sign="*"), test_kit_py=TESTS + AREA)
    (only,) = mined(tmp_path / "mine", root, good)
    assert only.reason == ""
    for task in only.tasks:
        save_task(task, tmp_path / task.id)
    fix, tests = (load_task(tmp_path / task.id) for task in only.tasks)
    return fix, tests


def test_a_bug_fix_begins_at_the_parent_and_hides_the_tests(pair):
    fix, _ = pair
    texts = {file.path: file.data.decode() for file in fix.files}
    assert "w + h" in texts["kit.py"]
    assert "test_area" not in texts["test_kit.py"]
    assert "Areas are products" in fix.prompt
    assert [file.data.decode() for file in fix.solution] == [KIT.format(sign="*")]


def test_a_bug_fix_pays_the_solution_and_nothing_else(tmp_path, pair):
    fix, _ = pair
    solution = [write(file.path, file.data.decode()) for file in fix.solution]
    assert reward(tmp_path / "solved", fix, [*solution, DONE]) == 1.0
    assert reward(tmp_path / "idle", fix, [DONE]) == 0.0
    breaks_another = write("kit.py", "def area(w, h):\n    return w * h\n")
    assert reward(tmp_path / "half", fix, [breaks_another, DONE]) == 0.0


@pytest.mark.parametrize(
    "cheat",
    [
        "import os\nos._exit(0)\n",
        "import sys\nsys.exit(0)\n",
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: 1 / 0\n",
    ],
)
def test_code_that_ends_or_breaks_the_test_run_earns_nothing(tmp_path, pair, cheat):
    fix, _ = pair
    assert reward(tmp_path, fix, [write("kit.py", cheat), DONE]) == 0.0


def test_modules_planted_beside_the_verifier_are_not_imported(tmp_path, pair):
    fix, _ = pair
    forged = "import os, sys\nopen(sys.argv[2], 'w').write('1')\nos._exit(0)\n"
    lines = [write(f".verify/{name}.py", forged) for name in ("json", "unittest", "shutil")]
    assert reward(tmp_path, fix, [*lines, DONE]) == 0.0


def test_written_tests_are_paid_if_they_tell_right_from_wrong(tmp_path, pair):
    _, tests = pair
    assert {file.path for file in tests.files} == {"kit.py"}
    good = write("test_written.py", TESTS + AREA)
    blind = write("test_written.py", TESTS)
    wrong = write("test_written.py", TESTS + AREA.replace("10", "7"))
    empty = write("test_written.py", "")
    rewards = [
        reward(tmp_path / str(index), tests, [line, DONE])
        for index, line in enumerate((good, blind, wrong, empty))
    ]
    assert rewards == [1.0, 0.0, 0.0, 0.0]


def test_written_tests_are_judged_on_the_commits_code_not_on_the_agents(tmp_path, pair):
    _, tests = pair
    spoiled = write("kit.py", KIT.format(sign="-"))
    lines = [spoiled, write("test_written.py", TESTS + AREA.replace("10", "-3")), DONE]
    assert reward(tmp_path, tests, lines) == 0.0


def test_commits_that_cannot_be_tasks_say_why(tmp_path):
    root = repository(tmp_path)
    ids = [
        commit(root, "no test", kit_py=KIT.format(sign="-")),
        commit(root, "no source", test_kit_py=TESTS + "\n"),
        commit(root, "no flip", kit_py=KIT.format(sign="+"), test_kit_py=TESTS + "#\n"),
        commit(
            root,
            "all flip",
            kit_py=KIT.format(sign="*"),
            test_kit_py=TESTS.replace("test_name", "test_it").replace(
                'kit.name(), "kit"', "kit.area(2, 5), 10"
            ),
        ),
    ]
    assert [each.reason for each in mined(tmp_path / "mine", root, *ids)] == [
        "changes no test",
        "changes no source",
        "no test fails before and passes after",
        "no test passes both before and after",
    ]


def test_a_commit_that_changes_most_of_the_suite_is_refused(tmp_path):
    root = repository(tmp_path)
    twice = AREA + AREA.replace("test_area", "test_again")
    big = commit(root, "big", kit_py=KIT.format(sign="*"), test_kit_py=TESTS + twice)
    (only,) = mined(tmp_path / "mine", root, big)
    assert only.reason == "2 of 3 tests change, more than 50%"


def test_flaky_tests_are_dropped(tmp_path):
    root = repository(tmp_path)
    flaky = """
    def test_flaky(self):
        import os
        self.assertEqual(os.getpid() and int.from_bytes(os.urandom(8), "big") % 97, 13)
"""
    good = commit(root, "g", kit_py=KIT.format(sign="*"), test_kit_py=TESTS + AREA + flaky)
    (only,) = mined(tmp_path / "mine", root, good)
    (expected,) = (f for f in only.tasks[0].checks[0].files if f.path.endswith("expected.json"))
    assert b"test_area" in expected.data
    assert b"test_flaky" not in expected.data


def test_links_and_big_trees_are_refused(tmp_path):
    root = repository(tmp_path)
    with pytest.raises(UnusableCommitError, match="max_files=1"):
        Repository(root, max_files=1).commit(commit(root, "x", kit_py="a"))
    with pytest.raises(UnusableCommitError, match="max_bytes=5"):
        Repository(root, max_bytes=5).commit(git(root, "rev-parse", "HEAD"))
    (root / "link").symlink_to("kit.py")
    with pytest.raises(UnusableCommitError, match="link is a link"):
        Repository(root).commit(commit(root, "link"))
    with pytest.raises(ValueError, match="git -C"):
        Repository(root).commit_ids("no-such-branch")


def test_commits_are_listed_newest_first_without_the_root(tmp_path):
    root = repository(tmp_path)
    ids = [commit(root, str(index), kit_py=str(index)) for index in range(3)]
    assert Repository(root).commit_ids() == ids[::-1]
    assert Repository(root).commit_ids(max_commits=1) == ids[2:]


@pytest.mark.parametrize(
    ("path", "kinds"),
    [
        ("test_a.py", (True, False)),
        ("pkg/a_test.py", (True, False)),
        ("tests/conftest.py", (False, False)),
        ("src/a.py", (False, True)),
        ("src/test.txt", (False, False)),
    ],
)
def test_paths_are_told_apart(path, kinds):
    assert (is_test(path), is_source(path)) == kinds
