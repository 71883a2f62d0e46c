"""Run by the interop environment's Python: what E2B's own package sees of our server.

The server's address is the one argument. Prints a JSON object of what it found.
"""

import asyncio
import io
import json
import sys
import time

from e2b import AsyncSandbox, Sandbox, SandboxQuery
from e2b.exceptions import (
    AuthenticationException,
    FileNotFoundException,
    SandboxException,
    SandboxNotRunningException,
    TimeoutException,
)
from e2b.sandbox.commands.command_handle import CommandExitException, PtySize

URL = sys.argv[1]
HERE = {"api_url": URL, "sandbox_url": URL, "api_key": "one"}
DATA = bytes.fromhex("89504e470d0a1a0a") + bytes(range(256)) * 100


def raised(kind, action):
    """Whether `action` raises exactly that."""
    try:
        action()
    except kind:
        return True
    return False


def commands(box):
    result = box.commands.run('echo "$X$Y"; echo err >&2', envs={"Y": "2"})
    handle = box.commands.run("cat; echo done", background=True, stdin=True)
    listed = [each.cmd for each in box.commands.list()]
    box.commands.send_stdin(handle.pid, "a ")
    box.commands.stream_input(handle.pid, ["b ", b"c "])
    handle.close_stdin()
    sleeper = box.commands.run("sleep 60", background=True)
    other = box.commands.connect(sleeper.pid)
    killed = [box.commands.kill(sleeper.pid), box.commands.kill(9999)]
    terminal, shown = box.pty.create(PtySize(rows=31, cols=91)), []
    box.pty.send_stdin(terminal.pid, b"stty size; exit 0\n")
    terminal.wait(on_pty=shown.append)
    return {
        "run": [result.stdout, result.stderr, result.exit_code],
        "listed": listed,
        "stdin": handle.wait().stdout,
        "killed": killed,
        "exit_raises": raised(CommandExitException, lambda: box.commands.run("exit 3")),
        "killed_raises": raised(CommandExitException, other.wait),
        "late": raised(TimeoutException, lambda: box.commands.run("sleep 60", timeout=0.5)),
        "pty": b"31 91" in b"".join(shown),
    }


def files(box):
    box.files.write("pic.png", DATA)
    box.files.write_files([{"path": "d/one", "data": "1"}, {"path": "d/e/two", "data": b"22"}])
    box.files.write("big", io.BytesIO(DATA * 20))
    box.files.write("packed", "text" * 1000, gzip=True)
    watch = box.files.watch_dir("d")
    box.files.write("d/three", "3")
    events = [(each.name, each.type.value) for each in watch.get_new_events()]
    watch.stop()
    return {
        "bytes": bytes(box.files.read("pic.png", format="bytes")) == DATA,
        "stream": b"".join(box.files.read("big", format="stream")) == DATA * 20,
        "gzip": box.files.read("packed", gzip=True) == "text" * 1000,
        "list": [(each.path, each.type.value, each.size) for each in box.files.list("d/e")],
        "exists": [box.files.exists("d"), box.files.exists("no")],
        "made": [box.files.make_dir("new/er"), box.files.make_dir("new/er")],
        "renamed": box.files.rename("d/one", "q/1").path,
        "removed": [box.files.remove("q"), box.files.exists("q")],
        "missing": raised(FileNotFoundException, lambda: box.files.read("no")),
        "mode": box.files.get_info("pic.png").permissions,
        "events": events,
    }


def left_alone(box):
    """A client that leaves, and what its command did meanwhile."""
    handle = box.commands.run("for i in 1 2 3 4 5 6; do echo $i; sleep 0.2; done", background=True)
    handle.disconnect()
    time.sleep(0.5)  # what it says now nobody hears
    again = box.commands.connect(handle.pid)
    text = again.wait().stdout
    return {
        "same": again.pid == handle.pid,
        "last": text.endswith("6\n"),
        "not_all": len(text) < 12,
    }


async def at_once(box):
    """The asynchronous client: commands at the same time, and a folder watched as a stream."""
    same = await AsyncSandbox.connect(box.sandbox_id, **HERE)
    start = time.monotonic()
    runs = (same.commands.run(f"sleep 1; echo {i}") for i in range(5))
    texts = [result.stdout for result in await asyncio.gather(*runs)]
    took_s = time.monotonic() - start
    seen, came = [], asyncio.Event()

    def hear(event):
        seen.append((event.name, event.type.value))
        came.set()

    await same.files.make_dir("watched")
    watch = await same.files.watch_dir("watched", on_event=hear)
    await same.files.write("watched/new", b"")
    await asyncio.wait_for(came.wait(), 20)
    await watch.stop()
    return {"texts": texts, "together": took_s < 4, "seen": seen}


def life(box):
    (listed,) = Sandbox.list(query=SandboxQuery(metadata={"a": "b c"}), **HERE).next_items()
    paused = [box.pause(), box.pause(), box.is_running()]
    refused = raised(SandboxNotRunningException, lambda: box.commands.run("true"))
    again = Sandbox.connect(box.sandbox_id, **HERE)
    left, right = again.fork(count=2)
    left.files.write("x", "left")
    right.files.write("x", "right")
    snapshot = left.create_snapshot().snapshot_id
    third = Sandbox.create(snapshot, **HERE)
    short = Sandbox.create(timeout=1, **HERE)
    keyed = [Sandbox.create(idempotency_key="k", **HERE).sandbox_id for _ in range(2)]
    time.sleep(1.2)
    return {
        "listed": listed.sandbox_id == box.sandbox_id,
        "metadata": box.get_info().metadata,
        "paused": paused,
        "refused": refused,
        "kept": bytes(again.files.read("pic.png", format="bytes")) == DATA,
        "branches": [left.files.read("x"), right.files.read("x"), again.files.exists("x")],
        "from_snapshot": third.files.read("x"),
        "deleted": [Sandbox.delete_snapshot(snapshot, **HERE) for _ in range(2)],
        "over": short.is_running(),
        "same_key": keyed[0] == keyed[1],
        "metrics": again.get_metrics()[0].disk_used > len(DATA),
        "unknown_template": raised(SandboxException, lambda: Sandbox.create("ubuntu", **HERE)),
        "wrong_key": raised(
            AuthenticationException, lambda: Sandbox.create(**{**HERE, "api_key": "two"})
        ),
        "killed": [third.kill(), third.kill(), third.is_running()],
    }


box = Sandbox.create(metadata={"a": "b c"}, envs={"X": "1"}, **HERE)
found = {"commands": commands(box), "files": files(box), "left_alone": left_alone(box)}
found["at_once"] = asyncio.run(at_once(box))
print(json.dumps(found | {"life": life(box)}))
