"""The largest causal logit of every head on an NVIDIA GPU: attention's first product, not kept.

A program takes some queries of one head and walks over the keys of their sequences up to them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baltoro.ops.impl import ImplError
from baltoro.ops.triton import cdiv, enqueue, refuse_unserved

QUERIES, KEYS, PIECE = 128, 64, 64  # of a tile, and channels of a product
NUM_WARPS, NUM_STAGES = 8, 2


@triton.jit
def piece_of(x, rows, num_rows, stride, c: tl.constexpr, P: tl.constexpr):
    """Channels c P to (c + 1) P of rows, zeros beyond the last."""
    at = x + rows.to(tl.int64)[:, None] * stride + (c * P + tl.arange(0, P))[None, :]
    return tl.load(at, mask=(rows < num_rows)[:, None], other=0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def largest_kernel(
    q, k, starts, largest, num_tokens, q_stride, q_head, k_stride, k_head,
    K: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, L: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`starts[i]` is the first token of the sequence of token i."""
    head = tl.program_id(1)
    q += head * q_head
    k += head * k_head
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles walk longest
    rows = tile * Q + tl.arange(0, Q)
    first_of_row = tl.load(starts + rows, mask=rows < num_tokens, other=num_tokens)
    queries: tl.tuple = ()
    for c in tl.static_range(K // P):
        queries += (piece_of(q, rows, num_tokens, q_stride, c, P),)
    begin = tl.load(starts + tile * Q) // L * L
    end = tl.minimum(tile * Q + Q, num_tokens)
    top = tl.full([Q], float("-inf"), tl.float32)
    for first in tl.range(begin, end, L, num_stages=STAGES):
        keys = first + tl.arange(0, L)
        logits = tl.zeros([Q, L], tl.float32)
        for c in tl.static_range(K // P):
            piece = piece_of(k, keys, num_tokens, k_stride, c, P)
            logits = tl.dot(queries[c], tl.trans(piece), logits, input_precision=PRECISION)
        is_seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] >= first_of_row[:, None])
        is_seen &= (rows < num_tokens)[:, None]
        top = tl.maximum(top, tl.max(tl.where(is_seen, logits, float("-inf")), 1))
    tl.store(largest + head * tl.num_programs(0) + tile, tl.max(top, 0))


def largest_logits(q: Tensor, k: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """`baltoro.ops.mla.largest.largest_logits`; K is a multiple of 16 and `scale` positive."""
    refuse_unserved("largest_logits", q, k)
    T, H, K = q.shape
    piece = next((p for p in (PIECE, 32, 16) if K % p == 0), 0)
    if piece == 0 or not scale > 0.0:
        raise ImplError(
            f"largest_logits: impl='triton' serves head dims that are multiples of 16 and positive "
            f"scales, not {K} and {scale}; use 'torch'"
        )
    if T == 0:
        return q.new_full((H,), -torch.inf, dtype=torch.float32)
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    tokens = torch.arange(T, dtype=torch.int32, device=q.device)
    bounds = cu_seqlens.to(torch.int32)
    # empty sequences share a bound: the last of equal ones begins the next tokens
    starts = bounds[torch.searchsorted(bounds, tokens, right=True) - 1]
    num_tiles = cdiv(T, QUERIES)
    largest = torch.empty(H, num_tiles, dtype=torch.float32, device=q.device)
    enqueue(
        largest_kernel, (num_tiles, H), q, k, starts, largest, T, *q.stride()[:2], *k.stride()[:2],
        K=K, P=piece, Q=QUERIES, L=KEYS, STAGES=NUM_STAGES,
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32", num_warps=NUM_WARPS,
    )  # fmt: skip
    return largest.amax(1) * scale
