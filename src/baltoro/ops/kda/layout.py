"""Where the chunks of a packed batch lie: a table of (sequence, start, length) in scan order.

Sequences are ranked by falling number of chunks, the table is ordered by chunk number, then rank:
step s of a scan is one contiguous range of rows, and the states it advances are a prefix.
"""

from typing import NamedTuple

import torch


class ChunkLayout(NamedTuple):
    """Index tables of a pack cut into chunks; `M` chunks of `C` rows, `H` heads."""

    steps: list[tuple[int, int]]  # first table row and number of active sequences, per scan step
    order: torch.Tensor  # [N] sequence at each rank
    rank: torch.Tensor  # [N] rank of each sequence
    gather: torch.Tensor  # [M * H * C] row of a [T * H, ...] tensor; padding repeats a valid row
    padding: torch.Tensor  # rows of [M * H * C] beyond the length of their chunk
    scatter: torch.Tensor  # [T * H] row of a [M * H * C, ...] tensor
    num_rows: int  # M * H * C

    def to_chunks(self, x: torch.Tensor, dtype: torch.dtype, chunk_size: int) -> torch.Tensor:
        """`[T, H, X]` to `[M * H, C, X]` in `dtype`, padding rows zero."""
        rows = x.flatten(0, 1).index_select(0, self.gather).to(dtype)
        if self.padding.numel():
            rows.index_fill_(0, self.padding, 0.0)
        return rows.view(-1, chunk_size, x.shape[-1])

    def to_tokens(self, x: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
        """`[M * H, C, X]` to `[T, H, X]` in `dtype`."""
        rows = x.flatten(0, 1).index_select(0, self.scatter)
        return rows.view(-1, num_heads, x.shape[-1]).to(dtype)


def chunk_layout(
    bounds: list[int], chunk_size: int, num_heads: int, device: torch.device
) -> ChunkLayout:
    """The table for sequences `bounds[n] : bounds[n + 1]`; an empty sequence has no row."""
    edges = torch.tensor(bounds)
    starts, ends = edges[:-1], edges[1:]
    counts = (ends - starts + (chunk_size - 1)).div(chunk_size, rounding_mode="floor")
    counts, order = counts.sort(descending=True, stable=True)
    num_steps = int(counts[0])
    active = counts > torch.arange(num_steps)[:, None]
    step, ranked = active.nonzero(as_tuple=True)
    num_active: list[int] = active.sum(1).tolist()

    row = torch.arange(chunk_size)
    chunk_start = starts[order[ranked]] + step * chunk_size
    token = chunk_start[:, None] + row
    is_valid = token < ends[order[ranked]][:, None]
    head = torch.arange(num_heads)
    token = torch.where(is_valid, token, chunk_start[:, None])
    gather = token[:, None, :] * num_heads + head[:, None]
    padding = (~is_valid)[:, None, :].expand_as(gather).flatten().nonzero().flatten()

    chunk_row = torch.arange(len(step))[:, None] * (num_heads * chunk_size) + row
    first_row = torch.empty(bounds[-1], dtype=torch.int64)
    first_row[token[is_valid]] = chunk_row[is_valid]
    scatter = first_row[:, None] + head * chunk_size

    steps, first = [], 0
    for n in num_active:
        steps.append((first, n))
        first += n
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    return ChunkLayout(
        steps=steps,
        order=order.to(device),
        rank=rank.to(device),
        gather=gather.flatten().to(device),
        padding=padding.to(device),
        scatter=scatter.flatten().to(device),
        num_rows=gather.numel(),
    )
