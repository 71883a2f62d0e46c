"""Drafts on real layers: text, states and pages are those of one token per step."""

import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
import torch
from model.tiny import tiny_k3, tiny_kimi_linear
from serve.test_engine import GREEDY, TIE, TINY, assert_plain, engine, ids, made, request, written
from torch import Tensor
from torch.nn.functional import cross_entropy

from baltoro.model.model import Model
from baltoro.serve.draft import MAX_DRAFT_TOKENS, Seen, SpeculationConfig
from baltoro.serve.engine import Engine, EngineConfig
from baltoro.serve.form import Form, Tool
from baltoro.serve.grammar import Grammars
from baltoro.serve.metrics import Metrics
from baltoro.serve.request import Sequence
from baltoro.serve.sampling import Penalties, Sampling
from baltoro.text.channels import parse_ids

DOUBLE = made(tiny_k3()).double()  # sums in another order change no choice
LINEAR = made(tiny_kimi_linear()).double()
MTP = made(tiny_k3(num_mtp_layers=1)).double()
DRAWN = Sampling(temperature=1.0, top_p=0.95)


class Script:
    """Drafts whose first tokens are right and whose other ones are wrong."""

    def __init__(
        self, replies: list[Sequence], right: int | Callable[[], int], count: int = MAX_DRAFT_TOKENS
    ) -> None:
        self.replies = {s.request.prompt_ids: written(s) for s in replies}
        self.right = right if callable(right) else lambda: right
        self.count = count

    def propose(self, sequences: list[Sequence]) -> list[list[int]]:
        drafts = []
        for sequence in sequences:
            reply = self.replies.get(sequence.request.prompt_ids, [])
            first, right = len(sequence.new_tokens), self.right()
            draft = reply[first : first + self.count]
            wrong = [(token + 1) % 60 for token in draft[right:]]
            drafts.append(draft[:right] + wrong)
        return drafts

    def observe(self, seen: list[Seen]) -> None:
        for sequence, start, mixture in seen:
            assert start + len(mixture) == sequence.num_computed

    def rest(self) -> None:
        """Nothing is remembered of a sequence."""


def double(model: Model = DOUBLE, **changes: object) -> Engine:
    return engine(model, **changes)


def assert_same(model: Model, sequence: Sequence, plain: Sequence) -> None:
    """Equal ids, or a first difference between two logits that are as good as equal."""
    pairs = zip(written(sequence), written(plain), strict=True)
    place = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        return
    tokens = torch.tensor(plain.tokens[: len(plain.request.prompt_ids) + place])
    bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
    with torch.no_grad():
        logits = model.lm_head(model(tokens, bounds).hidden[-1])
    gap = abs(float(logits[written(sequence)[place]] - logits[written(plain)[place]]))
    assert gap < TIE, f"token {place} differs, and its logits by {gap}"


def kept(served: Engine, sequence: Sequence) -> dict[str, Tensor]:
    """All that a sequence and the checkpoints hold, by what it is."""
    pool, table = served.runner.pool, sequence.table
    assert table is not None
    found = {"pages": torch.tensor(len(table.kv_pages))}
    for layer_idx in served.layout.mla_layers:
        rows = pool.latents(layer_idx)[table.kv_pages].flatten(0, 1)
        found[f"latents {layer_idx}"] = rows[: sequence.num_computed]
    owners = {"own": table.state_pages}
    owners |= {str(c.position): c.state_pages for c in served.cache.device.checkpoints.values()}
    for owner, pages in owners.items():
        for layer_idx in served.layout.kda_layers:
            group, (windows, states) = pool.states(layer_idx)
            found[f"window {layer_idx} {owner}"] = windows[pages[group]]
            found[f"state {layer_idx} {owner}"] = states[pages[group]]
    return {name: tensor.clone() for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("model", "counts"), [(DOUBLE, range(1, 9)), (LINEAR, (3, 8))], ids=["k3", "kimi-linear"]
)
def test_every_accept_count_leaves_the_states_and_pages_of_sequential_decode(
    model: Model, counts: Iterable[int]
) -> None:
    prompt = ids(26)  # C08; eight tokens further there are two hash boundaries
    (whole,) = double(model).generate([request(prompt, 20)])
    plain = double(model)
    sequence = plain.submit(request(prompt, 20))
    after: list[tuple[list[int], dict[str, Tensor]]] = []
    while len(after) <= MAX_DRAFT_TOKENS:
        plain.step()
        if len(sequence.new_tokens) > 1:
            after.append((list(sequence.tokens), kept(plain, sequence)))
    for count in counts:
        for right in range(count + 1):
            served = double(model)
            served.draft = Script([whole], right, count)
            sequence = served.submit(request(prompt, 20))
            while len(sequence.new_tokens) < 2:
                served.step()
            assert served.stats.accepted_tokens == right and served.stats.draft_tokens == count
            tokens, expected = after[right]
            found = kept(served, sequence)
            assert sequence.tokens == tokens and found.keys() == expected.keys()
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-11, msg=name)
            served.cache.audit()


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_every_accept_count_writes_the_same_reply(sampling: Sampling) -> None:
    asked = {"sampling": sampling, "seed": 3, "num_logprobs": 3}
    (plain,) = double().generate([request(ids(30), 40, **asked)])
    for right in range(MAX_DRAFT_TOKENS + 1):
        served = double()
        served.draft = Script([plain], right)
        (sequence,) = served.generate([request(ids(30), 40, **asked)])
        assert written(sequence) == written(plain)
        for token, other in zip(sequence.new_tokens, plain.new_tokens, strict=True):
            assert token.logprob == pytest.approx(other.logprob, abs=1e-6)
            assert [i for i, _ in token.top] == [i for i, _ in other.top]
        assert served.stats.new_tokens == 40
        # two steps for the prompt, and each further one brings the right ones and one more
        assert served.stats.num_steps == 1 + -(-39 // (right + 1))
        assert set(served.stats.accepted_at) == set(range(right))


@pytest.mark.parametrize("draft", ["ngram", pytest.param("mtp", marks=pytest.mark.slow)])
def test_256_greedy_tokens_are_those_without_drafts(draft: str) -> None:
    model = made(tiny_k3(num_mtp_layers=1))  # C09, in fp32
    copied = ids(24) * 2  # what an edit looks like: vllm 39273
    (plain,) = engine(model).generate([request(copied, 256)])
    served = engine(model, speculation=SpeculationConfig(draft=draft))
    (sequence,) = served.generate([plain.request])
    assert_same(model, sequence, plain)
    assert served.stats.num_drafts > 0


def trained() -> Model:
    """A model with an MTP layer that learned one line by heart."""
    torch.manual_seed(1)
    model = Model(tiny_k3(num_mtp_layers=1, moe=None))
    line = torch.tensor(ids(12) * 4)
    bounds = torch.tensor([0, len(line) - 1], dtype=torch.int32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(50):
        out = model(line[:-1], bounds)
        further = model.predict_next(line[1:], out.mixture, bounds).hidden[:-1]
        loss = cross_entropy(model.lm_head(out.hidden), line[1:])
        loss = loss + cross_entropy(model.lm_head(further), line[2:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def test_real_drafts_of_a_trained_model_save_steps_and_change_nothing() -> None:
    model = trained()  # copied text, greedy: vllm 39273
    for sampling in (GREEDY, DRAWN):
        asked = request(ids(12) * 2, 48, sampling=sampling, seed=4)
        plain = engine(model)
        (expected,) = plain.generate([asked])
        for draft in ("ngram", "mtp"):
            served = engine(model, speculation=SpeculationConfig(draft=draft))
            (sequence,) = served.generate([asked])
            assert_same(model, sequence, expected)
            assert served.stats.num_steps < 0.6 * plain.stats.num_steps
            assert served.stats.accepted_tokens > 20


def test_a_second_request_is_hit_and_written_as_the_first() -> None:
    for right in (0, 3, 8):  # vllm 53912
        (plain,) = double().generate([request(ids(30), 20)])
        served = double()
        served.draft = Script([plain], right)
        first, second = (served.generate([request(ids(30), 20)])[0] for _ in range(2))
        assert written(first) == written(second) == written(plain)
        assert second.num_cached == 28


def test_a_turn_written_from_drafts_is_gone_on_from() -> None:
    (plain,) = double().generate([request(ids(30), 27)])
    for right in (1, 3, 4, 5, 7, 8):
        served = double()
        served.draft = Script([plain], right)
        (first,) = served.generate([request(ids(30), 27)])
        (second,) = served.generate([request(first.tokens + ids(7, 1), 12)])
        assert second.num_cached == 56
        assert_plain(DOUBLE, second)


def test_penalties_count_the_drafted_tokens_that_come_before() -> None:
    penalties = Penalties(presence=2.0, frequency=2.0, repetition=1.5)
    asked = {"sampling": Sampling(temperature=3.0), "seed": 1, "penalties": penalties}
    (plain,) = double().generate([request(ids(12), 30, **asked)])
    for right in (0, 1, 5, 8):
        served = double()
        served.draft = Script([plain], right)
        assert written(served.generate([plain.request])[0]) == written(plain)


def test_a_stop_token_among_accepted_ones_ends_the_reply() -> None:
    (free,) = double().generate([request(ids(9), 20)])
    for place in (1, 2, 6, 10):
        stop_ids = frozenset({written(free)[place]})
        (plain,) = double().generate([request(ids(9), 20, stop_ids=stop_ids)])
        served = double()
        served.draft = Script([free], 8)
        (sequence,) = served.generate([plain.request])
        assert written(sequence) == written(plain) and sequence.finish_reason == "stop"
        (again,) = served.generate([request(sequence.tokens + ids(5), 6)])
        assert again.num_cached == (len(sequence.tokens) - 1) // 4 * 4
        assert_plain(DOUBLE, again)


def test_logits_that_are_not_finite_behind_a_draft_end_that_reply_there() -> None:
    model = made(tiny_k3())
    (plain,) = engine(model).generate([request(ids(11), 12)])
    served = engine(model)
    served.draft = Script([plain], 8)
    bad, good = served.submit(request(ids(11), 12)), served.submit(request([1, 2], 20))
    while not bad.new_tokens:
        served.step()
    hook = model.lm_head.register_forward_hook(
        lambda _, __, logits: logits.index_fill(0, torch.tensor(3), float("nan"))
    )
    events = served.step()
    hook.remove()
    assert [token and token.id for owner, token in events if owner is bad] == [
        *written(plain)[1:4],
        None,
    ]
    assert bad.finish_reason == "error" and written(bad) == written(plain)[:4]
    while not served.is_idle:
        served.step()
    assert good.finish_reason == "length" and served.stats.num_corrupted == 1
    assert served.cache.device.num_available == served.cache.config.num_pages


def test_what_was_not_reached_does_no_harm() -> None:
    model = made(tiny_k3())
    (plain,) = engine(model).generate([request(ids(11), 12)])
    served = engine(model)
    served.draft = Script([plain], 2)
    sequence = served.submit(request(ids(11), 12))
    while not sequence.new_tokens:
        served.step()
    hook = model.lm_head.register_forward_hook(
        lambda _, __, logits: logits.index_fill(0, torch.tensor(3), float("nan"))
    )
    served.step()
    hook.remove()
    while not served.is_idle:
        served.step()
    assert written(sequence) == written(plain)


def test_an_aborted_reply_gives_everything_back() -> None:
    (plain,) = double().generate([request(ids(30), 40)])
    for num_steps in range(1, 6):
        served = double()
        served.draft = Script([plain], 3)
        sequence, other = served.submit(request(ids(30), 40)), served.submit(request(ids(9, 1), 12))
        for _ in range(num_steps):
            served.step()
        served.abort(sequence)
        while not served.is_idle:
            served.step()
        assert_plain(DOUBLE, other)
        assert served.cache.device.num_available == served.cache.config.num_pages


class Parity:
    """A constraint that begins in the reply: from the third token on parities alternate."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def start(self) -> "Parity":
        return Parity()

    def _may_follow(self, token_id: int) -> bool:
        return len(self.tokens) < 3 or token_id % 2 != self.tokens[-1] % 2

    def mask(self, logits_W: Tensor) -> bool:
        if len(self.tokens) >= 3:
            logits_W[self.tokens[-1] % 2 :: 2] = -torch.inf
        return True

    def accept(self, token_id: int) -> bool:
        may_follow = self._may_follow(token_id)
        if may_follow:
            self.tokens.append(token_id)
        return may_follow

    def rollback(self, count: int) -> None:
        del self.tokens[len(self.tokens) - count :]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_grammar_goes_forth_and_back_with_the_drafts(sampling: Sampling) -> None:
    asked = {"sampling": sampling, "seed": 2, "grammar": Parity()}  # vllm 51660
    (plain,) = double().generate([request(ids(9), 20, **asked)])
    (free,) = double().generate([request(ids(9), 20, **{**asked, "grammar": None})])
    assert written(plain) != written(free)
    for right in (0, 1, 2, 4, 8):
        for truth in (plain, free):  # drafts that the grammar excludes, too
            served = double()
            served.draft = Script([truth], right)
            (sequence,) = served.generate([plain.request])
            assert written(sequence) == written(plain)
            assert sequence.constraint is not None
            assert sequence.constraint.tokens == written(plain)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_calls_hold_their_schema_under_drafts(nano: Model) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 20, 300]}, "unit": {"enum": ["C", "F"]}},
        "required": ["n", "unit"],
        "additionalProperties": False,
    }
    form = Form(thinking=False, tools=(Tool("get", schema, True),), calls="forced", is_single=True)
    tokenizer = nano.processor.tokenizer
    asked = request(
        ids(11),
        240,
        sampling=Sampling(temperature=0.7),
        seed=1,
        grammar=Grammars(tokenizer).compile(form),
        stop_ids=frozenset(tokenizer.stop_ids),
    )
    (plain,) = Engine(nano, EngineConfig()).generate([asked])
    assert plain.finish_reason == "stop"
    rng = random.Random(0)
    served = Engine(nano, EngineConfig(), draft=Script([plain], lambda: rng.randint(0, 8)))
    (sequence,) = served.generate([asked])
    assert_same(nano, sequence, plain)
    assert sequence.finish_reason == "stop" and served.stats.accepted_tokens > 50
    (call,) = parse_ids(written(sequence), tokenizer, thinking=False).tool_calls
    assert json.loads(call.arguments).keys() == schema["properties"].keys()


def test_many_requests_in_a_full_pool_are_written_as_alone() -> None:
    requests = [  # sglang 36537
        request(ids(5 + n, n), 30, sampling=DRAWN if n % 2 else GREEDY, seed=n) for n in range(12)
    ]
    plain = double(is_caching=False).generate(requests)
    served = double(pool_tokens=60, num_kept_states=1, max_running=4, max_step_tokens=20)
    rng = random.Random(0)
    served.draft = Script(plain, lambda: rng.randint(0, 8))
    replies = served.generate(requests)
    assert [written(s) for s in replies] == [written(s) for s in plain]
    assert served.scheduler.num_preemptions > 0 and served.stats.accepted_tokens > 50


def run_workload(seed: int, model: Model = MTP) -> Engine:
    """Random requests, sizes, aborts and drafts against the same requests without any."""
    rng = random.Random(seed)
    bases = [ids(40, base) for base in range(2)]
    requests = []
    for number in range(rng.randint(2, 8)):
        prompt = rng.choice(bases)[: rng.randint(0, 24)] + ids(rng.randint(1, 9), rng.randrange(99))
        requests.append(
            request(
                prompt,
                rng.choice([1, 8, 40]),
                sampling=rng.choice([GREEDY, DRAWN]),
                seed=number,
                penalties=rng.choice([Penalties(), Penalties(frequency=0.5)]),
                grammar=rng.choice([None, None, Parity()]),
            )
        )
    plain = double(model, is_caching=False, max_running=8).generate(requests)
    max_running = rng.randint(1, 5)
    named = rng.choice(["ngram", "mtp", None, None])
    served = double(
        model,
        max_running=max_running,
        max_step_tokens=max_running + rng.randint(1, 60),
        pool_tokens=rng.choice([60, 60, 150, 400]),
        num_kept_states=rng.choice([1, 1, 20]),
        hash_block=rng.choice([2, 4, 8]),
        host_bytes=rng.choice([0, 0, 400_000]),
        retention_interval=rng.choice([None, None, 16]),
        speculation=None if named is None else SpeculationConfig(draft=named),
    )
    if named is None:
        some = rng.sample(plain, rng.randint(1, len(plain)))  # the others go without drafts
        served.draft = Script(some, lambda: rng.randint(0, 8), rng.randint(1, 8))
    todo, sequences = list(enumerate(requests)), dict[int, Sequence]()
    rate = rng.choice([0.5, 1.0])
    for _ in range(2000):
        while todo and rng.random() < rate:
            number, asked = todo.pop(rng.randrange(len(todo)))
            sequences[number] = served.submit(asked)
        if sequences and rng.random() < 0.02:
            served.abort(rng.choice(list(sequences.values())))
        served.step()
        served.cache.audit()
        if served.is_idle and not todo:
            break
    for number, sequence in sequences.items():
        reply = written(plain[number])
        assert sequence.finish_reason in ("length", "abort")
        assert written(sequence) == reply[: len(sequence.new_tokens)]
        assert sequence.finish_reason == "abort" or len(sequence.new_tokens) == len(reply)
    assert served.cache.device.num_available == served.cache.config.num_pages
    return served


@pytest.mark.parametrize("seed", range(6))
def test_workloads_are_written_as_without_drafts(seed: int) -> None:
    run_workload(seed)


@pytest.mark.slow
def test_a_hundred_workloads_are_written_as_without_drafts() -> None:
    totals = Counter[str]()
    for seed in range(120):
        served = run_workload(seed)
        totals["accepted"] += served.stats.accepted_tokens
        totals["wrong"] += served.stats.draft_tokens - served.stats.accepted_tokens
        totals["hit"] += served.cache.stats.agreed_hit_tokens
        totals["preempted"] += served.scheduler.num_preemptions
        totals["host"] += served.cache.stats.host_hit_tokens
    assert min(totals.values()) > 0


def test_drafts_that_are_never_right_are_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baltoro.serve.engine.WARN_AFTER", 64)
    (plain,) = engine().generate([request(ids(9), 16)])
    for right, num_warnings in ((0, 1), (1, 0)):
        caplog.clear()
        served = engine()
        served.draft = Script([plain], right)
        with caplog.at_level(logging.WARNING):
            served.generate([plain.request])
        assert caplog.text.count("none of the last") == num_warnings


def test_acceptance_is_counted_by_position() -> None:
    (plain,) = engine().generate([request(ids(11), 31)])
    served = engine()
    served.draft = Script([plain], 2, count=4)
    served.generate([plain.request])
    text = Metrics().text(served)
    # ten steps of three tokens behind the first; the last has room for a draft of two
    for line in (
        "vllm:spec_decode_num_drafts_total 10",
        "vllm:spec_decode_num_draft_tokens_total 38",
        "vllm:spec_decode_num_accepted_tokens_total 20",
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 10',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 10',
    ):
        assert line in text.splitlines()
    assert 'position="2"' not in text


def test_without_speculation_nothing_is_drafted() -> None:
    served = engine(TINY)
    served.generate([request([1, 2] * 10, 20)])
    assert served.draft is None and served.stats.num_drafts == 0
