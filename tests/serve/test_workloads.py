"""Random workloads against the toy: whatever happens, the text is that of no cache at all."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve.toy import Toy, reply

from baltoro.serve.pages import CacheConfig
from baltoro.serve.scheduler import SchedulerConfig

BASES = [[(7 * base + i * (base + 1)) % 50 for i in range(60)] for base in range(3)]

small = st.integers(0, 1_000_000)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Toy, list[tuple[int, str, tuple]]]:
    """An engine of random sizes and events `(step, kind, details)`."""
    unit = draw(st.sampled_from([1, 2, 4, 8]))
    size = unit * draw(st.integers(1, 4))
    groups = draw(st.integers(1, 3))
    least = -(-80 // size) + groups  # the longest sequence alone
    max_running = draw(st.sampled_from([1, 1, 2, 3, 6]))
    max_step_tokens = max_running + draw(st.integers(1, 40))
    cache = CacheConfig(
        num_pages=least + draw(st.integers(0, 3 * least)),
        page_size=size,
        hash_block=unit,
        num_state_groups=groups,
        retention_interval=draw(st.sampled_from([None, None, unit, 2 * unit])),
        host_pages=draw(st.sampled_from([0, 5, 40, 200])),
        cold_pages=draw(st.sampled_from([None, None, 1, 2])),
        prefetch_pages=draw(st.sampled_from([0, 1, 3, 64])),
        value_weight=draw(st.sampled_from([0.0, 4.0, 64.0])),
    )
    scheduler = SchedulerConfig(
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        max_prefill_tokens=draw(st.sampled_from([None, 3 * max_step_tokens])),
        ageing_s=draw(st.sampled_from([1.0, 10.0])),
        max_skips=draw(st.integers(0, 3)),
        long_tokens=draw(st.sampled_from([40, 1000])),
    )
    events: list[tuple[int, str, tuple]] = []
    for number in range(draw(st.integers(1, 10))):
        base = BASES[draw(st.integers(0, 2))][: draw(st.integers(0, 55))]
        tail = [draw(st.integers(0, 49)) for _ in range(draw(st.integers(0 if base else 1, 3)))]
        step, count = draw(st.integers(0, 30)), draw(st.integers(1, 20))
        events.append((step, "submit", (number, base + tail, count, draw(st.integers(0, 2)))))
        if draw(st.integers(0, 5)) == 0:
            events.append((step + draw(st.integers(0, 12)), "abort", (number,)))
    if draw(st.integers(0, 5)) == 0:
        events.append((draw(st.integers(1, 40)), "weights", ()))
    return Toy(cache, scheduler), sorted(events, key=lambda event: event[0])


def run(toy: Toy, events: list[tuple[int, str, tuple]]) -> None:
    sequences: dict[int, tuple] = {}
    step, has_new_weights = 0, False
    while events or toy.scheduler.waiting or toy.scheduler.running:
        while events and events[0][0] <= step:
            _, kind, details = events.pop(0)
            if kind == "submit":
                number, prompt, count, priority = details
                sequences[number] = (toy.submit(prompt, count, priority=priority), prompt, count)
            elif kind == "abort" and details[0] in sequences:
                toy.abort(sequences[details[0]][0])
            elif kind == "weights":
                toy.new_weights("2")
                has_new_weights = True
        toy.step()
        step += 1
        assert step < 5000, "no progress"
    for sequence, prompt, count in sequences.values():
        assert sequence.finish_reason in ("length", "abort")
        if not has_new_weights:
            written = [token.id for token in sequence.new_tokens]
            assert written == reply(prompt, count)[: len(written)]
            assert len(written) == count or sequence.finish_reason == "abort"
    assert toy.cache.device.num_available == toy.cache_config.num_pages


@settings(max_examples=150)
@given(workloads())
def test_a_cache_changes_no_text(workload: tuple[Toy, list]) -> None:
    run(*workload)


def test_cpu_memory_that_is_written_twice_in_a_step_holds_what_came_last() -> None:
    cache = CacheConfig(
        num_pages=81,
        page_size=1,
        hash_block=1,
        num_state_groups=1,
        retention_interval=1,
        host_pages=5,
        cold_pages=1,
        value_weight=0.0,
    )
    limits = SchedulerConfig(max_running=3, max_step_tokens=4, max_skips=0)
    requests = [([0], 1), (list(range(28)), 1), ([0], 19), ([14, 17, 20, 0], 1), ([0], 1)]
    events = [(0, "submit", (n, *request, 0)) for n, request in enumerate(requests)]
    run(Toy(cache, limits), [*events, (18, "submit", (9, [14, 17, 20, 0, 0], 1, 0))])


@pytest.mark.slow
@settings(max_examples=4000)
@given(workloads())
def test_a_cache_changes_no_text_in_thousands_of_workloads(workload: tuple[Toy, list]) -> None:
    run(*workload)


@settings(max_examples=30)
@given(workloads())
def test_a_disabled_cache_reuses_nothing_and_changes_no_text(workload: tuple[Toy, list]) -> None:
    toy, events = workload
    toy = Toy(replace(toy.cache_config, is_enabled=False), toy.scheduler_config)
    run(toy, events)
    assert toy.cache.stats.kv_hit_tokens == toy.cache.stats.num_states_written == 0
