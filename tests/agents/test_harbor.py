"""Foreign task folders: what they become, what is refused, and that their verdict is read."""

import asyncio
from pathlib import Path

import pytest
from agents.worlds import DONE, World, machine_world, plain_harness, sh

from baltoro.agents.harbor import import_task
from baltoro.agents.policy import Line, ScriptedPolicy
from baltoro.agents.task import load_task, save_task

TOML = """version = "1.0"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 42.0
env = { MODE = "strict" }
[environment]
cpus = 2
memory_mb = 512
storage = "1G"
"""
DOCKERFILE = """# a comment
FROM debian:12
WORKDIR /app
COPY data/ ./data
COPY start.txt \\
  /etc/start.txt
CMD ["bash"]
"""
TEST = """#!/bin/bash
test "$MODE" = strict || exit 1
if grep -qx hello /app/hello.txt; then echo 0.5 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt; fi
"""


def harbor_folder(root: Path, **files: str | None) -> Path:
    folder = root / "hello"
    contents: dict[str, str | None] = {
        "task.toml": TOML,
        "instruction.md": "<!-- harbor-canary GUID 1 -->\n\nWrite hello.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/data/a/b.txt": "b",
        "environment/start.txt": "s",
        "tests/test.sh": TEST,
        "solution/solve.sh": "echo hello > hello.txt",
    }
    for name, text in (contents | {k.replace("|", "/"): v for k, v in files.items()}).items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


def bench_folder(root: Path) -> Path:
    folder = root / "bench"
    for name, text in {
        "task.yaml": "instruction: |\n  Write hello.\ndifficulty: hard\nmax_test_timeout_sec: 60\n",
        "Dockerfile": "FROM debian:12\nWORKDIR /app\n",
        "docker-compose.yaml": "services:\n  client: {}\n",
        "run-tests.sh": "grep -qx hello /app/hello.txt && test -e $TEST_DIR/test_outputs.py\n",
        "tests/test_outputs.py": "pass\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_harbor_folder_becomes_a_task(tmp_path):
    task = import_task(harbor_folder(tmp_path))
    assert (task.id, task.prompt) == ("hello", "Write hello.")
    assert (task.image, task.workdir) == ("debian:12", "/app")
    assert {file.path for file in task.files} == {"/app/data/a/b.txt", "/etc/start.txt"}
    (check,) = task.checks
    assert check.argv == ("env", "MODE=strict", "bash", "/tests/test.sh")
    assert check.timeout_s == 42.0
    assert check.result_path == "/logs/verifier/reward.txt"
    assert [file.path for file in check.files] == ["/tests/test.sh"]
    limits = task.limits
    assert (limits.cpus, limits.memory_bytes, limits.disk_bytes) == (2.0, 512 << 20, 1 << 30)
    assert task.needs_isolation
    assert task.source["difficulty"] == "easy"
    save_task(task, tmp_path / "saved")
    assert load_task(tmp_path / "saved") == task


def test_a_ready_image_takes_the_place_of_the_dockerfile(tmp_path):
    folder = harbor_folder(
        tmp_path, **{"environment|Dockerfile": "FROM x\nRUN make\nWORKDIR /srv\nWORKDIR in\n"}
    )
    with pytest.raises(ValueError, match="RUN 'make' cannot be followed"):
        import_task(folder)
    task = import_task(folder, image="built")
    assert (task.image, task.workdir, task.files) == ("built", "/srv/in", ())


def test_an_image_of_the_folders_own_gets_the_files_where_there_is_no_dockerfile(tmp_path):
    toml = TOML + 'docker_image = "ready:1"\n'
    folder = harbor_folder(tmp_path, **{"task.toml": toml, "environment|Dockerfile": None})
    task = import_task(folder)
    assert task.image == "ready:1"
    assert {file.path for file in task.files} == {"/app/data/a/b.txt", "/app/start.txt"}


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"steps|1|instruction.md": "x"}, "several steps"),
        ({"tests|test.sh": None}, "tests/test.sh is missing"),
        ({"task.toml": TOML.replace("strict", "${KEY}")}, "secrets do not enter"),
        ({"task.toml": TOML.replace("1G", "1 GB")}, "size '1 GB'"),
        ({"environment|Dockerfile": "FROM a\nCOPY ../x /y\n"}, "not in the build context"),
        ({"environment|Dockerfile": "FROM a AS b\n"}, "FROM 'a AS b' cannot be followed"),
        ({"environment|Dockerfile": "FROM a\nCOPY --from=b /x /y\n"}, "COPY '--from=b"),
        ({"environment|Dockerfile": "FROM a\nUSER nobody\n"}, "USER 'nobody'"),
        ({"environment|Dockerfile": None}, "name an image"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path, files, complaint):
    with pytest.raises(ValueError, match=complaint):
        import_task(harbor_folder(tmp_path, **files))


def test_a_terminal_bench_folder_becomes_a_task(tmp_path):
    task = import_task(bench_folder(tmp_path))
    assert task.prompt == "Write hello.\n"
    (check,) = task.checks
    assert check.timeout_s == 60.0
    assert check.result_path is None
    assert {file.path for file in check.files} == {"/tests/test_outputs.py", "/tests/run-tests.sh"}
    (tmp_path / "bench/docker-compose.yaml").write_text("services:\n  client: {}\n  db: {}\n")
    with pytest.raises(ValueError, match="2 services: client, db"):
        import_task(tmp_path / "bench")


def test_a_folder_of_neither_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"neither task.toml nor task.yaml"):
        import_task(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gvisor", "criu"])
def test_foreign_tasks_are_judged_in_a_machine(tmp_path, kind):
    """S05 in its usual place: a reward that the agent wrote is gone when the tests run."""
    planted = sh("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt")
    good = sh("echo hello > hello.txt")
    scripts: dict[str, list[Line]] = {"idle": [planted, DONE], "good": [planted, good, DONE]}
    tasks = [
        import_task(harbor_folder(tmp_path), image="default"),
        import_task(bench_folder(tmp_path), image="default"),
    ]

    async def main(here: World) -> dict[str, float | None]:
        rewards = {}
        for task in tasks:
            for name, lines in scripts.items():
                trace = await here.runner().run(
                    task,
                    plain_harness(),
                    ScriptedPolicy(lines),
                    episode=f"{task.id}-{name}",
                    group=task.id,
                    seed=0,
                )
                assert trace.end is not None
                rewards[trace.start.episode] = trace.end.reward
        return rewards

    async def run() -> dict[str, float | None]:
        async with machine_world(tmp_path, kind) as here:
            return await main(here)

    assert asyncio.run(asyncio.wait_for(run(), 300)) == {
        "hello-idle": 0.0,
        "hello-good": 0.5,
        "bench-idle": 0.0,
        "bench-good": 1.0,
    }
