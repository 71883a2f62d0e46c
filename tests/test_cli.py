"""The binary: finding verbs, reading arguments, turning errors into one line and an exit code."""

import subprocess
import sys
from pathlib import Path

import pytest

from baltoro import cli

calls: list[tuple] = []


def verb(
    path: Path, out: Path, *, prompt: str, images: tuple[Path, ...] = (), seed: int = 0
) -> None:
    """Do it.

    Args:
        path: where from
        out: where to
        prompt: what with
    """
    calls.append((path, out, prompt, images, seed))
    failures = {
        "value": ValueError("heads=3:\n  must be even"),
        "file": FileNotFoundError(2, "No such file or directory", "/nowhere"),
        "interrupt": KeyboardInterrupt(),
        "bug": RuntimeError("ours"),
        "pipe": BrokenPipeError(),
    }
    if prompt in failures:
        raise failures[prompt]


@pytest.fixture(autouse=True)
def one_verb(monkeypatch):
    calls.clear()
    monkeypatch.setitem(cli.VERBS, "verb", (f"{__name__}:verb", "for these tests"))


def run(*args: str, capsys) -> tuple[int, str, str]:
    code = cli.main(args)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_lists_every_verb(capsys):
    code, out, _ = run("--help", capsys=capsys)
    assert code == 0
    assert all(f"  {verb} " in out and text in out for verb, (_, text) in cli.VERBS.items())


def test_every_verb_is_a_documented_function():
    for name in cli.VERBS:
        assert cli.load_verb(name).__doc__, name


def test_a_verb_without_its_extra_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "needy.py").write_text("import a_package_of_serve\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.VERBS, "serve", ("needy:verb", "for these tests"))
    code, _, err = run("serve", "somewhere", capsys=capsys)
    assert code == 2 and "Traceback" not in err
    assert "a_package_of_serve" in err and "pip install 'baltoro[serve]'" in err


def test_a_module_of_ours_that_is_missing_is_our_mistake(monkeypatch):
    monkeypatch.setitem(cli.VERBS, "serve", ("baltoro.serve.nowhere:verb", "for these tests"))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["serve"])


def test_required_parameters_are_positional_and_the_rest_are_options():
    assert cli.main(["verb", "a", "b", "--prompt", "x", "--images", "c", "d"]) == 0
    assert calls == [(Path("a"), Path("b"), "x", (Path("c"), Path("d")), 0)]


def test_help_of_a_verb_shows_names_and_meanings(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["verb", "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert out.startswith("usage: baltoro verb [-h]")
    for words in ("PATH", "OUT", "where from", "--prompt", "what with", "Do it."):
        assert words in out


@pytest.mark.parametrize(
    "args", [["verb", "a"], ["verb", "a", "b", "--prompt", "x", "--seeed", "1"]]
)
def test_wrong_arguments_exit_2_without_running(args, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(args)
    assert stop.value.code == 2
    assert capsys.readouterr().out == ""
    assert calls == []


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ((), "baltoro: a verb is needed, one of: "),
        (("verp",), "baltoro: verp: unknown verb; did you mean 'verb'?"),
        (("verb", "a", "b", "--prompt", "value"), "baltoro: heads=3: must be even"),
        (("verb", "a", "b", "--prompt", "file"), "baltoro: /nowhere: No such file or directory"),
    ],
)
def test_what_a_user_got_wrong_is_one_line_and_exit_2(args, line, capsys):
    code, out, err = run(*args, capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_an_interrupt_exits_130(capsys):
    code, _, err = run("verb", "a", "b", "--prompt", "interrupt", capsys=capsys)
    assert (code, err) == (130, "baltoro: interrupted\n")


def test_debug_shows_the_error_itself():
    with pytest.raises(ValueError, match="must be even"):
        cli.main(["verb", "a", "b", "--prompt", "value", "--debug"])


def test_our_own_mistakes_keep_their_traceback():
    with pytest.raises(RuntimeError, match="ours"):
        cli.main(["verb", "a", "b", "--prompt", "bug"])


def test_a_reader_that_leaves_is_no_error():
    command = f"{sys.executable} -m baltoro.cli --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_and_an_unknown_verb_load_neither_torch_nor_the_argument_parser():
    code = (
        "import sys\n"
        "from baltoro import cli\n"
        "cli.main(['--help']), cli.main(['nope'])\n"
        "assert not {'torch', 'tyro', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_verb_with_verbs_of_its_own_reads_them_and_gives_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def own(argv):
        seen.append(argv)
        return 1

    monkeypatch.setattr(cli, "load_verb", lambda _: own)
    assert cli.main(["sandbox", "run", "--", "ls", "-l"]) == 1
    assert seen == [["run", "--", "ls", "-l"]]
