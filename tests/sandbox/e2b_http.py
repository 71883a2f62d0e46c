"""A client of the server for E2B's clients, without their package; the tests' files use it."""

import asyncio
import base64
import json
from pathlib import Path

import httpx

from baltoro.sandbox.e2b.connect import HEAD, envelope
from baltoro.sandbox.e2b.server import ServerConfig, build, create_app
from baltoro.sandbox.keeper import KeeperPolicy
from baltoro.sandbox.protocol import Limits

PNG = bytes.fromhex("89504e470d0a1a0a")
POLICY = KeeperPolicy(min_available_bytes=1, ttl_s=None)
STREAM = "application/connect+json"


class Box:
    """A sandbox of the server, as its clients address it."""

    def __init__(self, http, made):
        self.http = http
        self.id = made["sandboxID"]
        self.headers = {"E2b-Sandbox-Id": self.id, "X-Access-Token": made["envdAccessToken"]}

    async def call(self, name, message, status=200, **headers):
        reply = await self.http.post(f"/{name}", json=message, headers=self.headers | headers)
        assert reply.status_code == status, reply.text
        return reply.json()

    async def stream(self, name, *messages, **headers):
        """The messages of a streamed call, and its error."""
        headers = self.headers | {"content-type": STREAM} | headers
        content = b"".join(envelope(message) for message in messages)
        reply = await self.http.post(f"/{name}", content=content, headers=headers)
        assert reply.status_code == 200, reply.text
        got, rest = [], reply.content
        while rest:
            flags, size = HEAD.unpack_from(rest)
            message, rest = json.loads(rest[HEAD.size :][:size]), rest[HEAD.size + size :]
            if flags == 2:
                return got, message.get("error")
            got.append(message)
        raise AssertionError("the stream has no end")

    async def run(self, text, **start):
        """Output and exit code of a shell command."""
        message = {"process": {"cmd": "sh", "args": ["-c", text]}, "stdin": False} | start
        events, error = await self.stream("process.Process/Start", message)
        assert error is None
        data = [each["event"]["data"] for each in events if "data" in each["event"]]
        text = b"".join(base64.b64decode(value) for piece in data for value in piece.values())
        return text, events[-1]["event"]["end"]["exitCode"]

    async def put(self, path, data, **options):
        return await self.http.post(
            "/files", params={"path": path}, content=data, headers=self.headers, **options
        )

    async def get(self, path):
        return await self.http.get("/files", params={"path": path}, headers=self.headers)


def serve(tmp_path, body, config=None, driver="process", prefix=Path("/none"), image=None):
    """Run `body(http, control)` against a server of its own; nothing may be left afterwards."""
    (tmp_path / "image").mkdir(exist_ok=True)
    images = {"base": image or tmp_path / "image"}

    async def run():
        parts = (driver, tmp_path / "served", prefix, images, Limits(), POLICY, 4 << 30)
        control, store = build(*parts)
        app = create_app(control, config or ServerConfig())
        transport = httpx.ASGITransport(app=app)
        try:
            async with (
                app.router.lifespan_context(app),
                httpx.AsyncClient(transport=transport, base_url="http://x") as http,
            ):
                await body(http, control)
        finally:
            store.close()
        assert list((tmp_path / "served/boxes").iterdir()) == []

    asyncio.run(asyncio.wait_for(run(), 60))


async def new(http, status=201, headers=None, **body):
    reply = await http.post("/v2/sandboxes", json={"templateID": "base"} | body, headers=headers)
    assert reply.status_code == status, reply.text
    return Box(http, reply.json()) if status == 201 else reply.json()["message"]
