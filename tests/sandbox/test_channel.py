"""The agent and the host's end of it, over plain pipes: no isolation, only the protocol."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from baltoro.sandbox.channel import OUTPUT, AgentProcess, Channel, open_pipes
from baltoro.sandbox.install import find_tool, install
from baltoro.sandbox.protocol import Command, ImageError, LimitError, SandboxError

ROOM = 1 << 20


@pytest.fixture(scope="module")
def agent(tmp_path_factory) -> str:
    prefix = tmp_path_factory.mktemp("prefix")
    install(prefix, ["guest"])
    return find_tool(prefix, "agent")[0]


def run(agent: str, body: Callable[[Channel], Awaitable[None]]) -> None:
    async def main() -> None:
        guest_in, host_out = os.pipe()
        host_in, guest_out = os.pipe()
        process = subprocess.Popen([agent, "0", "1"], stdin=guest_in, stdout=guest_out)
        os.close(guest_in)
        os.close(guest_out)
        channel = Channel(await open_pipes(host_in, host_out))
        try:
            await channel.hello(10)
            await body(channel)
        finally:
            await channel.close()
            await asyncio.to_thread(process.wait)
        assert process.returncode == 0

    asyncio.run(main())


def sh(text: str, **kwargs: object) -> Command:
    return Command(argv=("sh", "-c", text), **kwargs)  # type: ignore[arg-type]


def test_streams_exit_codes_and_input_pass(agent):
    async def body(channel):
        result = await (
            await channel.start(sh("cat; echo e >&2; exit 3", stdin=b"in"), ROOM)
        ).wait()
        assert (result.stdout, result.stderr, result.exit_code) == (b"in", b"e\n", 3)
        killed = await (await channel.start(sh("kill -TERM $$"), ROOM)).wait()
        assert killed.exit_code == 143

    run(agent, body)


def test_two_commands_at_once_do_not_mix(agent):
    async def body(channel):
        loud = [await channel.start(sh(f"yes {i} | head -c 300000"), ROOM) for i in range(4)]
        results = await asyncio.gather(*(process.wait() for process in loud))
        for index, result in enumerate(results):
            assert result.stdout == f"{index}\n".encode() * 150_000

    run(agent, body)


def test_time_and_output_are_bounded_and_the_agent_lives(agent):
    async def body(channel):
        with pytest.raises(LimitError, match="timeout_s"):
            await (await channel.start(sh("sleep 100", timeout_s=0.1), ROOM)).wait()
        with pytest.raises(LimitError, match="max_output_bytes=1000"):
            await (await channel.start(sh("yes"), 1000)).wait()
        assert (await (await channel.start(sh("echo ok"), ROOM)).wait()).stdout == b"ok\n"

    run(agent, body)


def test_output_that_nobody_reads_is_bounded_and_its_command_killed(agent):
    async def body(channel):
        process = await channel.start(sh("yes", timeout_s=None), ROOM)
        queue = channel.subscribe(process.id)
        async with asyncio.timeout(20):
            while ord("Z") not in (kinds := [kind for kind, _ in queue._queue]):
                await asyncio.sleep(0.01)
        assert sum(len(data) for kind, data in queue._queue if kind in OUTPUT) <= ROOM
        assert len(kinds) < 200
        other = await channel.start(sh("echo fine"), ROOM)
        assert (await other.wait()).stdout == b"fine\n"
        with pytest.raises(LimitError, match=f"max_output_bytes={ROOM}"):
            await process.wait()

    run(agent, body)


def test_a_huge_file_of_holes_is_not_read_to_its_end(agent, tmp_path):
    path = tmp_path / "holes"

    async def body(channel):
        path.write_bytes(b"")
        os.truncate(path, 1 << 40)
        with pytest.raises(LimitError, match="max_bytes=1000"):
            await asyncio.wait_for(channel.read(str(path), 1000), 5)
        os.truncate(path, 1000)
        assert await channel.read(str(path), 1000) == bytes(1000)
        with pytest.raises(LimitError, match="max_bytes=999"):
            await channel.read(str(path), 999)

    run(agent, body)


OLD_KILL = r"""
import ctypes, mmap, os, struct
code = mmap.mmap(-1, 4096, prot=7)
code.write(b"\x53\xb8" + struct.pack("<I", 37) + b"\xbb" + struct.pack("<i", os.getppid()))
code.write(b"\x31\xc9\xcd\x80\x5b\xc3")
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the filter of calls needs root, as in a sandbox")
def test_no_kind_of_call_signals_the_agent(agent):
    """By the numbers of x86-64, of x32, and by those of i386, which `int 0x80` reaches."""

    async def body(channel):
        kill = "import ctypes, os; print(ctypes.CDLL(None).syscall(%d, os.getppid(), 0))"
        for number in (62, 62 + 0x40000000):
            command = Command(argv=(sys.executable, "-c", kill % number))
            assert (await (await channel.start(command, ROOM)).wait()).stdout == b"-1\n"
        command = Command(argv=(sys.executable, "-c", OLD_KILL))
        old = await (await channel.start(command, ROOM)).wait()
        no_such_calls = (139, b"")  # a kernel without them
        assert (old.exit_code, old.stdout) in ((0, b"-1\n"), no_such_calls), old

    run(agent, body)


def test_a_background_job_outlives_its_command(agent, tmp_path):
    async def body(channel):
        text = f"(sleep 0.1; echo noise; echo late > {tmp_path}/done) & echo first"
        result = await (await channel.start(sh(text), ROOM)).wait()
        assert result.stdout == b"first\n"
        for _ in range(100):
            if (tmp_path / "done").exists():
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the job died with its command")

    run(agent, body)


def test_quiet_holds_output_back_until_go_on(agent):
    async def body(channel):
        process = await channel.start(sh("sleep 0.05; echo later"), ROOM)
        await channel.quiet()
        await asyncio.sleep(0.2)
        assert process._queue.empty()
        await channel.go_on()
        assert (await process.wait()).stdout == b"later\n"

    run(agent, body)


def test_another_handle_reads_on_where_the_first_stopped(agent):
    async def body(channel):
        process = await channel.start(sh("echo one; read x; echo $x", stdin=None), ROOM)
        async for piece in process.output():
            assert piece.data == b"one\n"
            break
        again = AgentProcess(channel, process.id, None, ROOM)
        await again.write_stdin(b"two\n")
        assert (await again.wait()).stdout == b"two\n"

    run(agent, body)


def test_files_pass_and_errors_are_the_guests_own(agent, tmp_path):
    async def body(channel):
        data = os.urandom(1_000_000)
        path = f"{tmp_path}/a/b/file"
        await channel.write(path, data, 0o750)
        assert await channel.read(path, 2_000_000) == data
        assert Path(path).stat().st_mode & 0o777 == 0o750
        with pytest.raises(LimitError, match="max_bytes=10"):
            await channel.read(path, 10)
        with pytest.raises(FileNotFoundError):
            await channel.read(f"{tmp_path}/none", 10)
        with pytest.raises(IsADirectoryError):
            await channel.read(str(tmp_path), 10)
        with pytest.raises(NotADirectoryError):
            await channel.write(f"{path}/under", b"x", 0o644)

    run(agent, body)


def test_what_cannot_start_is_named(agent):
    async def body(channel):
        for command in (Command(argv=("/none",)), Command(argv=("true",), cwd="/none")):
            with pytest.raises(ImageError, match="the image lacks it"):
                await (await channel.start(command, ROOM)).wait()

    run(agent, body)


def test_a_lost_agent_wakes_everybody_who_waits(agent):
    async def main() -> None:
        guest_in, host_out = os.pipe()
        host_in, guest_out = os.pipe()
        process = subprocess.Popen([agent, "0", "1"], stdin=guest_in, stdout=guest_out)
        os.close(guest_in)
        os.close(guest_out)
        channel = Channel(await open_pipes(host_in, host_out))
        await channel.hello(10)
        waiting = asyncio.ensure_future((await channel.start(sh("sleep 100"), ROOM)).wait())
        await asyncio.sleep(0.1)
        process.kill()
        await asyncio.to_thread(process.wait)
        with pytest.raises(SandboxError, match="gone"):
            await asyncio.wait_for(waiting, 5)
        with pytest.raises(SandboxError, match="gone"):
            await channel.start(sh("true"), ROOM)
        await channel.close()

    asyncio.run(main())
