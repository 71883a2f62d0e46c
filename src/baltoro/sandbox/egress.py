"""The way out of a sandbox that may reach some hosts: a proxy on the host that knows their names.

A sandbox has no network but loopback, so whatever it is allowed goes through here: a relay inside
(`guest/relay.py`, run by the image's `python3`) carries connections over the agent's channel, and
this file decides. It speaks CONNECT and plain HTTP; names are matched exactly, or by suffix if an
entry begins with a dot (`.pypi.org` also allows `pypi.org`); `host:port` allows one port, a bare
name 80 and 443. The host resolves; an allowed name that leads to a loopback, private or link-local
address is refused unless the entry is that address or `localhost`.

Enforced for gvisor, criu and qemu, since nothing else leads out. Not for the process driver, which
refuses such a `Net`. Does not stop: what an allowed host passes on; another name behind the same
address inside TLS (the proxy reads no TLS); data in the names and sizes of requests. Connections
are cut when a sandbox is restored or forked: the peer's half is not in the snapshot.
"""

import asyncio
import contextlib
import ipaddress
import logging
import re
import struct
import urllib.parse
from pathlib import Path

from baltoro.sandbox.guest.relay import HEAD, WINDOW_BYTES
from baltoro.sandbox.protocol import Command, Process, SandboxError

log = logging.getLogger(__name__)
PORT = 3128
RELAY = (Path(__file__).with_name("guest") / "relay.py").read_text()
RELAY_COMMAND = Command(
    argv=("python3", "-I", "-S", "-c", RELAY, str(PORT)), stdin=None, timeout_s=None
)
URL = f"http://127.0.0.1:{PORT}"
PROXY_ENV = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), URL)
PROXY_ENV |= {"no_proxy": "localhost,127.0.0.1", "NO_PROXY": "localhost,127.0.0.1"}
HELLO_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 15.0
MAX_HEAD_BYTES = 64 << 10
DEFAULT_PORTS = (80, 443)
ENTRY = re.compile(r"(?P<name>\.?[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*)(:(?P<port>\d{1,5}))?")


class RefusedError(Exception):
    """The proxy will not do it; the status and the reason that the client reads."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


class AllowList:
    """Which hosts and ports a sandbox may reach."""

    def __init__(self, entries: tuple[str, ...]):
        """`ValueError` for an entry that is no host name, `.suffix` or address, with its port."""
        self._entries: list[tuple[str, int | None]] = []
        for entry in entries:
            match = ENTRY.fullmatch(entry.removeprefix("*"))
            port = int(match["port"]) if match is not None and match["port"] else None
            if match is None or not 1 <= (port or 1) <= 65535 or port == 0:
                raise ValueError(
                    f"net.allowed_hosts: {entry!r} is no host; write example.org, .example.org for"
                    " it and all below it, or example.org:8080 for one port"
                )
            self._entries.append((match["name"].lower(), port))

    def check(self, host: str, port: int) -> None:
        """`RefusedError` unless an entry allows it."""
        name = host.lower().rstrip(".")
        for entry, only_port in self._entries:
            is_name = name == entry.removeprefix(".") or (
                entry.startswith(".") and name.endswith(entry)
            )
            if is_name and (port == only_port if only_port else port in DEFAULT_PORTS):
                return
        raise RefusedError(403, f"{host}:{port} is not on this sandbox's list of hosts")

    async def resolve(self, host: str, port: int) -> str:
        """An address of an allowed host. `RefusedError` if it leads inside the host's network."""
        self.check(host, port)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=1)
        except OSError as error:
            raise RefusedError(502, f"{host}: {error}") from None
        address = str(found[0][4][0])
        is_meant = host.lower() == "localhost" or host == address
        if not ipaddress.ip_address(address).is_global and not is_meant:
            raise RefusedError(403, f"{host} leads to {address}, which is inside; name the address")
        return address


class Gate:
    """The host's end of one sandbox's relay."""

    def __init__(self, process: Process, allowed_hosts: tuple[str, ...]):
        self.process = process
        self.allowed_hosts = allowed_hosts
        self._allowed = AllowList(allowed_hosts)
        self._buffer = bytearray()
        self._hello = asyncio.get_running_loop().create_future()
        self._clients: dict[int, Client] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._reader = asyncio.create_task(self._read())

    async def hello(self) -> None:
        """Wait until the relay listens. `SandboxError` if it does not."""
        try:
            await asyncio.wait_for(asyncio.shield(self._hello), HELLO_TIMEOUT_S)
        except TimeoutError:
            raise SandboxError(f"the relay did not start within {HELLO_TIMEOUT_S} s") from None

    async def cut(self) -> None:
        """End the connections that a snapshot brought along; their other halves are not here."""
        await self.send("R", 0)

    async def hold(self) -> None:
        """Send nothing until `go_on`: the agent is about to be quiet."""
        await self._turn.acquire()

    def go_on(self) -> None:
        """End `hold`."""
        self._turn.release()

    async def close(self) -> None:
        """Forget the sandbox."""
        tasks = [self._reader, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def send(self, kind: str, number: int, payload: bytes = b"") -> None:
        """One frame to the relay."""
        async with self._turn:
            await self.process.write_stdin(HEAD.pack(len(payload), ord(kind), number) + payload)

    async def _read(self) -> None:
        try:
            async for piece in self.process.output():
                if piece.stream == "stdout":
                    self._buffer += piece.data
                    self._take_frames()
                elif not self._hello.done():
                    log.warning("relay: %s", piece.data.decode(errors="replace").strip())
            reason = "the relay ended"
        except SandboxError as error:
            reason = f"the relay cannot run, for which the image needs python3: {error}"
        if not self._hello.done():
            self._hello.set_exception(SandboxError(reason))

    def _take_frames(self) -> None:
        while len(self._buffer) >= HEAD.size:
            size, kind, number = HEAD.unpack_from(self._buffer)
            if len(self._buffer) < HEAD.size + size:
                return
            payload = bytes(self._buffer[HEAD.size : HEAD.size + size])
            del self._buffer[: HEAD.size + size]
            self._take(chr(kind), number, payload)

    def _take(self, kind: str, number: int, payload: bytes) -> None:
        if kind == "H" and not self._hello.done():
            self._hello.set_result(None)
        if kind == "O":
            client = self._clients[number] = Client(self, number)
            task = asyncio.create_task(self._serve(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        client_or_none = self._clients.get(number)
        if client_or_none is not None:
            client_or_none.hear(kind, payload)

    async def _serve(self, client: "Client") -> None:
        """One connection, whatever becomes of it."""
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                try:
                    await _proxy(client, self._allowed)
                except RefusedError as error:
                    log.info("refused: %s", error)
                    await client.write(_answer(error.status, str(error)))
            await client.write_end()
        except SandboxError:
            return  # it is gone
        finally:
            del self._clients[client.number]


class Client:
    """A connection inside, as bytes to read and a way to write, both bounded."""

    def __init__(self, gate: Gate, number: int):
        self.number = number
        self._gate = gate
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()  # b"": no more
        self._rest = b""
        self._unacknowledged = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_ended = False

    def hear(self, kind: str, payload: bytes) -> None:
        """A frame for this connection."""
        if kind == "D":
            self._pieces.put_nowait(payload)
        elif kind == "C":
            self._pieces.put_nowait(b"")
        elif kind == "A":
            self._count(-struct.unpack("<I", payload)[0])

    async def read(self) -> bytes:
        """The next bytes; empty at the end."""
        if self._rest:
            data, self._rest = self._rest, b""
            return data
        data = b"" if self._is_ended else await self._pieces.get()
        self._is_ended = self._is_ended or not data
        if data:
            await self._gate.send("A", self.number, struct.pack("<I", len(data)))
        return data

    async def read_head(self) -> bytes:
        """Up to and with the empty line. `RefusedError` if it is too long or cut off."""
        head = b""
        while b"\r\n\r\n" not in head:
            data = await self.read()
            head += data
            if not data or len(head) > MAX_HEAD_BYTES:
                raise RefusedError(400, "the head of the request is cut off or too long")
        head, _, self._rest = head.partition(b"\r\n\r\n")
        return head

    async def write(self, data: bytes) -> None:
        """Bytes to the program inside; waits while too many are on their way."""
        await self._has_room.wait()
        await self._gate.send("D", self.number, data)
        self._count(len(data))

    async def write_end(self) -> None:
        """No more of them."""
        await self._gate.send("C", self.number)

    def _count(self, num_bytes: int) -> None:
        self._unacknowledged += num_bytes
        if self._unacknowledged < WINDOW_BYTES:
            self._has_room.set()
        else:
            self._has_room.clear()


async def _proxy(client: Client, allowed: AllowList) -> None:
    """Read a request, decide, and carry both directions to their ends."""
    head = (await client.read_head()).decode("latin-1")
    method, _, rest = head.partition(" ")
    target, _, rest = rest.partition(" ")
    version, *fields = rest.split("\r\n")
    if not version.startswith("HTTP/1."):
        raise RefusedError(400, "not an HTTP/1 request")
    if method == "CONNECT":
        host, port = _split(target, None)
        first = b""
    else:
        url = urllib.parse.urlsplit(target)
        if url.scheme != "http" or not url.netloc or "@" in url.netloc:
            raise RefusedError(400, "this is a proxy: ask for http://host/path, or CONNECT")
        host, port = _split(url.netloc, 80)
        path = urllib.parse.urlunsplit(("", "", url.path or "/", url.query, ""))
        kept = [
            field
            for field in fields
            if field.partition(":")[0].strip().lower() not in ("host", "connection")
            and not field.lower().startswith("proxy-")
        ]
        lines = [f"{method} {path} {version}", f"Host: {url.netloc}", "Connection: close", *kept]
        first = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
    address = await allowed.resolve(host, port)
    try:
        opening = asyncio.open_connection(address, port)
        reader, writer = await asyncio.wait_for(opening, CONNECT_TIMEOUT_S)
    except (OSError, TimeoutError) as error:
        raise RefusedError(502, f"{host}:{port}: {error or 'no answer'}") from None
    try:
        if method == "CONNECT":
            await client.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        writer.write(first)
        there = asyncio.create_task(_carry_there(client, writer))
        try:
            while data := await reader.read(1 << 16):
                await client.write(data)
        finally:
            there.cancel()
            await asyncio.gather(there, return_exceptions=True)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _carry_there(client: Client, writer: asyncio.StreamWriter) -> None:
    while data := await client.read():
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def _split(netloc: str, default_port: int | None) -> tuple[str, int]:
    host, colon, port = netloc.rpartition(":")
    if not colon:
        host, port = netloc, "" if default_port is None else str(default_port)
    if not re.fullmatch(r"[A-Za-z0-9.-]+", host) or not re.fullmatch(r"\d{1,5}", port):
        raise RefusedError(400, f"{netloc!r}: must be a host name and a port")
    return host, int(port)


def _answer(status: int, reason: str) -> bytes:
    body = f"{reason}\n".encode()
    words = {400: "Bad Request", 403: "Forbidden", 502: "Bad Gateway"}[status]
    head = f"HTTP/1.1 {status} {words}\r\nContent-Type: text/plain\r\nConnection: close\r\n"
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
