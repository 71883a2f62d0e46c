"""Tools of an MCP server, over its standard streams or HTTP (the official SDK; extra `agents`).

The server runs on the host, outside any sandbox: give an agent only servers that it may use freely.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mcp
import mcp.types as mcp_types

from baltoro.agents.failure import ToolError
from baltoro.agents.tools import Observation, Tool

LOG = logging.getLogger(__name__)
# JSON-RPC's codes for a call that is the caller's mistake: unknown method, bad parameters.
CALLERS_MISTAKES = frozenset({-32601, -32602})


@dataclass(frozen=True, kw_only=True, slots=True)
class McpServer:
    """Where a server is; exactly one of `argv` and `url`."""

    name: str
    argv: tuple[str, ...] = ()  # a program that speaks over stdin and stdout
    env: Mapping[str, str] = field(default_factory=dict)  # of that program
    url: str | None = None  # streamable HTTP
    timeout_s: float = 60.0  # of one call

    def __post_init__(self) -> None:
        if bool(self.argv) == (self.url is not None):
            raise ValueError(
                f"mcp server {self.name!r}: argv={self.argv!r}, url={self.url!r}: give one of them"
            )


@contextlib.asynccontextmanager
async def mcp_tools(server: McpServer) -> AsyncIterator[list[Tool]]:
    """The server's tools, as long as the block lasts. `ToolError` if it cannot be reached."""
    place: mcp.StdioServerParameters | str
    if server.url is not None:
        place = server.url
    else:
        place = mcp.StdioServerParameters(
            command=server.argv[0], args=list(server.argv[1:]), env=dict(server.env)
        )
    # The client lives in a task of its own: its task groups would wrap what the block raises.
    ready: asyncio.Future[tuple[mcp.Client, list[mcp_types.Tool]]]
    ready = asyncio.get_running_loop().create_future()
    over = asyncio.Event()
    connection = asyncio.create_task(_connect(server, place, ready, over))
    try:
        client, declared = await ready
        yield [
            Tool(
                name=tool.name,
                description=tool.description or "",
                parameters=tool.input_schema,
                run=partial(_call, client, server, tool.name),
            )
            for tool in declared
        ]
    finally:
        over.set()
        await connection


async def _connect(
    server: McpServer,
    place: mcp.StdioServerParameters | str,
    ready: "asyncio.Future[tuple[mcp.Client, list[mcp_types.Tool]]]",
    over: asyncio.Event,
) -> None:
    """Hold a connection open; a server that dies later shows in its calls, not here."""
    try:
        async with mcp.Client(place, read_timeout_seconds=server.timeout_s) as client:
            ready.set_result((client, await _all_tools(client)))
            await over.wait()
    except (OSError, mcp.MCPError, ExceptionGroup) as error:
        if ready.done():
            LOG.info("mcp server %r: did not end well: %s", server.name, _cause(error))
            return
        failure = ToolError(
            f"mcp server {server.name!r}: cannot be reached at {server.url or server.argv}:"
            f" {_cause(error)}"
        )
        failure.__cause__ = error
        ready.set_exception(failure)


async def _all_tools(client: mcp.Client) -> list[mcp_types.Tool]:
    tools: list[mcp_types.Tool] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools


async def _call(
    client: mcp.Client, server: McpServer, name: str, arguments: dict[str, Any]
) -> Observation:
    try:
        result = await client.call_tool(name, arguments)
    except mcp.MCPError as error:
        if error.error.code in CALLERS_MISTAKES:
            return Observation(content=error.error.message, is_error=True)
        raise ToolError(f"mcp server {server.name!r}, tool {name!r}: {error}") from error
    return Observation(content=_text(result), is_error=result.is_error)


def _text(result: mcp_types.CallToolResult) -> str:
    """Text as it is; any other content by its kind, since a tool message holds text."""
    return "\n".join(
        block.text if isinstance(block, mcp_types.TextContent) else f"[{block.type} content]"
        for block in result.content
    )


def _cause(error: BaseException) -> str:
    """The first plain error inside a task group's."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
