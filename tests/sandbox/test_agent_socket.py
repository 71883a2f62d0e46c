"""The agent on a listening socket: a host goes, the same or another one comes, commands live on."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from baltoro.sandbox.channel import AgentProcess, Channel, Stream
from baltoro.sandbox.install import find_tool, install
from baltoro.sandbox.protocol import Command

ROOM = 1 << 20


@pytest.fixture(scope="module")
def agent(tmp_path_factory) -> str:
    prefix = tmp_path_factory.mktemp("prefix")
    install(prefix, ["guest"])
    return find_tool(prefix, "agent")[0]


async def connect(path: Path) -> Stream:
    reader, writer = await asyncio.open_unix_connection(str(path))
    return Stream(reader, writer, (writer.transport,))


def run(agent: str, folder: Path, body: Callable[[Path, Channel], Awaitable[None]]) -> None:
    """`body(path, channel)` with an agent that was met once."""

    async def main() -> None:
        path = folder / "agent.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(4)
            fd = str(listener.fileno())
            process = subprocess.Popen([agent, fd, fd], pass_fds=[listener.fileno()])
        channel = Channel(await connect(path))
        try:
            await channel.hello(10)
            await asyncio.wait_for(body(path, channel), 20)
        finally:
            await channel.close()
            process.kill()
            await asyncio.to_thread(process.wait)

    asyncio.run(main())


def sh(text: str, **kwargs: object) -> Command:
    return Command(argv=("sh", "-c", text), **kwargs)  # type: ignore[arg-type]


async def line(process: AgentProcess) -> bytes:
    text = b""
    async for piece in process.output():
        text += piece.data
        if text.endswith(b"\n"):
            break
    return text


def test_a_command_talks_on_over_the_next_connection(agent, tmp_path):
    async def body(path, channel):
        process = await channel.start(Command(argv=("cat",), stdin=None, timeout_s=None), ROOM)
        await process.write_stdin(b"one\n")
        assert await line(process) == b"one\n"
        await channel.quiet()
        await channel.detach()
        channel.reattach(await connect(path))
        await channel.go_on()
        await process.write_stdin(b"two\n")
        assert await line(process) == b"two\n"

    run(agent, tmp_path, body)


@pytest.mark.parametrize("is_late", [False, True])
def test_what_is_written_while_nobody_listens_comes_later(agent, tmp_path, is_late):
    """`is_late`: the agent hears of the output and of the hang-up at once."""

    async def body(path, channel):
        gate = tmp_path / "gate"
        text = f"echo $PPID; while ! test -e {gate}; do sleep 0.01; done; echo late; exit 3"
        process = await channel.start(sh(text), ROOM)
        pid = int(await line(process))
        await channel.quiet()
        if is_late:
            os.kill(pid, signal.SIGSTOP)
        writer = channel._writer
        await channel.go_on()
        await channel.detach()
        await writer.wait_closed()
        gate.touch()
        await asyncio.sleep(0.2)  # the command ends without a host
        os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(0.2)  # it hears of both before the next host calls
        channel.reattach(await connect(path))
        await channel.go_on()  # as every host does: the first word is lost if it calls too soon
        result = await process.wait()
        assert (result.stdout, result.exit_code) == (b"late\n", 3)

    run(agent, tmp_path, body)


def test_a_new_host_replaces_one_that_never_hung_up(agent, tmp_path):
    """As after a snapshot whose reset event the guest's kernel did not deliver."""

    async def body(path, channel):
        await channel.quiet()
        other = Channel(await connect(path), channel.next_id)
        await other.go_on()
        result = await (await other.start(sh("echo heard"), ROOM)).wait()
        assert result.stdout == b"heard\n"
        await other.close()

    run(agent, tmp_path, body)


def test_a_host_that_dies_within_a_frame_does_not_take_the_agent_along(agent, tmp_path):
    async def body(path, channel):
        await channel.detach()
        half = await connect(path)
        half.writer.write(b"\x10\x00\x00\x00X")
        await half.writer.drain()
        half.writer.close()
        with contextlib.suppress(ConnectionError):
            await half.writer.wait_closed()
        channel.reattach(await connect(path))
        assert (await (await channel.start(sh("echo fine"), ROOM)).wait()).stdout == b"fine\n"

    run(agent, tmp_path, body)
