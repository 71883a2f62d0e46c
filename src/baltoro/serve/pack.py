"""Where the new tokens of some sequences stand in one call of the model: numbers, on the host.

A sequence may be cut at a boundary whose state is kept. The pack has its tokens before the cut
among those of the others, and those behind it after all of them: so each part is one piece of a
sequence, and a recurrence takes in one part after another.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baltoro.serve.pages import Table

Ints = npt.NDArray[np.int64]


class Span(NamedTuple):
    """Tokens of one sequence in one model call."""

    table: Table
    start: int
    stop: int

    @property
    def cut(self) -> tuple[int, tuple[int, ...]] | None:
        """A position inside whose state is kept, and its pages."""
        captures = self.table.captures
        return next((kept for kept in captures if self.start < kept[0] < self.stop), None)


class Piece(NamedTuple):
    """Tokens of one sequence that a recurrence takes in at once."""

    number: int  # of the sequence
    start: int
    stop: int
    row: int  # of the first in the pack
    source: tuple[int, ...]  # pages of the state before them
    target: tuple[int, ...]  # and of the state behind them


class Pack(NamedTuple):
    """Where the new tokens of some sequences stand, on the host; T counts them piece by piece."""

    pieces: list[list[Piece]]  # those of a list stand one behind the other
    owner_T: Ints  # their sequence
    row_T: Ints  # of the pack
    page_T: Ints  # where their latents go
    place_T: Ints  # in that page

    @property
    def order_T(self) -> Ints:
        """Rows of the pack in the order of the sequences and their tokens."""
        return self.row_T[np.argsort(self.owner_T, kind="stable")]


class Part(NamedTuple):
    """Pieces of different sequences, one behind the other in the pack."""

    tokens: slice  # of the pack
    cu_seqlens: Tensor  # int32 [n + 1], from its first token
    sources_GN: Tensor
    targets_GN: Tensor


def pieces_of(spans: Sequence[Span], tail_row: int | None = None) -> list[list[Piece]]:
    """The sequences' tokens up to their cuts; and those behind, from row `tail_row` of the pack.

    Without a `tail_row` they follow right behind the former.
    """
    heads, tails, row = list[Piece](), list[Piece](), 0
    for n, (table, start, stop) in enumerate(spans):
        cut, pages = spans[n].cut or (stop, table.state_pages)
        heads.append(Piece(n, start, cut, row, table.state_pages, pages))
        row += cut - start
    row = row if tail_row is None else tail_row
    for n, pages in ((piece.number, piece.target) for piece in heads):
        table, _, stop = spans[n]
        if pages is not table.state_pages:
            tails.append(Piece(n, heads[n].stop, stop, row, pages, table.state_pages))
            row += stop - heads[n].stop
    return [heads, tails] if tails else [heads]


def packed(spans: Sequence[Span], page_size: int, tail_row: int | None = None) -> Pack:
    """The new tokens of sequences, those behind cuts after all others (`pieces_of`)."""
    pieces = pieces_of(spans, tail_row)
    in_order = [piece for part in pieces for piece in part]
    counts = np.array([piece.stop - piece.start for piece in in_order])
    tables = [span.table.kv_pages for span in spans]
    bounds = list(accumulate((len(pages) for pages in tables), initial=0))
    firsts = [[p.number, p.row, p.start, bounds[p.number]] for p in in_order]
    owner_T, row_T, position_T, table_T = np.repeat(np.array(firsts).T, counts, axis=1)
    within_T = np.arange(len(owner_T)) - np.repeat(counts.cumsum() - counts, counts)
    position_T = position_T + within_T
    pages = np.array([page for pages in tables for page in pages])
    page_T = pages[table_T + position_T // page_size]
    return Pack(pieces, owner_T, row_T + within_T, page_T, position_T % page_size)


def sent(arrays: Sequence[npt.NDArray[np.integer]], device: torch.device) -> list[Tensor]:
    """Copies of arrays of one dtype on a device, in one transfer that waits for nothing."""
    sizes = [array.size for array in arrays]
    # each begins at a multiple of 16 bytes, which kernels are launched the short way for
    starts = list(accumulate((-(-size // 4) * 4 for size in sizes), initial=0))
    numbers = np.zeros(starts[-1], arrays[0].dtype)
    for array, start, size in zip(arrays, starts, sizes, strict=False):
        numbers[start : start + size] = array.ravel()
    x = torch.from_numpy(numbers)
    if device.type == "cuda":
        x = x.pin_memory().to(device, non_blocking=True)
    return [
        x[start : start + array.size].view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]


def bounds_of(pieces: Sequence[Piece]) -> list[int]:
    """Where the pieces of a part begin, from its first token, and where the last one ends."""
    return list(accumulate((piece.stop - piece.start for piece in pieces), initial=0))


def pages_of(pieces: Sequence[Piece]) -> Ints:
    """Pages of the states before and behind the pieces, `[2, G, n]`."""
    pages = [[piece.source for piece in pieces], [piece.target for piece in pieces]]
    return np.array(pages).transpose(0, 2, 1)
