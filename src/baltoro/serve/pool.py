"""The pages themselves: one buffer of bytes, read as latents, states or convolution windows.

`PagePool` moves whole pages as the account says; `PagedCache` is what the model sees of them in one
call; decoding reads and writes states in the pages themselves. `VerifyCache` is that where not
every new token may stay: states wait until it is known how many do, and then take in just those,
from the inputs that each layer recorded. A is the tokens that stay.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from baltoro.model.cache import Attend, KdaScan, KdaStep, LatentPages, LatentRows, ScanInputs
from baltoro.model.config import ModelConfig
from baltoro.ops.kda.decode import DecodeInputs, StatePool
from baltoro.ops.mla.rows import append_rows
from baltoro.serve.cold import ColdStates
from baltoro.serve.layout import PoolLayout
from baltoro.serve.pack import Part, Span, bounds_of, packed, pages_of, sent
from baltoro.serve.pages import PageOps, StateMove


class PagePool:
    """`num_pages` pages and the padding page 0 on a device, `host_pages` in CPU memory.

    With `is_drafting` the first MTP layer has latents too, in a buffer apart with the same pages.
    They follow copies but not the way to CPU memory and back: what is stale makes worse drafts.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: PoolLayout,
        *,
        num_pages: int,
        host_pages: int,
        dtype: torch.dtype,
        device: torch.device,
        is_drafting: bool = False,
    ) -> None:
        state_dtype = torch.promote_types(dtype, torch.float32)
        if layout.layer_bytes % state_dtype.itemsize:
            raise ValueError(
                f"hash_block={layout.hash_block}: a page has {layout.layer_bytes} bytes per layer, "
                f"no multiple of {state_dtype.itemsize}; use an even number"
            )
        shape = (layout.layers_per_page, layout.layer_bytes)
        self.layout = layout
        self.pages = torch.zeros((num_pages + 1, *shape), dtype=torch.uint8, device=device)
        self.host_pages = torch.zeros(
            (host_pages + 1, *shape), dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        kda, mla = config.kda, config.mla
        latents = self.pages.view(dtype).unflatten(-1, (layout.page_size, mla.kv_latent_dim))
        self._latents = {
            layer_idx: latents[:, place] for place, layer_idx in enumerate(layout.mla_layers)
        }
        draft_shape = (num_pages + 1 if is_drafting else 0, layout.page_size, mla.kv_latent_dim)
        self.draft_latents = torch.zeros(draft_shape, dtype=dtype, device=device)
        if is_drafting:
            self._latents[config.num_layers] = self.draft_latents
        channels, taps = 3 * kda.num_heads * kda.head_dim, kda.conv_kernel_size - 1
        first = layout.state_bytes // dtype.itemsize
        windows = self.pages.view(dtype)[..., first : first + channels * taps]
        windows = windows.unflatten(-1, (channels, taps))
        states = self.pages.view(state_dtype)[..., : kda.num_heads * kda.head_dim**2]
        states = states.unflatten(-1, (kda.num_heads, kda.head_dim, kda.head_dim))
        self._states = {
            layer_idx: (group, StatePool(windows[:, place], states[:, place]))
            for group, layers in enumerate(layout.state_groups)
            for place, layer_idx in enumerate(layers)
        }
        self._cold = ColdStates(layout, [self._states[i] for i in layout.kda_layers])
        self._side = torch.cuda.Stream(device) if device.type == "cuda" and host_pages else None
        self._arrival: torch.cuda.Event | None = None  # of what is on its way from CPU memory

    def latents(self, layer_idx: int) -> Tensor:
        """Latent rows of an MLA or MTP layer in every page, `[pages, page_size, R]`."""
        return self._latents[layer_idx]

    def states(self, layer_idx: int) -> tuple[int, StatePool]:
        """A KDA layer's group, and its states: one slot in each page."""
        return self._states[layer_idx]

    def prepare(self, ops: PageOps) -> None:
        """The movements before the model runs: stores first, since their pages are taken anew."""
        if self._arrival is not None:
            torch.cuda.current_stream(self.pages.device).wait_event(self._arrival)
            self._arrival = None
        for sources, targets, is_packed in ops.stores:
            pages = (
                self._cold.packed(sources) if is_packed else map(self.pages.__getitem__, sources)
            )
            for target, page in zip(targets, pages, strict=True):
                self.host_pages[target].copy_(page)
        self._load(ops.loads, ops.unpacks)
        _copy_pages(self.pages, ops.copies)
        if len(self.draft_latents):
            _copy_pages(self.draft_latents, ops.copies)
        for page in ops.resets:
            self.pages[page].zero_()
        self._load_ahead(ops)

    def _load(self, pages: Sequence[tuple[int, int]], states: Sequence[StateMove]) -> None:
        """From CPU memory; the host does not wait for a device."""
        for source, target in pages:
            self.pages[target].copy_(self.host_pages[source], non_blocking=True)
        for sources, targets in states:
            cold = [self.host_pages[i].to(self.pages.device, non_blocking=True) for i in sources]
            self._cold.unpack(torch.stack(cold), targets)

    def _load_ahead(self, ops: PageOps) -> None:
        """For later steps: on a GPU beside this one, once all before it is done."""
        if self._side is None or not (ops.prefetches or ops.unpacks_ahead):
            self._load(ops.prefetches, ops.unpacks_ahead)
            return
        self._side.wait_stream(torch.cuda.current_stream(self.pages.device))
        with torch.cuda.stream(self._side):
            self._load(ops.prefetches, ops.unpacks_ahead)
            self._arrival = self._side.record_event()

    def capture(self, ops: PageOps) -> None:
        """The movements after it: states at a boundary into pages that nobody writes again."""
        _copy_pages(self.pages, ops.captures)


def _copy_pages(pages: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy pages `(from, to)` in one launch; none is both."""
    if pairs:
        sources, targets = zip(*pairs, strict=True)
        torch._foreach_copy_([pages[i] for i in targets], [pages[i] for i in sources])


class PagedCache:
    """A `baltoro.model.cache.Cache` over the pages of some sequences, their tokens in a `pack`."""

    def __init__(
        self, pool: PagePool, form: Literal["prefill", "decode"], spans: Sequence[Span]
    ) -> None:
        self.form: Literal["prefill", "decode"] = form
        pack = packed(spans, pool.layout.page_size)
        self.pieces = pack.pieces
        self._pool = pool
        size, device = pool.layout.page_size, pool.pages.device
        self._starts = [span.start for span in spans]
        self._stops = [span.stop for span in spans]
        counts = [-(-stop // size) for stop in self._stops]
        padded = [
            span.table.kv_pages[:count] + [0] * (max(counts) - count)
            for span, count in zip(spans, counts, strict=True)
        ]
        self._counts = counts
        self._pages_NP, self._lengths_N, *bounds = sent(
            [np.array(x, np.int32) for x in (padded, self._stops, *map(bounds_of, pack.pieces))],
            device,
        )
        self._state_pages_GN, new_2T, order_T, *pages = sent(
            [
                np.array([span.table.state_pages for span in spans]).T,
                np.stack([pack.page_T, pack.place_T]),
                pack.order_T,
                *map(pages_of, pack.pieces),
            ],
            device,
        )
        self._cu_seqlens = torch.tensor([0, *(stop - start for _, start, stop in spans)]).cumsum(0)
        self._new_pages_T, self._new_rows_T = new_2T
        # rows of the pack by sequence; None where they are
        is_mixed = len(self.pieces) > 1 and len(spans) > 1
        self._order_T = order_T if is_mixed else None
        firsts = [pieces[0].row for pieces in self.pieces]
        self._parts = [
            Part(slice(first, stop), cu_seqlens, *sources_and_targets)
            for first, stop, cu_seqlens, sources_and_targets in zip(
                firsts, [*firsts[1:], len(order_T)], bounds, pages, strict=True
            )
        ]

    def prefill_kda(
        self, layer_idx: int, scan: KdaScan, inputs: ScanInputs, cu_seqlens: Tensor
    ) -> Tensor:
        group, (windows, states) = self._pool.states(layer_idx)
        outputs = []
        for part in self._parts:
            given = ScanInputs(*(x[part.tokens] for x in inputs))
            sources_N, targets_N = part.sources_GN[group], part.targets_GN[group]
            out = scan(given, part.cu_seqlens, windows[sources_N], states[sources_N])
            windows[targets_N] = out.conv_state
            states[targets_N] = out.state
            outputs.append(out.o)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def decode_kda(self, layer_idx: int, step: KdaStep, inputs: DecodeInputs) -> Tensor:
        group, pool = self._pool.states(layer_idx)
        return step(inputs, pool, self._state_pages_GN[group], None, None)

    def append_kv(self, layer_idx: int, rows: LatentRows, cu_seqlens: Tensor) -> None:
        append_rows(
            rows.raw,
            rows.weight,
            self._pool.latents(layer_idx),
            self._new_pages_T,
            self._new_rows_T,
            eps=rows.eps,
            impl=rows.append_impl,
        )

    def attended(self, layer_idx: int, attend: Attend, q_THK: Tensor, cu_seqlens: Tensor) -> Tensor:
        if self._order_T is None:
            return self.attended_in_order(layer_idx, attend, q_THK)
        y_THV = self.attended_in_order(layer_idx, attend, q_THK[self._order_T])
        return torch.empty_like(y_THV).index_copy_(0, self._order_T, y_THV)

    def attended_in_order(self, layer_idx: int, attend: Attend, q_THK: Tensor) -> Tensor:
        """As `attended`, of queries in the order of the sequences and their tokens."""
        latents = self._pool.latents(layer_idx)
        rows = [
            latents[self._pages_NP[n, : self._counts[n]]].flatten(0, 1)[:stop]
            for n, stop in enumerate(self._stops)
        ]
        kv_SR = rows[0] if len(rows) == 1 else torch.cat(rows)
        # both bounds on the host: who looks at them need not wait for the device
        bounds = torch.tensor([0, *self._stops]).cumsum(0)
        return attend(q_THK, kv_SR, self._cu_seqlens, bounds)

    def by_sequence(self, x_TD: Tensor) -> Tensor:
        """Rows of the pack in the order of the sequences and their tokens."""
        return x_TD if self._order_T is None else x_TD[self._order_T]

    def latent_pages(self, layer_idx: int) -> LatentPages:
        return LatentPages(self._pool.latents(layer_idx), self._pages_NP, self._lengths_N)

    def is_empty(self, layer_idx: int) -> Tensor:
        return torch.tensor([start == 0 for start in self._starts])


class VerifyCache(PagedCache):
    """A cache for drafted tokens: it decodes several of each sequence and keeps what `replay` says.

    Latents of tokens that go stay behind the sequence's end, where the next ones overwrite them.
    """

    def __init__(self, pool: PagePool, spans: Sequence[Span]) -> None:
        super().__init__(pool, "decode", spans)
        self._lengths = [span.stop - span.start for span in spans]
        bounds = torch.tensor([0, *self._lengths]).cumsum(0)
        self._firsts = bounds.tolist()
        self._cu_seqlens = bounds.to(pool.pages.device, torch.int32)
        self._none_kept_N = torch.zeros_like(self._lengths_N)
        self._seen: dict[int, tuple[KdaStep, DecodeInputs]] = {}

    def decode_kda(self, layer_idx: int, step: KdaStep, inputs: DecodeInputs) -> Tensor:
        self._seen[layer_idx] = (step, inputs)
        group, pool = self._pool.states(layer_idx)
        slots_N = self._state_pages_GN[group]
        return step(inputs, pool, slots_N, self._cu_seqlens, self._none_kept_N)

    def latent_pages(self, layer_idx: int) -> LatentPages:
        pages = super().latent_pages(layer_idx)
        return pages._replace(cu_seqlens=self._cu_seqlens, max_tokens=max(self._lengths))

    def replay(self, froms: Sequence[int], tos: Sequence[int]) -> None:
        """Take tokens `froms[n]` to `tos[n]` of each sequence's new ones into its states.

        Counted from the first new token; the states are those before `froms[n]`.
        """
        chosen = [n for n, (start, stop) in enumerate(zip(froms, tos, strict=True)) if stop > start]
        if not chosen:
            return
        device = self._pages_NP.device
        spans = [torch.arange(self._firsts[n] + froms[n], self._firsts[n] + tos[n]) for n in chosen]
        tokens_A = torch.cat(spans).to(device)
        bounds = torch.tensor([0, *(len(span) for span in spans)]).cumsum(0)
        cu_seqlens = bounds.to(device, torch.int32)
        chosen_N = torch.tensor(chosen, device=device)
        for layer_idx, (step, inputs) in self._seen.items():
            group, pool = self._pool.states(layer_idx)
            kept = DecodeInputs(*(x[tokens_A] for x in inputs))
            step(kept, pool, self._state_pages_GN[group, chosen_N], cu_seqlens, None)
