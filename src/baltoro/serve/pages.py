"""Records of the cache account: settings, a sequence's pages, a step's page movements, counts."""

from dataclasses import dataclass, field
from typing import NamedTuple

from baltoro.serve.tier import Checkpoint

StateMove = tuple[tuple[int, ...], tuple[int, ...]]  # pages of one state here and there


class Store(NamedTuple):
    """Pages to CPU memory: each to its own, or the pages of one state packed."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    is_packed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """Sizes and rules of one pool."""

    num_pages: int
    page_size: int  # tokens of a page of latents
    hash_block: int  # tokens of a unit of matching: the shortest prefix that can be reused
    num_state_groups: int  # pages of one state
    is_enabled: bool = True  # False: nothing is reused, pages are only accounted for
    retention_interval: int | None = None  # also keep a state every so many tokens
    host_pages: int = 0  # pages in CPU memory for what is evicted
    cold_pages: int | None = None  # there for one state, packed; None: as in the pool
    prefetch_pages: int = 64  # brought back in one step for sequences that wait
    attention_weight: float = 0.0  # cost of a context token, in costs of a token without context
    value_weight: float = 64.0  # steps that a state outlives others for saving a page's prefill

    def __post_init__(self) -> None:
        for name in ("num_pages", "page_size", "hash_block", "num_state_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.page_size % self.hash_block:
            raise ValueError(
                f"page_size={self.page_size}: must be a multiple of hash_block={self.hash_block}"
            )
        interval = self.retention_interval
        if interval is not None and (interval < 1 or interval % self.hash_block):
            raise ValueError(
                f"retention_interval={interval}: must be a multiple of hash_block={self.hash_block}"
            )
        for name in ("host_pages", "prefetch_pages"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must not be negative")

    @property
    def is_cold_packed(self) -> bool:
        """Whether states have another form in CPU memory."""
        return self.cold_pages is not None

    @property
    def num_cold_pages(self) -> int:
        """Pages of one state in CPU memory."""
        return self.num_state_groups if self.cold_pages is None else self.cold_pages

    def num_kv_pages(self, num_tokens: int) -> int:
        """Pages of the latents of so many tokens."""
        return -(-num_tokens // self.page_size)


@dataclass(slots=True)
class PageOps:
    """Page movements of one step, in the order in which they must run."""

    stores: list[Store] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)  # (host page, page)
    unpacks: list[StateMove] = field(default_factory=list)  # (host pages, pages)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to)
    resets: list[int] = field(default_factory=list)  # state pages that begin as zeros
    # as loads and unpacks, for a later step: done when that one begins
    prefetches: list[tuple[int, int]] = field(default_factory=list)
    unpacks_ahead: list[StateMove] = field(default_factory=list)
    captures: list[tuple[int, int]] = field(default_factory=list)  # (from, to), after the model ran


@dataclass(slots=True)
class CacheStats:
    """Counts since the start."""

    query_tokens: int = 0  # tokens of admitted sequences, again after each preemption
    kv_hit_tokens: int = 0  # of them with latents at hand
    agreed_hit_tokens: int = 0  # of them with a state too: not computed again
    host_hit_tokens: int = 0  # of the agreed ones, those whose state came from CPU memory
    num_pages_without_state: int = 0  # admissions that found latents beyond their state
    num_states_written: int = 0
    num_states_hit: int = 0
    num_states_evicted_unread: int = 0
    num_states_skipped: int = 0  # no page could be had
    num_copies: int = 0  # pages copied because somebody else's
    num_written_back: int = 0  # pages stored in CPU memory
    num_prefetched: int = 0  # pages brought back for sequences that waited


@dataclass(eq=False, slots=True)
class Table:
    """The pages of one running sequence."""

    kv_pages: list[int]
    state_pages: tuple[int, ...]  # one per group, written by this sequence alone
    num_hit: int  # tokens that came from the cache
    stops: frozenset[int]  # positions whose state will be kept
    is_cacheable: bool  # False: nothing of it is registered any more
    last_kept: int  # position of the last kept state below this sequence
    num_registered: int = 0  # hash blocks offered to the index
    latest: Checkpoint | None = None  # gives way to the next one unless somebody read it
    # positions, in order, and pages of this step's states that are kept: at the end of its tokens,
    # and at one boundary before it; position 0: where drafts will turn out to end
    captures: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
