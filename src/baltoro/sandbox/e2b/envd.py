"""The two services of a sandbox, commands and folders, over Connect as envd has them.

Commands and paths belong to the one user a sandbox has; a client that names another than root is
refused. Not served: resizing a terminal after its start, file metadata, watchers with entries or
over network mounts. The version that we report is the newest without the last three, so that
clients say so themselves.
"""

import asyncio
import base64
import binascii
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from baltoro.sandbox.e2b import connect, files
from baltoro.sandbox.e2b.commands import Running, listen, parse_start
from baltoro.sandbox.e2b.connect import Message, RpcError, as_rpc_error, field
from baltoro.sandbox.e2b.records import Started
from baltoro.sandbox.e2b.session import NotRunningError, Session
from baltoro.sandbox.e2b.transfer import read_body
from baltoro.sandbox.protocol import SandboxError

ENVD_VERSION = "0.6.1"
MAX_MESSAGE_BYTES = 16 << 20
WATCH_INTERVAL_S = 0.5
SIGNALS = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9, 15: 15, 9: 9}
Events = AsyncGenerator[Message, None]


async def call(session: Session, name: str, request: Request) -> Response:
    """Serve one call, `service/Method`."""
    try:
        check_user(request.headers)
        is_stream = name in STREAMS or name == STREAM_INPUT
        expected = connect.STREAM_TYPE if is_stream else connect.UNARY_TYPE
        if request.headers.get("content-type", "").partition(";")[0] != expected:
            return Response(status_code=415, headers={"accept-post": expected})
        if name == STREAM_INPUT:
            return await _stream_input(session, request)
        if name in STREAMS:
            return await _stream(session, name, request)
        if name not in UNARY:
            raise RpcError("unimplemented", f"{name}: not served")
        message = connect.parse_message(await read_body(request, MAX_MESSAGE_BYTES))
        return JSONResponse(await UNARY[name](session, message))
    except NotRunningError as error:
        return not_running(error)
    except (RpcError, SandboxError, OSError, ValueError) as error:
        failure = as_rpc_error(error)
        return JSONResponse(failure.body(), failure.status)


def not_running(error: NotRunningError) -> Response:
    """As the proxy before envd answers for a sandbox that is not there."""
    return JSONResponse({"code": 502, "message": error.message}, 502)


def check_user(headers: Mapping[str, str]) -> None:
    """`RpcError` if the client names a user that sandboxes do not have."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return
    try:
        user = base64.b64decode(given, validate=True).decode().partition(":")[0]
    except (binascii.Error, UnicodeDecodeError):
        raise RpcError("unauthenticated", "authorization: not base64 of user:") from None
    if user not in ("", "root"):
        raise RpcError("unauthenticated", f"user={user!r}: a sandbox has one user; leave it out")


async def _stream(session: Session, name: str, request: Request) -> Response:
    """A call that is answered by many messages; a failure before the first is a plain error."""
    message = await anext(connect.read_envelopes(request.stream(), MAX_MESSAGE_BYTES), None)
    if message is None:
        raise RpcError("invalid_argument", f"{name}: needs a message")
    ping = request.headers.get("keepalive-ping-interval", "")
    keepalive_s = float(ping) if ping.isdigit() and int(ping) > 0 else None
    events = STREAMS[name](session, message, connect.timeout_s(request.headers), keepalive_s)

    async def body() -> AsyncIterator[bytes]:
        try:
            async for event in events:
                yield connect.envelope(event)
            yield connect.end_of_stream()
        except (RpcError, SandboxError, OSError, ValueError) as error:
            yield connect.end_of_stream(as_rpc_error(error))
        finally:
            await events.aclose()

    return StreamingResponse(body(), media_type=connect.STREAM_TYPE)


async def _start(
    session: Session, message: Message, limit_s: float | None, keepalive_s: float | None
) -> Events:
    env = {**session.home.env, **session.record.env}
    command, tag = parse_start(message, env, session.home.path, limit_s)
    config = field(message, "process", dict, {})
    started = Started(id=0, config=config, tag=tag, uses_pty=command.use_pty)
    running = await session.start(command, started)
    async for event in listen(running, keepalive_s):
        yield {"event": event}


async def _connect(
    session: Session, message: Message, limit_s: float | None, keepalive_s: float | None
) -> Events:
    async with session.awake():
        running = _selected(session, message)
    async for event in listen(running, keepalive_s):
        yield {"event": event}


async def _watch_dir(
    session: Session, message: Message, limit_s: float | None, keepalive_s: float | None
) -> Events:
    watcher = await _open_watcher(session, message)
    yield {"start": {}}
    while True:
        await asyncio.sleep(WATCH_INTERVAL_S)
        async with session.awake() as sandbox:
            events = await watcher.events(sandbox)
        for event in events:
            yield {"filesystem": event}


async def _list_commands(session: Session, message: Message) -> Message:
    async with session.awake():
        listed = session.commands.started()
    return {
        "processes": [
            {"config": dict(each.config), "pid": each.id}
            | ({} if each.tag is None else {"tag": each.tag})
            for each in listed
        ]
    }


async def _send_input(session: Session, message: Message) -> Message:
    async with session.awake():
        await _feed(_selected(session, message), field(message, "input", dict, {}))
    return {}


async def _stream_input(session: Session, request: Request) -> Response:
    """A stream of input: first whose, then what; the sandbox stays awake meanwhile."""
    error = None
    try:
        async with session.awake():
            running = None
            messages = connect.read_envelopes(request.stream(), MAX_MESSAGE_BYTES)
            async for message in messages:
                if "start" in message:
                    running = _selected(session, field(message, "start", dict, {}))
                elif "data" in message and running is not None:
                    data = field(message, "data", dict, {})
                    await _feed(running, field(data, "input", dict, {}))
                elif "keepalive" not in message:
                    raise RpcError("invalid_argument", "start: must be the first message")
    except NotRunningError:
        raise
    except (RpcError, SandboxError, OSError) as failure:
        error = as_rpc_error(failure)
    reply = b"" if error else connect.envelope({})
    return Response(reply + connect.end_of_stream(error), media_type=connect.STREAM_TYPE)


async def _close_stdin(session: Session, message: Message) -> Message:
    async with session.awake():
        running = _selected(session, message)
        if running.started.uses_pty:
            raise RpcError("invalid_argument", "a terminal has no end of input; send byte 4")
        await running.process.write_stdin(b"")
    return {}


async def _send_signal(session: Session, message: Message) -> Message:
    signal = SIGNALS.get(message.get("signal", ""))
    if signal is None:
        raise RpcError("invalid_argument", f"signal={message.get('signal')!r}: SIGTERM or SIGKILL")
    async with session.awake():
        await _selected(session, message).process.kill(signal)
    return {}


async def _update(session: Session, message: Message) -> Message:
    _selected(session, message)
    raise RpcError("unimplemented", "a terminal keeps the size it was started with")


async def _stat(session: Session, message: Message) -> Message:
    async with session.awake() as sandbox:
        return {"entry": await files.look(sandbox, _path(session, message))}


async def _list_dir(session: Session, message: Message) -> Message:
    depth = field(message, "depth", int, 0)  # 0 is 1 in envd
    async with session.awake() as sandbox:
        entries = await files.list_folder(sandbox, _path(session, message), max(depth, 1))
    return {"entries": entries}


async def _make_dir(session: Session, message: Message) -> Message:
    async with session.awake() as sandbox:
        return {"entry": await files.make_folder(sandbox, _path(session, message))}


async def _move(session: Session, message: Message) -> Message:
    source, target = (_path(session, message, name) for name in ("source", "destination"))
    async with session.awake() as sandbox:
        return {"entry": await files.move(sandbox, source, target)}


async def _remove(session: Session, message: Message) -> Message:
    async with session.awake() as sandbox:
        await files.remove(sandbox, _path(session, message))
    return {}


async def _create_watcher(session: Session, message: Message) -> Message:
    watcher_id = uuid.uuid4().hex
    session.watchers[watcher_id] = await _open_watcher(session, message)
    return {"watcherId": watcher_id}


async def _watcher_events(session: Session, message: Message) -> Message:
    watcher = session.watchers.get(field(message, "watcherId", str, ""))
    if watcher is None:
        raise RpcError("not_found", f"watcherId={message.get('watcherId')!r}: no such watcher")
    async with session.awake() as sandbox:
        return {"events": await watcher.events(sandbox)}


async def _remove_watcher(session: Session, message: Message) -> Message:
    session.watchers.pop(field(message, "watcherId", str, ""), None)
    return {}


async def _open_watcher(session: Session, message: Message) -> files.Watcher:
    for name in ("includeEntry", "allowNetworkMounts"):
        if message.get(name):
            raise RpcError("unimplemented", f"{name}: not served")
    path = _path(session, message)
    async with session.awake() as sandbox:
        return await files.Watcher.open(sandbox, path, field(message, "recursive", bool, False))


def _selected(session: Session, message: Message) -> Running:
    return session.commands.find(field(message, "process", dict, {}))


def _path(session: Session, message: Message, name: str = "path") -> str:
    return files.inside(field(message, name, str, ""), session.home.path)


async def _feed(running: Running, given: Mapping[str, Any]) -> None:
    """A process.ProcessInput to a command."""
    kind = "pty" if running.started.uses_pty else "stdin"
    text = given.get(kind)
    if not isinstance(text, str):
        raise RpcError("invalid_argument", f"input: the command reads from {kind}")
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error:
        raise RpcError("invalid_argument", f"input.{kind}: not base64") from None
    if data:  # nothing would close it
        await running.process.write_stdin(data)


STREAM_INPUT = "process.Process/StreamInput"
STREAMS = {
    "process.Process/Start": _start,
    "process.Process/Connect": _connect,
    "filesystem.Filesystem/WatchDir": _watch_dir,
}
UNARY = {
    "process.Process/List": _list_commands,
    "process.Process/SendInput": _send_input,
    "process.Process/CloseStdin": _close_stdin,
    "process.Process/SendSignal": _send_signal,
    "process.Process/Update": _update,
    "filesystem.Filesystem/Stat": _stat,
    "filesystem.Filesystem/ListDir": _list_dir,
    "filesystem.Filesystem/MakeDir": _make_dir,
    "filesystem.Filesystem/Move": _move,
    "filesystem.Filesystem/Remove": _remove,
    "filesystem.Filesystem/CreateWatcher": _create_watcher,
    "filesystem.Filesystem/GetWatcherEvents": _watcher_events,
    "filesystem.Filesystem/RemoveWatcher": _remove_watcher,
}
