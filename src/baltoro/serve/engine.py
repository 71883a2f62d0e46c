"""The engine: requests in, tokens out. A step is plan, run, commit.

Single-threaded and synchronous: who calls `step` owns the engine between two steps.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from baltoro.model.config import ModelConfig
from baltoro.model.counts import flop_counts
from baltoro.model.model import Model
from baltoro.serve.cache import PrefixCache
from baltoro.serve.layout import PoolLayout, pool_layout
from baltoro.serve.pages import CacheConfig
from baltoro.serve.pool import PagePool
from baltoro.serve.prefix import root_hash
from baltoro.serve.request import FinishReason, NewToken, Request, Sequence
from baltoro.serve.runner import Runner
from baltoro.serve.scheduler import Scheduler, SchedulerConfig

_FLOPS_AT = 4096  # sequence length at which the shares of attention and the rest are counted


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Memory and limits of an engine."""

    pool_tokens: int = 65536  # latents that the pool has room for, states not counted
    host_bytes: int = 0  # CPU memory for what is evicted
    hash_block: int | None = None  # tokens of a unit of prefix matching; None: from the page size
    is_caching: bool = True
    retention_interval: int | None = None  # also keep a state every so many tokens
    num_kept_states: int = 64  # checkpoints that the pool has room for
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        for name in ("pool_tokens", "num_kept_states"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.host_bytes < 0:
            raise ValueError(f"host_bytes={self.host_bytes}: must not be negative")


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


class Engine:
    """One model and its sequences.

    `model` is in eval mode and on its device. Raises `ValueError` for settings that do not fit it.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
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
        cache_config = _cache_config(model.config, self.layout, config)
        pool = PagePool(
            model.config,
            self.layout,
            num_pages=cache_config.num_pages,
            host_pages=cache_config.host_pages,
            dtype=weight.dtype,
            device=weight.device,
        )
        self.cache = PrefixCache(cache_config)
        self.scheduler = Scheduler(config.scheduler, self.cache)
        self.runner = Runner(model, pool)
        self._clock = clock

    @property
    def is_idle(self) -> bool:
        return not self.scheduler.waiting and not self.scheduler.running

    def submit(self, request: Request) -> Sequence:
        """Queue a request.

        Raises `ValueError` if the model or the pool cannot serve it, `Overloaded` if too many wait.
        """
        self._check(request)
        root = root_hash(self.weights_version, request.cache_salt)
        sequence = Sequence(request=request, root=root, arrival=self._clock())
        self.scheduler.submit(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """End a sequence and free its pages; one that has ended stays as it is."""
        if sequence.finish_reason is None:
            self._finish(sequence, "abort")

    def step(self) -> list[tuple[Sequence, NewToken | None]]:
        """Advance everything that runs; the new tokens, None for a reply that ended in an error.

        A sequence that ended has its `finish_reason`.
        """
        start = self._clock()
        plan = self.scheduler.plan()
        if plan is None:
            return []
        drawn = self.runner.run(plan, self.weights_version)
        events: list[tuple[Sequence, NewToken | None]] = []
        for work, token in zip(plan.works, drawn, strict=True):
            sequence, is_sampled = work.sequence, work.is_sampled
            assert sequence.table is not None
            if sequence.num_computed == sequence.table.num_hit and not sequence.num_preemptions:
                self.stats.prompt_tokens += len(sequence.request.prompt_ids)
                self.stats.cached_tokens += sequence.num_cached
            sequence.num_computed = work.stop
            self.cache.commit(sequence.table, sequence.chain, work.stop)
            if is_sampled:
                self._take(sequence, token)
                events.append((sequence, token))
        self.cache.end_step()
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

    def update_weights(self, version: str, apply: Callable[[Model], None]) -> None:
        """Let `apply` put new weights into the model, and take them for another model's.

        Running replies go on with the state they have; their later tokens carry the new version.
        Nothing computed before is ever reused. Raises `ValueError` for the version it has.
        """
        if version == self.weights_version:
            raise ValueError(f"version={version!r}: the engine has it already; give a new one")
        apply(self.model)
        self.weights_version = version
        self.cache.forget()
        for sequence in self.scheduler.waiting:
            sequence.root = root_hash(version, sequence.request.cache_salt)
            sequence.chain.clear()
            sequence.extend_chain(self.layout.hash_block)

    def _take(self, sequence: Sequence, token: NewToken | None) -> None:
        if token is None:
            self.stats.num_corrupted += 1
            self._finish(sequence, "error")
            return
        if sequence.first_token_at is None:
            sequence.first_token_at = self._clock()
        if sequence.constraint is not None:
            is_allowed = sequence.constraint.accept(token.id)
            assert is_allowed, "a token was drawn that its grammar excludes"
        sequence.tokens.append(token.id)
        sequence.new_tokens.append(token)
        self.stats.new_tokens += 1
        if token.id in sequence.request.stop_ids:
            self._finish(sequence, "stop")
        elif len(sequence.new_tokens) == sequence.request.max_new_tokens:
            self._finish(sequence, "length")
        else:
            sequence.extend_chain(self.layout.hash_block)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self.stats.finished[reason] += 1
        self.scheduler.remove(sequence)

    def _check(self, request: Request) -> None:
        config = self.model.config
        ids = request.prompt_ids
        if len(ids) + request.max_new_tokens > config.max_seq_len:
            raise ValueError(
                f"prompt: {len(ids)} tokens and {request.max_new_tokens} new ones exceed the "
                f"context of {config.max_seq_len}; shorten the prompt or lower max_tokens"
            )
        wrong = next((i for i in ids if not 0 <= i < config.vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"prompt: token id {wrong} is outside the vocabulary of {config.vocab_size}"
            )
        features = request.image_features
        if features is None:
            return
        if config.vision is None:
            raise ValueError("image_features: this model takes only text")
        num_pads = ids.count(config.vision.placeholder_token_id)
        if features.shape != (num_pads, config.hidden_size):
            raise ValueError(
                f"image_features: {list(features.shape)} for {num_pads} placeholder tokens and "
                f"hidden_size {config.hidden_size}; expected one row each"
            )
        if sum(span.stop - span.start for span in request.media) != num_pads:
            raise ValueError("media: the spans must cover every placeholder, else replies mix up")


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
        attention_weight=flops.attention * 2 / _FLOPS_AT / (flops.matmul + flops.kda),
    )
