"""Reports of other engines' prefix caches, each as a small case (`serving.md` 6, `cases.md` 6)."""

import random
from dataclasses import replace

import pytest
from serve.toy import Toy, reply

from baltoro.serve.pages import CacheConfig
from baltoro.serve.scheduler import SchedulerConfig
from baltoro.serve.tier import Tier

CONFIG = CacheConfig(num_pages=60, page_size=12, hash_block=4, num_state_groups=3)


def toy(max_running: int = 4, max_step_tokens: int = 64, **changes: object) -> Toy:
    return Toy(
        replace(CONFIG, **changes),  # type: ignore[arg-type]
        SchedulerConfig(max_running=max_running, max_step_tokens=max_step_tokens),
    )


def ids(count: int, seed: int = 0) -> list[int]:
    return [(seed * 17 + i * 7 + i * i) % 50 for i in range(count)]


def fill(engine: Toy) -> None:
    """Push everything cached out of the pool."""
    wanted = set(engine.cache.device.index)
    for seed in range(20, 50):
        if not wanted & set(engine.cache.device.index):
            return
        engine.serve(ids(200, seed))
    raise AssertionError("the pool is too large to be filled")


def test_a_resend_hits_all_but_the_last_block() -> None:
    engine = toy()
    engine.serve(ids(30))
    assert engine.serve(ids(30)).num_cached == 28


def test_an_aligned_prompt_is_hit_by_its_resend_and_by_its_extension() -> None:
    for more in (0, 1, 2, 9):  # vllm 50235
        engine = toy()
        engine.serve(ids(24))
        expected = 20 if more == 0 else 24
        assert engine.serve(ids(24) + ids(more, 5)).num_cached == expected


def test_a_second_turn_begins_where_the_first_one_ended() -> None:
    engine = toy()  # C01
    first = engine.serve(ids(21), 9)
    second = engine.serve([*first.tokens, *ids(5, 3)], 4)
    assert second.num_cached == 28  # 29 of 30 tokens were computed; the boundary below
    assert [token.id for token in second.new_tokens] == reply(first.tokens + ids(5, 3), 4)


def test_lengths_around_a_boundary_write_the_same_text() -> None:
    for length in (3, 4, 5, 11, 12, 13, 23, 24, 25):  # C05
        engine = toy()
        written = [[t.id for t in engine.serve(ids(length), 6).new_tokens] for _ in range(2)]
        assert written[0] == written[1] == reply(ids(length), 6)


def test_a_prompt_shorter_than_a_block_or_a_page_is_ordinary() -> None:
    engine = toy()  # sglang 26450
    for length in (1, 2, 3, 5, 11):
        assert engine.serve(ids(length)).finish_reason == "length"
    assert engine.serve(ids(3)).num_cached == 0
    assert engine.serve(ids(11)).num_cached == 8


def test_a_prefix_far_below_a_page_is_reused() -> None:
    engine = toy(page_size=96, num_pages=12)  # vllm 53749: silently inert below a page
    engine.serve(ids(9))
    assert engine.serve(ids(9)).num_cached == 8


def test_the_third_request_of_a_shared_prefix_hits_where_they_part() -> None:
    engine = toy()  # vllm 45238
    requests = [ids(40) + ids(10, seed) for seed in (1, 2, 3)]
    assert [engine.serve(prompt).num_cached for prompt in requests] == [0, 0, 40]
    assert engine.cache.stats.num_pages_without_state == 1


def test_an_interval_lets_the_second_request_hit() -> None:
    engine = toy(retention_interval=8)
    engine.serve(ids(40) + ids(10, 1))
    assert engine.serve(ids(40) + ids(10, 2)).num_cached == 40


def test_pages_without_their_state_are_no_hit() -> None:
    engine = toy()  # C04, vllm 43090
    engine.serve(ids(40))
    for checkpoint in list(engine.cache.device.checkpoints.values()):
        engine.cache.device.drop(checkpoint)
    again = engine.serve(ids(40), 5)  # the toy fails on a state that begins as something else
    assert again.num_cached == 0
    assert engine.cache.stats.kv_hit_tokens == 36


def test_a_state_never_outlives_its_latents() -> None:
    engine = toy()  # vllm 46453: a deeper state survived the tail of its latents
    for seed in range(4):
        engine.serve(ids(30) + ids(20, seed), 3)
    tier = engine.cache.device
    while tier.index:
        tier.drop(tier.victim())
        tier.audit([])  # asserts that the latents of every state are in the index
    assert not tier.checkpoints and tier.num_free == CONFIG.num_pages


def test_a_resend_does_not_evict_what_it_is_about_to_hit() -> None:
    engine = toy(num_pages=16)  # vllm 42948: A, B, A in a full pool
    engine.serve(ids(48, 1))
    engine.serve(ids(30, 2))
    again = engine.serve(ids(48, 1), 4)
    assert again.num_cached == 44
    assert [t.id for t in again.new_tokens] == reply(ids(48, 1), 4)


def test_a_hit_that_leaves_no_room_for_its_own_pages_is_given_up_not_waited_for() -> None:
    engine = toy(num_pages=8, value_weight=1000.0)
    engine.serve(ids(50))
    assert engine.serve(ids(50)).finish_reason == "length"


def test_a_state_that_finds_no_page_is_skipped() -> None:
    engine = toy(num_pages=4, page_size=64, hash_block=4)  # sglang 36770: asserted, 16 times a day
    assert engine.serve(ids(40), 6).finish_reason == "length"
    assert engine.cache.stats.num_states_skipped > 0
    assert engine.cache.stats.num_states_written == 0


def test_entries_of_a_step_are_hidden_until_the_next() -> None:
    engine = toy()
    chain_owner = engine.submit(ids(20))
    plan = engine.scheduler.plan()
    assert plan is not None
    assert engine.cache.lookup(chain_owner.chain, 20) == 0


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    engine = toy()
    sequences = [engine.submit(ids(41), 3) for _ in range(4)]
    engine.drain()
    assert [s.num_cached for s in sequences] == [0, 40, 40, 40]


def test_prompts_that_arrive_together_compute_what_they_share_once() -> None:
    engine = toy()
    sequences = [engine.submit(ids(40) + ids(9, seed), 3) for seed in range(1, 5)]
    engine.drain()
    assert [s.num_cached for s in sequences] == [0, 40, 40, 40]
    for seed, sequence in enumerate(sequences, 1):
        assert [t.id for t in sequence.new_tokens] == reply(ids(40) + ids(9, seed), 3)


def test_new_weights_hit_nothing() -> None:
    engine = toy()  # C06
    engine.serve(ids(30))
    engine.new_weights("2")
    assert engine.serve(ids(30)).num_cached == 0


def test_a_reply_that_began_under_old_weights_leaves_nothing_to_hit() -> None:
    engine = toy()  # R01
    sequence = engine.submit(ids(20), 20)
    for _ in range(6):
        engine.step()
    engine.new_weights("2")
    engine.drain()
    assert {token.weights_version for token in sequence.new_tokens} == {"1", "2"}
    assert engine.cache.lookup(sequence.chain, 40) == 0
    assert not engine.cache.device.index


def test_a_long_prefix_is_hit_under_drafts_whose_steps_end_anywhere() -> None:
    engine = toy(num_pages=200)  # vllm 55600: states were found by the wrong size beyond 8 blocks
    engine.guesses = random.Random(1)
    first = engine.serve(ids(130), 20)
    again = engine.serve([*first.tokens, *ids(7, 3)], 20)
    assert again.num_cached >= 9 * CONFIG.page_size
    assert [t.id for t in again.new_tokens] == reply([*first.tokens, *ids(7, 3)], 20)


def test_a_hit_from_both_memories_in_a_full_pool_takes_no_page_twice() -> None:
    num_both = 0
    for length in range(40, 150, 5):  # vllm 43884: what one group allocated was the other's hit
        engine = toy(num_pages=24, host_pages=200)
        engine.serve(ids(100))
        engine.serve(ids(length, 1))
        known = {page.tier for page in engine.cache._find(engine.submit(ids(100), 5).chain, 99)[0]}
        num_both += len(known) == 2
        engine.drain()  # the toy reads every page, and the account is audited at every step
        assert [t.id for t in engine.finished[-1].new_tokens] == reply(ids(100), 5)
    assert num_both > 2


def test_a_prefix_without_its_state_is_taken_over_in_no_group() -> None:
    engine = toy()  # vllm-ascend 14810: only the first group was cut to what all had
    engine.serve(ids(40))
    for checkpoint in list(engine.cache.device.checkpoints.values()):
        engine.cache.device.drop(checkpoint)
    cached = set(engine.cache.device.index.values())
    sequence = engine.submit(ids(40))
    engine.scheduler.plan()
    table = sequence.table
    assert table is not None and table.num_hit == 0
    own = [*table.kv_pages, *table.state_pages]
    assert len(set(own)) == len(own) == 4 + CONFIG.num_state_groups and not cached & set(own)
    engine.cache.audit()


def test_a_step_removes_no_more_than_it_needs_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy(num_pages=1500)  # sglang 30314: minutes in one step's evictions
    for seed in range(250):
        engine.serve(random.Random(seed).choices(range(50), k=30))
    assert engine.cache.device.num_free < 20
    drop, dropped = Tier.drop, list[object]()
    monkeypatch.setattr(Tier, "drop", lambda tier, item: (dropped.append(item), drop(tier, item)))
    large = engine.submit(ids(1000, 999))
    engine.step()
    assert large.table is not None and 0 < len(dropped) <= 1000 // CONFIG.page_size + 10


def test_what_comes_from_cpu_memory_comes_with_a_state_for_every_group() -> None:
    engine = toy(num_pages=30, host_pages=200)  # LMCache 4247: latents alone were handed over
    engine.serve(ids(40))
    fill(engine)
    sequence = engine.submit(ids(40), 3)
    plan = engine.scheduler.plan()
    assert plan is not None and sequence.table is not None and sequence.table.num_hit == 36
    loaded = [target for _, target in plan.ops.loads]
    assert set(sequence.table.state_pages) <= set(loaded)
    assert not set(sequence.table.state_pages) & set(plan.ops.resets)


def test_one_that_was_preempted_goes_on_from_cpu_memory() -> None:
    engine = toy(num_pages=24, max_running=2, host_pages=300)
    low = engine.submit(ids(60, 1), 60, priority=5)
    for _ in range(20):
        engine.step()
    engine.submit(ids(150, 2), 30)
    engine.drain()
    assert low.num_preemptions > 0 and engine.cache.stats.host_hit_tokens >= 60
    assert [t.id for t in low.new_tokens] == reply(ids(60, 1), 60)


def test_salts_do_not_share() -> None:
    engine = toy()
    for salt in ("a", "b"):
        sequence = engine.submit(ids(30), cache_salt=salt)
        engine.drain()
        assert sequence.num_cached == 0


def test_what_is_evicted_comes_back_from_cpu_memory_whole() -> None:
    engine = toy(num_pages=30, host_pages=200)  # sglang 33713, 39830
    engine.serve(ids(40))
    fill(engine)
    assert engine.cache.stats.host_hit_tokens == 0
    again = engine.serve(ids(40), 6)
    assert again.num_cached == engine.cache.stats.host_hit_tokens == 36
    assert [t.id for t in again.new_tokens] == reply(ids(40), 6)


def test_cpu_memory_that_is_full_keeps_what_was_used_last() -> None:
    engine = toy(num_pages=30, host_pages=30)
    for seed in range(8):
        engine.serve(ids(40, seed))
    engine.cache.audit()
    assert engine.serve(ids(40, 7)).num_cached == 36
    assert engine.serve(ids(40, 0)).num_cached == 0


def test_a_state_replaced_by_the_next_one_gives_its_pages_back() -> None:
    engine = toy(max_step_tokens=5)
    engine.serve(ids(40), 20)
    positions = sorted(c.position for c in engine.cache.device.checkpoints.values())
    assert positions == [36, 40, 56]  # two ends of an aligned prompt, and the turn's end


def test_page_numbers_are_all_different_after_a_preemption() -> None:
    engine = toy(num_pages=14, max_running=3)  # nano-vllm 211, mini-sglang 142
    sequences = [engine.submit(ids(20, seed), 30) for seed in range(3)]
    engine.drain()  # the account is audited at every step
    assert engine.scheduler.num_preemptions > 0
    for seed, sequence in enumerate(sequences):
        assert [t.id for t in sequence.new_tokens] == reply(ids(20, seed), 30)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 10}, "page_size=10: must be a multiple of hash_block=4"),
        ({"num_pages": 0}, "num_pages=0"),
        ({"retention_interval": 6}, "retention_interval=6"),
        ({"host_pages": -1}, "host_pages=-1"),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **changes)
