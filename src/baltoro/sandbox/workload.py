"""The world that snapshots are proven on: a Python REPL with everything that is hard to keep.

A thread that counts, a child that echoes over pipes, a file open with an offset, a deleted file
still open, an established TCP connection over loopback, and any number of megabytes of random
memory. It answers one line of Python with one line: `World.ask`.
"""

from dataclasses import dataclass

from baltoro.sandbox.protocol import Command, Process, Sandbox, SandboxError

MEGABYTE = 1 << 20
PROGRAM = """
import hashlib, os, socket, subprocess, sys, threading, time
size = int(sys.argv[1])
memory = os.urandom(size)
digest = hashlib.md5(memory).hexdigest()
ticks = 0
def count():
    global ticks
    while True:
        ticks += 1
        time.sleep(0.02)
threading.Thread(target=count, daemon=True).start()
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
log = open("/work/log", "a+")
log.write("first line\\n")
log.flush()
gone = open("/work/gone", "w+")
gone.write("deleted but open")
gone.flush()
os.unlink("/work/gone")
server = socket.create_server(("127.0.0.1", 0))
near = socket.create_connection(server.getsockname())
far, _ = server.accept()
def echo(text):
    child.stdin.write(text.encode() + b"\\n")
    child.stdin.flush()
    return child.stdout.readline().decode().strip()
def send(text):
    near.sendall(text.encode())
    return far.recv(100).decode()
def append(text):
    log.write(text + "\\n")
    log.flush()
    return log.tell()
def whole():
    before, deadline = ticks, time.monotonic() + 10
    while ticks == before and time.monotonic() < deadline:
        time.sleep(0.005)
    gone.seek(0)
    return (hashlib.md5(memory).hexdigest() == digest and ticks > before and echo("pipe") == "pipe"
            and send("tcp") == "tcp" and gone.read() == "deleted but open")
print("ready", digest, flush=True)
names = globals()
for line in sys.stdin:
    try:
        print(repr(eval(line, names)), flush=True)
    except SyntaxError:
        exec(line, names)
        print("None", flush=True)
"""


@dataclass
class World:
    """The REPL in one sandbox."""

    process: Process

    @classmethod
    async def start(cls, sandbox: Sandbox, megabytes: int) -> "World":
        """Start it and wait until it stands."""
        await sandbox.write("/work/world.py", PROGRAM.encode())
        argv = ("python3", "-u", "/work/world.py", str(megabytes * MEGABYTE))
        world = cls(await sandbox.start(Command(argv=argv, stdin=None, timeout_s=None)))
        answer = await world._line()
        if not answer.startswith("ready"):
            raise SandboxError(f"the world did not start: {answer}")
        return world

    async def follow(self, branch: Sandbox) -> "World":
        """The same REPL in a branch."""
        return World(await branch.attach(self.process.id))

    async def ask(self, line: str) -> str:
        """Evaluate or execute one line; returns the repr of its value."""
        await self.process.write_stdin(line.encode() + b"\n")
        return await self._line()

    async def _line(self) -> str:
        text = b""
        async for piece in self.process.output():
            text += piece.data
            if text.endswith(b"\n"):
                break
        return text.decode(errors="replace").strip()
