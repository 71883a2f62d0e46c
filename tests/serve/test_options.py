import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from serve.api import listening, made

from baltoro.cli import main
from baltoro.model.model import Model
from baltoro.serve import server as serving
from baltoro.serve.listen import Listener
from baltoro.serve.options import ServeOptions, ServerConfig
from baltoro.serve.server import Server


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Server, Listener]]:
    """The servers that would have been started, and how they would listen."""
    found: list[tuple[Server, Listener]] = []
    servers: list[Server] = []
    create_app = serving.create_app

    def created(server: Server) -> Any:
        servers.append(server)
        return create_app(server)

    monkeypatch.setattr(serving, "create_app", created)
    monkeypatch.setattr(Listener, "run", lambda self: found.append((servers[-1], self)))
    return found


def test_every_option_arrives_where_it_is_meant(
    nano_dir: Path,
    tmp_path: Path,
    started: list[tuple[Server, Listener]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    words = "--port 7 --max-running 3 --max-step-tokens 99 --max-queued 5 --max-queued-tokens 6000"
    words += " --max-new-tokens 11 --effort low --max-thinking low 20 high 300 --model-name me"
    words += " --pool-tokens 4096 --host-bytes 1000000 --cold-states int8 --draft ngram"
    words += f" --api-key-file {keys}"
    assert main(["serve", str(nano_dir), *words.split()]) == 0
    ((server, listener),) = started
    engine = server.background.engine
    assert (listener.config.host, listener.config.port) == ("127.0.0.1", 7)
    limits = engine.config.scheduler
    assert (limits.max_running, limits.max_step_tokens) == (3, 99)
    assert limits.max_prefill_tokens == 198
    assert (limits.max_queued, limits.max_queued_tokens) == (5, 6000)
    assert (engine.config.pool_tokens, engine.config.host_bytes) == (4096, 1_000_000)
    assert engine.config.cold_states == "int8"
    assert engine.config.speculation is not None and engine.config.speculation.draft == "ngram"
    assert server.config == ServerConfig(
        model_name="me",
        max_new_tokens=11,
        default_effort="low",
        max_thinking={"low": 20, "high": 300},
        api_keys=("one", "two"),
    )
    line = capsys.readouterr().err
    assert "float32 weights on cpu, torch's operators; eager decoding" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--port 65536", "port=65536: must be 0"),
        ("--max-queued 0", "max_queued=0"),
        ("--max-prefill-tokens 99", "max_prefill_tokens=99: must be at least max_step_tokens=2048"),
        ("--max-queued-tokens 0", "max_queued_tokens=0"),
        ("--max-new-tokens 0", "max_new_tokens=0"),
        ("--max-thinking low 0", "max_thinking: low 0"),
        ("--api-key-file /dev/null", "holds no key"),
    ],
)
def test_an_option_that_cannot_be_is_named(
    nano_dir: Path,
    words: str,
    message: str,
    started: list[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", str(nano_dir), *words.split()]) == 2
    assert message in capsys.readouterr().err and not started


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"default_effort": "medium"}, "default_effort='medium': use one of none, low"),
        ({"max_thinking": {"none": 5}}, "'none' does not think; use low, high, max"),
        ({"max_thinking": {"medium": 5}}, "'medium' does not think"),
    ],
)
def test_settings_that_cannot_be_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerConfig(model_name="x", **changes)


def test_a_server_is_called_as_its_directory(tmp_path: Path) -> None:
    assert ServeOptions().server_config(str(tmp_path)).model_name == tmp_path.name


def test_options_are_read_without_torch() -> None:
    code = "import sys, baltoro.serve.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_thread_that_lasts_has_a_team_beside_the_engine_s(
    nano_dir: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaders: list[threading.Thread] = []
    load = serving.load_for_text

    def watched(*arguments: Any, **options: Any) -> Any:
        loaders.append(threading.current_thread())
        return load(*arguments, **options)

    monkeypatch.setattr(serving, "load_for_text", watched)
    assert main(["serve", str(nano_dir), "--pool-tokens", "4096"]) == 0
    (loader,) = loaders
    assert loader is not threading.main_thread() and not loader.is_alive()


def test_a_server_says_where_it_listens(nano: Model, capsys: pytest.CaptureFixture[str]) -> None:
    with listening(made(nano)) as address:
        pass
    assert f"listening on {address}" in capsys.readouterr().err.splitlines()
