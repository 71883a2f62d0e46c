"""Prefill with its inputs at fixed places on the device, as CUDA graphs that pause at attention.

A prompt's kernels are short and hundreds, so that a host which launches them one by one takes
longer than the device. Here the new tokens of a few sequences lie in a pack of fixed rows: some
for those before cuts, and some for those behind them (`pack`). Rows that nobody uses belong to one
more sequence, in page 0, which is nobody's. All between two attentions is one graph; attention
itself, whose keys are as many as the sequences are long, is launched by the host in between. On a
CPU the same rows go through the same call, without graphs.

G is the groups of KDA layers that share a page.
"""

import gc
import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baltoro.model.cache import Attend
from baltoro.model.model import Model
from baltoro.serve.pack import Part, Piece, Span, packed, sent
from baltoro.serve.pages import Table
from baltoro.serve.pool import PagedCache, PagePool
from baltoro.serve.resident import forked, waiting_operators

logger = logging.getLogger(__name__)

FEW_SEQUENCES, MAX_SEQUENCES = 8, 32  # of a short pack, whose states would cost most, of a long one
LONG = 2048  # rows
# that have graphs, up to the tokens of a step; beyond, the device takes longer than the host
SIZES = (64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
OPERATORS = ("kda", "short_conv", "moe")  # of a prefill that may look at values


class Shape(NamedTuple):
    """How many rows and sequences a pack has room for."""

    num_rows: int  # of tokens before cuts
    num_tail_rows: int  # behind cuts
    num_sequences: int

    def holds(self, spans: Sequence[Span]) -> bool:
        """Whether there is room for them."""
        before, behind = _num_rows(spans)
        has_rows = before <= self.num_rows and behind <= self.num_tail_rows
        return has_rows and len(spans) <= self.num_sequences


def shapes(max_tokens: int, hash_block: int, *, has_cuts: bool) -> tuple[Shape, ...]:
    """Packs for steps of up to `max_tokens` new tokens, in the order in which they are tried.

    An eighth of a pack is behind cuts, and a hash block at least. Of the largest there are two
    more, of a quarter and of a half: a sequence has about as many tokens behind its cut as before
    it at most, since its slices begin at boundaries.
    """
    limit = min(max_tokens, SIZES[-1])
    sizes = [size for size in SIZES if size < limit] + [-(-limit // SIZES[0]) * SIZES[0]]
    found = []
    for size in sizes:
        num_sequences = MAX_SEQUENCES if size >= LONG else FEW_SEQUENCES
        most = min(size // 2, num_sequences * hash_block)
        room = max(hash_block, min(most, size // 8)) if has_cuts else 0
        found.append(Shape(size, room, num_sequences))
        while has_cuts and size == sizes[-1] and room < most:
            # what is behind cuts beyond the former room is not before them
            before, room = size - room, min(most, 2 * room)
            found.append(Shape(before, room, num_sequences))
    return tuple(found)


class Prefilled(NamedTuple):
    """What a pack gave, valid until the next one."""

    hidden: Tensor  # [rows, D]
    last: list[int]  # the row of each sequence's last token


class _Recorder:
    """Graphs, and what the host does between them."""

    def __init__(self, pool: "torch.cuda._POOL_HANDLE") -> None:
        self._pool = pool
        self.steps: list[Callable[[], object]] = []
        self._begin()

    def pause(self, run: Callable[[], object]) -> None:
        """Have `run` called at this point of each replay."""
        self.end()
        self.steps.append(run)
        self._begin()

    def end(self) -> None:
        self._graph.capture_end()
        self.steps.append(self._graph.replay)

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool)


class _FixedCache(PagedCache):
    """The pages of whatever pack lies in a batch's first rows."""

    def __init__(self, batch: "PrefillBatch", shape: Shape) -> None:
        self.form = "prefill"
        self._pool = batch.pool
        self._batch = batch
        self.num_rows = shape.num_rows + shape.num_tail_rows
        regions = [slice(0, shape.num_rows), slice(shape.num_rows, self.num_rows)]
        num_sequences = shape.num_sequences
        bounds, states = (
            batch.bounds[:, : num_sequences + 2],
            batch.states[..., : num_sequences + 1],
        )
        self._parts = [
            Part(rows, bounds[part], *states[part])
            for part, rows in enumerate(regions)
            if rows.stop > rows.start
        ]
        self._new_pages_T, self._new_rows_T = batch.places[:, : self.num_rows]
        self.recorder: _Recorder | None = None
        self.steps: list[Callable[[], object]] = []  # none: it is computed call by call
        self.hidden: Tensor | None = None

    def attended(self, layer_idx: int, attend: Attend, q_THK: Tensor, cu_seqlens: Tensor) -> Tensor:
        mla = self._batch.model.config.mla
        out_THV = q_THK.new_zeros(len(q_THK), mla.num_heads, mla.v_head_dim)

        def attend_now() -> None:
            order_T, live = self._batch.order_T, self._batch.live
            assert order_T is not None and live is not None
            out_THV.index_copy_(
                0, order_T, live.attended_in_order(layer_idx, attend, q_THK[order_T])
            )

        if self.recorder is None:
            attend_now()
        else:
            self.recorder.pause(attend_now)
        return out_THV


class PrefillBatch:
    """Packs of up to `max_tokens` new tokens of sequences whose state is in `pool`.

    With `has_cuts` sequences may be cut. One is that a hash block follows at most.
    """

    def __init__(self, model: Model, pool: PagePool, max_tokens: int, *, has_cuts: bool) -> None:
        device = pool.pages.device
        self.model = model
        self.pool = pool
        self.shapes = shapes(max_tokens, pool.layout.hash_block, has_cuts=has_cuts)
        waits = waiting_operators(model.config, OPERATORS)
        if waits and device.type == "cuda":
            logger.warning("prefill: no graphs, since %s waits for the host", ", ".join(waits))
            self.shapes = ()
        num_rows = max((shape.num_rows + shape.num_tail_rows for shape in self.shapes), default=0)
        num_groups = len(pool.layout.state_groups)
        self.tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.places = torch.zeros((2, num_rows), dtype=torch.int64, device=device)
        self.bounds = torch.zeros((2, MAX_SEQUENCES + 2), dtype=torch.int32, device=device)
        # of each part: pages of the states before it, and behind it
        pages = (2, 2, num_groups, MAX_SEQUENCES + 1)
        self.states = torch.zeros(pages, dtype=torch.int64, device=device)
        self.is_ready = False  # to be run
        self.live: PagedCache | None = None  # the pack itself, for attention
        self.order_T: Tensor | None = None
        self._caches = {shape: _FixedCache(self, shape) for shape in self.shapes}

    def shape_of(self, spans: Sequence[Span]) -> Shape | None:
        """The first shape that has room for them, if any."""
        return next((shape for shape in self.shapes if shape.holds(spans)), None)

    def lacking(self, spans: Sequence[Span]) -> str:
        """What there is not enough of for those that have no shape."""
        if not self.shapes:
            return "graphs"
        if len(spans) > max(shape.num_sequences for shape in self.shapes):
            return "sequences"
        before, _ = _num_rows(spans)
        return "rows" if before > max(shape.num_rows for shape in self.shapes) else "tails"

    @torch.inference_mode()
    def capture(self) -> None:
        """Make the graphs, on a GPU; call it again when weights have become other tensors."""
        device = self.pool.pages.device
        self.is_ready = device.type != "cuda"
        if self.is_ready:
            return
        self.drop_graphs()
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for shape in reversed(self.shapes):  # the largest first: others fit into its memory
                cache = self._caches[shape] = _FixedCache(self, shape)
                nobody = _nobody(self.pool, shape.num_rows)
                self._place(shape, [nobody], lambda piece: [0] * (piece.stop - piece.start))
                self._compute(cache)  # kernels are built
                cache.recorder = _Recorder(pool)
                with forked(self.model, device):
                    cache.hidden = self._compute(cache)
                cache.recorder.end()
                cache.steps, cache.recorder = cache.recorder.steps, None
        torch.cuda.current_stream(device).wait_stream(stream)
        self.is_ready = True

    def drop_graphs(self) -> None:
        """Free all graphs, and those of engines that are gone.

        One that is freed while another is captured, whenever Python looks for cycles, spoils that.
        """
        for cache in self._caches.values():
            cache.steps.clear()  # they lead back to the cache
        gc.collect()

    @torch.inference_mode()
    def run(self, spans: Sequence[Span], tokens_of: Callable[[Piece], Sequence[int]]) -> Prefilled:
        """Compute the new tokens of sequences that have a shape."""
        shape = self.shape_of(spans)
        assert shape is not None
        cache = self._caches[shape]
        ends = self._place(shape, spans, tokens_of)
        for step in cache.steps:
            step()
        hidden = cache.hidden if cache.steps else self._compute(cache)
        assert hidden is not None
        return Prefilled(hidden, [end - 1 for end in ends])

    def _compute(self, cache: _FixedCache) -> Tensor:
        tokens_T = self.tokens[: cache.num_rows]
        return self.model(tokens_T, self.bounds[0], cache).hidden

    def _place(
        self,
        shape: Shape,
        spans: Sequence[Span],
        tokens_of: Callable[[Piece], Sequence[int]],
    ) -> list[int]:
        """Put a pack into the rows; where each sequence ends."""
        device = self.pool.pages.device
        num_rows = shape.num_rows + shape.num_tail_rows
        pack = packed(spans, self.pool.layout.page_size, tail_row=shape.num_rows)
        rows = np.zeros((3, num_rows), np.int64)
        num_sequences = shape.num_sequences
        bounds = np.zeros((2, num_sequences + 2), np.int64)
        states = np.zeros((*self.states.shape[:-1], num_sequences + 1), np.int64)
        bounds[:, -1] = shape.num_rows, shape.num_tail_rows
        ids, ends = list[int](), [0] * len(spans)
        for part, pieces in enumerate(pack.pieces):
            counts = [piece.stop - piece.start for piece in pieces]
            starts = list(accumulate(counts, initial=0))
            starts += [starts[-1]] * (num_sequences - len(pieces))
            bounds[part, :-1] = starts
            states[part, 0, :, : len(pieces)] = np.array([piece.source for piece in pieces]).T
            states[part, 1, :, : len(pieces)] = np.array([piece.target for piece in pieces]).T
            for piece in pieces:
                ids += tokens_of(piece)
                ends[piece.number] = piece.row + piece.stop - piece.start
        rows[:, pack.row_T] = ids, pack.page_T, pack.place_T
        rows_3T, new_states, new_bounds, self.order_T = sent(
            [rows, states, bounds, pack.order_T], device
        )
        self.tokens[:num_rows] = rows_3T[0]
        self.places[:, :num_rows] = rows_3T[1:]
        self.states[..., : num_sequences + 1] = new_states
        self.bounds[:, : num_sequences + 2] = new_bounds
        self.live = PagedCache(self.pool, "prefill", spans)
        return ends


def _num_rows(spans: Sequence[Span]) -> tuple[int, int]:
    """Of tokens before cuts, and behind them."""
    behind = sum(span.stop - span.cut[0] for span in spans if span.cut is not None)
    return sum(span.stop - span.start for span in spans) - behind, behind


def _nobody(pool: PagePool, num_tokens: int) -> Span:
    """A sequence in page 0."""
    pages = -(-num_tokens // pool.layout.page_size)
    table = Table(
        kv_pages=[0] * pages,
        state_pages=(0,) * len(pool.layout.state_groups),
        num_hit=0,
        stops=frozenset(),
        is_cacheable=False,
        last_kept=0,
    )
    return Span(table, 0, num_tokens)
