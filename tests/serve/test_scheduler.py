from dataclasses import replace

import pytest
from serve.toy import Toy

from baltoro.serve.pages import CacheConfig
from baltoro.serve.scheduler import Overloaded, SchedulerConfig

CACHE = CacheConfig(num_pages=400, page_size=12, hash_block=4, num_state_groups=1)


def toy(num_pages: int = 400, **limits: object) -> Toy:
    settings = {"max_running": 4, "max_step_tokens": 64, **limits}
    return Toy(replace(CACHE, num_pages=num_pages), SchedulerConfig(**settings))  # type: ignore[arg-type]


def ids(count: int, seed: int = 0) -> list[int]:
    return [(seed * 17 + i * 7 + i * i) % 50 for i in range(count)]


def test_those_that_decode_get_a_token_in_every_step() -> None:
    engine = toy(max_step_tokens=20)
    short = engine.submit(ids(4), 30)
    engine.step()
    engine.submit(ids(1000, 1))
    for _ in range(20):
        before = len(short.new_tokens)
        engine.step()
        assert len(short.new_tokens) == before + 1


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    engine = toy(max_step_tokens=40)  # sglang 34623, ATOM 1835, vllm 57413
    long = engine.submit(ids(4000), 1)
    for _ in range(3):
        engine.step()
    short = engine.submit(ids(18, 1), 1)
    for _ in range(2):
        engine.step()
    assert short.finish_reason == "length" and long.num_computed < 400


def test_prompts_of_one_length_come_to_their_first_tokens_one_after_the_other() -> None:
    engine = toy(max_running=8, max_step_tokens=128)
    sequences = [engine.submit(ids(50, seed), 99) for seed in range(8)]
    num_first = []
    for _ in range(5):
        engine.step()
        num_first.append(sum(bool(sequence.new_tokens) for sequence in sequences))
    # equal shares would bring all eight in the fourth step
    assert num_first[1] >= 2 and num_first[2] >= 4 and num_first[4] == 8


def test_a_long_prompt_goes_on_under_any_number_of_short_ones() -> None:
    engine = toy(max_running=6, max_step_tokens=64)
    long = engine.submit(ids(400), 1)
    for number in range(200):
        engine.submit(ids(40, number), 1)
    num_steps = 0
    while not long.finish_reason:
        before = long.num_computed
        engine.step()
        num_steps += 1
        # 64 // (4 * 6) tokens are promised in each step, up to a boundary of 4 in two
        assert long.num_computed > before and num_steps <= 200


def test_what_is_left_of_a_step_goes_to_the_higher_priority_first() -> None:
    engine = toy(max_running=2, max_step_tokens=40)
    low = engine.submit(ids(30), 1, priority=1)
    high = engine.submit(ids(90, 1), 1)
    engine.step()
    engine.step()
    assert high.num_computed > 40 and not low.finish_reason


def test_all_places_are_used_as_long_as_there_are_tokens() -> None:
    engine = toy(max_running=4, max_step_tokens=64)  # sglang 35537: a latch left the fourth outside
    sequences = [engine.submit(ids(60, seed), 40) for seed in range(4)]
    for _ in range(6):
        engine.step()
    assert all(sequence.new_tokens for sequence in sequences)


def test_every_step_goes_on_whatever_the_remainders_are() -> None:
    for budget in range(5, 30):  # 1Cat-vLLM 472
        engine = toy(max_step_tokens=budget)
        for seed in range(5):
            engine.submit(ids(5 + 7 * seed, seed), 3)
        engine.drain(max_steps=400)


def test_a_slice_ends_at_a_hash_boundary_where_it_can() -> None:
    engine = toy(max_step_tokens=10)
    sequence = engine.submit(ids(30))
    stops = []
    while sequence.finish_reason is None:
        engine.step()
        stops.append(sequence.num_computed)
    assert stops == [8, 16, 24, 30]  # the last keeps the state at 28 on its way


def test_a_sequence_that_does_not_fit_is_passed_but_not_forever() -> None:
    engine = toy(num_pages=30, max_skips=2)  # vllm 31731, 41951
    engine.submit(ids(200), 60)
    engine.step()
    big = engine.submit(ids(250, 1), 1)
    small = [engine.submit(ids(8, seed), 30) for seed in range(2, 6)]
    engine.step()
    started = [sequence.table is not None for sequence in small]
    assert big.num_skips == 2 and started == [True, True, False, False]
    engine.drain()
    assert big.finish_reason == "length"
    order = [sequence for sequence in engine.finished if sequence in (big, *small[2:])]
    assert order[0] is big


def test_one_that_was_preempted_keeps_its_place() -> None:
    engine = toy(num_pages=12, max_running=3)
    sequences = [engine.submit(ids(20, seed), 40) for seed in range(3)]
    engine.drain()
    assert engine.scheduler.num_preemptions > 0
    assert engine.finished == sequences


def test_priority_goes_before_arrival_and_takes_a_place_from_a_lower_one() -> None:
    engine = toy(max_running=1)
    low = engine.submit(ids(8), 200, priority=1)
    for _ in range(3):
        engine.step()
    high = engine.submit(ids(8, 1), 2, priority=0)
    engine.drain()
    assert engine.finished == [high, low] and low.num_preemptions == 1


def test_one_that_gave_way_does_not_come_back_before_the_higher_one() -> None:
    engine = toy(num_pages=34)
    low = [engine.submit(ids(150, seed), 30, priority=1) for seed in range(2)]
    for _ in range(3):
        engine.step()
    high = engine.submit(ids(300, 2), 1)
    for _ in range(3):
        engine.step()
    assert high.table is not None
    assert [sequence.num_preemptions for sequence in low] == [1, 1]
    engine.drain()


def test_waiting_makes_up_for_a_lower_priority() -> None:
    engine = toy(max_running=1, ageing_s=5.0)
    engine.submit(ids(8), 20)
    engine.step()
    low = engine.submit(ids(8, 1), 1, priority=1)
    engine.clock += 6.0
    high = engine.submit(ids(8, 2), 1, priority=0)
    engine.drain()
    assert engine.finished[1:] == [low, high]


def test_long_requests_leave_places_to_short_ones() -> None:
    engine = toy(max_running=4, long_tokens=100)
    long = [engine.submit(ids(200, seed), 5) for seed in range(4)]
    short = engine.submit(ids(8, 9), 1)
    engine.step()
    assert sum(sequence.table is not None for sequence in long) == 2
    assert short.table is not None or short.finish_reason == "length"
    engine.drain()


def test_a_full_queue_refuses_and_says_how_much_waits() -> None:
    engine = toy(max_running=1, max_queued=2, max_queued_tokens=1000)
    for _ in range(2):
        engine.submit(ids(8), 2)
    with pytest.raises(Overloaded) as refused:
        engine.submit(ids(8), 2)
    assert refused.value.queued_tokens == 20


def test_the_queue_counts_tokens_too_and_the_first_may_be_as_large_as_it_likes() -> None:
    engine = toy(max_queued_tokens=50)
    engine.submit(ids(60), 2)
    with pytest.raises(Overloaded, match="62 tokens"):
        engine.submit(ids(8), 2)
    engine.drain()
    engine.submit(ids(8), 2)


def test_what_is_expected_counts_not_what_is_allowed() -> None:
    engine = toy(max_queued_tokens=100)
    engine.submit(ids(8), 2)
    engine.submit(ids(8), 500, expected_new_tokens=20)
    assert engine.scheduler.queued_tokens == 38


def test_a_request_that_the_empty_pool_could_not_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 5 pages and the pool has 4"):
        toy(num_pages=4).submit(ids(40), 8)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_frees_everything_at_once(steps: int) -> None:
    engine = toy(max_step_tokens=10)  # sglang 36552, vllm 46289
    sequence = engine.submit(ids(15), 30)
    other = engine.submit(ids(15, 1), 3)
    for _ in range(steps):
        engine.step()
    engine.abort(sequence)
    engine.cache.audit()
    engine.drain()
    assert other.finish_reason == "length"
    assert engine.cache.device.num_available == 400 and engine.scheduler.queued_tokens == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_running", 0),
        ("max_step_tokens", 4),
        ("ageing_s", 0.0),
        ("max_skips", -1),
        ("max_long_running", 0),
    ],
)
def test_limits_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field}={value}"):
        toy(**{field: value})


def test_a_step_is_larger_where_nobody_waits_for_a_next_token() -> None:
    engine = toy(max_running=4, max_step_tokens=16, max_prefill_tokens=48)
    first = engine.submit(ids(40), 8)
    plan = engine.step()
    assert plan is not None and plan.num_tokens == 40 and first.is_decoding
    engine.submit(ids(40, 1), 1)
    plan = engine.step()
    assert plan is not None and plan.num_tokens <= 16 and len(plan.decodes) == 1
