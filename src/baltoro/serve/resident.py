"""The decoding sequences' inputs at fixed places on the device, so that a step is one CUDA graph.

A row holds one sequence: the token to compute, its position, the sequence's state slots and its
pages. A launch computes the rows' tokens and moves every position on by one, so the next one needs
nothing but the tokens that were drawn. There is a graph for each number of rows in `ladder`; rows
beyond those in use read and write slot 0 and page 0, which are nobody's. On a CPU the same rows go
through the same model call, without a graph.

G is the groups of KDA layers that share a page, P the pages of a sequence.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from baltoro.model.beside import at_once
from baltoro.model.config import ModelConfig
from baltoro.model.model import Model
from baltoro.model.moe import Moe
from baltoro.ops.mla.rows import next_rows
from baltoro.serve.pack import sent
from baltoro.serve.pages import Table
from baltoro.serve.pool import PagedCache, PagePool

T = TypeVar("T")
FED = -1  # in the place of a token: the one that was fed from the device
OPERATORS = ("kda_decode", "attention_decode", "moe")  # of a step that may look at values
_WAITING_IMPLS = ("reference", "torch")
WARM_UPS = 2  # calls before a capture: kernels are built, libraries choose theirs


def waiting_operators(config: ModelConfig, operators: Sequence[str]) -> list[str]:
    """Those of `operators` whose implementation reads values on the host, as `name='impl'`.

    A CUDA graph cannot hold them.
    """
    used = [name for name in operators if name != "moe" or config.moe is not None]
    impls = {name: str(getattr(config.impl, name)) for name in used}
    return [f"{name}={impl!r}" for name, impl in impls.items() if impl in _WAITING_IMPLS]


class SideStream:
    """A fork of the work on a device into a second stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Callable[[], T], /) -> Callable[[], T]:
        main = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_event(main.record_event())
        with torch.cuda.stream(self._stream):
            result = run()
            done = self._stream.record_event()

        def joined() -> T:
            main.wait_event(done)
            return result

        return joined


@contextmanager
def forked(model: Model, device: torch.device) -> Iterator[None]:
    """For as long as graphs are made: branches of a layer stand beside one another in them."""
    fork = SideStream(device)
    layers = [module for module in model.modules() if isinstance(module, Moe)]
    for layer in layers:
        layer.fork = fork
    try:
        yield
    finally:
        for layer in layers:
            layer.fork = at_once


class Place(NamedTuple):
    """A row's sequence: its pages, the token to compute and its position."""

    table: Table
    position: int
    token: int  # or `FED`


def ladder(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that have a graph: powers of two, and the largest."""
    sizes = [1 << power for power in range(max_rows.bit_length()) if 1 << power < max_rows]
    return (*sizes, max_rows)


class _RowCache(PagedCache):
    """The pages of the first `size` rows, read from the batch's own tensors."""

    def __init__(self, batch: "ResidentBatch", size: int) -> None:
        page_size = batch.pool.layout.page_size
        self.form = "decode"
        self._pool = batch.pool
        self._state_pages_GN = batch.slots[:, :size]
        self._pages_NP = batch.page_table[:size]
        impl = batch.model.config.impl.attention_decode
        self._new_pages_T, self._new_rows_T, self._lengths_N = next_rows(
            batch.positions[:size], batch.is_used[:size], self._pages_NP, page_size, impl=impl
        )


class ResidentBatch:
    """Up to `max_rows` decoding sequences of a model whose state is in `pool`."""

    def __init__(self, model: Model, pool: PagePool, max_rows: int) -> None:
        device = pool.pages.device
        max_pages = -(-model.config.max_seq_len // pool.layout.page_size)
        self.model = model
        self.pool = pool
        self.sizes = ladder(max_rows)
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.is_used = torch.zeros(max_rows, dtype=torch.int64, device=device)  # 0 or 1
        num_groups = len(pool.layout.state_groups)
        self.slots = torch.zeros((num_groups, max_rows), dtype=torch.int32, device=device)
        self.page_table = torch.zeros((max_rows, max_pages), dtype=torch.int32, device=device)
        self._cu_seqlens = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._captured: tuple[int, ...] = ()  # addresses of the weights that the graphs read

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Join the model's projections; on a GPU make the graphs too, if those there read others.

        Call it again when weights may have become other tensors. What the rows held is lost.
        Returns whether graphs were made. Raises `ValueError` where an operator forbids them.
        """
        device = self.pool.pages.device
        self.model.join_projections()
        if device.type != "cuda" or self._addresses() == self._captured:
            return False
        if waits := waiting_operators(self.model.config, OPERATORS):
            raise ValueError(
                f"decode='resident': {', '.join(waits)} of the model's impl waits for the host, "
                "which a CUDA graph cannot; use kernels (impl 'triton') or decode='eager'"
            )
        self._graphs = {}
        gc.collect()  # a graph of an engine that is gone, freed during a capture, would spoil it
        for tensor in (self.tokens, self.positions, self.is_used, self.slots, self.page_table):
            tensor.zero_()
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):  # the largest first: others fit into its memory
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    self._compute(size)
            torch.cuda.current_stream(device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # torch's own stream for captures stays on the device of the first one
            captured = torch.cuda.graph(graph, pool=pool, stream=stream)
            with captured, forked(self.model, device):
                logits_NW = self._compute(size)
            self._graphs[size] = (graph, logits_NW)
        self._captured = self._addresses()
        return True

    @torch.inference_mode()
    def place(self, places: Sequence[Place]) -> None:
        """Put sequences into the first rows and leave the others empty."""
        num_groups, max_pages = len(self.slots), max(len(p.table.kv_pages) for p in places)
        size = self._size(len(places))
        rows = np.zeros((size, 3 + num_groups + max_pages), np.int32)
        for row, (table, position, token) in zip(rows, places, strict=False):
            numbers = [token, position, 1, *table.state_pages, *table.kv_pages]
            row[: len(numbers)] = numbers
        (packed,) = sent([rows], self.tokens.device)
        self.tokens[:size] = torch.where(packed[:, 0] < 0, self.tokens[:size], packed[:, 0])
        self.positions[:size] = packed[:, 1]
        self.is_used[:size] = packed[:, 2]
        self.slots[:, :size] = packed[:, 3 : 3 + num_groups].T
        self.page_table[:size, :max_pages] = packed[:, 3 + num_groups :]

    @torch.inference_mode()
    def extend(self, pages: Sequence[tuple[int, int, int]]) -> None:
        """Give rows more pages: row, number of the page among the row's, page of the pool."""
        ((row_N, number_N, page_N),) = sent([np.array(pages).T], self.tokens.device)
        self.page_table[row_N, number_N] = page_N.int()

    @torch.inference_mode()
    def feed(self, ids: Tensor) -> None:
        """Have the first rows compute these tokens `[N]` int64 next."""
        self.tokens[: len(ids)] = ids

    @torch.inference_mode()
    def run(self, count: int, *, is_eager: bool = False) -> Tensor:
        """Compute the tokens of the first `count` rows; logits `[count, W]`, until the next run.

        `is_eager` leaves the graphs aside, so that hooks see what is computed.
        """
        size = self._size(count)
        if is_eager or not self._graphs:
            return self._compute(size)[:count]
        graph, logits_NW = self._graphs[size]
        graph.replay()
        return logits_NW[:count]

    def _addresses(self) -> tuple[int, ...]:
        weights = (*self.model.parameters(), *self.model.buffers())
        return tuple(tensor.data_ptr() for tensor in weights)

    def _size(self, count: int) -> int:
        return next(size for size in self.sizes if size >= count)

    def _compute(self, size: int) -> Tensor:
        cache = _RowCache(self, size)
        output = self.model(self.tokens[:size], self._cu_seqlens[: size + 1], cache)
        return self.model.lm_head(output.hidden)
