"""Runs in a sandbox that may reach some hosts: carries connections to the host's proxy and back.

    python3 relay.py PORT

Listens on the loopback; what comes and goes travels as frames over standard output and input, which
the agent carries. Decides nothing: `egress.py` on the host does. Frame: u32 length, u8 kind, u32
connection, payload; little endian. Both ways: D bytes; C no more of them; A u32 bytes that were
passed on. From here: H listening, O opened. From the host: R every connection is cut.
"""

import asyncio
import itertools
import struct
import sys

HEAD = struct.Struct("<IBI")
WINDOW_BYTES = 256 << 10  # of a connection, on their way


class Connection:
    """One client of the proxy."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.unacknowledged = 0
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.from_host: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: no more

    def add(self, num_bytes: int) -> None:
        """Count bytes that left, or that were passed on if negative."""
        self.unacknowledged += num_bytes
        if self.unacknowledged < WINDOW_BYTES:
            self.has_room.set()
        else:
            self.has_room.clear()


class Relay:
    """All connections of the sandbox."""

    def __init__(self) -> None:
        self.connections: dict[int, Connection] = {}
        self.ids = itertools.count(1)

    def send(self, kind: str, number: int, payload: bytes = b"") -> None:
        """Write a frame; the host always reads."""
        sys.stdout.buffer.write(HEAD.pack(len(payload), ord(kind), number) + payload)
        sys.stdout.buffer.flush()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until both ends have said all."""
        number = next(self.ids)
        connection = self.connections[number] = Connection(writer)
        self.send("O", number)
        back = asyncio.create_task(self.pass_back(number, connection))
        try:
            while data := await reader.read(1 << 16):
                self.send("D", number, data)
                connection.add(len(data))
                await connection.has_room.wait()
        except OSError:
            pass  # the client left
        self.send("C", number)
        await back
        del self.connections[number]
        writer.close()

    async def pass_back(self, number: int, connection: Connection) -> None:
        """Give the host's bytes to the client; each piece that went makes room for more."""
        is_there = True
        while data := await connection.from_host.get():
            if is_there:
                try:
                    connection.writer.write(data)
                    await connection.writer.drain()
                except OSError:
                    is_there = False  # the host must not wait for it
            self.send("A", number, struct.pack("<I", len(data)))
        if is_there and not connection.writer.is_closing():
            connection.writer.write_eof()

    def hear(self, kind: str, number: int, payload: bytes) -> None:
        """Act on a frame of the host."""
        if kind == "R":
            for cut in self.connections.values():
                cut.writer.transport.abort()
                cut.from_host.put_nowait(None)
                cut.has_room.set()
        connection = self.connections.get(number)
        if connection is None:
            return
        if kind == "D":
            connection.from_host.put_nowait(payload)
        elif kind == "C":
            connection.from_host.put_nowait(None)
        elif kind == "A":
            connection.add(-struct.unpack("<I", payload)[0])

    async def run(self, port: int) -> None:
        """Until the host hangs up."""
        host = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(host), sys.stdin)
        server = await asyncio.start_server(self.serve, "127.0.0.1", port)
        self.send("H", 0)
        async with server:
            while True:
                size, kind, number = HEAD.unpack(await host.readexactly(HEAD.size))
                self.hear(chr(kind), number, await host.readexactly(size))


if __name__ == "__main__":
    asyncio.run(Relay().run(int(sys.argv[1])))
