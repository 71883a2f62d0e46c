"""The pages themselves: one buffer of bytes, read as latents, states or convolution windows.

`PagePool` moves whole pages as the account says; `PagedCache` is what the model sees of them in one
call, with states gathered from and written back to the pages of its N sequences.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from baltoro.model.config import ModelConfig
from baltoro.serve.layout import PoolLayout
from baltoro.serve.pages import PageOps, Table


class PagePool:
    """`num_pages` pages and the padding page 0 on a device, `host_pages` in CPU memory."""

    def __init__(
        self,
        config: ModelConfig,
        layout: PoolLayout,
        *,
        num_pages: int,
        host_pages: int,
        dtype: torch.dtype,
        device: torch.device,
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
        channels, taps = 3 * kda.num_heads * kda.head_dim, kda.conv_kernel_size - 1
        first = layout.state_bytes // dtype.itemsize
        windows = self.pages.view(dtype)[..., first : first + channels * taps]
        windows = windows.unflatten(-1, (channels, taps))
        states = self.pages.view(state_dtype)[..., : kda.num_heads * kda.head_dim**2]
        states = states.unflatten(-1, (kda.num_heads, kda.head_dim, kda.head_dim))
        self._states = {
            layer_idx: (group, windows[:, place], states[:, place])
            for group, layers in enumerate(layout.state_groups)
            for place, layer_idx in enumerate(layers)
        }

    def latents(self, layer_idx: int) -> Tensor:
        """Latent rows of an MLA layer in every page, `[pages, page_size, R]`."""
        return self._latents[layer_idx]

    def states(self, layer_idx: int) -> tuple[int, Tensor, Tensor]:
        """A KDA layer's group, windows `[pages, C, W-1]` and states `[pages, H, K, V]`."""
        return self._states[layer_idx]

    def prepare(self, ops: PageOps) -> None:
        """The movements before the model runs: stores first, since their pages are taken anew."""
        for source, target in ops.stores:
            self.host_pages[target].copy_(self.pages[source])
        for source, target in ops.loads:
            self.pages[target].copy_(self.host_pages[source])
        for source, target in ops.copies:
            self.pages[target].copy_(self.pages[source])
        for page in ops.resets:
            self.pages[page].zero_()

    def capture(self, ops: PageOps) -> None:
        """The movements after it: states at a boundary into pages that nobody writes again."""
        for source, target in ops.captures:
            self.pages[target].copy_(self.pages[source])


class Span(NamedTuple):
    """Tokens of one sequence in one model call."""

    table: Table
    start: int
    stop: int


class PagedCache:
    """A `baltoro.model.cache.Cache` over the pages of some sequences."""

    def __init__(
        self, pool: PagePool, form: Literal["prefill", "decode"], spans: Sequence[Span]
    ) -> None:
        self.form: Literal["prefill", "decode"] = form
        self._pool = pool
        size, device = pool.layout.page_size, pool.pages.device
        self._starts = [span.start for span in spans]
        self._stops = [span.stop for span in spans]
        self._state_pages_GN = torch.tensor(
            [span.table.state_pages for span in spans], device=device
        ).T
        counts = [-(-stop // size) for stop in self._stops]
        padded = [
            span.table.kv_pages[:count] + [0] * (max(counts) - count)
            for span, count in zip(spans, counts, strict=True)
        ]
        self._counts = counts
        self._pages_NP = torch.tensor(padded, device=device)
        positions = [torch.arange(span.start, span.stop) for span in spans]
        rows_T = torch.cat(positions).to(device)
        owner_T = torch.arange(len(spans)).repeat_interleave(
            torch.tensor([len(p) for p in positions])
        )
        self._new_pages_T = self._pages_NP[owner_T.to(device), rows_T // size]
        self._new_rows_T = rows_T % size

    def kda_state(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        group, windows, states = self._pool.states(layer_idx)
        pages_N = self._state_pages_GN[group]
        return windows[pages_N], states[pages_N]

    def store_kda_state(self, layer_idx: int, conv_state: Tensor, state: Tensor) -> None:
        group, windows, states = self._pool.states(layer_idx)
        pages_N = self._state_pages_GN[group]
        windows[pages_N] = conv_state
        states[pages_N] = state

    def append_kv(self, layer_idx: int, kv_latent: Tensor, cu_seqlens: Tensor) -> None:
        self._pool.latents(layer_idx)[self._new_pages_T, self._new_rows_T] = kv_latent

    def kv_packed(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        latents = self._pool.latents(layer_idx)
        rows = [
            latents[self._pages_NP[n, : self._counts[n]]].flatten(0, 1)[:stop]
            for n, stop in enumerate(self._stops)
        ]
        bounds = torch.tensor([0, *self._stops], device=latents.device).cumsum(0)
        return torch.cat(rows), bounds.to(torch.int32)

    def kv_padded(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        latents = self._pool.latents(layer_idx)
        rows = latents[self._pages_NP].flatten(1, 2)[:, : max(self._stops)]
        return rows, torch.tensor(self._stops, device=latents.device)

    def is_empty(self, layer_idx: int) -> Tensor:
        return torch.tensor([start == 0 for start in self._starts])
