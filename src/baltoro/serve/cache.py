"""The cache account: who has which page, and which prefixes can be continued. No tensors here.

Report 5.4.1: one pool of equal pages for MLA latents and KDA states; a prefix is a hit only where
latents and every group's state end at one token. The rules that keep it honest:

- A hit is the longest boundary with a checkpoint, and a checkpoint keeps its latents (`tier`).
- Everything that a hit reads is pinned before anything is allocated.
- A state is copied into the sequence's own pages, as is a latent page that it will go on filling;
  rows and states that a hash names are never written again.
- What a step computes is registered when it is committed, so nobody hits it in the same step.
- A checkpoint that cannot be had is skipped: caching never stops a sequence.

Kept are the ends of prompts, junctions (where a second request shared latents but found no state),
intervals if asked for, and the last boundary that a sequence passed, which becomes its turn's end.
"""

from collections.abc import Sequence

from baltoro.serve.exchange import Exchange
from baltoro.serve.pages import CacheConfig, Table
from baltoro.serve.tier import Checkpoint, Found, Tier


class PrefixCache(Exchange):
    """The account of one pool and, if there is one, its second tier in CPU memory."""

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self._tables: set[Table] = set()

    def lookup(self, chain: Sequence[bytes], max_tokens: int) -> int:
        """Tokens, at most `max_tokens`, that a sequence with these hashes would not compute."""
        _, hit = self._find(chain, max_tokens)
        return 0 if hit is None else hit[1].position

    def admit(self, chain: Sequence[bytes], num_tokens: int) -> Table | None:
        """Pages for a sequence of `num_tokens`, all but at least the last of them perhaps hit.

        None if the pool cannot give them now; then nothing has changed.
        """
        found, hit = self._find(chain, num_tokens - 1)
        table = self._reserve(found, hit, num_tokens)
        if table is None and hit is not None and not self._tables:
            # alone in the pool, and pinning the hit takes the room that computing anew would need
            hit = None
            table = self._reserve(found, None, num_tokens)
        if table is None:
            return None
        self._tables.add(table)
        known = sum(page.units for page in found) * self.config.hash_block
        self.stats.query_tokens += num_tokens
        self.stats.kv_hit_tokens += known
        self.stats.agreed_hit_tokens += table.num_hit
        self.stats.num_pages_without_state += known > table.num_hit
        if hit is not None:
            self.stats.num_states_hit += 1
            if hit[0] is self.host or hit[1].is_fetched:
                self.stats.host_hit_tokens += table.num_hit
            hit[1].is_fetched = False
        return table

    def grow(self, table: Table, num_tokens: int) -> bool:
        """Have latent pages for `num_tokens`; False if the pool cannot give them now."""
        need = self.config.num_kv_pages(num_tokens) - len(table.kv_pages)
        if need > 0 and not self._make_room(need):
            return False
        table.kv_pages += [self.device.take() for _ in range(need)]
        return True

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens could have its pages now, without any hit."""
        need = self.config.num_kv_pages(num_tokens) + self.config.num_state_groups
        return need <= self.device.num_available

    def next_stop(self, table: Table, start: int, end: int) -> int:
        """The first position behind `start`, at most `end`, whose state is to be kept."""
        if not table.is_cacheable:
            return end
        stops = [stop for stop in table.stops if start < stop < end]
        interval = self.config.retention_interval
        if interval is not None:
            stops.append((start // interval + 1) * interval)
        return min([*stops, end])

    def slice_stop(self, table: Table, start: int, end: int) -> int:
        """Where a slice from `start` towards `end` must stop so that its states can be kept.

        One call may keep two: at its end, and at a stop that at most a hash block follows.
        """
        stop = self.next_stop(table, start, end)
        is_only = self.next_stop(table, stop, end) == end
        return end if is_only and end - stop <= self.config.hash_block else stop

    def plan_captures(self, table: Table, chain: Sequence[bytes], start: int, end: int) -> None:
        """Have the states at `end`, and at a stop before it, kept: at boundaries if there is room.

        The former is copied away after this step, the latter written where it is kept. Call it
        once the step's sequences have their pages, so that it can take none from them.
        """
        if not table.is_cacheable:
            return
        unit = self.config.hash_block
        for position in sorted({self.next_stop(table, start, end), end}):
            if position % unit:
                continue
            known = self.device.checkpoints.get(chain[position // unit - 1])
            if known is not None:
                self.device.touch(known, self._clock)
                continue
            pages = self._capture_pages(table)
            if pages:
                table.captures.append((position, pages))
            if pages and position == end:
                self.ops.captures += zip(table.state_pages, pages, strict=True)

    def plan_draft(self, table: Table, start: int, end: int) -> None:
        """As `plan_captures`, for new tokens of which some may go: `settle` says where they end."""
        unit = self.config.hash_block
        if table.is_cacheable and end // unit > start // unit:
            pages = self._capture_pages(table)
            table.captures = [(0, pages)] if pages else []

    def settle(self, table: Table, start: int, end: int) -> None:
        """The tokens from `start` to `end` stay: give back what the others would have needed.

        The state at the last boundary among them is copied away, if `plan_draft` had room for it.
        """
        for page in reversed(table.kv_pages[self.config.num_kv_pages(end) :]):
            self.device.release(page, self._clock)
        del table.kv_pages[self.config.num_kv_pages(end) :]
        if not table.captures:
            return
        ((_, pages),) = table.captures
        boundary = end // self.config.hash_block * self.config.hash_block
        table.captures = [(boundary, pages)] if boundary > start else []
        if table.captures:
            self.ops.captures += zip(table.state_pages, pages, strict=True)
        else:
            for page in pages:
                self.device.release(page, self._clock)

    def commit(self, table: Table, chain: Sequence[bytes], num_computed: int) -> None:
        """Register what a sequence has computed, its captured states among it."""
        if table.is_cacheable:
            size, unit = self.config.page_size, self.config.hash_block
            for block in range(table.num_registered, num_computed // unit):
                self.device.register(chain[block], table.kv_pages[block * unit // size])
            table.num_registered = num_computed // unit
        captures, table.captures = table.captures, []
        for position, pages in captures:
            if table.is_cacheable:
                self._keep(table, chain, position, pages)
            for page in pages:
                self.device.release(page, self._clock)

    def release(self, table: Table) -> None:
        """Give back a sequence's pages, the tail first; what has hashes stays cached."""
        self._tables.remove(table)
        for page in (*table.state_pages, *reversed(table.kv_pages)):
            self.device.release(page, self._clock)

    def forget(self) -> None:
        """The weights changed: no prefix counts any more, nor what running sequences will add."""
        assert not self._pins and not self._holds
        self.device.forget()
        self.host.forget()
        for table in self._tables:
            table.is_cacheable = False
            table.latest = None

    def audit(self) -> None:
        """Assert that both tiers add up: every hold belongs to a running sequence or this step."""
        holds = {self.device: list[int](), self.host: list[int]()}
        for table in self._tables:
            holds[self.device] += [*table.kv_pages, *table.state_pages]
            for _, captured in table.captures:
                holds[self.device] += captured
        for tier, checkpoint in self._pins:
            holds[tier] += checkpoint.pages
        for tier, page, _ in self._holds:
            holds[tier].append(page)
        for tier, pages in holds.items():
            tier.audit(pages)

    def _reserve(
        self, found: list[Found], hit: tuple[Tier, Checkpoint] | None, num_tokens: int
    ) -> Table | None:
        size, unit = self.config.page_size, self.config.hash_block
        num_hit = 0 if hit is None else hit[1].position
        whole = [page for page in found[: num_hit // size] if page.tier is self.device]
        num_new = self.config.num_kv_pages(num_tokens) - len(whole)
        # pin all of it, in every group and tier, before the first page is allocated
        if hit is not None:
            hit[0].pin(hit[1])
        used = found[: self.config.num_kv_pages(num_hit)]
        for tier, page, _ in used:
            tier.hold(page)
        if not self._make_room(num_new + self.config.num_state_groups):
            for tier, page, _ in used:
                tier.release(page, 0.0)
            if hit is not None:
                hit[0].unpin(hit[1], self._clock)
            return None
        kv_pages = self._take_latents(used, num_hit)
        while len(kv_pages) < self.config.num_kv_pages(num_tokens):
            kv_pages.append(self.device.take())
        state_pages = tuple(self.device.take() for _ in range(self.config.num_state_groups))
        if hit is None:
            self.ops.resets += state_pages
        else:
            hit[1].num_hits += 1
            self._pins.append(hit)
            self._queue_state(hit[0], hit[1].state_pages, state_pages)
        stops = {(num_tokens - 1) // unit * unit, num_tokens // unit * unit}
        stops.add(sum(page.units for page in found) * unit)
        return Table(
            kv_pages=kv_pages,
            state_pages=state_pages,
            num_hit=num_hit,
            stops=frozenset(stop for stop in stops if stop > num_hit),
            is_cacheable=self.config.is_enabled,
            last_kept=num_hit,
        )

    def _take_latents(self, used: list[Found], num_hit: int) -> list[int]:
        """Pages of a hit for a new sequence: shared where whole and here, else its own copies."""
        pages: list[int] = []
        for number, (tier, page, _) in enumerate(used):
            if tier is self.device and (number + 1) * self.config.page_size <= num_hit:
                pages.append(page)  # the hold passes to the sequence
                continue
            own = self.device.take()
            self._queue_page(tier, page, own)
            self._holds.append((tier, page, 0.0))
            pages.append(own)
        return pages

    def _queue_page(self, tier: Tier, source: int, target: int) -> None:
        if tier is self.host:
            self.ops.loads.append((source, target))
        else:
            self.ops.copies.append((source, target))
            self.stats.num_copies += 1

    def _queue_state(self, tier: Tier, sources: tuple[int, ...], targets: tuple[int, ...]) -> None:
        if tier is self.host and self.config.is_cold_packed:
            self.ops.unpacks.append((sources, targets))
            return
        for pair in zip(sources, targets, strict=True):
            self._queue_page(tier, *pair)

    def _capture_pages(self, table: Table) -> tuple[int, ...]:
        """Pages for a state that will be kept; none if the pool cannot give them."""
        num_groups = self.config.num_state_groups
        if self.device.num_free < num_groups:
            self._supersede(table)
        if not self._make_room(num_groups):
            self.stats.num_states_skipped += 1
            return ()
        return tuple(self.device.take() for _ in range(num_groups))

    def _keep(
        self, table: Table, chain: Sequence[bytes], position: int, pages: tuple[int, ...]
    ) -> None:
        """Register a captured state, with the pages by which its latents are found."""
        size, unit = self.config.page_size, self.config.hash_block
        key = chain[position // unit - 1]
        if key in self.device.checkpoints:
            return  # another sequence of this step came first
        self._supersede(table)
        kv_keys = []
        for number in range(self.config.num_kv_pages(position)):
            kv_keys.append(chain[min((number + 1) * size, position) // unit - 1])
            # the page that this hash led to may have gone since; ours has the same rows
            self.device.register(kv_keys[-1], table.kv_pages[number])
        checkpoint = Checkpoint(
            key=key,
            position=position,
            state_pages=pages,
            kv_pages=tuple(self.device.index[key] for key in kv_keys),
            kv_keys=tuple(kv_keys),
            bonus=self._bonus(table.last_kept, position),
        )
        self.device.add(checkpoint, self._clock)
        self.stats.num_states_written += 1
        interval = self.config.retention_interval
        if position in table.stops or (interval is not None and position % interval == 0):
            table.last_kept = position
        else:
            table.latest = checkpoint

    def _supersede(self, table: Table) -> None:
        """Drop the state at the last boundary that a sequence passed, unless it is of use."""
        latest, table.latest = table.latest, None
        if latest is not None and latest.is_alive and not latest.num_hits and not latest.num_pins:
            self.device.drop(latest)

    def _bonus(self, start: int, end: int) -> float:
        """Saved prefill per page (Marconi), against that of the first page, in clock units."""

        def cost(first: int, last: int) -> float:
            return last - first + self.config.attention_weight * (last**2 - first**2) / 2

        kv_pages = self.config.num_kv_pages(end) - self.config.num_kv_pages(start)
        per_page = cost(start, end) / (kv_pages + self.config.num_state_groups)
        return self.config.value_weight * per_page / cost(0, self.config.page_size)
