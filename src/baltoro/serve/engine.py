"""The engine: requests in, tokens out. A step is plan, run, commit.

With a draft a step may write several tokens of a sequence: its last token and the guessed ones are
computed in one call, and guesses are kept as long as each is the token that was drawn in its place.
Single-threaded and synchronous: who calls `step` owns the engine between two steps.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Series
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

from baltoro.model.config import ModelConfig
from baltoro.model.counts import flop_counts
from baltoro.model.model import Model
from baltoro.serve.cache import PrefixCache
from baltoro.serve.draft import Draft, Seen, SpeculationConfig, made_draft
from baltoro.serve.layout import PoolLayout, pool_layout
from baltoro.serve.pages import CacheConfig
from baltoro.serve.pool import PagePool
from baltoro.serve.prefill import PrefillBatch
from baltoro.serve.prefix import root_hash
from baltoro.serve.request import FinishReason, NewToken, Request, Sequence
from baltoro.serve.resident import ResidentBatch
from baltoro.serve.runner import Runner
from baltoro.serve.scheduler import ContextExceeded, Scheduler, SchedulerConfig, StepPlan, Work

logger = logging.getLogger(__name__)

WARN_AFTER = 512  # drafted tokens in a row that were all wrong
_PREFETCH_BYTES = 32 << 20  # from CPU memory in one step, for sequences that wait
_FLOPS_AT = 4096  # sequence length at which the shares of attention and the rest are counted


class WeightsNotWhole(RuntimeError):
    """An update of the weights failed half way: nothing is computed until a whole one comes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Memory and limits of an engine."""

    pool_tokens: int = 65536  # latents that the pool has room for, states not counted
    host_bytes: int = 0  # CPU memory for what is evicted
    # there; int8 takes a quarter of a state's bytes and changes what follows a bit (`cold`)
    cold_states: Literal["exact", "int8"] = "exact"
    hash_block: int | None = None  # tokens of a unit of prefix matching; None: from the page size
    is_caching: bool = True
    retention_interval: int | None = None  # also keep a state every so many tokens
    num_kept_states: int = 64  # checkpoints that the pool has room for
    speculation: SpeculationConfig | None = None  # None: one token per sequence and step
    # resident: inputs stay on the device, one CUDA graph a step, computed one step ahead; those of
    # prompts too, as graphs that pause at attention
    decode: Literal["eager", "resident"] = "eager"
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        for name in ("pool_tokens", "num_kept_states"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.host_bytes < 0:
            raise ValueError(f"host_bytes={self.host_bytes}: must not be negative")
        if self.cold_states not in ("exact", "int8"):
            raise ValueError(f"cold_states={self.cold_states!r}: must be 'exact' or 'int8'")
        if self.cold_states == "int8" and self.host_bytes == 0:
            raise ValueError("cold_states='int8': no CPU memory holds states; give host_bytes")
        if self.decode not in ("eager", "resident"):
            raise ValueError(f"decode={self.decode!r}: must be 'eager' or 'resident'")
        if self.decode == "resident" and self.speculation is not None:
            raise ValueError(
                "decode='resident': its steps have one token per sequence and verify no drafts; "
                "use 'eager' with speculation"
            )


@dataclass(slots=True)
class EngineStats:
    """Counts since the start."""

    num_steps: int = 0
    prompt_tokens: int = 0  # of first admissions
    cached_tokens: int = 0  # of them from the cache
    new_tokens: int = 0
    num_corrupted: int = 0  # replies ended by logits that are not finite, or by a grammar at fault
    finished: Counter[FinishReason] = field(default_factory=Counter)
    busy_s: float = 0.0  # inside steps
    computed_tokens: int = 0  # by the model
    num_drafts: int = 0  # verified
    draft_tokens: int = 0  # in them
    accepted_tokens: int = 0  # of these
    accepted_at: Counter[int] = field(default_factory=Counter)  # by place in the draft, from 0


class Engine:
    """One model and its sequences.

    `model` is in eval mode and on its device. `draft` stands in for what `config.speculation`
    names. Raises `ValueError` for settings that do not fit the model.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        draft: Draft | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        weight = model.lm_head.weight
        self.model = model
        self.config = config
        self.layout = pool_layout(
            model.config, dtype_bytes=weight.dtype.itemsize, hash_block=config.hash_block
        )
        self.stats = EngineStats()
        self.weights_version = "0"
        speculation = config.speculation
        cache_config = _cache_config(model.config, self.layout, config)
        pool = PagePool(
            model.config,
            self.layout,
            num_pages=cache_config.num_pages,
            host_pages=cache_config.host_pages,
            dtype=weight.dtype,
            device=weight.device,
            is_drafting=speculation is not None and speculation.draft == "mtp",
        )
        if draft is None and speculation is not None:
            draft = made_draft(speculation, model, pool)
        self.draft = draft
        self.cache = PrefixCache(cache_config)
        self.scheduler = Scheduler(config.scheduler, self.cache)
        batch = packs = None
        if config.decode == "resident":
            most = config.scheduler.num_prefill_tokens
            batch = ResidentBatch(model, pool, config.scheduler.max_running)
            packs = PrefillBatch(model, pool, most, has_cuts=config.is_caching)
        self.runner = Runner(model, pool, batch, packs)
        self._clock = clock
        self._num_wrong = 0  # drafted tokens since the last right one
        self._fault: str | None = None  # why no token can be computed

    @property
    def is_idle(self) -> bool:
        return not self.scheduler.waiting and not self.scheduler.running

    def submit(self, request: Request) -> Sequence:
        """Queue a request.

        Raises `ValueError` if the model or the pool cannot serve it, `Overloaded` if too many wait,
        `WeightsNotWhole` while the weights are not whole (`update_weights`).
        """
        if self._fault is not None:
            raise WeightsNotWhole(self._fault)
        self.check_length(len(request.prompt_ids), request.max_new_tokens)
        request.check(self.model.config)
        root = root_hash(self.weights_version, request.cache_salt)
        sequence = Sequence(request=request, root=root, arrival=self._clock())
        self.scheduler.submit(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """End a sequence and free its pages; one that has ended stays as it is."""
        if sequence.finish_reason is None:
            self._finish(sequence, "abort")
            self._rest_if_idle()

    def step(self) -> list[tuple[Sequence, NewToken | None]]:
        """Advance everything that runs; the new tokens, None for a reply that ended in an error.

        A sequence that ended has its `finish_reason`; with a draft several of these tokens may be
        its last ones, the end being the last of `new_tokens`.
        """
        start = self._clock()
        if self._fault is not None:
            return self._end_all()
        plan = self.scheduler.plan(self._drafts())
        if plan is None:
            return []
        if self.config.decode == "resident":
            self._grow_ahead(plan)
        for sequence in (work.sequence for work in plan.prefills):
            sequence.began_at = start if sequence.began_at is None else sequence.began_at
        output = self.runner.run(plan, self.weights_version)
        taken = [_accepted(*pair) for pair in zip(plan.works, output.drawn, strict=True)]
        stops = [
            work.stop + max(0, len(tokens) - 1)
            for work, tokens in zip(plan.works, taken, strict=True)
        ]
        self._settle(plan, stops)
        self.runner.keep(plan, output, stops)
        events: list[tuple[Sequence, NewToken | None]] = []
        for work, stop, tokens in zip(plan.works, stops, taken, strict=True):
            self._commit(work.sequence, stop, tokens)
            events += [(work.sequence, token) for token in tokens]
        if self.draft is not None:
            assert output.mixture is not None
            sizes = [work.end - work.start for work in plan.works]
            rows = zip(plan.works, stops, output.mixture.split(sizes), strict=True)
            self.draft.observe(
                [
                    Seen(work.sequence, work.start, mixture[: stop - work.start])
                    for work, stop, mixture in rows
                ]
            )
        self.cache.end_step()
        self._rest_if_idle()
        self.stats.num_steps += 1
        self.stats.computed_tokens += plan.num_tokens
        self.stats.busy_s += self._clock() - start
        return events

    def generate(self, requests: Iterable[Request]) -> list[Sequence]:
        """Serve requests to their end, together, in an engine that nobody else steps."""
        sequences = [self.submit(request) for request in requests]
        while any(sequence.finish_reason is None for sequence in sequences):
            self.step()
        return sequences

    def check_length(self, num_prompt: int, num_new: int) -> None:
        """Raise `ContextExceeded` if context or pool have no room for so many tokens."""
        if num_prompt + num_new > self.model.config.max_seq_len:
            raise ContextExceeded(
                f"prompt: {num_prompt} tokens and {num_new} new ones exceed the context of "
                f"{self.model.config.max_seq_len}; shorten the prompt or lower max_tokens"
            )
        self.scheduler.check(num_prompt + num_new)

    def update_weights(self, version: str, apply: Callable[[Model], None]) -> None:
        """Let `apply` put new weights into the model, and take them for another model's.

        Running replies go on with the state they have; their later tokens carry the new version
        (but for the next one of each where a step is computed ahead).
        Nothing computed before is ever reused. Raises `ValueError` for the version it has.

        If `apply` raises, the weights may be half of each: all replies end in an error with the
        next step, and requests are refused until another call succeeds.
        """
        if version == self.weights_version and self._fault is None:
            raise ValueError(f"version={version!r}: the engine has it already; give a new one")
        self._fault = (
            f"weights: the update from version {self.weights_version!r} to {version!r} failed half "
            "way; call update_weights again with whole weights"
        )
        apply(self.model)
        self.runner.renew()
        self._fault = None
        self.weights_version = version
        self.cache.forget()
        for sequence in self.scheduler.waiting:
            sequence.root = root_hash(version, sequence.request.cache_salt)
            sequence.chain.clear()
            sequence.extend_chain(self.layout.hash_block)

    def _end_all(self) -> list[tuple[Sequence, NewToken | None]]:
        ended = [*self.scheduler.running, *self.scheduler.waiting]
        for sequence in ended:
            self._finish(sequence, "error")
        self._rest_if_idle()
        return [(sequence, None) for sequence in ended]

    def _rest_if_idle(self) -> None:
        """Keep no sequence alive that nobody waits for."""
        if self.is_idle:
            self.runner.rest()
            if self.draft is not None:
                self.draft.rest()

    def _drafts(self) -> dict[Sequence, list[int]]:
        """Guesses for the sequences that decode."""
        if self.draft is None:
            return {}
        running = self.scheduler.running
        decoding = [s for s in running if s.is_decoding and s.num_left > 1]
        return dict(zip(decoding, self.draft.propose(decoding), strict=True))

    def _grow_ahead(self, plan: StepPlan) -> None:
        """Have a page for the token after the next one, where that is to be had."""
        for work in plan.works:
            goes_on = work.is_sampled and work.sequence.num_left > 1
            if goes_on and work.stop % self.layout.page_size == 0:
                assert work.sequence.table is not None
                self.cache.grow(work.sequence.table, work.stop + 1)

    def _settle(self, plan: StepPlan, stops: Series[int]) -> None:
        """Count what drafts brought, and give back the pages of what they got wrong."""
        for work, stop in zip(plan.works, stops, strict=True):
            if not work.draft:
                continue
            assert work.sequence.table is not None
            self.cache.settle(work.sequence.table, work.start, stop)
            num_accepted = stop - work.stop
            self.stats.num_drafts += 1
            self.stats.draft_tokens += len(work.draft)
            self.stats.accepted_tokens += num_accepted
            self.stats.accepted_at.update(range(num_accepted))
            self._num_wrong = 0 if num_accepted else self._num_wrong + len(work.draft)
        if self._num_wrong >= WARN_AFTER:
            logger.warning(
                "speculation: none of the last %d drafted tokens was right; serve without a draft "
                "or with one that was trained for these weights",
                self._num_wrong,
            )
            self._num_wrong = 0

    def _commit(self, sequence: Sequence, stop: int, tokens: Series[NewToken | None]) -> None:
        """Tokens up to `stop` are computed, and `tokens` follow what the sequence had."""
        table = sequence.table
        assert table is not None
        if sequence.num_computed == table.num_hit and not sequence.num_preemptions:
            self.stats.prompt_tokens += len(sequence.request.prompt_ids)
            self.stats.cached_tokens += sequence.num_cached
        sequence.num_computed = stop
        for token in tokens:
            if token is not None:
                self._append(sequence, token)
        sequence.extend_chain(self.layout.hash_block)
        if table.captures or stop // self.layout.hash_block > table.num_registered:
            self.cache.commit(table, sequence.chain, stop)
        if not tokens:
            return
        if tokens[-1] is None:
            self.stats.num_corrupted += 1
            name = sequence.request.request_id
            logger.warning("request %s: logits not finite, or a grammar at fault", name)
            self._finish(sequence, "error")
        elif tokens[-1].id in sequence.request.stop_ids:
            self._finish(sequence, "stop")
        elif sequence.num_left == 0:
            self._finish(sequence, "length")

    def _append(self, sequence: Sequence, token: NewToken) -> None:
        if sequence.first_token_at is None:
            sequence.first_token_at = self._clock()
        if sequence.constraint is not None:
            is_allowed = sequence.constraint.accept(token.id)
            assert is_allowed, "a token was drawn that its grammar excludes"
        sequence.tokens.append(token.id)
        sequence.new_tokens.append(token)
        self.stats.new_tokens += 1

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self.stats.finished[reason] += 1
        self.scheduler.remove(sequence)


def _accepted(work: Work, drawn: Series[NewToken | None]) -> list[NewToken | None]:
    """What was drawn, up to the first token that ends the reply or that its draft missed."""
    if not work.draft:
        return list(drawn)
    taken: list[NewToken | None] = []
    for token, guess in zip_longest(drawn, work.draft):
        taken.append(token)
        if token is None or token.id != guess or token.id in work.sequence.request.stop_ids:
            break
    return taken


def _cache_config(model: ModelConfig, layout: PoolLayout, config: EngineConfig) -> CacheConfig:
    """Pages for the latents, for a state of each running sequence, and for those kept."""
    num_groups = len(layout.state_groups)
    num_states = config.scheduler.max_running + config.num_kept_states
    flops = flop_counts(model, _FLOPS_AT)
    return CacheConfig(
        num_pages=-(-config.pool_tokens // layout.page_size) + num_states * num_groups,
        page_size=layout.page_size,
        hash_block=layout.hash_block,
        num_state_groups=num_groups,
        is_enabled=config.is_caching,
        retention_interval=config.retention_interval,
        host_pages=config.host_bytes // layout.page_bytes,
        cold_pages=layout.num_cold_pages if config.cold_states == "int8" else None,
        prefetch_pages=max(1, _PREFETCH_BYTES // layout.page_bytes),
        attention_weight=flops.attention * 2 / _FLOPS_AT / (flops.matmul + flops.kda),
    )
