"""The keeper: idle sandboxes cost nothing, come back on demand, and outlive the keeper."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox import contract

from baltoro.sandbox.criu import Criu
from baltoro.sandbox.install import default_prefix
from baltoro.sandbox.keeper import MAX_LAYERS, Keeper, KeeperPolicy
from baltoro.sandbox.machine import MachineDriver
from baltoro.sandbox.process import ProcessDriver
from baltoro.sandbox.protocol import (
    Binding,
    DriverUnavailableError,
    Image,
    Limits,
    Net,
    SandboxError,
    SnapshotError,
)
from baltoro.sandbox.store import Store
from baltoro.sandbox.workload import World

POLICY = KeeperPolicy(freeze_after_s=5, store_after_s=60, ttl_s=1000, min_available_bytes=1)


class Host:
    """A clock and a host whose memory the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.available = 1 << 40


Body = Callable[[Keeper, Host, Image], Awaitable[None]]


def run_keeper(tmp_path: Path, body: Body, policy: KeeperPolicy = POLICY) -> None:
    (tmp_path / "image").mkdir(exist_ok=True)
    host = Host()

    async def main() -> None:
        store = Store(tmp_path / "store", 1 << 30, is_durable=False)
        driver = ProcessDriver(tmp_path / "boxes", store)
        keeper = Keeper(
            driver,
            store,
            tmp_path / "journal",
            policy,
            clock=lambda: host.now,
            available_bytes=lambda: host.available,
        )
        try:
            await keeper.adopt()
            await body(keeper, host, Image(root=tmp_path / "image"))
        finally:
            await driver.close()
            store.close()

    asyncio.run(main())


def test_idleness_freezes_then_stores_and_use_wakes(tmp_path):
    async def body(keeper, host, image):
        name = await keeper.create(image, Limits(), Net())
        async with keeper.use(name) as sandbox:
            await sandbox.write("file", b"kept")
        places = []
        for host.now in (4, 6, 61):
            await keeper.tick()
            places.append(keeper.place(name))
        assert places == ["running", "frozen", "stored"]
        assert list(keeper.driver.root.iterdir()) == []
        async with keeper.use(name) as sandbox:
            assert await sandbox.read("file") == b"kept"
        assert keeper.place(name) == "running"

    run_keeper(tmp_path, body)


def test_a_frozen_sandbox_wakes_in_place(tmp_path):
    async def body(keeper, host, image):
        name = await keeper.create(image, Limits(), Net())
        host.now = 6
        await keeper.tick()
        assert keeper.place(name) == "frozen"
        async with keeper.use(name) as sandbox:
            assert sandbox.state == "running"

    run_keeper(tmp_path, body)


@pytest.mark.parametrize("end", ["frozen", "stored", "closed"])
def test_a_sandbox_that_fails_does_not_keep_the_others_from_their_places(tmp_path, end):
    async def body(keeper, host, image):
        first, second = [await keeper.create(image, Limits(), Net()) for _ in range(2)]

        async def fail(*_):
            raise SandboxError("its machine failed")

        keeper.peek(first).pause = keeper.peek(first).snapshot = fail
        host.now = {"frozen": 6, "stored": 61, "closed": 0}[end]
        await (keeper.close() if end == "closed" else keeper.tick())
        assert keeper.place(first) == "running"
        assert keeper.place(second) == ("frozen" if end == "frozen" else "stored")
        assert keeper._tidying is not None or end == "closed"

    run_keeper(tmp_path, body)


def test_a_used_sandbox_is_never_idle(tmp_path):
    async def body(keeper, host, image):
        name = await keeper.create(image, Limits(), Net())
        async with keeper.use(name):
            host.now = 5000
            await keeper.tick()
            assert keeper.place(name) == "running"
        await keeper.tick()
        assert keeper.place(name) == "running"

    run_keeper(tmp_path, body)


def test_scarce_memory_stores_the_longest_idle_first(tmp_path):
    async def body(keeper, host, image):
        names = []
        for host.now in (0, 1, 2):
            names.append(await keeper.create(image, Limits(), Net()))
        store_away = keeper._store_away

        async def one_is_enough(kept, binding):
            host.available = 1 << 40
            return await store_away(kept, binding)

        keeper._store_away = one_is_enough
        host.available = 0
        await keeper.tick()
        assert [keeper.place(name) for name in names] == ["stored", "running", "running"]

    run_keeper(tmp_path, body)


def test_the_end_of_its_time_stores_or_destroys(tmp_path):
    async def stored(keeper, host, image):
        name = await keeper.create(image, Limits(), Net())
        host.now = 1001
        await keeper.tick()
        assert keeper.place(name) == "stored"

    async def destroyed(keeper, host, image):
        name = await keeper.create(image, Limits(), Net())
        host.now = 1001
        await keeper.tick()
        with pytest.raises(SandboxError, match="never made or destroyed"):
            keeper.place(name)

    run_keeper(tmp_path, stored)
    run_keeper(tmp_path, destroyed, KeeperPolicy(ttl_s=1000, ttl_action="destroy"))


def test_the_next_keeper_adopts_what_was_stored_and_names_what_was_lost(tmp_path):
    seen = {}

    async def first(keeper, host, image):
        seen["kept"] = await keeper.create(image, Limits(), Net(), key="episode")
        async with keeper.use(seen["kept"]) as sandbox:
            await sandbox.write("file", b"kept")
        await keeper.checkpoint(seen["kept"])
        seen["lost"] = await keeper.create(image, Limits(), Net())

    async def second(keeper, host, image):
        assert keeper.lost == [seen["lost"]]
        assert await keeper.create(image, Limits(), Net(), key="episode") == seen["kept"]
        async with keeper.use(seen["kept"]) as sandbox:
            assert await sandbox.read("file") == b"kept"
        with pytest.raises(SandboxError, match="lost with the keeper"):
            async with keeper.use(seen["lost"]):
                pass

    run_keeper(tmp_path, first)
    run_keeper(tmp_path, second)


def test_what_a_dead_keepers_dump_wrote_meanwhile_is_no_snapshot(tmp_path):
    async def body(keeper, host, image):
        sweep = keeper.driver.gc
        late = keeper.store.root / "payloads/late/memory"

        async def sweep_late():
            late.mkdir(parents=True)
            return await sweep()

        keeper.driver.gc = sweep_late
        await keeper.adopt()
        assert not late.parent.exists()

    run_keeper(tmp_path, body)


def test_a_wrong_prefix_is_refused_and_counted(tmp_path):
    async def body(keeper, host, image):
        name = await keeper.create(image, Limits(), Net())
        here = Binding(token_position=10, prefix_hash="a", policy_version=1)
        await keeper.store_away(name, here)
        there = Binding(token_position=11, prefix_hash="b", policy_version=1)
        with pytest.raises(SnapshotError, match="token_position=11"):
            async with keeper.use(name, there):
                pass
        assert keeper.place(name) == "stored"
        assert "baltoro_sandbox_wrong_prefix_total 1" in keeper.metrics()
        async with keeper.use(name, here):
            pass

    run_keeper(tmp_path, body)


def test_branches_have_names_of_their_own(tmp_path):
    async def body(keeper, host, image):
        name = await keeper.create(image, Limits(), Net())
        async with keeper.use(name) as sandbox:
            await sandbox.write("file", b"base")
        left, right = await keeper.fork(name, 2)
        async with keeper.use(left) as sandbox:
            await sandbox.write("file", b"left")
        await keeper.store_away(name)
        (again,) = await keeper.fork(name, 1)
        for each, text in ((left, b"left"), (right, b"base"), (again, b"base")):
            async with keeper.use(each) as sandbox:
                assert await sandbox.read("file") == text
        await keeper.destroy(left)
        metrics = keeper.metrics()
        assert 'baltoro_sandboxes{place="stored"} 1' in metrics
        assert 'baltoro_sandboxes{place="running"} 2' in metrics
        assert "baltoro_sandbox_fork_seconds_count 2" in metrics

    run_keeper(tmp_path, body)


def test_a_snapshot_is_taken_up_again_although_its_origin_went_on(tmp_path):
    async def body(keeper, host, image):
        origin = await keeper.create(image, Limits(), Net())
        async with keeper.use(origin) as sandbox:
            await sandbox.write("file", b"then")
        here = Binding(token_position=3, prefix_hash="a", policy_version=0)
        snapshot = await keeper.checkpoint(origin, here)
        async with keeper.use(origin) as sandbox:
            await sandbox.write("file", b"now")
        again = keeper.take(snapshot)
        assert keeper.place(again) == "stored"
        async with keeper.use(again, here) as sandbox:
            assert await sandbox.read("file") == b"then"
        async with keeper.use(origin) as sandbox:
            assert await sandbox.read("file") == b"now"
        with pytest.raises(SnapshotError, match="never committed"):
            keeper.take("none")

    run_keeper(tmp_path, body)


def test_snapshots_that_lie_unused_are_packed_beside_the_running_keeper(tmp_path):
    async def body(keeper, host, image):
        name = await keeper.create(image, Limits(), Net())
        snapshot = await keeper.store_away(name)
        packed = []
        keeper.store.untidy = lambda unused_s, max_layers: ([snapshot, "evicted"], [snapshot])
        keeper.store.pack, keeper.store.flatten = packed.append, keeper.store.get
        await keeper.tick()
        await keeper.close()
        assert packed == [snapshot, "evicted"]
        keeper.store.flatten = keeper.store.pack = keeper.store.get
        await keeper.tick()
        await keeper.close()
        assert 'failures_total{stage="tidy"} 1' in keeper.metrics()

    run_keeper(tmp_path, body)


def test_metrics_are_what_prometheus_reads(tmp_path):
    """Every sample has a type that was told once, above it; counters count, summaries sum up."""

    async def body(keeper, host, image):
        name = await keeper.create(image, Limits(), Net())
        await keeper.checkpoint(name)
        await keeper.fork(name, 1)
        kinds: dict[str, str] = {}
        values = {}
        for line in keeper.metrics().splitlines():
            if line.startswith("# TYPE "):
                _, _, metric, kind = line.split()
                assert metric not in kinds
                kinds[metric] = kind
                continue
            sample, value = line.rsplit(" ", 1)
            metric = sample.partition("{")[0]
            base = metric.removesuffix("_sum").removesuffix("_count")
            assert kinds[base if kinds.get(base) == "summary" else metric]
            values[sample] = float(value)
        assert values['baltoro_sandboxes{place="running"}'] == 2
        assert values["baltoro_sandbox_checkpoint_seconds_count"] == 2
        assert 0 < values["baltoro_sandbox_frozen_seconds_total"] < 5
        assert values["baltoro_sandbox_snapshots"] == 2

    run_keeper(tmp_path, body)


def test_policies_that_contradict_themselves_are_refused():
    with pytest.raises(ValueError, match="max_dumps=0"):
        KeeperPolicy(max_dumps=0)
    with pytest.raises(ValueError, match="store_after_s=1"):
        KeeperPolicy(freeze_after_s=2, store_after_s=1)


@pytest.mark.slow
def test_a_world_sleeps_in_chunks_of_one_layer_and_goes_on(tmp_path):
    """Packed and flattened while it sleeps, for more generations than layers may lie on another."""
    try:
        mechanism = Criu(default_prefix())
    except DriverUnavailableError as error:
        pytest.skip(str(error))

    async def main() -> None:
        store = Store(tmp_path / "store", 4 << 30, is_durable=False)
        driver = MachineDriver(mechanism, tmp_path / "boxes", store)
        policy = replace(POLICY, tidy_after_s=0.0)
        keeper = Keeper(driver, store, tmp_path / "journal", policy)
        name = await keeper.create(Image(root=contract.IMAGE), contract.LIMITS, Net())
        async with keeper.use(name) as sandbox:
            world = await World.start(sandbox, 10)
            await world.ask("x = 1")
        for turn in range(2, 8):
            snapshot = await keeper.store_away(name)
            assert list(driver.root.iterdir()) == []
            await keeper.tick()
            await keeper._tidying
            assert not (store.root / "payloads" / snapshot / "memory").exists()
            assert len(store.get(snapshot).layers) <= MAX_LAYERS
            async with keeper.use(name) as sandbox:
                world = await world.follow(sandbox)
                await world.ask("x += 1")
                assert await world.ask("x") == str(turn)
                assert await world.ask("whole()") == "True"
        await keeper.destroy(name)
        await driver.close()
        store.close()

    asyncio.run(main())
    assert not [each for each in contract.leftovers() if str(tmp_path) in each]
