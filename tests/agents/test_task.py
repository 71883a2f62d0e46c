"""Tasks as data: they survive the disk, and what is wrong with one is named."""

import json

import pytest

from baltoro.agents.task import Check, SubmissionBudget, Task, TaskFile, load_task, save_task
from baltoro.agents.task import task_digest as digest
from baltoro.sandbox.protocol import Limits

PNG = bytes.fromhex("89504e470d0a1a0a")


def task_with(**changes: object) -> Task:
    fields: dict[str, object] = {
        "id": "fix-1",
        "prompt": "Repair it.",
        "checks": (
            Check(
                name="hidden", argv=("python3", "t.py"), files=(TaskFile(path="t.py", data=b"1"),)
            ),
            Check(name="smoke", argv=("true",), is_hidden=False),
        ),
    }
    return Task(**(fields | changes))  # type: ignore[arg-type]


def test_a_task_comes_back_from_disk_as_it_was(tmp_path):
    task = task_with(
        files=(TaskFile(path="a/b.py", data=PNG, mode=0o755), TaskFile(path="/etc/x", data=b"x")),
        solution=(TaskFile(path="a/b.py", data=b"good"),),
        submissions=SubmissionBudget(max_submissions=2, num_free=0),
        limits=Limits(cpus=2.0),
        source={"commit": "abc"},
    )
    save_task(task, tmp_path / "task")
    assert load_task(tmp_path / "task") == task
    assert (tmp_path / "task/files/a/b.py").read_bytes() == PNG


def test_a_stored_task_of_another_version_is_refused(tmp_path):
    save_task(task_with(), tmp_path / "task")
    path = tmp_path / "task/task.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))
    with pytest.raises(ValueError, match=r"version=2, this build reads 1"):
        load_task(tmp_path / "task")


def test_an_unknown_field_of_a_stored_task_is_named(tmp_path):
    save_task(task_with(), tmp_path / "task")
    path = tmp_path / "task/task.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"promt": "x"}))
    with pytest.raises(ValueError, match=r"promt: unknown key; did you mean 'prompt'"):
        load_task(tmp_path / "task")


def test_the_digest_sees_the_contents_of_files():
    one, other = (task_with(files=(TaskFile(path="f", data=data),)) for data in (b"1", b"2"))
    assert digest(one) == digest(one)
    assert digest(one) != digest(other)


def test_files_land_in_the_working_folder_unless_absolute():
    task = task_with(workdir="/repo")
    assert task.place("a/b") == "/repo/a/b"
    assert task.place("/tests/x") == "/tests/x"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"id": "a/b"}, r"task.id='a/b'"),
        ({"prompt": " "}, "prompt is empty"),
        ({"workdir": "work"}, "workdir='work': must be absolute"),
        ({"checks": (Check(name="a", argv=("x",)), Check(name="a", argv=("x",)))}, "must differ"),
        ({"checks": (Check(name="a", argv=("x",), is_hidden=False),)}, "must be hidden"),
        (
            {"checks": (Check(name="a", argv=("x",)),), "submissions": SubmissionBudget()},
            "need a public check",
        ),
    ],
)
def test_a_wrong_task_names_the_field(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        task_with(**changes)


@pytest.mark.parametrize("path", ["", "a/", "../x", "a/../../x", "a\0b"])
def test_a_file_that_leaves_its_place_is_refused(path):
    with pytest.raises(ValueError, match="must name a file"):
        TaskFile(path=path, data=b"")


def test_wrong_checks_and_budgets_are_refused():
    with pytest.raises(ValueError, match="use letters"):
        Check(name="../x", argv=("true",))
    with pytest.raises(ValueError, match="weight=0"):
        Check(name="x", argv=("true",), weight=0)
    with pytest.raises(ValueError, match="must be absolute"):
        Check(name="x", argv=("true",), result_path="logs/reward.txt")
    with pytest.raises(ValueError, match="num_free=4"):
        SubmissionBudget(num_free=4)
