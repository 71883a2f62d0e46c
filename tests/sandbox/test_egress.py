"""The way out of a sandbox: what the list allows, what the proxy refuses, bytes through the relay.

Here the relay runs as a process of ours; `contract.only_listed_hosts_answer` has it in machines.
"""

import asyncio
import contextlib
import hashlib
import sys

import pytest

from baltoro.sandbox import egress
from baltoro.sandbox.egress import AllowList, Gate, RefusedError
from baltoro.sandbox.host_process import HostProcess
from baltoro.sandbox.protocol import Command, SandboxError

DATA = hashlib.shake_256(b"x").digest(3 << 20)


@pytest.mark.parametrize(
    ("entry", "host", "port", "is_allowed"),
    [
        ("example.org", "example.org", 443, True),
        ("example.org", "EXAMPLE.org.", 80, True),
        ("example.org", "example.org", 22, False),
        ("example.org", "a.example.org", 443, False),
        ("example.org", "badexample.org", 443, False),
        (".example.org", "example.org", 443, True),
        ("*.example.org", "a.b.example.org", 443, True),
        (".example.org", "badexample.org", 443, False),
        (".example.org", "example.org.evil.net", 443, False),
        ("example.org:8080", "example.org", 8080, True),
        ("example.org:8080", "example.org", 443, False),
    ],
)
def test_names_match_exactly_or_by_suffix(entry, host, port, is_allowed):
    allowed = AllowList((entry,))
    if is_allowed:
        allowed.check(host, port)
    else:
        with pytest.raises(RefusedError, match="not on this sandbox's list"):
            allowed.check(host, port)


def test_an_entry_that_is_no_host_is_named():
    for entry in ("", "*", "http://x", "a b", "x:0", "x:99999", "x/y", "..x"):
        with pytest.raises(ValueError, match="allowed_hosts"):
            AllowList((entry,))


def test_an_allowed_name_that_leads_inside_is_refused(monkeypatch):
    async def body():
        loop = asyncio.get_running_loop()

        async def rebound(host, port, type):
            return [(2, 1, 6, "", ("169.254.169.254", port))]

        monkeypatch.setattr(loop, "getaddrinfo", rebound)
        with pytest.raises(RefusedError, match="which is inside"):
            await AllowList(("example.org",)).resolve("example.org", 80)
        allowed = AllowList(("169.254.169.254",))
        assert await allowed.resolve("169.254.169.254", 80) == "169.254.169.254"

    asyncio.run(body())


async def upstream(reader, writer):
    """Echoes the head it got, then what follows, reversed in case."""
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"GET /big"):
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + DATA)
    elif head.startswith(b"RAW"):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    else:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + head)
    await writer.drain()
    writer.close()


async def ask(port, data, then=b""):
    """Everything that comes back through the proxy for `data`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    if then:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head
        writer.write(then)
    writer.write_eof()
    got = await reader.read()
    writer.close()
    return got


def run_proxy(body, relay=egress.RELAY):
    """Run `body(proxy_port, server_port, gate)` with a relay and a server of ours."""

    async def main():
        server = await asyncio.start_server(upstream, "127.0.0.1", 0)
        there = server.sockets[0].getsockname()[1]
        probe = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = probe.sockets[0].getsockname()[1]
        probe.close()
        await probe.wait_closed()
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", relay, str(port)),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
        process = HostProcess(1, child, Command(argv=("relay",), timeout_s=None))
        process.begin(1 << 40)
        gate = Gate(process, (f"localhost:{there}", f"127.0.0.1:{there}"))
        try:
            await gate.hello()
            await body(port, there, gate)
        finally:
            await gate.close()
            await process.end()
            server.close()
            await server.wait_closed()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_plain_requests_arrive_rewritten_and_answers_come_whole():
    async def body(proxy, there, gate):
        head = f"GET http://localhost:{there}/a?b=c HTTP/1.1\r\nHost: evil.example\r\n"
        got = await ask(proxy, head.encode() + b"Proxy-Authorization: secret\r\nX: y\r\n\r\n")
        assert (
            got
            == (
                f"HTTP/1.1 200 OK\r\n\r\nGET /a?b=c HTTP/1.1\r\nHost: localhost:{there}\r\n"
                "Connection: close\r\nX: y\r\n\r\n"
            ).encode()
        )
        big = f"GET http://127.0.0.1:{there}/big HTTP/1.1\r\n\r\n".encode()
        answers = await asyncio.gather(*(ask(proxy, big) for _ in range(3)))
        assert [answer.partition(b"\r\n\r\n")[2] == DATA for answer in answers] == [True] * 3

    run_proxy(body)


def test_a_tunnel_carries_both_ways_more_than_fits_on_the_way():
    async def body(proxy, there, gate):
        connect = f"CONNECT localhost:{there} HTTP/1.1\r\n\r\n".encode()
        assert await ask(proxy, connect, then=b"RAW\r\n\r\n" + DATA) == DATA

    run_proxy(body)


def test_what_is_not_listed_is_refused_with_the_reason():
    async def body(proxy, there, gate):
        for request, words in {
            f"CONNECT localhost:{there + 1} HTTP/1.1": b"403 Forbidden",
            "CONNECT example.org:443 HTTP/1.1": b"example.org:443 is not on this sandbox's list",
            "GET http://example.org/ HTTP/1.1": b"403 Forbidden",
            f"GET http://localhost:{there}@example.org/ HTTP/1.1": b"400 Bad Request",
            "GET / HTTP/1.1": b"400 Bad Request",
            "CONNECT nonsense HTTP/1.1": b"400 Bad Request",
            "nonsense": b"400 Bad Request",
            "GET http://x/ HTTP/1.1\r\nX: " + "y" * 70_000: b"too long",
        }.items():
            assert words in await ask(proxy, f"{request}\r\n\r\n".encode()), request
        assert b"cut off" in await ask(proxy, b"GET http://x")

    run_proxy(body)


def test_held_frames_wait_and_a_cut_ends_what_was_open():
    async def body(proxy, there, gate):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy)
        writer.write(f"CONNECT localhost:{there} HTTP/1.1\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        await gate.hold()
        writer.write(b"RAW\r\n\r\nabc")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(3), 0.3)
        gate.go_on()
        assert await reader.readexactly(3) == b"abc"
        await gate.cut()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()

    run_proxy(body)


def test_a_program_that_sends_more_than_is_taken_has_to_wait():
    async def body(proxy, there, gate):
        _, writer = await asyncio.open_connection("127.0.0.1", proxy)
        await gate.hold()  # nothing is acknowledged
        writer.write(b"x" * (16 << 20))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.drain(), 1.5)
        gate.go_on()
        writer.transport.abort()

    run_proxy(body)


def test_a_relay_that_cannot_run_is_named():
    async def body(proxy, there, gate):
        raise AssertionError("it must not start")

    with pytest.raises(SandboxError, match="the relay ended"):
        run_proxy(body, relay="raise SystemExit(1)")
