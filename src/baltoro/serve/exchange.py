"""What moves between the pool and the CPU memory behind it. No tensors here.

A checkpoint that is dropped from the pool is written back whole, latents and state; one that a
sequence hits is loaded as it is let in. A sequence that still waits has its prefix fetched ahead,
latents first, a few pages a step. Pages for it are free ones or those of what is least of use, and
never what runs or what a sequence before it in the queue will hit. What is fetched in a step can be
hit, or dropped, in the next.
"""

from collections.abc import Iterable, Sequence

from baltoro.serve.pages import CacheConfig, CacheStats, PageOps, Store
from baltoro.serve.tier import Checkpoint, Found, Tier, cover


class Exchange:
    """The pool's pages, those in CPU memory, and the movements of one step."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.device = Tier(config.num_pages)
        self.host = Tier(config.host_pages)
        self.ops = PageOps()
        self.stats = CacheStats()
        self._units_per_page = config.page_size // config.hash_block
        self._pins: list[tuple[Tier, Checkpoint]] = []  # until this step has run
        self._holds: list[tuple[Tier, int, float]] = []  # and how much longer it is of use
        self._clock = 0.0

    def prefetch(self, wanted: Iterable[tuple[Sequence[bytes], int]]) -> None:
        """Fetch prefixes ahead: `wanted` has the hashes and the most tokens of each, best first.

        Call it last in a step, so that it takes room from nobody.
        """
        budget = self.config.prefetch_pages
        if not self.config.is_enabled or not self.host.checkpoints:
            return
        kept: list[Checkpoint] = []
        for chain, max_tokens in wanted:
            _, hit = self._find(chain, max_tokens)
            if hit is None:
                continue
            if hit[0] is self.device:
                self.device.pin(hit[1])
                kept.append(hit[1])
            elif budget > 0:
                budget -= self._fetch(hit[1], budget)
        for checkpoint in kept:
            self.device.unpin(checkpoint, self._clock)

    def end_step(self) -> None:
        """Unpin what the step read. The ops of the next step begin empty."""
        for tier, checkpoint in self._pins:
            tier.unpin(checkpoint, self._clock)
        for tier, page, bonus in self._holds:
            tier.release(page, self._clock + bonus)
        self._pins, self._holds, self.ops = [], [], PageOps()
        self._clock += 1.0

    def _find(
        self, chain: Sequence[bytes], max_tokens: int
    ) -> tuple[list[Found], tuple[Tier, Checkpoint] | None]:
        """Known latents of a prefix and the furthest checkpoint inside them."""
        if not self.config.is_enabled:
            return [], None
        tiers = (self.device, self.host) if self.config.host_pages else (self.device,)
        chain = chain[: max_tokens // self.config.hash_block]
        found = cover(chain, self._units_per_page, tiers)
        for block in range(sum(page.units for page in found) - 1, -1, -1):
            for tier in tiers:
                checkpoint = tier.checkpoints.get(chain[block])
                if checkpoint is not None:
                    return found, (tier, checkpoint)
        return found, None

    def _fetch(self, checkpoint: Checkpoint, budget: int) -> int:
        """Fetch what the pool lacks of a checkpoint; how many pages that were.

        At most `budget`, but a state comes whole.
        """
        device, num_groups = self.device, self.config.num_state_groups
        pages = [device.index.get(key, 0) for key in checkpoint.kv_keys]
        num_missing = pages.count(0)
        present = [page for page in pages if page]
        for page in present:
            device.hold(page)
        self.host.pin(checkpoint)
        self._pins.append((self.host, checkpoint))
        num_latents = min(num_missing, budget)
        is_whole = num_missing + num_groups <= budget or not num_missing
        num_new = num_latents + (num_groups if is_whole else 0)
        # a part is of no use if there will be no room for the rest
        has_room = num_missing + num_groups <= device.num_available and self._make_room(num_new)
        if has_room:
            self._fetch_latents(checkpoint, pages, num_latents)
            if is_whole:
                self._fetch_state(checkpoint, pages)
            self.stats.num_prefetched += num_new
        for page in present:
            device.release(page, self._clock)
        return num_new if has_room else 0

    def _fetch_latents(self, checkpoint: Checkpoint, pages: list[int], count: int) -> None:
        """The first `count` of those that are missing in `pages`, which are found from now on."""
        missing = [number for number, page in enumerate(pages) if not page]
        for number in missing[:count]:
            source = checkpoint.kv_pages[number]
            pages[number] = self.device.take()
            self._holds.append((self.device, pages[number], checkpoint.bonus))
            self.ops.prefetches.append((source, pages[number]))
            for key in self.host.keys_of(source):
                self.device.register(key, pages[number])

    def _fetch_state(self, checkpoint: Checkpoint, pages: list[int]) -> None:
        states = tuple(self.device.take() for _ in range(self.config.num_state_groups))
        self._holds += [(self.device, page, 0.0) for page in states]
        if self.config.is_cold_packed:
            self.ops.unpacks_ahead.append((checkpoint.state_pages, states))
        else:
            self.ops.prefetches += zip(checkpoint.state_pages, states, strict=True)
        copy = Checkpoint(
            key=checkpoint.key,
            position=checkpoint.position,
            state_pages=states,
            kv_pages=tuple(pages),
            kv_keys=checkpoint.kv_keys,
            bonus=checkpoint.bonus,
            is_fetched=True,
        )
        self.device.add(copy, self._clock)
        self.device.pin(copy)
        self._pins.append((self.device, copy))

    def _make_room(self, num_pages: int) -> bool:
        """Have free pages, dropping the least useful; without any change if they cannot be had."""
        if num_pages > self.device.num_available:
            return False
        while self.device.num_free < num_pages:
            item = self.device.victim()
            if isinstance(item, Checkpoint):
                is_unread = item.num_hits == 0 and not item.is_fetched
                self.stats.num_states_evicted_unread += is_unread
                self._write_back(item)
            self.device.drop(item)
        return True

    def _write_back(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint that is about to go into CPU memory, its latents with it."""
        host = self.host
        if checkpoint.key in host.checkpoints:
            host.touch(host.checkpoints[checkpoint.key], self._clock)
            return
        kv_pages = [host.index.get(key, 0) for key in checkpoint.kv_keys]
        present = [page for page in kv_pages if page]
        for page in present:
            host.hold(page)
        num_new = kv_pages.count(0) + self.config.num_cold_pages
        if num_new <= host.num_available:
            while host.num_free < num_new:
                host.drop(host.victim())
            for number, source in enumerate(checkpoint.kv_pages):
                if not kv_pages[number]:
                    kv_pages[number] = self._store(source)
                    present.append(kv_pages[number])
                    for key in self.device.keys_of(source):
                        host.register(key, kv_pages[number])
            state_pages = self._store_state(checkpoint.state_pages)
            present += state_pages
            copy = Checkpoint(
                key=checkpoint.key,
                position=checkpoint.position,
                state_pages=state_pages,
                kv_pages=tuple(kv_pages),
                kv_keys=checkpoint.kv_keys,
                bonus=checkpoint.bonus,
            )
            host.add(copy, self._clock)
        for page in reversed(present):
            host.release(page, self._clock)

    def _store_state(self, sources: tuple[int, ...]) -> tuple[int, ...]:
        if not self.config.is_cold_packed:
            return tuple(self._store(source) for source in sources)
        targets = tuple(self.host.take() for _ in range(self.config.num_cold_pages))
        self.ops.stores.append(Store(sources, targets, is_packed=True))
        self.stats.num_written_back += len(targets)
        return targets

    def _store(self, source: int) -> int:
        target = self.host.take()
        self.ops.stores.append(Store((source,), (target,)))
        self.stats.num_written_back += 1
        return target
