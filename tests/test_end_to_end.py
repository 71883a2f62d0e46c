"""Every verb of the binary on a tiny checkpoint, and what it says to wrong input."""

import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file

import baltoro
from baltoro import cli

BALTORO = [sys.executable, "-m", "baltoro.cli"]
# as in conftest.py: the tensors are small, and other work on the machine stalls a second thread
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def nano(tmp_path_factory) -> Path:
    """The fixture of the preset `nano`, written by the binary."""
    path = tmp_path_factory.mktemp("end_to_end") / "nano"
    subprocess.run([*BALTORO, "fixture", path, "--preset", "nano"], check=True, env=ONE_THREAD)
    return path


@pytest.fixture
def copy(nano, tmp_path) -> Path:
    """A copy of the fixture to damage."""
    path = tmp_path / "copy"
    path.mkdir()
    for file in nano.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def run(*args: str | Path, capfd) -> str:
    """Run a verb in this process; its standard output."""
    assert cli.main([str(arg) for arg in args]) == 0
    return capfd.readouterr().out


def files(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_the_console_script_is_installed():
    script = Path(sys.executable).with_name("baltoro")
    done = subprocess.run([script, "--version"], check=True, capture_output=True, text=True)
    assert done.stdout == f"baltoro {baltoro.__version__}\n"


def test_the_fixture_holds_golden_logits_that_its_checkpoint_gives(nano):
    golden = load_file(nano / "golden.safetensors")
    pictures = (golden["pixel_values"], golden["grid_thws"])
    logits_BTW = baltoro.logits(baltoro.load(nano), golden["input_ids"], *pictures)
    assert (logits_BTW - golden["logits"]).abs().max() < 1e-4


def test_inspect_counts_a_checkpoint_and_a_preset_of_trillions(nano, capfd):
    out = run("inspect", nano, capfd=capfd)
    assert "2,199,992 parameters" in out
    assert "2,779,931,837,184" in run("inspect", "k3", capfd=capfd)
    listed = run("inspect", nano, "--tensors", capfd=capfd).splitlines()
    assert len(listed) == 398


def test_generate_gives_the_same_text_for_the_same_seed(nano, capfd):
    command = ["generate", nano, "--prompt", "The quick", "--max-new-tokens", "12", "--seed", "3"]
    first = run(*command, capfd=capfd)
    assert first.strip()
    assert run(*command, capfd=capfd) == first
    assert run(*command[:-1], "4", capfd=capfd) != first


def test_generate_takes_a_picture(nano, tmp_path, capfd):
    picture = tmp_path / "red.png"
    Image.new("RGB", (40, 30), "red").save(picture)
    command = ["generate", nano, "--prompt", "What is this?", "--max-new-tokens", "16"]
    command += ["--seed", "1"]
    assert run(*command, "--image", picture, capfd=capfd) != run(*command, capfd=capfd)


def test_convert_changes_the_experts_and_nothing_else(nano, tmp_path, capfd):
    run("convert", nano, tmp_path / "packed", "--experts", "mxfp4", capfd=capfd)
    before, after = (
        load_file(nano / "model.safetensors"),
        load_file(tmp_path / "packed" / "model.safetensors"),
    )
    assert any(name.endswith("weight_packed") for name in after)
    kept = [name for name in before if ".experts." not in name]
    assert kept and all(before[name].equal(after[name]) for name in kept)
    text = run("generate", tmp_path / "packed", "--prompt", "a", "--seed", "1", capfd=capfd)
    assert text.strip()


def test_chat_answers_questions_from_a_pipe(nano):
    command = [*BALTORO, "chat", nano, "--max-new-tokens", "8", "--seed", "1"]
    done = subprocess.run(
        command, input=b"hello\n/reset\nbye\n", capture_output=True, check=True, env=ONE_THREAD
    )
    assert b"conversation forgotten" in done.stdout
    assert done.stderr == b""


def test_chat_in_a_terminal_greets_answers_and_leaves(nano):
    ours, theirs = pty.openpty()
    command = [*BALTORO, "chat", nano, "--max-new-tokens", "4", "--seed", "1"]
    chat = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=ONE_THREAD)
    os.close(theirs)

    def read_until(words: bytes) -> bytes:
        seen = b""
        while words not in seen:
            assert select.select([ours], [], [], 60)[0], f"nothing more after {seen!r}"
            seen += os.read(ours, 4096)
        return seen

    read_until(b"/help")
    os.write(ours, b"hello\n")
    read_until(b"tokens/s")
    os.write(ours, b"/efort low\n")
    read_until(b"unknown command")
    os.write(ours, b"/exit\n")
    assert chat.wait(timeout=30) == 0
    os.close(ours)


def truncate(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def drop_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def add_config_key(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["num_expertz"] = 3
    (path / "config.json").write_text(json.dumps(config))


def break_config(path: Path) -> None:
    (path / "config.json").write_text("{")


def break_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").write_text('{"version": "1.0"}')


def drop_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").unlink()


def nothing(path: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("damage", "args", "words"),
    [
        (nothing, ["generate", "{0}/nowhere", "--prompt", "a"], "nowhere"),
        (nothing, ["generate", "{0}/config.json", "--prompt", "a"], "config.json"),
        (truncate, ["generate", "{0}", "--prompt", "a"], "model.safetensors"),
        (drop_weights, ["generate", "{0}", "--prompt", "a"], "safetensors"),
        (add_config_key, ["generate", "{0}", "--prompt", "a"], "num_expertz"),
        (break_config, ["chat", "{0}"], "config.json"),
        (break_tokenizer, ["generate", "{0}", "--prompt", "a"], "tokenizer"),
        (drop_tokenizer, ["chat", "{0}"], "tokenizer"),
        (nothing, ["generate", "{0}", "--prompt", ""], "prompt"),
        (nothing, ["generate", "{0}", "--prompt", "a b c d e f g h " * 1500], "context"),
        (nothing, ["generate", "{0}", "--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens"),
        (nothing, ["generate", "{0}", "--prompt", "a", "--temperature", "-1"], "temperature"),
        (
            nothing,
            ["generate", "{0}", "--prompt", "a", "--image", "{0}/config.json"],
            "config.json",
        ),
        (nothing, ["generate", "{0}", "--prompt", "a", "--image", "{0}/no.png"], "no.png"),
        (nothing, ["generate", "{0}", "--prompt", "a", "--device", "cuda:99"], "cuda:99"),
        (nothing, ["inspect", "kimi"], "kimi"),
        (truncate, ["inspect", "{0}"], "model.safetensors"),
        (truncate, ["convert", "{0}", "{0}/out"], "model.safetensors"),
        (nothing, ["convert", "{0}/nowhere", "{0}/out"], "nowhere"),
        (nothing, ["fixture", "{0}/out", "--preset", "nanno"], "nanno"),
        (nothing, ["fixture", "{0}/out", "--preset", "k3"], "k3"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2_and_writes_nothing(
    damage: Callable[[Path], None], args: list[str], words: str, copy: Path, capfd
):
    damage(copy)
    before = files(copy)
    code = cli.main([arg.format(copy) for arg in args])
    captured = capfd.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith("baltoro: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err
    assert files(copy) == before


def test_chat_on_wrong_input_from_a_pipe_exits_2(nano):
    command = [*BALTORO, "chat", nano, "--max-new-tokens", "4"]
    done = subprocess.run(command, input=b"/nonsense\n", capture_output=True, env=ONE_THREAD)
    assert done.returncode == 2
    assert done.stderr.startswith(b"baltoro: /nonsense: unknown command")
