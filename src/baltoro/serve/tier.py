"""The pages of one memory and the prefixes kept in them. Plain Python: numbers, no tensors.

A page is *held* by sequences (and by a checkpoint while it is being read), *kept* by checkpoints,
or free. Latent pages are found by the chain hashes of their hash blocks. A checkpoint is a whole
resumable prefix: the state pages of every group and every latent page under it, which it keeps, so
half of one cannot exist. A page that nobody holds or keeps but that has hashes is cached.

What is dropped first is decided by recency plus a bonus for what the item saves per page. Held
pages are never dropped, so `num_available` pages can always be had.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(eq=False, slots=True)
class Checkpoint:
    """A read-only state at a hash boundary with the latents that belong to it."""

    key: bytes  # chain hash of the boundary
    position: int  # tokens before it
    state_pages: tuple[int, ...]  # one per state group
    kv_pages: tuple[int, ...]  # latent pages from token 0 to `position`
    kv_keys: tuple[bytes, ...]  # for each of them a hash under which it is found
    bonus: float  # what it saves per page, in units of the clock
    score: float = 0.0
    num_pins: int = 0  # steps that read it right now
    num_hits: int = 0
    is_alive: bool = True
    is_fetched: bool = False  # from CPU memory for a sequence that has not come to it yet

    @property
    def pages(self) -> tuple[int, ...]:
        return self.state_pages + self.kv_pages


@dataclass(slots=True)
class _Page:
    num_holds: int = 0
    num_keeps: int = 0
    keys: list[bytes] = field(default_factory=list)
    score: float = 0.0


class Found(NamedTuple):
    """A latent page that holds a part of a prefix."""

    tier: "Tier"
    page: int
    units: int  # hash blocks of the prefix in it, counted from its first row


class Tier:
    """`num_pages` pages, numbered from 1; page 0 is padding and belongs to nobody."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_available = num_pages  # pages that nobody holds
        self.index: dict[bytes, int] = {}  # chain hash -> latent page whose rows reach its boundary
        self.checkpoints: dict[bytes, Checkpoint] = {}
        self._pages = [_Page() for _ in range(num_pages + 1)]
        self._free = list(range(num_pages, 0, -1))  # the last one is taken first
        self._heap: list[tuple[float, int, int | Checkpoint]] = []
        self._num_pushes = 0

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    def take(self) -> int:
        """A free page, held once."""
        page = self._free.pop()
        self.hold(page)
        return page

    def hold(self, page: int) -> None:
        """Keep a page from being dropped until it is released."""
        entry = self._pages[page]
        entry.num_holds += 1
        if entry.num_holds == 1:
            self.num_available -= 1

    def release(self, page: int, clock: float) -> None:
        """End a hold; `clock` is when the page was last of use."""
        entry = self._pages[page]
        assert entry.num_holds > 0, f"page {page} is not held"
        entry.num_holds -= 1
        entry.score = max(entry.score, clock)
        if entry.num_holds == 0:
            self.num_available += 1
            self._settle(page)

    def register(self, key: bytes, page: int) -> None:
        """Let a held page be found by a hash; a hash that leads to another page stays there."""
        if key not in self.index:
            self.index[key] = page
            self._pages[page].keys.append(key)

    def add(self, checkpoint: Checkpoint, clock: float) -> None:
        """Make a checkpoint findable. Its pages are held by the caller, who then releases them."""
        assert checkpoint.key not in self.checkpoints
        for page in checkpoint.pages:
            self._pages[page].num_keeps += 1
        self.checkpoints[checkpoint.key] = checkpoint
        self.touch(checkpoint, clock)

    def keys_of(self, page: int) -> tuple[bytes, ...]:
        """The hashes under which a latent page is found."""
        return tuple(self._pages[page].keys)

    def touch(self, checkpoint: Checkpoint, clock: float) -> None:
        """Note a use, which puts off its removal."""
        checkpoint.score = clock + checkpoint.bonus
        if checkpoint.num_pins == 0:
            self._push(checkpoint.score, checkpoint)

    def pin(self, checkpoint: Checkpoint) -> None:
        """Hold all pages of a checkpoint while it is read."""
        checkpoint.num_pins += 1
        for page in checkpoint.pages:
            self.hold(page)

    def unpin(self, checkpoint: Checkpoint, clock: float) -> None:
        """End a pin and note the use."""
        checkpoint.num_pins -= 1
        for page in reversed(checkpoint.pages):
            self.release(page, clock)
        self.touch(checkpoint, clock)

    def victim(self) -> int | Checkpoint:
        """What to drop next: a cached page or a whole checkpoint. There must be one."""
        while True:
            entry = heapq.heappop(self._heap)
            if self._is_due(*entry):
                return entry[2]

    def drop(self, item: int | Checkpoint) -> None:
        """Forget a cached page, or a checkpoint in all groups at once."""
        if isinstance(item, Checkpoint):
            assert item.num_pins == 0 and item.is_alive
            item.is_alive = False
            del self.checkpoints[item.key]
            for page in (*item.state_pages, *reversed(item.kv_pages)):
                self._pages[page].num_keeps -= 1
                self._settle(page)
            return
        entry = self._pages[item]
        for key in entry.keys:
            del self.index[key]
        entry.keys = []
        self._settle(item)

    def forget(self) -> None:
        """Drop everything that no sequence holds; held pages lose their hashes."""
        for checkpoint in list(self.checkpoints.values()):
            self.drop(checkpoint)
        for page in sorted(set(self.index.values())):
            self.drop(page)

    def audit(self, holds: Sequence[int]) -> None:
        """Assert that the account adds up; `holds` lists every hold that the caller knows of."""
        expected = [0] * (self.num_pages + 1)
        for page in holds:
            expected[page] += 1
        keeps = [0] * (self.num_pages + 1)
        for checkpoint in self.checkpoints.values():
            assert checkpoint.is_alive
            for page in checkpoint.pages:
                keeps[page] += 1
            for key, page in zip(checkpoint.kv_keys, checkpoint.kv_pages, strict=True):
                assert self.index[key] == page, "a checkpoint lost its latents"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        for page, entry in enumerate(self._pages):
            assert entry.num_holds == expected[page], f"page {page}: {entry} but {expected[page]}"
            assert entry.num_keeps == keeps[page], f"page {page}: {entry} but {keeps[page]}"
            idle = page > 0 and not (entry.num_holds or entry.num_keeps or entry.keys)
            assert (page in free) == idle, f"page {page}: {entry}"
            assert all(self.index[key] == page for key in entry.keys)
        assert len(self.index) == sum(len(entry.keys) for entry in self._pages)
        assert self.num_available == sum(not entry.num_holds for entry in self._pages[1:])

    def _settle(self, page: int) -> None:
        """Free a page that nobody wants, or line it up to be dropped."""
        entry = self._pages[page]
        if entry.num_holds or entry.num_keeps:
            return
        if entry.keys:
            self._push(entry.score, page)
        else:
            entry.score = 0.0
            self._free.append(page)

    def _push(self, score: float, item: int | Checkpoint) -> None:
        self._num_pushes += 1
        heapq.heappush(self._heap, (score, self._num_pushes, item))
        if len(self._heap) > 4 * self.num_pages + 64:
            due = {(entry[0], entry[2]): entry for entry in self._heap if self._is_due(*entry)}
            self._heap = list(due.values())
            heapq.heapify(self._heap)

    def _is_due(self, score: float, _: int, item: int | Checkpoint) -> bool:
        """Whether a heap entry still says when its item is to go."""
        if isinstance(item, Checkpoint):
            return item.is_alive and item.num_pins == 0 and item.score == score
        entry = self._pages[item]
        wanted = entry.num_holds or entry.num_keeps or not entry.keys
        return not wanted and entry.score == score


def cover(chain: Sequence[bytes], units_per_page: int, tiers: Sequence[Tier]) -> list[Found]:
    """The latent pages of the longest prefix of `chain` that the tiers know, in order.

    First whole pages, then the longest boundary inside the first one that is missing; of equally
    long ones the earlier tier's.
    """
    found: list[Found] = []
    for first in range(0, len(chain), units_per_page):
        known = _longest(chain[first : first + units_per_page], tiers)
        if known is None:
            break
        found.append(known)
        if known.units < units_per_page:
            break
    return found


def _longest(keys: Sequence[bytes], tiers: Sequence[Tier]) -> Found | None:
    for units in range(len(keys), 0, -1):
        for tier in tiers:
            page = tier.index.get(keys[units - 1])
            if page is not None:
                return Found(tier, page, units)
    return None
