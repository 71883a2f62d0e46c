"""Task folders of Harbor and of Terminal-Bench, as tasks.

    Harbor            task.toml, instruction.md, environment/, tests/test.sh, which writes a number
                      to /logs/verifier/reward.txt
    Terminal-Bench    task.yaml, Dockerfile, run-tests.sh, tests/; its exit code is the result

No image is built here. Either the operator names one in which the Dockerfile has been carried out,
or the Dockerfile only says FROM, WORKDIR and COPY, and the image is the one that FROM names. What
cannot be honoured is refused: several steps, several services, secrets of the host in `env`. There
is no network, whatever the task says about it, so tests that download their tools fail. Commands
name absolute paths, so such tasks run on drivers with isolation only.
"""

import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from baltoro.agents.task import Check, Task, TaskFile
from baltoro.sandbox.protocol import MIB, Limits

REWARD_PATH = "/logs/verifier/reward.txt"
UNITS = {"K": 1 << 10, "M": MIB, "G": 1 << 30}
# What a Dockerfile may say without changing the files: how the container would be started.
WITHOUT_EFFECT = frozenset({"LABEL", "MAINTAINER", "CMD", "ENTRYPOINT", "EXPOSE", "STOPSIGNAL"})
DEFAULT_WORKDIR = "/app"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a Dockerfile says, as far as we can follow it."""

    image: str  # of FROM
    workdir: str
    files: tuple[TaskFile, ...]


def import_task(folder: Path, *, image: str | None = None) -> Task:
    """A task from a Harbor or Terminal-Bench folder.

    image: the name of an image in which the folder's Dockerfile has been carried out; None: follow
        the Dockerfile, if it is simple enough.

    `ValueError` for a folder of neither kind, or what cannot be honoured.
    """
    if (folder / "task.toml").exists():
        return _harbor(folder, image)
    if (folder / "task.yaml").exists():
        return _terminal_bench(folder, image)
    raise ValueError(f"{folder}: holds neither task.toml nor task.yaml")


def _harbor(folder: Path, image: str | None) -> Task:
    with (folder / "task.toml").open("rb") as source:
        config = tomllib.load(source)
    if (folder / "steps").exists():
        raise ValueError(f"{folder}: has several steps, which one task cannot have")
    if not (folder / "tests/test.sh").exists():
        raise ValueError(f"{folder}: tests/test.sh is missing")
    environment, verifier = config.get("environment", {}), config.get("verifier", {})
    image = image or environment.get("docker_image")
    recipe = _recipe(folder / "environment", image)
    argv = (*_environment(verifier.get("env", {}), folder), "bash", "/tests/test.sh")
    check = Check(
        name="harbor",
        argv=argv,
        files=tuple(_tree(folder / "tests", "/tests")),
        timeout_s=float(verifier.get("timeout_sec", 600.0)),
        result_path=REWARD_PATH,
    )
    limits = _limits(
        cpus=environment.get("cpus", 1),
        memory=environment.get("memory_mb", environment.get("memory", 2048)),
        storage=environment.get("storage_mb", environment.get("storage", 10240)),
    )
    prompt = _without_canary((folder / "instruction.md").read_text())
    return _task(folder, prompt, check, recipe, limits, config.get("metadata", {}))


def _terminal_bench(folder: Path, image: str | None) -> Task:
    config = yaml.safe_load((folder / "task.yaml").read_text())
    if not isinstance(config, dict) or not isinstance(config.get("instruction"), str):
        raise ValueError(f"{folder}: task.yaml has no instruction")
    compose = folder / "docker-compose.yaml"
    if compose.exists():
        services = (yaml.safe_load(compose.read_text()) or {}).get("services", {})
        if len(services) > 1:
            raise ValueError(f"{folder}: needs {len(services)} services: {', '.join(services)}")
    tests = list(_tree(folder / "tests", "/tests"))
    script = folder / "run-tests.sh"
    if not script.exists():
        raise ValueError(f"{folder}: run-tests.sh is missing")
    tests.append(TaskFile(path="/tests/run-tests.sh", data=script.read_bytes(), mode=0o755))
    check = Check(
        name="terminal-bench",
        argv=("env", "TEST_DIR=/tests", "bash", "/tests/run-tests.sh"),
        files=tuple(tests),
        timeout_s=float(config.get("max_test_timeout_sec", 180.0)),
    )
    limits = _limits(cpus=1, memory=2048, storage=10240)
    metadata = {key: config[key] for key in ("difficulty", "category") if key in config}
    return _task(folder, config["instruction"], check, _recipe(folder, image), limits, metadata)


def _task(
    folder: Path,
    prompt: str,
    check: Check,
    recipe: Recipe,
    limits: Limits,
    metadata: Mapping[str, Any],
) -> Task:
    source = {"folder": folder.name, "kind": check.name}
    source |= {key: str(metadata[key]) for key in ("difficulty", "category") if key in metadata}
    return Task(
        id=folder.name,
        prompt=prompt,
        checks=(check,),
        image=recipe.image,
        workdir=recipe.workdir,
        files=recipe.files,
        scoring="mean",
        limits=limits,
        needs_isolation=True,
        source=source,
    )


def _recipe(context: Path, image: str | None) -> Recipe:
    dockerfile = context / "Dockerfile"
    if not dockerfile.exists():
        if image is None:
            raise ValueError(f"{context}: has no Dockerfile; name an image with image=")
        # as Harbor has it: with a ready image and no Dockerfile, files go to the working folder
        files = tuple(_tree(context, DEFAULT_WORKDIR)) if context.is_dir() else ()
        return Recipe(image=image, workdir=DEFAULT_WORKDIR, files=files)
    steps = list(_instructions(dockerfile))
    if image is not None:
        return Recipe(image=image, workdir=_last_workdir(steps), files=())
    return _followed(context, steps)


def _followed(context: Path, steps: Sequence[tuple[str, str]]) -> Recipe:
    image, workdir = None, "/"
    files: list[TaskFile] = []
    for word, rest in steps:
        if word == "FROM" and image is None and " " not in rest:
            image = rest
        elif word == "WORKDIR":
            workdir = str(PurePosixPath(workdir) / rest)
        elif word == "COPY" and not rest.startswith(("--", "[")) and "*" not in rest:
            files += _copied(context, shlex.split(rest), workdir)
        elif word not in WITHOUT_EFFECT:
            raise ValueError(
                f"{context}/Dockerfile: {word} {rest[:60]!r} cannot be followed; build the image"
                " elsewhere, unpack it and name it with image="
            )
    if image is None:
        raise ValueError(f"{context}/Dockerfile: has no FROM")
    return Recipe(
        image=image, workdir=workdir if workdir != "/" else DEFAULT_WORKDIR, files=tuple(files)
    )


def _copied(context: Path, words: Sequence[str], workdir: str) -> Iterable[TaskFile]:
    *sources, target = words
    for name in sources:
        source = context / name
        if not source.resolve().is_relative_to(context.resolve()) or not source.exists():
            raise ValueError(f"{context}/Dockerfile: COPY {name!r}: not in the build context")
        place = PurePosixPath(workdir) / target
        if source.is_dir():
            yield from _tree(source, str(place))
            continue
        is_folder = target.endswith(("/", ".")) or len(sources) > 1
        yield _file(source, str(place / source.name if is_folder else place))


def _instructions(dockerfile: Path) -> Iterable[tuple[str, str]]:
    """Instruction words in capitals with what follows them, continuation lines joined."""
    lines = [line for line in dockerfile.read_text().splitlines() if line.strip()]
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    for line in text.replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        yield word.upper(), rest.strip()


def _last_workdir(steps: Sequence[tuple[str, str]]) -> str:
    workdir = "/"
    for word, rest in steps:
        if word == "WORKDIR":
            workdir = str(PurePosixPath(workdir) / rest)
    return workdir if workdir != "/" else DEFAULT_WORKDIR


def _tree(root: Path, place: str) -> Iterable[TaskFile]:
    for path in sorted(root.rglob("*")):
        if path.is_symlink():
            raise ValueError(f"{path}: is a link, which a task's files cannot be")
        if path.is_file():
            yield _file(path, f"{place.rstrip('/')}/{path.relative_to(root).as_posix()}")


def _file(path: Path, place: str) -> TaskFile:
    return TaskFile(path=place, data=path.read_bytes(), mode=path.stat().st_mode & 0o777)


def _environment(values: Mapping[str, Any], folder: Path) -> tuple[str, ...]:
    """Words that set variables for a check."""
    for name, value in values.items():
        if "${" in str(value):
            raise ValueError(
                f"{folder}: verifier.env {name}={value!r} asks for a variable of the host; secrets"
                " do not enter a sandbox"
            )
    return ("env", *(f"{name}={value}" for name, value in values.items())) if values else ()


def _limits(*, cpus: float, memory: int | str, storage: int | str) -> Limits:
    return Limits(cpus=float(cpus), memory_bytes=_bytes(memory), disk_bytes=_bytes(storage))


def _bytes(size: int | str) -> int:
    """A number of MiB, or text such as "2G"."""
    if isinstance(size, int):
        return size * MIB
    number, unit = size[:-1], size[-1:].upper()
    if unit not in UNITS or not number.isdigit():
        raise ValueError(f"size {size!r}: write a number with K, M or G")
    return int(number) * UNITS[unit]


def _without_canary(text: str) -> str:
    """The instruction without the leading lines that mark it as benchmark data."""
    lines = text.splitlines()
    while lines and (not lines[0].strip() or _is_canary(lines[0])):
        lines.pop(0)
    return "\n".join(lines)


def _is_canary(line: str) -> bool:
    return line.lstrip().startswith(("#", "<!--")) and "canary" in line.lower()
