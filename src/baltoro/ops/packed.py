"""The packed layout at the door of an operator: where each sequence of the pack begins and ends."""

import itertools

import torch


def read_boundaries(cu_seqlens: torch.Tensor, num_tokens: int) -> list[int]:
    """`cu_seqlens` (int32 `[N + 1]`) as Python numbers, checked against `num_tokens`.

    Reads the values, so on a GPU it waits for the stream. Raises `ValueError` unless the boundaries
    start at 0, never decrease and end at `num_tokens`; empty sequences are allowed.
    """
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(
            f"cu_seqlens: expected int32 [N + 1] with N >= 1, got {cu_seqlens.dtype} "
            f"{list(cu_seqlens.shape)}"
        )
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != num_tokens:
        raise ValueError(
            f"cu_seqlens={bounds}: must start at 0 and end at the number of tokens, {num_tokens}"
        )
    if any(start > end for start, end in itertools.pairwise(bounds)):
        raise ValueError(f"cu_seqlens={bounds}: boundaries must not decrease")
    return bounds
