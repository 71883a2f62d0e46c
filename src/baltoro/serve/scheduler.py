"""Which sequences run in the next step, and how far. Plain Python, no tensors.

One budget of tokens per step, which may be larger where nobody decodes. Every decoding sequence
gets its token first; what is left is split among the prefills, most of it to those nearest to their
end. Places go by priority and arrival: `ageing_s` seconds of waiting make up for one level, and a
preempted sequence keeps its place. A sequence is let in with pages for its whole prompt. One that
does not fit may be passed by `max_skips` later ones; then the room that others give back is kept
for it.

Drafted tokens are verified beside a sequence's own where the step has room: together they take at
most half of what the decoding tokens leave, and a draft that finds no page displaces nobody.
"""

from bisect import insort
from collections.abc import Mapping
from collections.abc import Sequence as Series
from dataclasses import dataclass

from baltoro.serve.cache import PrefixCache
from baltoro.serve.pages import PageOps
from baltoro.serve.prefix import num_common
from baltoro.serve.request import Sequence

MAX_TRIES = 32  # waiting sequences looked at in one step
MAX_AHEAD = 4  # waiting sequences whose prefixes are brought back from CPU memory


class ContextExceeded(ValueError):
    """A prompt and its reply are longer than the model or the pool has room for."""


class QueueExceeded(ValueError):
    """Requests that come together are more than the empty queue has room for."""


class Overloaded(RuntimeError):
    """The queue is full; `queued_tokens` are waiting."""

    def __init__(self, message: str, queued_tokens: int) -> None:
        super().__init__(message)
        self.queued_tokens = queued_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of the queue."""

    max_running: int = 16
    max_step_tokens: int = 2048
    max_prefill_tokens: int | None = None  # of a step in which nobody decodes; None: as of others
    max_queued: int = 4096  # requests
    max_queued_tokens: int = 4_000_000  # their budgets together
    ageing_s: float = 10.0
    max_skips: int = 16
    long_tokens: int = 65536  # a request with a larger budget is long
    max_long_running: int | None = None  # None: half of `max_running`, at least one

    def __post_init__(self) -> None:
        for name in ("max_running", "max_queued", "max_queued_tokens", "long_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.max_step_tokens <= self.max_running:
            raise ValueError(
                f"max_step_tokens={self.max_step_tokens}: must be above max_running="
                f"{self.max_running}, so that prefills go on while all others decode"
            )
        if self.num_prefill_tokens < self.max_step_tokens:
            raise ValueError(
                f"max_prefill_tokens={self.max_prefill_tokens}: must be at least max_step_tokens="
                f"{self.max_step_tokens}, which those who decode wait for"
            )
        if not self.ageing_s > 0.0:
            raise ValueError(f"ageing_s={self.ageing_s}: must be positive")
        if self.max_skips < 0:
            raise ValueError(f"max_skips={self.max_skips}: must not be negative")
        if self.max_long_running is not None and self.max_long_running < 1:
            raise ValueError(f"max_long_running={self.max_long_running}: must be at least 1")

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of a step in which nobody decodes, and so nobody waits for a next token."""
        return self.max_step_tokens if self.max_prefill_tokens is None else self.max_prefill_tokens

    @property
    def num_long_places(self) -> int:
        """How many long requests may run at once."""
        return self.max_long_running or max(1, self.max_running // 2)


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens `start` to `stop` of one sequence and a draft behind them, computed in one step."""

    sequence: Sequence
    start: int
    stop: int
    draft: tuple[int, ...] = ()  # guessed tokens; only if it is sampled

    @property
    def end(self) -> int:
        """Where it ends if the whole draft is right."""
        return self.stop + len(self.draft)

    @property
    def is_sampled(self) -> bool:
        """Whether the last token's logits give the next token."""
        return self.stop == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does."""

    decodes: tuple[Work, ...]  # one token each, and drafts
    prefills: tuple[Work, ...]
    ops: PageOps

    @property
    def works(self) -> tuple[Work, ...]:
        return self.decodes + self.prefills

    @property
    def num_tokens(self) -> int:
        return sum(work.end - work.start for work in self.works)


class Scheduler:
    """The waiting and the running sequences, best first."""

    def __init__(self, config: SchedulerConfig, cache: PrefixCache) -> None:
        self.config = config
        self.cache = cache
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.queued_tokens = 0  # budgets of the waiting ones
        self.num_preemptions = 0
        self._serial: dict[Sequence, int] = {}
        self.num_submitted = 0

    def check(self, num_tokens: int) -> None:
        """Raise `ContextExceeded` if so many tokens would not fit into the empty pool."""
        config = self.cache.config
        need = config.num_kv_pages(num_tokens) + config.num_state_groups
        if need > config.num_pages:
            raise ContextExceeded(
                f"prompt: with its new tokens it needs {need} pages and the pool has "
                f"{config.num_pages}; shorten it, lower max_tokens or serve with more pages"
            )

    def check_together(self, count: int, num_tokens: int = 0) -> None:
        """Raise `QueueExceeded` if so many with these budgets would not fit into the empty queue.

        A single one always does.
        """
        config = self.config
        if count > config.max_queued:
            raise QueueExceeded(
                f"{count} replies at once are more than max_queued={config.max_queued}; "
                "ask for fewer in one request"
            )
        if count > 1 and num_tokens > config.max_queued_tokens:
            raise QueueExceeded(
                f"{count} replies at once may take {num_tokens} tokens, more than "
                f"max_queued_tokens={config.max_queued_tokens}; ask for fewer in one request"
            )

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises `Overloaded` when the queue is full, `ValueError` as `check`."""
        request = sequence.request
        self.check(len(request.prompt_ids) + request.max_new_tokens)
        if len(self.waiting) >= self.config.max_queued:
            raise Overloaded(f"{len(self.waiting)} requests are waiting", self.queued_tokens)
        if self.waiting and self.queued_tokens + request.budget > self.config.max_queued_tokens:
            raise Overloaded(f"{self.queued_tokens} tokens are waiting", self.queued_tokens)
        sequence.extend_chain(self.cache.config.hash_block)
        self._serial[sequence] = self.num_submitted
        self.num_submitted += 1
        self._wait(sequence)

    def plan(self, drafts: Mapping[Sequence, Series[int]] | None = None) -> StepPlan | None:
        """The next step, or None if there is nothing to do. Every running sequence goes on.

        `drafts` are guesses at the next tokens of sequences that decode.
        """
        self._yield_place()
        decodes = self._plan_decodes()
        if drafts:
            decodes = self._plan_drafts(decodes, drafts)
        budget = self.config.max_step_tokens if decodes else self.config.num_prefill_tokens
        budget -= sum(work.end - work.start for work in decodes)
        self._admit(budget)
        prefills = self._plan_prefills(decodes, budget)
        works = (*decodes, *prefills)
        if not works:
            assert not self.running and not self.waiting, "sequences wait and nothing runs"
            return None
        for work in works:
            sequence = work.sequence
            assert sequence.table is not None and work.stop > work.start
            if work.draft:
                self.cache.plan_draft(sequence.table, work.start, work.end)
            else:
                self.cache.plan_captures(sequence.table, sequence.chain, work.start, work.stop)
        ahead = self.waiting[:MAX_AHEAD]
        self.cache.prefetch((sequence.chain, len(sequence.tokens) - 1) for sequence in ahead)
        return StepPlan(decodes, prefills, self.cache.ops)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out and give its pages back; not between a plan and its end."""
        del self._serial[sequence]
        if sequence.table is None:
            self.waiting.remove(sequence)
            self.queued_tokens -= sequence.request.budget
        else:
            self.running.remove(sequence)
            self.cache.release(sequence.table)
            sequence.table = None

    def _key(self, sequence: Sequence) -> tuple[float, int]:
        age = sequence.arrival / self.config.ageing_s
        return sequence.request.priority + age, self._serial[sequence]

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=self._key)
        self.queued_tokens += sequence.request.budget

    def _preempt(self, sequence: Sequence) -> None:
        """Give back a sequence's pages; what it computed is cached as far as there is room."""
        assert sequence.table is not None
        self.cache.release(sequence.table)
        self.running.remove(sequence)
        sequence.table, sequence.num_computed = None, 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._wait(sequence)

    def _yield_place(self) -> None:
        """Make room for a waiting sequence of a higher priority, one running one per step."""
        if not self.waiting or not self.running:
            return
        head, last = self.waiting[0], self.running[-1]
        is_higher = head.request.priority < last.request.priority
        if not is_higher or self._key(head) > self._key(last) or self._is_held_back(head):
            return
        is_full = len(self.running) >= self.config.max_running
        if is_full or not self.cache.fits(len(head.tokens)):
            self._preempt(last)

    def _plan_decodes(self) -> tuple[Work, ...]:
        works: list[Work] = []
        planned: set[Sequence] = set()
        for sequence in list(self.running):
            if sequence.table is None or not sequence.is_decoding:
                continue
            while sequence.table and not self.cache.grow(sequence.table, len(sequence.tokens)):
                # the last in order that has no work yet; at worst this one itself
                self._preempt(next(s for s in reversed(self.running) if s not in planned))
            if sequence.table is not None:
                planned.add(sequence)
                works.append(Work(sequence, sequence.num_computed, len(sequence.tokens)))
        return tuple(works)

    def _plan_drafts(
        self, decodes: tuple[Work, ...], drafts: Mapping[Sequence, Series[int]]
    ) -> tuple[Work, ...]:
        """Each draft as far as its reply may go and its state need not be kept, whole or not."""
        budget = (self.config.max_step_tokens - len(decodes)) // 2
        works = []
        for work in decodes:
            sequence, table = work.sequence, work.sequence.table
            assert table is not None
            end = work.stop + min(len(drafts.get(sequence, ())), sequence.num_left - 1)
            end = self.cache.next_stop(table, work.start, end)
            if work.stop < end <= work.stop + budget and self.cache.grow(table, end):
                budget -= end - work.stop
                draft = tuple(drafts[sequence][: end - work.stop])
                work = Work(sequence, work.start, work.stop, draft)
            works.append(work)
        return tuple(works)

    def _admit(self, budget: int) -> None:
        """Let waiting sequences in while there are places, pages and tokens for them."""
        skipped: list[Sequence] = []
        num_prefills = sum(not sequence.is_decoding for sequence in self.running)
        for sequence in self.waiting[:MAX_TRIES]:
            if len(self.running) >= self.config.max_running or num_prefills >= budget:
                return
            if any(other.num_skips >= self.config.max_skips for other in skipped):
                return  # what is free now is kept for that one
            if skipped and skipped[0].request.priority < sequence.request.priority:
                return
            if self._is_held_back(sequence):
                continue
            table = self.cache.admit(sequence.chain, len(sequence.tokens))
            if table is None:
                skipped.append(sequence)
                continue
            for other in skipped:
                other.num_skips += 1
            self.waiting.remove(sequence)
            self.queued_tokens -= sequence.request.budget
            insort(self.running, sequence, key=self._key)
            sequence.table, sequence.num_computed = table, table.num_hit
            if sequence.num_preemptions == 0:
                sequence.num_cached = table.num_hit
            num_prefills += 1

    def _is_held_back(self, sequence: Sequence) -> bool:
        """Whether its class is full, or a running prefill is about to keep what it could reuse."""
        if sequence.request.budget > self.config.long_tokens:
            longs = sum(s.request.budget > self.config.long_tokens for s in self.running)
            if longs >= self.config.num_long_places:
                return True
        known: int | None = None
        for other in self.running:
            table = other.table
            if table is None or not table.is_cacheable or other.is_decoding:
                continue
            shared = self._num_shared(sequence, other)
            if shared <= other.num_computed:
                continue
            if known is None:
                known = self.cache.lookup(sequence.chain, len(sequence.tokens) - 1)
            if shared - max(known, other.num_computed) >= self.cache.config.page_size:
                # a state is worth its page; so those that arrive together compute it once
                table.stops |= {shared}
            if any(max(known, other.num_computed) < stop <= shared for stop in table.stops):
                return True
        return False

    def _num_shared(self, sequence: Sequence, other: Sequence) -> int:
        """Tokens up to the last boundary at which one could go on from the other's state."""
        unit = self.cache.config.hash_block
        blocks = min(num_common(other.chain, sequence.chain), (len(sequence.tokens) - 1) // unit)
        return blocks * unit

    def _plan_prefills(self, decodes: tuple[Work, ...], budget: int) -> tuple[Work, ...]:
        """A quarter of an equal share to each, and the rest to those with the least left to do.

        So one that can have its first token now need not wait for others to come as far, and a
        long one goes on whatever short ones come.
        """
        decoding = {work.sequence for work in decodes}
        sequences = [sequence for sequence in self.running if sequence not in decoding]
        if not sequences:
            return ()
        share = max(1, budget // (4 * len(sequences)))
        wants = []
        for sequence in sequences:
            assert sequence.table is not None
            start = sequence.num_computed
            wants.append(self.cache.slice_stop(sequence.table, start, len(sequence.tokens)) - start)
        grants = []
        for want in wants:
            grants.append(min(want, share, budget))
            budget -= grants[-1]
        left = [len(s.tokens) - s.num_computed for s in sequences]
        order = sorted(range(len(left)), key=lambda n: (sequences[n].request.priority, left[n]))
        for number in order:
            extra = min(wants[number] - grants[number], budget)
            grants[number] += extra
            budget -= extra
        works = []
        for sequence, want, grant in zip(sequences, wants, grants, strict=True):
            start = sequence.num_computed
            stop = start + grant
            if grant < want:
                aligned = stop // self.cache.config.hash_block * self.cache.config.hash_block
                stop = aligned if aligned > start else stop
            if stop > start:
                works.append(Work(sequence, start, stop))
        return tuple(works)
