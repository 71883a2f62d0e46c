"""Keeps many sandboxes on little memory: freezes the idle, stores the long idle, wakes them.

A sandbox of the keeper has a name that outlives machines. It is `running`, `frozen` (memory
stays, no CPU) or `stored` (a snapshot, no process at all); `use` brings it back from wherever it
is. The journal, a file per name replaced by rename, is all a new keeper needs: it adopts every
stored sandbox, takes those that were running back to their last snapshot, and names the ones that
had none as lost.

    idle freeze_after_s           running -> frozen
    idle store_after_s, or memory below min_available_bytes (longest idle first)   -> stored
    use                           -> running
    time to live over             -> stored (or destroyed, if the policy says so)
    snapshot unused tidy_after_s  packed into chunks and flattened, in a thread of its own
"""

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from baltoro.sandbox.protocol import (
    Binding,
    Driver,
    Image,
    Limits,
    Net,
    Sandbox,
    SandboxError,
    SnapshotError,
)
from baltoro.sandbox.store import Store

log = logging.getLogger(__name__)
Place = Literal["running", "frozen", "stored"]
T = TypeVar("T")
MAX_LAYERS = 4  # of a snapshot that is tidied


@dataclass(frozen=True, kw_only=True, slots=True)
class KeeperPolicy:
    """When the keeper acts."""

    freeze_after_s: float = 5.0  # idle
    store_after_s: float = 60.0  # idle
    min_available_bytes: int = 2 << 30  # of the host; below it the idle are stored at once
    max_dumps: int = 1  # at the same time; each takes a core and memory bandwidth
    ttl_s: float | None = 3600.0  # since the last use; None: for ever
    ttl_action: Literal["store", "destroy"] = "store"
    tidy_after_s: float = 300.0  # of a snapshot, unused; to wake it then takes a little longer

    def __post_init__(self) -> None:
        if self.max_dumps < 1:
            raise ValueError(f"policy.max_dumps={self.max_dumps!r}: must be at least 1")
        if self.store_after_s < self.freeze_after_s:
            raise ValueError(
                f"policy.store_after_s={self.store_after_s!r}: must not be below"
                f" freeze_after_s={self.freeze_after_s!r}"
            )


@dataclass(kw_only=True)
class Kept:
    """One sandbox the keeper answers for."""

    name: str
    key: str | None  # of the request that made it
    snapshot: str | None = None  # the last one committed
    sandbox: Sandbox | None = None  # None: stored
    place: Place = "running"
    num_users: int = 0
    last_used: float = 0.0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalEntry:
    """What survives the keeper."""

    version: int = 1
    name: str
    key: str | None
    snapshot: str | None


class Keeper:
    """The sandboxes of one driver."""

    def __init__(
        self,
        driver: Driver,
        store: Store,
        journal: Path,
        policy: KeeperPolicy,
        *,
        clock: Callable[[], float] = time.monotonic,
        available_bytes: Callable[[], int] | None = None,
    ):
        journal.mkdir(parents=True, exist_ok=True)
        self.driver = driver
        self.store = store
        self.policy = policy
        self.lost: list[str] = []  # names that a dead keeper had running without a snapshot
        self._journal = journal
        self._clock = clock
        self._available_bytes = available_bytes or _available_bytes
        self._dumps = asyncio.Semaphore(policy.max_dumps)
        self._kept: dict[str, Kept] = {}
        self._counts: Counter[str] = Counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._tidying: asyncio.Task[None] | None = None

    async def adopt(self) -> list[str]:
        """Take over from a dead keeper: clean up after its driver, read its journal.

        Returns the names that can be used again; `lost` holds the others.
        """
        await self.driver.gc()
        self.store.recover()  # until now a dump of the dead keeper may have written into it
        for path in sorted(self._journal.glob("*.json")):
            data = json.loads(path.read_text())
            if data.get("version") != 1:
                raise SnapshotError(f"{path}: version={data.get('version')!r}, this build reads 1")
            entry = JournalEntry(**data)
            if entry.snapshot is None or entry.snapshot not in self.store.ids():
                self.lost.append(entry.name)
                path.unlink()
                continue
            self.store.pin(entry.snapshot)
            self._kept[entry.name] = Kept(
                name=entry.name,
                key=entry.key,
                snapshot=entry.snapshot,
                place="stored",
                last_used=self._clock(),
            )
        for path in self._journal.glob("*.work"):
            path.unlink()
        return sorted(self._kept)

    async def create(self, image: Image, limits: Limits, net: Net, key: str | None = None) -> str:
        """A new sandbox's name; the same `key` gives the same name, also after a restart."""
        for kept in self._kept.values():
            if key is not None and kept.key == key:
                return kept.name
        sandbox = await self._timed("create", self.driver.create(image, limits, net, key))
        for kept in self._kept.values():  # another request with this key was faster
            if key is not None and kept.key == key:
                return kept.name
        return self._keep(sandbox, key, None).name

    def take(self, snapshot: str, key: str | None = None) -> str:
        """A new name that is stored at a committed snapshot; `use` wakes it there.

        `SnapshotError` if there is no such snapshot. Whatever else came from it goes on unharmed.
        """
        self.store.get(snapshot)
        return self._keep(None, key, snapshot).name

    @contextlib.asynccontextmanager
    async def use(self, name: str, binding: Binding | None = None) -> AsyncIterator[Sandbox]:
        """The running sandbox of that name, woken if need be; it stays awake inside the block.

        With `binding`, a stored sandbox must have been stored at that place of its trajectory:
        `SnapshotError` otherwise, and it stays stored.
        """
        kept = self._find(name)
        async with kept.turn:
            sandbox = await self._wake(kept, binding)
            kept.num_users += 1
        try:
            yield sandbox
        finally:
            kept.num_users -= 1
            kept.last_used = self._clock()

    async def checkpoint(self, name: str, binding: Binding | None = None) -> str:
        """Snapshot a sandbox where it is; a crash from here on returns to it."""
        kept = self._find(name)
        async with kept.turn:
            if kept.sandbox is None:
                assert kept.snapshot is not None
                return kept.snapshot
            return await self._dump(kept, binding, is_last=False)

    async def fork(self, name: str, num_branches: int) -> list[str]:
        """Names of independent copies; the origin keeps its place."""
        kept = self._find(name)
        async with kept.turn:
            snapshot = kept.snapshot
            if kept.sandbox is not None:
                snapshot = await self._dump(kept, None, is_last=False)
            assert snapshot is not None
            branches = await self._timed("fork", self.driver.restore(snapshot, num_branches))
            return [self._keep(branch, None, snapshot).name for branch in branches]

    async def store_away(self, name: str, binding: Binding | None = None) -> str:
        """Turn a sandbox into a snapshot and free its memory; returns the snapshot's id."""
        kept = self._find(name)
        async with kept.turn:
            return await self._store_away(kept, binding)

    async def destroy(self, name: str) -> None:
        """End a sandbox and forget its name; its snapshot stays until the store needs room."""
        kept = self._find(name)
        async with kept.turn:
            if kept.sandbox is not None:
                await kept.sandbox.destroy()
            if kept.snapshot is not None:
                self.store.unpin(kept.snapshot)
            (self._journal / f"{name}.json").unlink(missing_ok=True)
            del self._kept[name]

    async def tick(self) -> None:
        """Look at every sandbox once, longest idle first. One that fails does not stop the rest."""
        for kept in sorted(self._kept.values(), key=lambda each: each.last_used):
            if kept.num_users or kept.turn.locked() or kept.name not in self._kept:
                continue
            try:
                await self._look_at(kept, self._clock() - kept.last_used)
            except SandboxError as error:
                log.error("sandbox %s: not frozen, stored or ended: %s", kept.name, error)
        if self._tidying is None or self._tidying.done():
            self._tidying = asyncio.create_task(asyncio.to_thread(self._tidy))

    async def run(self, interval_s: float = 1.0) -> None:
        """Tick until cancelled."""
        while True:
            await self.tick()
            await asyncio.sleep(interval_s)

    async def close(self) -> None:
        """Store every sandbox that lives, so that the next keeper finds it."""
        for kept in list(self._kept.values()):
            async with kept.turn:
                try:
                    await self._store_away(kept, None)
                except SandboxError as error:  # the others are stored
                    log.error("sandbox %s: not stored at the end: %s", kept.name, error)
        if self._tidying is not None:
            await self._tidying
        await self.driver.close()

    def place(self, name: str) -> Place:
        """Where a sandbox is now."""
        return self._find(name).place

    def peek(self, name: str) -> Sandbox | None:
        """The sandbox of that name to look at as it is, without waking it; None if stored."""
        return self._find(name).sandbox

    def metrics(self) -> str:
        """Prometheus text."""
        places = Counter(kept.place for kept in self._kept.values())
        lines = ["# TYPE baltoro_sandboxes gauge"]
        for place in ("running", "frozen", "stored"):
            lines.append(f'baltoro_sandboxes{{place="{place}"}} {places[place]}')
        verbs = ("create", "checkpoint", "restore", "fork", "tidy")
        for verb in verbs[:-1]:
            lines.append(f"# TYPE baltoro_sandbox_{verb}_seconds summary")
            lines.append(f"baltoro_sandbox_{verb}_seconds_sum {self._seconds[verb]:.6f}")
            lines.append(f"baltoro_sandbox_{verb}_seconds_count {self._counts[verb]}")
        lines.append("# TYPE baltoro_sandbox_failures_total counter")
        for verb in verbs:
            failures = self._counts[f"{verb}!"]
            lines.append(f'baltoro_sandbox_failures_total{{stage="{verb}"}} {failures}')
        usage = self.store.usage()
        for name, kind, value in (
            ("wrong_prefix_total", "counter", self._counts["wrong_prefix"]),
            ("frozen_seconds_total", "counter", round(self._seconds["frozen"], 6)),
            ("memory_bytes_dumped", "gauge", usage.logical_bytes),
            ("bytes_stored", "gauge", usage.stored_bytes),
            ("snapshots", "gauge", usage.num_snapshots),
        ):
            lines += [f"# TYPE baltoro_sandbox_{name} {kind}", f"baltoro_sandbox_{name} {value}"]
        return "\n".join(lines) + "\n"

    def _tidy(self) -> None:
        """Pack and flatten what was not used for long. What fails is counted and tried again."""
        to_pack, to_flatten = self.store.untidy(self.policy.tidy_after_s, MAX_LAYERS)
        for work, snapshots in ((self.store.pack, to_pack), (self.store.flatten, to_flatten)):
            for snapshot in snapshots:
                try:
                    work(snapshot)
                except SandboxError:  # evicted meanwhile, or the disk is full
                    self._counts["tidy!"] += 1

    async def _wake(self, kept: Kept, binding: Binding | None) -> Sandbox:
        if kept.sandbox is None:
            assert kept.snapshot is not None
            stored = self.store.get(kept.snapshot).binding
            if binding is not None and stored != binding:
                self._counts["wrong_prefix"] += 1
                raise SnapshotError(
                    f"sandbox {kept.name}: stored at {stored}, asked for at {binding};"
                    " restore the snapshot that belongs to this prefix"
                )
            (kept.sandbox,) = await self._timed("restore", self.driver.restore(kept.snapshot))
        elif kept.place == "frozen":
            await kept.sandbox.resume()
        kept.place = "running"
        return kept.sandbox

    async def _look_at(self, kept: Kept, idle_s: float) -> None:
        is_over = self.policy.ttl_s is not None and idle_s > self.policy.ttl_s
        if is_over and self.policy.ttl_action == "destroy":
            await self.destroy(kept.name)
        elif is_over or idle_s > self.policy.store_after_s or self._is_short():
            await self._try_store(kept)
        elif idle_s > self.policy.freeze_after_s and kept.place == "running":
            async with kept.turn:
                if kept.sandbox is not None and not kept.num_users:
                    await kept.sandbox.pause()
                    kept.place = "frozen"

    async def _try_store(self, kept: Kept) -> None:
        async with kept.turn:
            if not kept.num_users:
                await self._store_away(kept, None)

    async def _store_away(self, kept: Kept, binding: Binding | None) -> str:
        if kept.sandbox is not None:
            await self._dump(kept, binding, is_last=True)
            kept.sandbox = None
            kept.place = "stored"
        assert kept.snapshot is not None
        return kept.snapshot

    async def _dump(self, kept: Kept, binding: Binding | None, *, is_last: bool) -> str:
        assert kept.sandbox is not None
        async with self._dumps:
            mode: Literal["stop", "live"] = "stop" if is_last else "live"
            snapshot = await self._timed(
                "checkpoint", kept.sandbox.snapshot(mode, kept.snapshot, binding)
            )
        self._seconds["frozen"] += kept.sandbox.frozen_s
        old = kept.snapshot
        self.store.pin(snapshot)
        kept.snapshot = snapshot
        self._write(kept)
        if old is not None:
            self.store.unpin(old)
        return snapshot

    def _keep(self, sandbox: Sandbox | None, key: str | None, snapshot: str | None) -> Kept:
        name = uuid.uuid4().hex[:12]
        kept = Kept(
            name=name,
            key=key,
            snapshot=snapshot,
            sandbox=sandbox,
            place="stored" if sandbox is None else "running",
            last_used=self._clock(),
        )
        if snapshot is not None:
            self.store.pin(snapshot)
        self._kept[name] = kept
        self._write(kept)
        return kept

    def _write(self, kept: Kept) -> None:
        path = self._journal / f"{kept.name}.json"
        work = path.with_suffix(".work")
        entry = JournalEntry(name=kept.name, key=kept.key, snapshot=kept.snapshot)
        work.write_text(json.dumps(asdict(entry)))
        work.rename(path)

    def _find(self, name: str) -> Kept:
        if name not in self._kept:
            was_lost = name in self.lost
            reason = "lost with the keeper before" if was_lost else "never made or destroyed"
            raise SandboxError(f"sandbox {name!r}: {reason}")
        return self._kept[name]

    def _is_short(self) -> bool:
        return self._available_bytes() < self.policy.min_available_bytes

    async def _timed(self, verb: str, action: Awaitable[T]) -> T:
        start = time.monotonic()
        try:
            return await action
        except SandboxError:
            self._counts[f"{verb}!"] += 1
            raise
        finally:
            self._counts[verb] += 1
            self._seconds[verb] += time.monotonic() - start


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise SandboxError("/proc/meminfo has no MemAvailable")
