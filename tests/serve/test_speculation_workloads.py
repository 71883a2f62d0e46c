"""Random workloads with drafts against the toy: the text is that of one token per step."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve.test_workloads import run, workloads
from serve.toy import Toy, reply

from baltoro.serve.pages import CacheConfig
from baltoro.serve.scheduler import SchedulerConfig


def toy(*, max_step_tokens: int = 40, num_pages: int = 40, interval: int | None = None) -> Toy:
    """Pages of 8 tokens, hash blocks of 4, two groups, with drafts of up to 8 tokens."""
    cache = CacheConfig(
        num_pages=num_pages,
        page_size=8,
        hash_block=4,
        num_state_groups=2,
        retention_interval=interval,
    )
    scheduler = SchedulerConfig(max_running=4, max_step_tokens=max_step_tokens)
    return Toy(cache, scheduler, guesses=random.Random(0))


class Always(random.Random):
    """Drafts of so many tokens, all right."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def randint(self, a: int, b: int) -> int:
        return self.count


@settings(max_examples=150)
@given(workloads(), st.randoms(use_true_random=False))
def test_drafts_change_no_text(
    workload: tuple[Toy, list[tuple[int, str, tuple]]], guesses: random.Random
) -> None:
    served, events = workload
    served.guesses = guesses
    run(served, events)


@pytest.mark.slow
@settings(max_examples=4000)
@given(workloads(), st.randoms(use_true_random=False))
def test_drafts_change_no_text_in_thousands_of_workloads(
    workload: tuple[Toy, list[tuple[int, str, tuple]]], guesses: random.Random
) -> None:
    served, events = workload
    served.guesses = guesses
    run(served, events)


def test_every_accept_count_occurs() -> None:
    served = toy()
    for seed in range(12):
        served.serve([seed, 1, 2], 200)
    assert set(served.accepted) == set(range(9))


def test_a_turn_written_from_drafts_is_hit_where_one_without_them_would_be() -> None:
    prompt = [*range(11)]
    for count in range(1, 30):
        cached = []
        for guesses in (None, random.Random(count)):
            served = toy()
            served.guesses = guesses
            first = served.serve(prompt, count)
            second = served.serve([*first.tokens, 7, 7, 7], 3)
            cached.append(second.num_cached)
        assert cached[0] == cached[1] == (len(prompt) + count - 1) // 4 * 4


def test_states_at_intervals_are_kept_though_drafts_reach_beyond_them() -> None:
    served = toy(interval=4, num_pages=200)
    first = served.serve([*range(5)], 60)
    positions = {c.position for c in served.cache.device.checkpoints.values()}
    assert positions == set(range(4, len(first.tokens) - 1, 4)) | {(len(first.tokens) - 1) // 4 * 4}


def test_drafts_that_do_not_fit_the_step_are_left_out() -> None:
    served = toy(max_step_tokens=8)
    served.guesses = Always(3)
    prompts = [[n, 1, 2] for n in range(3)]
    sequences = [served.submit(prompt, 6 + 8 * n) for n, prompt in enumerate(prompts)]
    sizes: dict[int, set[int]] = {}
    while True:
        is_long = all(sequence.num_left > 3 for sequence in served.scheduler.running)
        plan = served.step()
        if plan is None:
            break
        drafts = [len(work.draft) for work in plan.decodes]
        if drafts and is_long:
            sizes.setdefault(len(drafts), set()).add(sum(drafts))
    assert sizes == {3: {0}, 2: {3}, 1: {3}}  # half of what is left of eight, whole or not at all
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert [token.id for token in sequence.new_tokens] == reply(
            prompt, sequence.request.max_new_tokens
        )


def test_prefills_go_on_beside_drafts() -> None:
    served = toy(max_step_tokens=10)
    running = [served.submit([n], 40) for n in range(3)]
    for _ in range(4):
        served.step()
    late = served.submit([*range(40)], 1)
    num_steps = 0
    while late.finish_reason is None:
        served.step()
        num_steps += 1
    assert num_steps <= 12  # at least four tokens a step are left to it
    assert all(sequence.new_tokens for sequence in running)


def test_a_draft_that_finds_no_page_takes_none_from_others() -> None:
    served = toy(num_pages=8)  # 4 state pages, and 4 for two times up to 16 tokens
    prompts = [[n, 2, 3, 4, 5, 6] for n in range(2)]
    sequences = [served.submit(prompt, 10) for prompt in prompts]
    served.drain()
    assert served.scheduler.num_preemptions == 0
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert [token.id for token in sequence.new_tokens] == reply(prompt, 10)


def test_a_draft_never_reaches_beyond_the_reply() -> None:
    served = toy()
    for count in range(1, 12):
        assert len(served.serve([1, 2, count], count).new_tokens) == count
