"""Prefixes that come back from CPU memory while their sequences still wait."""

from dataclasses import replace

import pytest
from serve.toy import Toy, reply

from baltoro.serve.pages import CacheConfig
from baltoro.serve.scheduler import MAX_AHEAD, SchedulerConfig

CONFIG = CacheConfig(
    num_pages=40, page_size=12, hash_block=4, num_state_groups=3, host_pages=2000, prefetch_pages=64
)


def ids(count: int, seed: int = 0) -> list[int]:
    return [(seed * 17 + i * 7 + i * i) % 50 for i in range(count)]


def cold(*seeds: int, busy: int = 30, **changes: object) -> Toy:
    """An engine with one place, which a long reply has, that knew some prompts once."""
    engine = Toy(
        replace(CONFIG, **changes),  # type: ignore[arg-type]
        SchedulerConfig(max_running=1, max_step_tokens=100),
    )
    for seed in seeds:
        engine.serve(ids(50, seed))
    for other in range(20, 40):
        engine.serve(ids(200, other))
    assert not set(engine.cache.device.checkpoints) & set(chains(engine, *seeds))
    engine.submit(ids(busy, 60), 40)
    engine.step()
    return engine


def chains(engine: Toy, *seeds: int) -> list[bytes]:
    """The names of these prompts' kept states."""
    found = []
    for seed in seeds:
        chain: list[bytes] = []
        sequence = Toy(engine.cache_config, engine.scheduler_config).submit(ids(50, seed))
        chain += sequence.chain
        found.append(chain[11])  # a block before the prompt's last token
    return found


def is_here(engine: Toy, seed: int) -> bool:
    (key,) = chains(engine, seed)
    return key in engine.cache.device.checkpoints


@pytest.mark.parametrize("cold_pages", [None, 1])
def test_who_waits_finds_its_prefix_in_the_pool(cold_pages: int | None) -> None:
    engine = cold(1, cold_pages=cold_pages)
    stats = engine.cache.stats
    waiting = engine.submit(ids(50, 1), 3)
    plan = engine.step()
    assert plan is not None and waiting.table is None
    num_pages = len(plan.ops.prefetches) + 3 * len(plan.ops.unpacks_ahead)
    assert num_pages == stats.num_prefetched == 4 + 3 and is_here(engine, 1)
    engine.abort(engine.scheduler.running[0])
    plan = engine.step()
    assert plan is not None and not plan.ops.loads and not plan.ops.unpacks
    assert waiting.num_cached == 48
    engine.drain()
    assert [token.id for token in waiting.new_tokens] == reply(ids(50, 1), 3)
    assert stats.host_hit_tokens == 48 and stats.num_states_hit == 1
    engine.serve(ids(50, 1))
    assert stats.host_hit_tokens == 48 and stats.num_states_hit == 2  # that one was in the pool


def test_a_step_fetches_no_more_than_it_may_and_latents_first() -> None:
    engine = cold(1, prefetch_pages=3)
    engine.submit(ids(50, 1), 3)
    fetched = []
    for _ in range(4):
        before = engine.cache.stats.num_prefetched
        engine.step()
        fetched.append((engine.cache.stats.num_prefetched - before, is_here(engine, 1)))
    assert fetched == [(3, False), (1, False), (3, True), (0, True)]


def test_all_who_wait_share_what_a_step_may_fetch() -> None:
    engine = cold(1, 2, prefetch_pages=9)
    for seed in (1, 2):
        engine.submit(ids(50, seed), 3)
    engine.step()
    assert engine.cache.stats.num_prefetched == 9 and is_here(engine, 1)
    engine.step()
    assert engine.cache.stats.num_prefetched == 14 and is_here(engine, 2)


def test_no_part_is_fetched_where_the_rest_will_find_no_room() -> None:
    engine = cold(1, busy=150, num_pages=22, prefetch_pages=1)
    engine.submit(ids(50, 1), 3)
    engine.step()
    assert engine.cache.device.num_available < 7 and engine.cache.stats.num_prefetched == 0


def test_a_state_of_more_pages_than_a_step_may_fetch_still_comes() -> None:
    engine = cold(1, prefetch_pages=1)
    engine.submit(ids(50, 1), 3)
    for _ in range(5):
        engine.step()
    assert is_here(engine, 1)


def test_nothing_is_fetched_where_nothing_may_be() -> None:
    engine = cold(1, prefetch_pages=0)
    waiting = engine.submit(ids(50, 1), 3)
    engine.step()
    assert engine.cache.stats.num_prefetched == 0 and not is_here(engine, 1)
    engine.drain()
    assert waiting.num_cached == 48 and engine.cache.stats.host_hit_tokens == 48


def test_the_first_in_the_queue_keep_what_was_fetched_for_them() -> None:
    engine = cold(*range(1, MAX_AHEAD + 3), num_pages=26)
    for seed in range(1, MAX_AHEAD + 3):
        engine.submit(ids(50, seed), 3)
    came = []
    for _ in range(12):
        engine.step()
        came.append([is_here(engine, seed) for seed in range(1, MAX_AHEAD + 3)])
    # a running reply has at least 6 of 26 pages, a prefix takes 7
    assert came[0][:2] == [True, True] and came[-1][:2] == [True, True]
    assert all(here[:2] == [True, True] for here in came), "they drive each other out"
    assert not any(here[MAX_AHEAD] or here[MAX_AHEAD + 1] for here in came)
    num_fetched = engine.cache.stats.num_prefetched
    assert num_fetched == 14, "pages go back and forth"


def test_what_is_fetched_for_one_who_leaves_stays_of_use() -> None:
    engine = cold(1)
    leaving = engine.submit(ids(50, 1), 3)
    engine.step()
    engine.abort(leaving)
    engine.drain()
    assert engine.serve(ids(50, 1)).num_cached == 48
    assert engine.cache.stats.host_hit_tokens == 48


def test_new_weights_while_pages_are_on_their_way_leave_nothing_behind() -> None:
    engine = cold(1)
    waiting = engine.submit(ids(50, 1), 3)
    engine.step()
    engine.new_weights("2")
    engine.drain()
    assert waiting.num_cached == 0
    assert [token.id for token in waiting.new_tokens] == reply(ids(50, 1), 3, "2")
