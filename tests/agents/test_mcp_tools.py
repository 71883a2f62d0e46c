"""Tools of an MCP server, over pipes and over HTTP, with the official SDK on both sides."""

import asyncio
import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from baltoro.agents.failure import ToolError
from baltoro.agents.mcp_tools import McpServer, mcp_tools
from baltoro.agents.tools import Observation, Toolbox

SERVER = '''
import os
import sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("on purpose")

@server.tool()
def die() -> str:
    """Leave."""
    os._exit(1)

if __name__ == "__main__":
    server.run("stdio")
'''


def stdio_server(folder: Path) -> McpServer:
    path = folder / "sums.py"
    path.write_text(SERVER)
    return McpServer(name="sums", argv=(sys.executable, str(path)), timeout_s=20.0)


def calls(server: McpServer, *pairs: tuple[str, str]) -> list[Observation]:
    async def main() -> list[Observation]:
        async with mcp_tools(server) as tools:
            box = Toolbox(tools)
            return [await box.call(name, arguments) for name, arguments in pairs]

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_a_server_over_pipes_answers_and_its_errors_are_observations(tmp_path):
    seen = calls(
        stdio_server(tmp_path),
        ("add", '{"a": 2, "b": 3}'),
        ("add", '{"a": "two", "b": 3}'),
        ("fail", "{}"),
        ("none", "{}"),
    )
    assert seen[0] == Observation(content="5")
    assert [observation.is_error for observation in seen] == [False, True, True, True]
    assert "fail" in seen[2].content


def test_the_schemas_are_the_servers_own(tmp_path):
    async def main() -> None:
        async with mcp_tools(stdio_server(tmp_path)) as tools:
            (add,) = (tool for tool in tools if tool.name == "add")
            assert add.description == "Add two numbers."
            assert add.parameters["required"] == ["a", "b"]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_server_that_dies_is_a_tool_failure(tmp_path):
    with pytest.raises(ToolError, match="tool 'die'"):
        calls(stdio_server(tmp_path), ("die", "{}"))


def test_a_server_that_is_not_there_is_a_tool_failure():
    with pytest.raises(ToolError, match="cannot be reached"):
        calls(McpServer(name="none", argv=("/no/such/program",)))


@contextlib.contextmanager
def http_server(folder: Path) -> Iterator[str]:
    """The same server over HTTP on a free port of loopback."""
    namespace: dict[str, object] = {"__name__": "sums"}
    exec(compile(SERVER, str(folder / "sums.py"), "exec"), namespace)
    app = namespace["server"].streamable_http_app()  # type: ignore[attr-defined]
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


def test_a_server_over_http_answers(tmp_path):
    with http_server(tmp_path) as url:
        seen = calls(McpServer(name="sums", url=url), ("add", '{"a": 2, "b": 3}'))
    assert seen == [Observation(content="5")]


def test_a_server_needs_exactly_one_place():
    with pytest.raises(ValueError, match="give one of them"):
        McpServer(name="x")
    with pytest.raises(ValueError, match="give one of them"):
        McpServer(name="x", argv=("a",), url="http://x")
