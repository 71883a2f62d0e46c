"""The official openai client and openai-agents hold conversations with tools with our server."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve.api import listening, made, script

from baltoro.checkpoint.fixture import fixture
from baltoro.checkpoint.load import load
from baltoro.serve.server import Server

pytestmark = pytest.mark.interop

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-interop" / "bin" / "python"
CALL = (
    "<|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Bari<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    directory = tmp_path_factory.mktemp("clients") / "nano"
    fixture(str(directory), preset="nano")
    return made(load(directory))


@pytest.fixture(scope="module")
def address(server: Server) -> Iterator[str]:
    with listening(server) as address:
        yield address


def talk(client: str, address: str) -> Any:
    program = [PYTHON, Path(__file__).with_name("foreign_clients.py"), client, address]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_openai_client_calls_tools_streams_and_reads_typed_answers(address: str) -> None:
    # the weights are random: what is right about the answers is what the grammar made so
    got = talk("openai", address)
    for arguments in (got["called"], *got["streamed"]):
        assert arguments["city"] in ("Rome", "Bari") and arguments["days"] in (1, 2, None)
    assert len(got["streamed"]) == 1 and got["finish_reason"] == "tool_calls"
    assert got["typed"]["name"] in ("Rome", "Bari") and isinstance(got["typed"]["is_far"], bool)
    assert got["refusal"] == "messages" and got["prompt_tokens"] > 0


@pytest.mark.parametrize("way", ["agents", "agents-streamed"])
def test_an_agent_of_openai_agents_uses_its_tool_and_answers(
    address: str, server: Server, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    script(server, monkeypatch, CALL, "It is mild.<|close|>response<|sep|><|close|>message<|sep|>")
    got = talk(way, address)
    assert got["asked"] == ["Bari"] and got["output"] == "It is mild."
    assert got["items"] == ["tool_call_item", "tool_call_output_item", "message_output_item"]
