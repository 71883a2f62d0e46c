"""What the two drafts propose, each against its plain definition."""

import random

import pytest
import torch
from model.tiny import tiny_k3
from serve.test_engine import GREEDY, engine, ids, made, request, written

from baltoro.model.model import Model
from baltoro.serve.draft import MtpDraft, NgramDraft, Seen, SpeculationConfig, made_draft
from baltoro.serve.engine import Engine
from baltoro.serve.pages import Table
from baltoro.serve.request import Sequence
from baltoro.serve.sampler import row_of, sample_rows
from baltoro.serve.sampling import Sampling

MTP = made(tiny_k3(num_mtp_layers=1)).double()


def running(tokens: list[int], count: int = 100) -> Sequence:
    """A sequence that has pages, of nothing but a prompt."""
    sequence = Sequence(request=request(tokens, count), root=b"", arrival=0.0)
    sequence.table = Table([], (), 0, frozenset(), False, 0)
    return sequence


def ngram(**changes: int) -> NgramDraft:
    return NgramDraft(SpeculationConfig(draft="ngram", **{"max_tokens": 4, **changes}))


def proposed(tokens: list[int], **changes: int) -> list[int]:
    (draft,) = ngram(**changes).propose([running(tokens)])
    return draft


def test_what_followed_the_latest_match_is_proposed() -> None:
    assert proposed([1, 2, 9, 9, 9, 9, 1, 2, 3, 4, 5, 6, 7, 1, 2]) == [3, 4, 5, 6]


def test_a_longer_match_goes_before_a_later_one() -> None:
    assert proposed([5, 1, 2, 3, 4, 7, 7, 1, 2, 8, 8, 5, 1, 2])[:2] == [3, 4]
    assert proposed([5, 1, 2, 3, 4, 7, 7, 1, 2, 8, 8, 5, 1, 2], max_match=2)[:2] == [8, 8]


def test_what_repeats_goes_on_repeating() -> None:
    assert proposed([1, 2, 3, 1, 2, 3, 1, 2]) == [3, 1, 2, 3]
    assert proposed([7, 7, 7]) == [7, 7, 7, 7]


def test_without_a_match_nothing_is_proposed() -> None:
    assert proposed([1, 2, 3, 4, 5]) == proposed([1]) == proposed([3, 2, 3]) == []
    assert proposed([3, 2, 3], min_match=1) == [2, 3, 2, 3]


def test_a_match_beyond_the_window_is_not_looked_at() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    assert proposed(tokens, window=9) == []
    assert proposed(tokens, window=10) == [3, 4, 5, 6]


def test_matches_begin_at_tokens_and_not_between_their_bytes() -> None:
    # the bytes of the last two tokens also stand across three earlier ones
    assert proposed([0x0100, 0x0200, 0x0300, 5, 0x010000, 0x020000, 0x030000, 0x0200, 0x0300]) == [
        5,
        0x010000,
        0x020000,
        0x030000,
    ]
    assert proposed([1, 2 << 24, 3 << 24, 9, 2, 3]) == []


@pytest.mark.parametrize("seed", range(20))
def test_proposals_are_those_of_a_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    draft, sequence = ngram(), running([rng.randrange(4) for _ in range(3)])
    for _ in range(60):
        (found,) = draft.propose([sequence])
        tokens, expected = sequence.tokens, list[int]()
        for length in (4, 3, 2):
            starts = range(len(tokens) - length - 1, -1, -1)
            ends = [s + length for s in starts if tokens[s : s + length] == tokens[-length:]]
            if ends and not expected:
                longer = list(tokens)
                for place in range(4):
                    longer.append(longer[ends[0] + place])
                expected = longer[len(tokens) :]
        assert found == expected
        sequence.tokens += [rng.randrange(4) for _ in range(rng.randint(1, 3))]


def test_a_sequence_without_pages_is_forgotten() -> None:
    draft, sequence = ngram(), running([1, 2, 1, 2])
    draft.propose([sequence])
    sequence.table = None
    draft.propose([])
    assert not draft._texts


@torch.no_grad()
def plain_drafts(model: Model, sequence: Sequence, count: int) -> list[int]:
    """The MTP layer run anew over the whole sequence for each token."""

    def bounds(length: int) -> torch.Tensor:
        return torch.tensor([0, length], dtype=torch.int32)

    tokens, drafted = torch.tensor(sequence.tokens), list[int]()
    mixture = model(tokens[:-1], bounds(len(tokens) - 1)).mixture
    following = tokens[1:]
    while True:
        out = model.predict_next(following, mixture, bounds(len(following)))
        row = row_of(sequence, drafted)
        (token_id,) = sample_rows(model.lm_head(out.hidden[-1:]), [row])[0].tolist()
        drafted.append(token_id)
        if len(drafted) == count:
            return drafted
        following = torch.cat([following, torch.tensor([token_id])])
        mixture = torch.cat([mixture, out.mixture[-1:]])


class Watched:
    """Right and wrong drafts by turns, and an MTP draft that watches."""

    def __init__(self, served: Engine, reply: list[int]) -> None:
        self.mtp = MtpDraft(served.model, served.runner.pool, 3)
        self.page_size = served.layout.page_size
        self.reply = reply
        self.num_calls = 0

    def propose(self, sequences: list[Sequence]) -> list[list[int]]:
        drafts = []
        for sequence, proposal in zip(sequences, self.mtp.propose(sequences), strict=True):
            assert proposal == plain_drafts(MTP, sequence, 3)[: len(proposal)]
            at_page_end = (sequence.num_computed + len(proposal) - 1) % self.page_size == 0
            assert at_page_end or len(proposal) == min(3, sequence.num_left - 1)
            first = len(sequence.new_tokens)
            draft = self.reply[first : first + 5]
            draft[self.num_calls % 6 :] = [0 for _ in draft[self.num_calls % 6 :]]
            drafts.append(draft)
            self.num_calls += 1
        return drafts

    def observe(self, seen: list[Seen]) -> None:
        self.mtp.observe(seen)

    def rest(self) -> None:
        self.mtp.rest()


@pytest.mark.parametrize(
    ("sampling", "max_step_tokens"), [(GREEDY, 11), (Sampling(temperature=1.0, top_p=0.9), 64)]
)
def test_mtp_proposes_what_its_layer_says_of_the_whole_sequence(
    sampling: Sampling, max_step_tokens: int
) -> None:
    options = {"sampling": sampling, "seed": 5}
    reply = written(engine(MTP).generate([request(ids(33), 30, **options)])[0])
    served = engine(
        MTP, max_step_tokens=max_step_tokens, speculation=SpeculationConfig(draft="mtp")
    )
    for num_cached in (0, 32):  # the second time from the cache, a page in part: vllm 53912
        served.draft = watched = Watched(served, reply)
        (sequence,) = served.generate([request(ids(33), 30, **options)])
        assert sequence.num_cached == num_cached and written(sequence) == reply
        assert watched.num_calls >= 10 and served.stats.accepted_tokens > 0


class Pairs:
    """A constraint: each second token is the one after the token before, and nothing follows 12."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def start(self) -> "Pairs":
        return Pairs()

    def mask(self, logits_W: torch.Tensor) -> bool:
        allowed = [i for i in range(len(logits_W)) if self._may_follow(i)]
        excluded = torch.ones_like(logits_W, dtype=torch.bool)
        excluded[allowed] = False
        logits_W.masked_fill_(excluded, -torch.inf)
        return bool(allowed)

    def accept(self, token_id: int) -> bool:
        may_follow = self._may_follow(token_id)
        if may_follow:
            self.tokens.append(token_id)
        return may_follow

    def rollback(self, count: int) -> None:
        del self.tokens[len(self.tokens) - count :]

    def _may_follow(self, token_id: int) -> bool:
        if len(self.tokens) == 12:
            return False
        return len(self.tokens) % 2 == 0 or token_id == (self.tokens[-1] + 1) % 60


def test_mtp_keeps_to_a_grammar_and_leaves_it_where_it_was() -> None:
    served = engine(MTP, speculation=SpeculationConfig(draft="mtp"))
    sequence = served.submit(request(ids(11), 40, grammar=Pairs()))
    while len(sequence.new_tokens) < 8:
        served.step()
    (draft,) = served.draft.propose([sequence])
    assert sequence.constraint.tokens == written(sequence)
    reply = [*written(sequence), *draft]
    assert len(reply) == 12  # where nothing may follow
    assert all(b == (a + 1) % 60 for a, b in zip(reply[::2], reply[1::2], strict=True))


def test_mtp_guesses_nothing_of_what_it_has_not_seen() -> None:
    served = engine(MTP, speculation=SpeculationConfig(draft="mtp"))
    sequence = served.submit(request(ids(9), 9))
    served.step()
    assert len(served.draft.propose([sequence])[0]) == 7
    sequence.num_computed -= 1
    assert served.draft.propose([sequence]) == [[]]


def test_a_model_without_an_mtp_layer_is_named() -> None:
    with pytest.raises(ValueError, match="num_mtp_layers=0"):
        engine(speculation=SpeculationConfig(draft="mtp"))


def test_a_configuration_makes_the_draft_that_it_names() -> None:
    served = engine(MTP, speculation=SpeculationConfig(draft="ngram"))
    assert isinstance(served.draft, NgramDraft)
    assert not len(served.runner.pool.draft_latents)
    served = engine(MTP, speculation=SpeculationConfig(draft="mtp", max_tokens=2))
    assert isinstance(served.draft, MtpDraft) and served.draft.max_tokens == 2
    config = SpeculationConfig(draft="ngram")
    assert isinstance(made_draft(config, MTP, served.runner.pool), NgramDraft)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft": "eagle"}, "draft='eagle'"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 9}, "max_tokens=9"),
        ({"min_match": 5}, "min_match=5"),
        ({"min_match": 0}, "min_match=0"),
        ({"window": 4}, "window=4"),
    ],
)
def test_settings_out_of_range_are_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"speculation.{message}"):
        SpeculationConfig(**{"draft": "ngram", **change})
