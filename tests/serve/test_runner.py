"""Decoding from rows that stay on the device, one step ahead, against separate eager calls."""

import gc
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model.tiny import VISION, tiny_k3, tiny_kimi_linear
from torch import Tensor

from baltoro.model.config import ModelConfig, gpu_impl
from baltoro.model.model import Model
from baltoro.model.presets import preset
from baltoro.serve.draft import SpeculationConfig
from baltoro.serve.engine import Engine, EngineConfig
from baltoro.serve.pages import Table
from baltoro.serve.prefix import MediaSpan
from baltoro.serve.request import Request, Sequence
from baltoro.serve.resident import OPERATORS, Place, ResidentBatch, ladder, waiting_operators
from baltoro.serve.sampling import Penalties, Sampling
from baltoro.serve.scheduler import SchedulerConfig
from baltoro.serve.thinking import ThinkingCap
from baltoro.text.markers import CLOSE, OPEN, SEP

GREEDY = Sampling(temperature=0.0)


def made(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Model:
    """In fp64, so that the order of sums decides no tie."""
    torch.manual_seed(1)
    model = Model(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3.0)
    return model.to(dtype)


TINY, LINEAR = made(tiny_k3()), made(tiny_kimi_linear())


def engine(decode: str, model: Model = TINY, **changes: object) -> Engine:
    """An engine with small blocks, whose unwritten pages hold NaN."""
    limits = {key: changes.pop(key) for key in ("max_running", "max_step_tokens") if key in changes}
    scheduler = SchedulerConfig(**{"max_running": 5, "max_step_tokens": 32, **limits})  # type: ignore[arg-type]
    options = {"pool_tokens": 2000, "hash_block": 4, "num_kept_states": 20, **changes}
    found = Engine(model, EngineConfig(scheduler=scheduler, decode=decode, **options))  # type: ignore[arg-type]
    found.runner.pool.pages[1:].fill_(255)
    return found


def request(prompt: list[int], count: int = 8, **options: object) -> Request:
    options = {"sampling": GREEDY, **options}
    return Request(
        request_id="r",
        prompt_ids=tuple(prompt),
        max_new_tokens=count,
        **options,  # type: ignore[arg-type]
    )


def ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(60), k=count)


def written(sequence: Sequence) -> list[int]:
    return [token.id for token in sequence.new_tokens]


def alone(model: Model, wanted: Request) -> Sequence:
    (sequence,) = engine("eager", model, is_caching=False).generate([wanted])
    return sequence


class EvenTokens:
    """A grammar, and the constraint of each reply: even ids alone."""

    def start(self) -> "EvenTokens":
        return self

    def mask(self, logits_W: Tensor) -> bool:
        logits_W[1::2] = -torch.inf
        return True

    def accept(self, token_id: int) -> bool:
        return token_id % 2 == 0

    def rollback(self, count: int) -> None:
        pass

    def is_free(self, count: int) -> bool:
        return False


class Marks:
    """A tokenizer of markers and two names."""

    def __init__(self) -> None:
        self.special_ids = {OPEN: 55, CLOSE: 56, SEP: 57}

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        return [56, 8, 57, 55, 9, 57]

    def token_bytes(self, token_id: int) -> bytes:
        return {8: b"think", 9: b"response"}.get(token_id, b"")


def capped(max_tokens: int) -> ThinkingCap:
    return ThinkingCap(Marks(), max_tokens)  # type: ignore[arg-type]


def test_there_is_a_size_for_every_number_of_rows() -> None:
    assert ladder(1) == (1,)
    assert ladder(8) == (1, 2, 4, 8)
    assert ladder(20) == (1, 2, 4, 8, 16, 20)


@pytest.mark.parametrize("model", [TINY, LINEAR], ids=["k3", "kimi-linear"])
def test_rows_on_the_device_write_what_eager_calls_write(model: Model) -> None:
    wanted = [request(ids(3 + 9 * n, n), 5 + 4 * n) for n in range(3)]
    wanted += [
        request(ids(12, n), 12, sampling=Sampling(temperature=0.9, top_k=9 + n), seed=n)
        for n in range(4)
    ]
    found = engine("resident", model).generate(wanted)
    for sequence, one in zip(found, wanted, strict=True):
        expected = alone(model, one)
        assert written(sequence) == written(expected)
        for token, other in zip(sequence.new_tokens, expected.new_tokens, strict=True):
            assert token.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_likeliest_tokens_are_reported_as_by_eager_calls() -> None:
    one = request(ids(9), 6, num_logprobs=3)
    (sequence,) = engine("resident").generate([one, request(ids(4))])[:1]
    expected = alone(TINY, one)
    for token, other in zip(sequence.new_tokens, expected.new_tokens, strict=True):
        assert [i for i, _ in token.top] == [i for i, _ in other.top]
        assert len(token.top) == 3


@pytest.mark.parametrize(
    "options",
    [{"grammar": EvenTokens()}, {"penalties": Penalties(frequency=1.5, repetition=1.2)}],
    ids=["grammar", "penalties"],
)
def test_a_reply_that_needs_the_host_keeps_all_from_going_ahead(options: dict) -> None:
    served = engine("resident")
    bound = request(ids(7), 6, **options)
    free = request(ids(11, 1), 14)
    found = [served.submit(bound), served.submit(free)]
    was_ahead = []
    while found[1].finish_reason is None:
        served.step()
        was_ahead.append((found[0].finish_reason is None, served.runner.is_ahead))
    assert not any(ahead for is_bound, ahead in was_ahead if is_bound)
    assert any(ahead for _, ahead in was_ahead)
    assert [written(sequence) for sequence in found] == [
        written(alone(TINY, one)) for one in (bound, free)
    ]


def test_a_capped_thought_keeps_all_from_going_ahead_only_while_it_is_ended() -> None:
    served = engine("resident")
    wanted = [request(ids(9), 24, grammar=capped(6)), request(ids(7, 1), 24)]
    sequences = [served.submit(one) for one in wanted]
    was_ahead: dict[int, bool] = {}
    while not served.is_idle:
        served.step()
        was_ahead[len(sequences[0].new_tokens)] = served.runner.is_ahead
    assert written(sequences[0])[6:12] == Marks().encode("")
    # who draws ahead must know of two tokens that nothing binds them
    assert [n for n, is_ahead in was_ahead.items() if not is_ahead] == [*range(6, 13), 24]
    assert [written(s) for s in sequences] == [written(alone(TINY, one)) for one in wanted]


def test_a_stop_token_ends_a_reply_whose_next_token_was_computed_ahead() -> None:
    plain = written(alone(TINY, request(ids(9), 12)))
    stop = plain[5]
    one = request(ids(9), 12, stop_ids=frozenset({stop}))
    served = engine("resident")
    first, second = served.generate([one, request(ids(13, 1), 12)])
    assert written(first) == plain[: plain.index(stop) + 1] and first.finish_reason == "stop"
    assert written(second) == written(alone(TINY, request(ids(13, 1), 12)))
    assert served.cache.device.num_available == served.cache.config.num_pages


def test_no_page_is_had_ahead_for_a_reply_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    served = engine("resident")
    size, grow, lengths = served.layout.page_size, served.cache.grow, list[int]()

    def watched(table: Table, num_tokens: int) -> bool:
        lengths.append(num_tokens)
        return grow(table, num_tokens)

    monkeypatch.setattr(served.cache, "grow", watched)
    served.generate([request(ids(size - 2), 3)])
    assert max(lengths) == size  # the third token is drawn and never computed


def test_a_picture_s_last_row_behind_a_cached_prefix_is_seen() -> None:
    model = made(tiny_k3(vision=VISION))
    served = engine("resident", model)
    for seed in range(2):
        features = torch.randn(1, 32, generator=torch.Generator().manual_seed(seed)).double()
        one = request(
            [*ids(8), 60],
            6,
            image_features=features,
            media=(MediaSpan(8, 9, bytes([seed])),),
        )
        (sequence,) = served.generate([one])
        assert sequence.num_cached == (8 if seed else 0)
        expected = alone(model, one)
        assert written(sequence) == written(expected)
        logprobs = [[t.logprob for t in s.new_tokens] for s in (sequence, expected)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-5)
    assert served.runner.missed_tokens["pictures"] > 0  # fixed rows have no room for them


def test_text_behind_a_picture_is_read_in_fixed_rows() -> None:
    model = made(tiny_k3(vision=VISION))
    served = engine("resident", model, max_step_tokens=128)
    features = torch.randn(1, 32, generator=torch.Generator().manual_seed(0)).double()
    media = (MediaSpan(8, 9, b"a"),)
    for count in (8, 20):
        prompt = [*ids(8), 60, *ids(count, 1)]
        one = request(prompt, 6, image_features=features, media=media)
        missed = served.runner.missed_tokens["pictures"]
        (sequence,) = served.generate([one])
        assert written(sequence) == written(alone(model, one))
        assert (served.runner.missed_tokens["pictures"] == missed) == (count == 20)
    assert sequence.num_cached > 8


@settings(max_examples=4)
@given(st.integers(0, 2**32))
def test_random_workloads_are_written_as_alone(seed: int) -> None:
    run_workload(random.Random(seed))


def test_what_was_computed_ahead_for_a_sequence_without_its_pages_is_dropped() -> None:
    assert run_workload(random.Random(6)) > 0  # one was preempted


@pytest.mark.slow
def test_many_random_workloads_are_written_as_alone() -> None:
    assert sum(run_workload(random.Random(seed)) for seed in range(80)) > 10


def run_workload(draws: random.Random) -> int:
    """Requests that come at any time, in a pool too small for all; how often one was preempted."""
    served = engine(
        "resident",
        pool_tokens=draws.choice([8, 20, 60, 300]),
        num_kept_states=draws.choice([1, 1, 6]),
        max_running=draws.randint(2, 4),
        max_step_tokens=draws.randint(8, 40),
        host_bytes=draws.choice([0, 1 << 20]),
    )
    prefix, sequences = ids(24, draws.randrange(3)), list[Sequence]()
    left = draws.randint(3, 6)
    while left or not served.is_idle:
        if left and draws.random() < 0.7:
            prompt = prefix[: draws.randrange(25)] + ids(draws.randint(1, 9), draws.randrange(99))
            kind = draws.random()
            sampling = GREEDY if kind < 0.5 else Sampling(temperature=0.8, top_p=0.9)
            options = {"grammar": EvenTokens()} if kind > 0.95 else {}
            options |= {"grammar": capped(draws.randint(1, 9))} if kind < 0.15 else {}
            one = request(prompt, draws.randint(1, 30), sampling=sampling, seed=left, **options)
            sequences.append(served.submit(one))
            left -= 1
        if sequences and draws.random() < 0.02:
            served.abort(draws.choice(sequences))
        served.step()
        served.cache.audit()
    for sequence in sequences:
        expected = written(alone(TINY, sequence.request))
        if sequence.finish_reason == "abort":
            expected = expected[: len(sequence.new_tokens)]
        assert written(sequence) == expected
    assert served.cache.device.num_available == served.cache.config.num_pages
    return served.scheduler.num_preemptions


def test_a_token_computed_ahead_has_the_version_of_its_weights() -> None:
    served = engine("resident")
    sequence = served.submit(request(ids(9), 8))
    for _ in range(3):
        served.step()
    count = len(sequence.new_tokens) + 1
    served.update_weights("1", lambda model: None)
    while sequence.finish_reason is None:
        served.step()
    assert [token.weights_version for token in sequence.new_tokens] == (
        ["0"] * count + ["1"] * (8 - count)
    )


def test_an_idle_engine_keeps_no_sequence_alive() -> None:
    served = engine("resident", max_step_tokens=80)
    stop = written(alone(TINY, request(ids(9), 6)))[-1]
    one = replace(request(ids(9), 12, stop_ids=frozenset({stop})), request_id="watched")
    served.generate([one])
    sequence = served.submit(replace(request(ids(7), 30), request_id="watched"))
    for _ in range(4):
        served.step()
    served.abort(sequence)
    del sequence
    gc.collect()
    left = [found for found in gc.get_objects() if type(found) is Sequence]
    assert not any(found.request.request_id == "watched" for found in left)


def test_drafts_and_unknown_forms_are_refused() -> None:
    with pytest.raises(ValueError, match="decode='resident': its steps have one token"):
        EngineConfig(decode="resident", speculation=SpeculationConfig(draft="ngram"))
    with pytest.raises(ValueError, match="decode='lazy': must be 'eager' or 'resident'"):
        EngineConfig(decode="lazy")  # type: ignore[arg-type]


def test_operators_that_a_graph_cannot_hold_are_named() -> None:
    plain, kernels = tiny_k3(), preset("nano")
    assert waiting_operators(plain, OPERATORS) == [
        "kda_decode='torch'",
        "attention_decode='torch'",
        "moe='torch'",
    ]
    assert waiting_operators(replace(kernels, impl=gpu_impl(kernels)), OPERATORS) == []
    dense = replace(plain, moe=None)
    assert "moe='torch'" not in waiting_operators(dense, OPERATORS)


@pytest.mark.gpu
def test_rows_without_kernels_are_refused_before_a_graph_is_begun() -> None:
    with torch.device("cuda"):
        model = Model(tiny_k3()).eval()
    with pytest.raises(ValueError, match="decode='resident': kda_decode='torch', attention"):
        Engine(model, EngineConfig(decode="resident"))


def on_the_gpu() -> Model:
    """nano's shape without sight, in bf16, on kernels."""
    config = preset("nano")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Model(replace(config, vision=None, impl=gpu_impl(config))).eval()
    return model.cast(torch.bfloat16)


@pytest.mark.gpu
def test_a_graph_computes_what_the_same_calls_compute() -> None:
    model = on_the_gpu()
    served = Engine(
        model,
        EngineConfig(decode="resident", scheduler=SchedulerConfig(max_running=6)),
    )
    batch = served.runner.batch
    assert batch is not None and set(batch.sizes) == {1, 2, 4, 6}
    draws = random.Random(0)
    sequences = [
        served.submit(request(draws.choices(range(400), k=20 + 31 * n), 40)) for n in range(5)
    ]
    while any(len(sequence.new_tokens) < 3 for sequence in sequences):
        served.step()
    plain = ResidentBatch(model, served.runner.pool, 6)
    places = [Place(s.table, s.num_computed, s.tokens[-1]) for s in sequences if s.table]
    pages = served.runner.pool.pages.clone()
    plain.place(places)
    expected = plain.run(5).clone()
    served.runner.pool.pages.copy_(pages)
    batch.place(places)
    assert torch.allclose(batch.run(5), expected, atol=2e-2, rtol=0.0)
    assert expected.isfinite().all()


@pytest.mark.gpu
def test_graphs_write_what_eager_calls_write_but_for_near_ties() -> None:
    model = on_the_gpu()
    draws = random.Random(0)
    wanted = [
        request(draws.choices(range(400), k=9 + 70 * n), 30, num_logprobs=2) for n in range(7)
    ]
    found = {}
    for decode in ("resident", "eager"):
        limits = SchedulerConfig(max_running=5)
        served = Engine(model, EngineConfig(decode=decode, scheduler=limits))  # type: ignore[arg-type]
        found[decode] = served.generate(wanted)
    for sequence, other in zip(found["resident"], found["eager"], strict=True):
        for token, expected in zip(sequence.new_tokens, other.new_tokens, strict=True):
            best, second = expected.top
            if token.id != expected.id:
                assert best[1] - second[1] < 0.1
                break
            assert token.logprob == pytest.approx(expected.logprob, abs=0.1)
