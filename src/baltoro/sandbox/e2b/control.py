"""The control plane: make, list, pause, resume, fork, snapshot and end sandboxes over a keeper.

A time to live runs out on the wall clock; `reap` then pauses or kills, as the client chose. What a
sandbox cannot have (volumes, identities, MCP gateways, networks beyond an allow list) is refused by
name, never left out in silence.
"""

import base64
import os
import secrets
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from baltoro.sandbox.e2b.envd import ENVD_VERSION
from baltoro.sandbox.e2b.records import OnTimeout, Record, Records
from baltoro.sandbox.e2b.session import Home, Session
from baltoro.sandbox.keeper import Keeper
from baltoro.sandbox.protocol import MIB, Image, Limits, Net, SandboxError
from baltoro.sandbox.usage import sample

MAX_TIMEOUT_S = 30 * 24 * 3600
MAX_FORKS = 20
REFUSED = ("mcp", "iam", "volumeMounts")
Json = dict[str, Any]


class ApiError(Exception):
    """A refusal, with its HTTP status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlConfig:
    """What sandboxes are made from."""

    images: Mapping[str, Path]  # by the template's name
    home: Home
    limits: Limits
    default_timeout_s: int = 300


class Control:
    """The sandboxes of a server."""

    def __init__(self, keeper: Keeper, records: Records, config: ControlConfig):
        self.config = config
        self.keeper = keeper
        self._records = records
        self._sessions: dict[str, Session] = {}
        self._cpu: dict[str, tuple[float, float]] = {}  # at the last sample: Unix seconds, cpu_s

    async def adopt(self) -> None:
        """Go on where an earlier server stopped: whoever has a record and a snapshot lives."""
        names = await self.keeper.adopt()
        known = {record.id for record in self._records}
        for name in names:
            if name not in known:  # made, but never answered
                await self.keeper.destroy(name)
        for lost in known - set(names):
            self._records.remove(lost)
        for record in self._records:
            self._sessions[record.id] = self._session(record)
        kept = [each for each in self._records.snapshots if each in self.keeper.store.ids()]
        self._records.set_snapshots(kept)
        for snapshot in kept:
            self.keeper.store.pin(snapshot)

    async def close(self) -> None:
        """Store what runs, with its commands; the next server wakes it on the first call."""
        for session in self._sessions.values():
            await session.store()
        await self.keeper.close()

    async def reap(self) -> None:
        """Look once at every sandbox's time, and let the keeper look at what is idle."""
        now = time.time()
        for record in self._records:
            if now < record.end_at or record.is_paused:
                continue
            if record.on_timeout == "pause":
                await self._sessions[record.id].pause()
            else:
                await self.kill(record.id)
        await self.keeper.tick()

    def session(self, sandbox_id: str) -> Session | None:
        """The sandbox of that id, paused or not."""
        return self._sessions.get(sandbox_id)

    async def create(self, body: Json, key: str | None) -> Json:
        """A new sandbox, from a template or a snapshot; the same key gives the same one again."""
        for name in REFUSED:
            if body.get(name):
                raise ApiError(400, f"{name}: not supported here; leave it out")
        net = _net(body)
        template = _typed(body, "templateID", str, "base")
        timeout_s = self._timeout(body, self.config.default_timeout_s)
        metadata = _texts(body, "metadata")
        env = _texts(body, "envVars")
        on_timeout: OnTimeout = "pause" if _typed(body, "autoPause", bool, False) else "kill"
        resume = _typed(body, "autoResume", dict, {})
        if template in self._records.snapshots:
            if net.allowed_hosts:
                raise ApiError(400, "network: a snapshot keeps the hosts it was taken with")
            name = self.keeper.take(template, key)
        elif template in self.config.images:
            image = Image(root=self.config.images[template])
            name = await self.keeper.create(image, self.config.limits, net, key)
        else:
            known = ", ".join(self.config.images)
            raise ApiError(404, f"templateID={template!r}: choose from {known}, or a snapshot's id")
        old = self._records.get(name)
        if old is not None:  # the same key
            return self._created(old)
        record = Record(
            id=name,
            template=template,
            token=secrets.token_urlsafe(24),
            limits=self.config.limits,
            metadata=metadata,
            env=env,
            started_at=time.time(),
            end_at=time.time() + timeout_s,
            on_timeout=on_timeout,
            wakes_itself=bool(resume.get("enabled", False)),
        )
        self._add(record)
        try:
            await self._sessions[name].make_home()
        except SandboxError:
            await self.kill(name)
            raise
        return self._created(record)

    def page(self, query: Mapping[str, str]) -> tuple[list[Json], str | None]:
        """A page of sandboxes, latest first unless told otherwise, and the token of the next."""
        states = set(query.get("state", "running,paused").split(","))
        wanted = dict(urllib.parse.parse_qsl(urllib.parse.unquote(query.get("metadata", ""))))
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order={order!r}: must be asc or desc")
        after = query.get("startedAfter")
        try:
            since = 0.0 if after is None else datetime.fromisoformat(after).timestamp()
            limit = int(query.get("limit", "100"))
            start = int(base64.b64decode(query.get("nextToken", "") or "MA=="))
        except ValueError as error:
            raise ApiError(400, f"startedAfter, limit or nextToken: {error}") from None
        found = [
            record
            for record in self._records
            if _state(record) in states
            and wanted.items() <= dict(record.metadata).items()
            and record.started_at >= since
            and query.get("template", record.template) == record.template
            and (record.is_paused or record.end_at > time.time())
        ]
        found.sort(key=lambda record: record.started_at, reverse=order == "desc")
        page = found[start : start + max(1, min(limit, 100))]
        end = start + len(page)
        token = base64.b64encode(str(end).encode()).decode() if end < len(found) else None
        return [self.detail(record.id) for record in page], token

    def detail(self, sandbox_id: str) -> Json:
        """All that is known of a sandbox."""
        record = self._find(sandbox_id)
        return {
            **self._created(record),
            "startedAt": _moment(record.started_at),
            "endAt": _moment(record.end_at),
            "cpuCount": max(1, round(record.limits.cpus)),
            "memoryMB": record.limits.memory_bytes // MIB,
            "diskSizeMB": record.limits.disk_bytes // MIB,
            "state": _state(record),
            "metadata": dict(record.metadata),
            "lifecycle": {"onTimeout": record.on_timeout, "autoResume": record.wakes_itself},
        }

    async def connect(self, sandbox_id: str, body: Json) -> tuple[Json, bool]:
        """Resume it if it is paused (then True); a longer time to live holds from now."""
        if body.get("memory") is False:
            raise ApiError(400, "memory=false: a sandbox comes back as it was stored")
        record = self._find(sandbox_id)
        end_at = time.time() + self._timeout(body, self.config.default_timeout_s)
        if record.is_paused or end_at > record.end_at:
            self._records.change(sandbox_id, end_at=end_at)
        was_paused = await self._sessions[sandbox_id].resume()
        return self._created(record), was_paused

    async def pause(self, sandbox_id: str, body: Json) -> None:
        """Store it. `ApiError` 409 if it is."""
        self._find(sandbox_id)
        if body.get("memory") is False:
            raise ApiError(400, "memory=false: a driver keeps what it can; choose another driver")
        if not await self._sessions[sandbox_id].pause():
            raise ApiError(409, f"sandbox {sandbox_id} is paused already")

    def set_timeout(self, sandbox_id: str, body: Json, *, is_refresh: bool = False) -> None:
        """Let it live that long from now; a refresh never shortens."""
        record = self._find(sandbox_id)
        name = "duration" if is_refresh else "timeout"
        end_at = time.time() + self._timeout(body, self.config.default_timeout_s, name)
        if not is_refresh or end_at > record.end_at:
            self._records.change(sandbox_id, end_at=end_at)

    async def kill(self, sandbox_id: str) -> None:
        """End it for good."""
        self._find(sandbox_id)
        self._cpu.pop(sandbox_id, None)
        await self._sessions.pop(sandbox_id).kill()

    async def fork(self, sandbox_id: str, body: Json) -> list[Json]:
        """Copies that run on their own, commands included if the driver keeps memory."""
        record = self._find(sandbox_id)
        count = _typed(body, "count", int, 1)
        if not 1 <= count <= MAX_FORKS:
            raise ApiError(400, f"count={count}: must be between 1 and {MAX_FORKS}")
        timeout_s = self._timeout(body, self.config.default_timeout_s)
        commands = self._sessions[sandbox_id].commands
        before = record.commands or commands.started()  # the first if it was not woken yet
        made = []
        for name in await self.keeper.fork(sandbox_id, count):
            alive = record.commands or commands.started()
            branch = Record(
                id=name,
                template=record.template,
                token=secrets.token_urlsafe(24),
                limits=record.limits,
                metadata=record.metadata,
                env=record.env,
                started_at=time.time(),
                end_at=time.time() + timeout_s,
                on_timeout=record.on_timeout,
                wakes_itself=record.wakes_itself,
                commands=tuple(each for each in before if each in alive),
            )
            self._add(branch)
            await self._sessions[name].resume()
            made.append({"sandbox": self._created(branch)})
        return made

    async def snapshot(self, sandbox_id: str, body: Json) -> Json:
        """A snapshot that outlives its sandbox; its id is a template for `create`."""
        self._find(sandbox_id)
        if body.get("name"):
            raise ApiError(400, "name: snapshots go by their ids; leave it out")
        if body.get("memory") is False:
            raise ApiError(400, "memory=false: a driver keeps what it can; choose another driver")
        snapshot = await self.keeper.checkpoint(sandbox_id)
        if snapshot not in self._records.snapshots:
            self.keeper.store.pin(snapshot)
            self._records.set_snapshots([*self._records.snapshots, snapshot])
        return {"snapshotID": snapshot, "names": []}

    def snapshots(self) -> list[Json]:
        """All that clients made and did not delete."""
        return [{"snapshotID": each, "names": []} for each in self._records.snapshots]

    def delete_snapshot(self, snapshot: str) -> None:
        """Forget one; sandboxes made from it go on."""
        if snapshot not in self._records.snapshots:
            raise ApiError(404, f"snapshot {snapshot!r}: never made or deleted")
        self._records.set_snapshots([each for each in self._records.snapshots if each != snapshot])
        self.keeper.store.unpin(snapshot)

    def metrics(self, sandbox_id: str) -> list[Json]:
        """One sample, of now; none while it is stored or where its processes cannot be told."""
        record = self._find(sandbox_id)
        sandbox = self.keeper.peek(sandbox_id)
        usage = None if sandbox is None else sample(sandbox)
        if usage is None:
            return []
        now = time.time()
        then, cpu_s = self._cpu.get(sandbox_id, (record.started_at, 0.0))
        self._cpu[sandbox_id] = (now, usage.cpu_s)
        cores = record.limits.cpus
        share = max(0.0, usage.cpu_s - cpu_s) / max(now - then, 1e-3) / cores
        disk = os.statvfs(self.keeper.store.root)
        return [
            {
                "timestamp": _moment(now),
                "timestampUnix": int(now),
                "cpuCount": max(1, round(cores)),
                "cpuUsedPct": round(100 * share, 2),
                "memUsed": usage.memory_bytes,
                "memTotal": record.limits.memory_bytes,
                "memCache": 0,
                "diskUsed": usage.disk_bytes,
                "diskTotal": min(record.limits.disk_bytes, disk.f_blocks * disk.f_frsize),
            }
        ]

    def _timeout(self, body: Json, default_s: int, name: str = "timeout") -> int:
        timeout_s = _typed(body, name, int, default_s)
        if not 0 <= timeout_s <= MAX_TIMEOUT_S:
            raise ApiError(400, f"{name}={timeout_s}: must be between 0 and {MAX_TIMEOUT_S} s")
        return int(timeout_s)

    def _add(self, record: Record) -> None:
        self._records.put(record)
        self._sessions[record.id] = self._session(record)

    def _session(self, record: Record) -> Session:
        return Session(record, self.keeper, self._records, self.config.home)

    def _find(self, sandbox_id: str) -> Record:
        record = self._records.get(sandbox_id)
        if record is None:
            raise ApiError(404, f"sandbox {sandbox_id!r}: never made, killed or over its time")
        return record

    def _created(self, record: Record) -> Json:
        return {
            "templateID": record.template,
            "sandboxID": record.id,
            "clientID": "baltoro",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": record.token,
            "domain": None,
        }


def _state(record: Record) -> str:
    return "paused" if record.is_paused else "running"


def _moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat()


def _typed(body: Json, name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ApiError(400, f"{name}={value!r}: must be {kind.__name__}")
    return value


def _texts(body: Json, name: str) -> dict[str, str]:
    texts = _typed(body, name, dict, {})
    for key, value in texts.items():
        if not isinstance(value, str):
            raise ApiError(400, f"{name}.{key}={value!r}: must be str")
    return dict(texts)


def _net(body: Json) -> Net:
    network = _typed(body, "network", dict, {})
    allowed = network.get("allowOut") or []
    for name, value in network.items():
        if value and name not in ("allowOut", "denyOut"):
            raise ApiError(400, f"network.{name}: not supported here; leave it out")
    if not isinstance(allowed, list) or not all(isinstance(each, str) for each in allowed):
        raise ApiError(400, f"network.allowOut={allowed!r}: must be a list of host names")
    if body.get("allow_internet_access") and not allowed:
        raise ApiError(
            400,
            "allow_internet_access=true: sandboxes reach no network; name hosts in"
            " network.allow_out, or leave it out",
        )
    return Net(allowed_hosts=tuple(allowed))
