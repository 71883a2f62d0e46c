"""The engine on real layers against whole forward passes without any cache."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model.tiny import VISION, tiny_k3, tiny_kimi_linear

from baltoro.model.config import ModelConfig
from baltoro.model.model import Model
from baltoro.serve.engine import Engine, EngineConfig, WeightsNotWhole
from baltoro.serve.prefix import MediaSpan
from baltoro.serve.request import Request, Sequence
from baltoro.serve.sampling import Penalties, Sampling
from baltoro.serve.scheduler import SchedulerConfig

GREEDY = Sampling(temperature=0.0)
TIE = 1e-4  # logits this near may change places when sums are taken in another order


def made(config: ModelConfig) -> Model:
    torch.manual_seed(1)
    model = Model(config).eval()
    for parameter in model.parameters():  # larger than at the start of training: sharper choices
        parameter.data.mul_(3.0)
    return model


TINY, LINEAR = made(tiny_k3()), made(tiny_kimi_linear())


def engine(model: Model = TINY, **changes: object) -> Engine:
    """An engine with small blocks, whose unwritten pages hold NaN."""
    limits = {key: changes.pop(key) for key in ("max_running", "max_step_tokens") if key in changes}
    scheduler = SchedulerConfig(**{"max_running": 4, "max_step_tokens": 32, **limits})  # type: ignore[arg-type]
    settings = {"pool_tokens": 2000, "hash_block": 4, "num_kept_states": 20, **changes}
    made_one = Engine(model, EngineConfig(scheduler=scheduler, **settings))  # type: ignore[arg-type]
    made_one.runner.pool.pages.fill_(255)
    return made_one


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


def assert_plain(model: Model, sequence: Sequence) -> None:
    """Every token is the likeliest of a whole forward pass, with that probability."""
    tokens = sequence.tokens
    bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
    with torch.no_grad():
        logprobs = model.lm_head(model(torch.tensor(tokens), bounds).hidden).log_softmax(-1)
    first = len(sequence.request.prompt_ids)
    for place, token in enumerate(sequence.new_tokens):
        row = logprobs[first + place - 1]
        assert row[token.id] >= row.max() - TIE, f"token {place}"
        assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-3)


def written(sequence: Sequence) -> list[int]:
    return [token.id for token in sequence.new_tokens]


@pytest.mark.parametrize("model", [TINY, LINEAR], ids=["k3", "kimi-linear"])
def test_a_reply_is_what_whole_forward_passes_choose(model: Model) -> None:
    for length in (1, 2, 5, 33, 70):
        (sequence,) = engine(model).generate([request(ids(length), 6)])
        assert_plain(model, sequence)


def test_one_slice_and_many_write_the_same() -> None:
    prompt = ids(128)  # C03
    replies = [
        written(engine(max_step_tokens=size).generate([request(prompt)])[0])
        for size in (512, 32, 7)
    ]
    assert replies[0] == replies[1] == replies[2]


def test_a_second_turn_is_written_as_without_a_cache() -> None:
    served = engine()
    (first,) = served.generate([request(ids(30), 12)])
    (second,) = served.generate([request(first.tokens + ids(7, 1), 12)])
    assert second.num_cached == 40
    assert_plain(TINY, second)


def test_a_batch_in_and_out_of_the_cache_repeats_itself() -> None:
    prompts = [ids(20, seed % 3) + ids(9, seed) for seed in range(8)]  # vllm 57267
    served = engine()
    runs = [[written(s) for s in served.generate(map(request, prompts))] for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]
    fresh = engine(is_caching=False, max_step_tokens=11)
    assert runs[0] == [written(s) for s in fresh.generate(map(request, prompts))]


def run_workload(seed: int, model: Model = TINY) -> Engine:
    """Random requests, sizes and aborts; every reply is checked and every page accounted for."""
    rng = random.Random(seed)
    max_running = rng.randint(1, 5)
    served = engine(
        model,
        max_running=max_running,
        max_step_tokens=max_running + rng.randint(1, 40),
        pool_tokens=rng.choice([60, 60, 150, 400]),
        num_kept_states=rng.choice([1, 1, 20]),
        hash_block=rng.choice([2, 4, 8]),
        host_bytes=rng.choice([0, 0, 200_000]),
        retention_interval=rng.choice([None, None, 16]),
    )
    bases = [ids(40, base) for base in range(2)]
    rate, todo = rng.choice([0.5, 1.0]), []
    for _ in range(rng.randint(2, 9)):
        prompt = rng.choice(bases)[: rng.randint(0, 24)] + ids(rng.randint(1, 9), rng.randrange(99))
        todo.append(request(prompt, rng.choice([1, 8, 40])))
    sequences: list[Sequence] = []
    for _ in range(2000):
        while todo and rng.random() < rate:
            sequences.append(served.submit(todo.pop()))
        if sequences and rng.random() < 0.02:
            served.abort(rng.choice(sequences))
        served.step()
        served.cache.audit()
        if served.is_idle and not todo:
            break
    assert served.is_idle
    for sequence in sequences:
        assert sequence.finish_reason in ("length", "abort")
        assert_plain(model, sequence)
    assert served.cache.device.num_available == served.cache.config.num_pages
    return served


@settings(max_examples=8)
@given(st.integers(0, 2**32))
def test_workloads_are_written_as_without_a_cache(seed: int) -> None:
    run_workload(seed)


@pytest.mark.slow
@pytest.mark.parametrize("model", [TINY, LINEAR], ids=["k3", "kimi-linear"])
def test_hundreds_of_workloads_are_written_as_without_a_cache(model: Model) -> None:
    totals = [0, 0, 0]
    for seed in range(100):
        served = run_workload(seed, model)
        totals[0] += served.cache.stats.agreed_hit_tokens
        totals[1] += served.scheduler.num_preemptions
        totals[2] += served.cache.stats.host_hit_tokens
    assert min(totals) > 0


def test_equal_seeds_draw_equal_text_alone_and_in_company() -> None:
    drawn = {"sampling": Sampling(temperature=1.0, top_p=0.9), "seed": 7}
    (alone,) = engine().generate([request(ids(9), 12, **drawn)])
    others = [request(ids(20 + n, n), 9, sampling=Sampling(), seed=n) for n in range(6)]
    together = engine(pool_tokens=60).generate([*others[:3], request(ids(9), 12, **drawn), *others])
    assert written(together[3]) == written(alone)
    (other,) = engine().generate([request(ids(9), 12, **{**drawn, "seed": 8})])
    assert written(other) != written(alone)


def test_a_stop_token_ends_the_reply_and_belongs_to_it() -> None:
    free = written(engine().generate([request(ids(9), 8)])[0])
    (sequence,) = engine().generate([request(ids(9), 8, stop_ids=frozenset({free[2]}))])
    assert written(sequence) == free[: free.index(free[2]) + 1]
    assert sequence.finish_reason == "stop"


def test_the_likeliest_tokens_are_reported_in_order() -> None:
    (sequence,) = engine().generate([request(ids(9), 3, num_logprobs=4)])
    for token in sequence.new_tokens:
        assert len(token.top) == 4 and token.top[0] == (token.id, token.logprob)
        assert [value for _, value in token.top] == sorted((v for _, v in token.top), reverse=True)


def test_a_frequency_penalty_lets_no_token_take_over() -> None:
    def most(penalties: Penalties) -> int:
        reply = written(engine().generate([request(ids(5), 40, penalties=penalties)])[0])
        return max(reply.count(token) for token in reply)

    assert most(Penalties(frequency=2.0)) < most(Penalties())


def test_logits_that_are_not_finite_end_that_reply_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = made(tiny_k3())
    served = engine(model)
    bad = served.submit(replace(request([1, 13, 2]), request_id="mine"))
    good = served.submit(request([1, 2, 3]))
    hook = model.lm_head.register_forward_hook(
        lambda _, __, logits: logits.index_fill(0, torch.tensor(0), float("nan"))
    )
    served.step()
    hook.remove()
    while not served.is_idle:
        served.step()
    assert bad.finish_reason == "error" and not bad.new_tokens
    assert good.finish_reason == "length"
    assert served.stats.num_corrupted == 1
    assert [record.getMessage()[:13] for record in caplog.records] == ["request mine:"]


def test_new_weights_in_the_middle_are_recorded_token_by_token() -> None:
    model = made(tiny_k3())
    served = engine(model)
    sequence = served.submit(request(ids(20), 10))
    for _ in range(5):
        served.step()
    served.update_weights("1", lambda model: model.lm_head.weight.data.neg_())
    while not served.is_idle:
        served.step()
    versions = [token.weights_version for token in sequence.new_tokens]
    assert versions == sorted(versions) and set(versions) == {"0", "1"}
    (again,) = served.generate([request(ids(20), 10)])
    assert again.num_cached == 0
    assert_plain(model, again)
    with pytest.raises(ValueError, match="version='1'"):
        served.update_weights("1", lambda model: None)


def test_pictures_with_equal_placeholders_are_not_mixed_up() -> None:
    model = made(tiny_k3(vision=VISION))
    served = engine(model, max_step_tokens=9)
    prompt = [5, 6, *[VISION.placeholder_token_id] * 12, *ids(9)]
    pictures = [torch.randn(12, 32), torch.randn(12, 32)]

    def seen(picture: int) -> Sequence:
        span = MediaSpan(2, 14, b"%d" % picture)
        features = pictures[picture]
        return served.generate([request(prompt, media=(span,), image_features=features)])[0]

    first, second, again = seen(0), seen(1), seen(0)
    assert second.num_cached == 0 and again.num_cached == 20
    assert written(first) == written(again)
    tokens = torch.tensor(first.tokens[:-1])
    bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
    with torch.no_grad():  # a placeholder that the model wrote itself is an ordinary token
        pad = VISION.placeholder_token_id
        own = model.embed_tokens.weight[[pad] * tokens[len(prompt) :].tolist().count(pad)]
        features = torch.cat([pictures[0], own])
        logits = model.lm_head(model(tokens, bounds, image_features=features).hidden)
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == written(first)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_served(dtype: torch.dtype) -> None:
    model = made(tiny_k3()).cast(dtype)
    if dtype is torch.float64:
        model = model.double()
    served = engine(model)
    for _ in range(2):
        (sequence,) = served.generate([request(ids(30), 6)])
        assert sequence.finish_reason == "length"
    assert sequence.num_cached == 28
    if dtype is torch.float64:
        assert_plain(model, sequence)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "no tokens"),
        ({"prompt": [64]}, "token id 64 is outside"),
        ({"count": 0}, "max_new_tokens=0"),
        ({"count": 10**7}, "exceed the context"),
        ({"count": 5000}, "the pool has"),
        ({"image_features": torch.zeros(1, 32)}, "takes only text"),
        ({"num_logprobs": -1}, "num_logprobs=-1"),
    ],
)
def test_what_cannot_be_served_is_refused(change: dict, message: str) -> None:
    options = {"prompt": [1, 2], "count": 4, **change}
    with pytest.raises(ValueError, match=message):
        engine().submit(request(**options))


def test_settings_out_of_range_are_named() -> None:
    for field in ("pool_tokens", "num_kept_states"):
        with pytest.raises(ValueError, match=f"{field}=0"):
            replace(EngineConfig(), **{field: 0})


def test_int8_states_without_memory_for_them_are_refused() -> None:
    with pytest.raises(ValueError, match="cold_states='int8': no CPU memory"):
        EngineConfig(cold_states="int8")


def test_weights_that_came_half_way_are_refused_until_they_are_whole() -> None:
    served = engine()
    running = served.submit(request(ids(9), 8))
    waiting = served.submit(request(ids(5), 8))
    served.step()

    def fails(model: Model) -> None:
        model.lm_head.weight.data.neg_()
        raise OSError("the trainer is gone")

    with pytest.raises(OSError, match="the trainer is gone"):
        served.update_weights("1", fails)
    with pytest.raises(WeightsNotWhole, match="from version '0' to '1' failed half way"):
        served.submit(request(ids(4), 2))
    assert dict(served.step()) == {running: None, waiting: None}
    assert running.finish_reason == waiting.finish_reason == "error"
    assert served.is_idle and served.step() == []
    served.update_weights("1", lambda model: model.lm_head.weight.data.neg_())
    (sequence,) = served.generate([request(ids(4), 2)])
    assert [token.weights_version for token in sequence.new_tokens] == ["1", "1"]
    with pytest.raises(OSError, match="the trainer is gone"):
        served.update_weights("2", fails)
    served.update_weights("1", lambda model: model.lm_head.weight.data.neg_())  # back to what was
    assert served.generate([request(ids(4), 2)])[0].new_tokens == sequence.new_tokens


@pytest.mark.parametrize("wrong", [-1, 64])
def test_an_id_outside_the_vocabulary_is_named(wrong: int) -> None:
    assert TINY.config.vocab_size == 64
    with pytest.raises(ValueError, match=f"token id {wrong} is outside the vocabulary of 64"):
        engine().submit(request([3, wrong, 5]))
