"""Where the chunks of a packed batch lie: a table of (sequence, start, length) in scan order.

Sequences are ranked by falling number of chunks, the table is ordered by chunk number, then rank:
step s of a scan is one contiguous range of rows, and the states it advances are a prefix.
"""

from typing import NamedTuple

import torch


class Block(NamedTuple):
    """Consecutive scan steps that are computed together; `B` chunk-heads of `C` rows."""

    steps: list[int]  # chunk-heads of each step
    token: torch.Tensor  # [B * C] row of a [T * H, ...] tensor; padding repeats a valid row
    padding: torch.Tensor | None  # which of these rows lie beyond the length of their chunk
    target: torch.Tensor  # as `token`, but padding goes to row T * H

    def chunks(self, x: torch.Tensor, dtype: torch.dtype, chunk_size: int) -> torch.Tensor:
        """The block's part of `[T, H, X]` as `[B, C, X]` in `dtype`, padding rows zero."""
        rows = x.flatten(0, 1).index_select(0, self.token).to(dtype)
        if self.padding is not None:
            rows.index_fill_(0, self.padding, 0.0)
        return rows.view(-1, chunk_size, x.shape[-1])

    def store(self, chunks: torch.Tensor, rows: torch.Tensor) -> None:
        """Write `[B, C, X]` into the rows of `[T * H + 1, X]`, whose last one takes the padding."""
        rows.index_copy_(0, self.target, chunks.flatten(0, 1).to(rows.dtype))


class ChunkLayout(NamedTuple):
    """A pack cut into chunks."""

    blocks: list[Block]
    order: torch.Tensor  # [N] sequence at each rank
    rank: torch.Tensor  # [N] rank of each sequence


def chunk_layout(
    bounds: list[int], chunk_size: int, num_heads: int, block_size: int, device: torch.device
) -> ChunkLayout:
    """The layout of sequences `bounds[n] : bounds[n + 1]`; an empty one has no chunk.

    Blocks have at most `block_size` chunk-heads, or one step.
    """
    edges = torch.tensor(bounds)
    starts, ends = edges[:-1], edges[1:]
    counts = (ends - starts + (chunk_size - 1)).div(chunk_size, rounding_mode="floor")
    counts, order = counts.sort(descending=True, stable=True)
    active = counts > torch.arange(int(counts[0]))[:, None]
    step, ranked = active.nonzero(as_tuple=True)

    first = starts[order[ranked]] + step * chunk_size
    token = first[:, None] + torch.arange(chunk_size)
    is_padding = token >= ends[order[ranked]][:, None]
    head = torch.arange(num_heads)[:, None]
    target = torch.where(is_padding, bounds[-1], token)[:, None] * num_heads + head
    target.clamp_(max=bounds[-1] * num_heads)
    token = torch.where(is_padding, first[:, None], token)[:, None] * num_heads + head
    is_padding = is_padding[:, None].expand_as(token)

    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    blocks, start = [], 0
    for steps in _grouped((active.sum(1) * num_heads).tolist(), block_size):
        rows = slice(start // num_heads, (start + sum(steps)) // num_heads)
        padding = is_padding[rows].flatten().nonzero().flatten()
        blocks.append(
            Block(
                steps=steps,
                token=token[rows].flatten().to(device),
                padding=padding.to(device) if len(padding) else None,
                target=target[rows].flatten().to(device),
            )
        )
        start += sum(steps)
    return ChunkLayout(blocks, order.to(device), rank.to(device))


def _grouped(steps: list[int], block_size: int) -> list[list[int]]:
    groups: list[list[int]] = []
    for step in steps:
        if groups and sum(groups[-1]) + step <= block_size:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups
