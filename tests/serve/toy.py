"""A model whose state is the whole history in one number, and pages that hold such numbers.

Every number read is compared with what the sequence's own tokens must have left there, so a page
or a state of somebody else, of another token or of older weights fails at once.
"""

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

from baltoro.serve.cache import PrefixCache
from baltoro.serve.pages import CacheConfig, StateMove
from baltoro.serve.prefix import root_hash
from baltoro.serve.request import NewToken, Request, Sequence
from baltoro.serve.scheduler import Scheduler, SchedulerConfig, StepPlan, Work

VOCABULARY = 50


def history(tokens: list[int], version: str = "1", start: int = 0) -> list[int]:
    """A number for each prefix of `tokens`."""
    numbers = []
    for token in tokens:
        text = f"{start} {token} {version}".encode()
        start = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        numbers.append(start)
    return numbers


def next_token(number: int) -> int:
    return number % VOCABULARY


def reply(prompt: list[int], count: int, version: str = "1") -> list[int]:
    """What the toy writes without any cache."""
    tokens = list(prompt)
    number = history(tokens, version)[-1]
    for _ in range(count):
        tokens.append(next_token(number))
        (number,) = history(tokens[-1:], version, number)
    return tokens[len(prompt) :]


@dataclass
class Toy:
    """An engine around the account and the scheduler, with numbers in place of tensors."""

    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    version: str = "1"
    clock: float = 0.0
    num_steps: int = 0
    guesses: random.Random | None = None  # drafts, right as far as it says; None: no drafts
    accepted: list[int] = field(default_factory=list)  # of each draft
    finished: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.cache_config)
        self.scheduler = Scheduler(self.scheduler_config, self.cache)
        self.pages: dict[int, dict[int, int]] = {}
        self.host: dict[int, Any] = {}
        self.in_flight: list[tuple[int, int]] = []  # (host page, page), on their way all step long
        self.states_in_flight: list[StateMove] = []
        self.truth: dict[Sequence, list[int]] = {}
        self.block_of: dict[bytes, int] = {}

    def submit(self, prompt: list[int], count: int = 1, **options: object) -> Sequence:
        request = Request(
            request_id="",
            prompt_ids=tuple(prompt),
            max_new_tokens=count,
            **options,  # type: ignore[arg-type]
        )
        root = root_hash(self.version, request.cache_salt)
        sequence = Sequence(request=request, root=root, arrival=self.clock)
        self.scheduler.submit(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        if sequence.finish_reason is None:
            sequence.finish_reason = "abort"
            self.scheduler.remove(sequence)

    def new_weights(self, version: str) -> None:
        self.version = version
        self.cache.forget()
        for sequence in self.scheduler.waiting:
            sequence.root, sequence.chain = root_hash(version, sequence.request.cache_salt), []
            sequence.extend_chain(self.cache_config.hash_block)

    def step(self) -> StepPlan | None:
        """Plan, run, commit; every read and write is checked."""
        plan = self.scheduler.plan(self._drafts())
        self.cache.audit()
        if plan is None:
            return None
        self.num_steps += 1
        self.clock += 1.0
        limits = self.scheduler_config
        most = limits.max_step_tokens if plan.decodes else limits.num_prefill_tokens
        assert plan.num_tokens <= most
        self._move_pages(plan)
        written = [self._compute(work) for work in plan.works]
        stops = [
            work.stop + max(0, len(w) - 1) for work, w in zip(plan.works, written, strict=True)
        ]
        self._keep_states(plan, stops)
        for work, stop, tokens in zip(plan.works, stops, written, strict=True):
            sequence = work.sequence
            sequence.num_computed = stop
            assert sequence.table is not None
            sequence.tokens += tokens
            sequence.new_tokens += [NewToken(token, 0.0, self.version) for token in tokens]
            sequence.extend_chain(self.cache_config.hash_block)
            self.cache.commit(sequence.table, sequence.chain, stop)
            if sequence.num_left == 0:
                sequence.finish_reason = "length"
                self.scheduler.remove(sequence)
                self.finished.append(sequence)
        self.cache.end_step()
        self.cache.audit()
        return plan

    def drain(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if self.step() is None:
                return
        raise AssertionError("it does not come to an end")

    def serve(self, prompt: list[int], count: int = 1) -> Sequence:
        """One request, alone, to its end."""
        sequence = self.submit(prompt, count)
        self.drain()
        return sequence

    def _move_pages(self, plan: StepPlan) -> None:
        self._land()
        ops = plan.ops
        for sources, targets, is_packed in ops.stores:
            states = [dict(self.pages[source]) for source in sources]
            values = [states] * len(targets) if is_packed else states
            self.host |= dict(zip(targets, values, strict=True))
        for source, target in ops.loads:
            self.pages[target] = dict(self.host[source])
        for sources, targets in ops.unpacks:
            self._unpack(sources, targets)
        for source, target in ops.copies:
            self.pages[target] = dict(self.pages[source])
        for page in ops.resets:
            self.pages[page] = {-1: 0}
        self.in_flight, self.states_in_flight = ops.prefetches, ops.unpacks_ahead
        for _, target in self.in_flight:
            self.pages[target] = {}  # nobody may find anything in it before it has come
        for _, targets in self.states_in_flight:
            self.pages |= {target: {} for target in targets}
        for work in plan.works:
            for block, key in enumerate(work.sequence.chain):
                self.block_of[key] = block

    def _land(self) -> None:
        """What was on its way has come; nobody has written where it goes."""
        for source, target in self.in_flight:
            assert self.pages[target] == {}, "a page is written while it is fetched"
            self.pages[target] = dict(self.host[source])
        for sources, targets in self.states_in_flight:
            assert all(self.pages[target] == {} for target in targets)
            self._unpack(sources, targets)

    def _unpack(self, sources: tuple[int, ...], targets: tuple[int, ...]) -> None:
        for source in sources:
            assert self.host[source] == self.host[sources[0]], "half a state"
        for target, state in zip(targets, self.host[sources[0]], strict=True):
            self.pages[target] = dict(state)

    def _drafts(self) -> dict[Sequence, list[int]]:
        drafts: dict[Sequence, list[int]] = {}
        for sequence in self.scheduler.running if self.guesses else ():
            if not sequence.is_decoding or sequence.table is None:
                continue
            assert self.guesses is not None
            count, right = self.guesses.randint(0, 8), self.guesses.randint(0, 8)
            (number,) = history(sequence.tokens[-1:], self.version, self.truth[sequence][-1])
            draft = []
            for place in range(count):
                draft.append(next_token(number))
                (number,) = history(draft[-1:], self.version, number)
                if place >= right:
                    draft[-1] = (draft[-1] + 1) % VOCABULARY
            drafts[sequence] = draft
        return drafts

    def _keep_states(self, plan: StepPlan, stops: list[int]) -> None:
        """Drafts settled; states at captured boundaries copied away, then those at the ends."""
        for work, stop in zip(plan.works, stops, strict=True):
            table = work.sequence.table
            assert table is not None
            if work.draft:
                self.accepted.append(stop - work.stop)
                self.cache.settle(table, work.start, stop)
                assert len(table.kv_pages) == self.cache_config.num_kv_pages(stop)
            truth = self.truth[work.sequence] = self.truth[work.sequence][:stop]
            place = stop
            for position, pages in table.captures:
                assert work.start < position <= stop
                if work.draft:
                    place = position
                elif position < stop:  # a cut: written where it is kept
                    for page in pages:
                        self.pages[page] = {-1: truth[position - 1]}
            for page in table.state_pages:
                self.pages[page] = {-1: truth[place - 1]}
        for source, target in plan.ops.captures:
            self.pages[target] = dict(self.pages[source])
        for work in plan.works:
            for page in work.sequence.table.state_pages:  # type: ignore[union-attr]
                self.pages[page] = {-1: self.truth[work.sequence][-1]}

    def _compute(self, work: Work) -> list[int]:
        """The tokens that a work gives, after every read and write of it was checked."""
        sequence, size = work.sequence, self.cache_config.page_size
        table = sequence.table
        assert table is not None
        if work.start == table.num_hit:
            self.truth[sequence] = history(sequence.tokens[: work.start], self.version)
        truth = self.truth[sequence]
        assert len(truth) == work.start
        for page in table.state_pages:
            assert self.pages[page][-1] == (truth[-1] if truth else 0), "a wrong state"
            assert all(page not in c.state_pages for c in self.cache.device.checkpoints.values())
        for index, number in enumerate(truth):
            page = self.pages[table.kv_pages[index // size]]
            assert page[index % size] == number, "a wrong latent"
        new = [*sequence.tokens[work.start : work.stop], *work.draft]
        truth += history(new, self.version, truth[-1] if truth else 0)
        for index in range(work.start, work.end):
            page = table.kv_pages[index // size]
            assert index % size >= self._num_named_rows(page), "a named row is written"
            self.pages.setdefault(page, {})[index % size] = truth[index]
        tokens: list[int] = []
        if work.is_sampled:
            for number, guess in zip(truth[work.stop - 1 :], [*work.draft, None], strict=True):
                tokens.append(next_token(number))
                if tokens[-1] != guess:
                    break
        return tokens

    def _num_named_rows(self, page: int) -> int:
        config = self.cache_config
        blocks = [self.block_of[key] for key in self.cache.device.keys_of(page)]
        ends = [(block + 1) * config.hash_block for block in blocks]
        return max(((end - 1) % config.page_size + 1 for end in ends), default=0)
