"""Absorbed attention over pages on an NVIDIA GPU: a latent row is read for many queries at once.

A program takes up to 32 rows, a row being one head of one query of a sequence, through a range of
the sequence's tokens. A tile of tokens is keys and values at once, so scores and outputs are held
transposed: tokens and latent columns are the long side of the products, the rows their width.

    s = kv q'    p = 2^(s - max)    out' <- out' 2^(old max - max) + kv' p

A sequence is cut in as many ranges as fill the GPU. Each leaves its softmax mean and the logarithm
of its sum, L; a second kernel weighs the means by 2^L. Which rows a range holds depends on the
sequence's own length and the number of ranges alone.

Tiles are 32 tokens: with 64 the compiler of Triton 3.6 (ptxas 12.8) gives some of the many products
of warp groups wrong places in shared memory, which a card reports as an illegal address.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baltoro.ops.impl import ImplError
from baltoro.ops.triton import cdiv, padded_width, refuse_unserved

LOG2E = 1.4426950408889634
LOWEST = tl.constexpr(-1e30)  # of a running maximum: finite, so that differences are numbers
NUM_SMS = 132
MERGED = 8  # ranges that are merged at a time
MAX_RANK, MAX_SHARED = 512, 64
DTYPES = (torch.bfloat16, torch.float16)


class Shape(NamedTuple):
    """How a launch cuts its work."""

    rows: int  # of a program
    tokens: int  # of a tile
    num_warps: int
    num_stages: int  # of which two go to page numbers: with 5, three tiles are in shared memory


def shape_of(num_rows: int) -> Shape:
    """The launch for sequences of at most `num_rows` rows, queries times heads."""
    return Shape(16 if num_rows <= 16 else 32, 32, 8, 5)


@functools.cache
def num_splits_of(num_programs: int, num_tiles: int) -> int:
    """Ranges of a sequence: those with the shortest way through; each costs two tiles more."""

    def way(splits: int) -> int:
        return cdiv(splits * num_programs, NUM_SMS) * (cdiv(num_tiles, splits) + 2)

    return min(range(1, min(num_tiles, cdiv(4 * NUM_SMS, num_programs)) + 1), key=way, default=1)


@triton.jit
def load_rows(
    latents, table, position, stop, columns, num_columns, page_stride, page_size,
    WIDTH: tl.constexpr, BN: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Rows `position` to `position + BN` of a sequence [BN, columns], 0 from `stop` on."""
    row = tl.arange(0, BN)
    is_row = row < stop - position
    if IS_ALIGNED:  # a tile lies in one page
        page = tl.load(table + position // page_size, mask=position < stop, other=0).to(tl.int64)
        place = latents + page * page_stride + position % page_size * WIDTH
        places = place + (row * WIDTH)[:, None] + columns[None, :]
    else:
        positions = position + row
        pages = tl.load(table + positions // page_size, mask=is_row, other=0).to(tl.int64)
        place = pages * page_stride + positions % page_size * WIDTH
        places = latents + place[:, None] + columns[None, :]
    is_here = is_row[:, None] & (columns < num_columns)[None, :]
    return tl.load(places, mask=is_here, other=0.0)


@triton.jit(do_not_specialize=["table_stride", "page_size", "num_heads", "num_splits"])
def split_kernel(
    q_latent, latents, page_table, lengths, cu_seqlens, out, sums,
    page_stride, table_stride, page_size, num_heads, num_splits, log2_scale,
    R: tl.constexpr, P: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    IS_ONE: tl.constexpr, IS_ALIGNED: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Some rows of a sequence over one range of its tokens; `IS_WHOLE`: there is one range."""
    split = tl.program_id(1)
    n = tl.program_id(2)
    table = page_table + n.to(tl.int64) * table_stride
    length = tl.load(lengths + n)
    if IS_ONE:
        first = n.to(tl.int64)
        num_tokens = 1
    else:
        first = tl.load(cu_seqlens + n).to(tl.int64)
        num_tokens = (tl.load(cu_seqlens + n + 1) - first).to(tl.int32)
    row = tl.program_id(0) * BH + tl.arange(0, BH)  # of the sequence
    is_row = row < num_tokens * num_heads
    place = first * num_heads + row  # among all rows
    values = tl.arange(0, BR)
    q_place = q_latent + place[None, :] * (R + P)
    is_here = is_row[None, :] & (values < R)[:, None]
    q = tl.load(q_place + values[:, None], mask=is_here, other=0.0)  # [BR, BH]
    span = tl.cdiv(tl.cdiv(length, BN), num_splits) * BN
    start = split * span
    stop = tl.minimum(start + span, length)
    stop = tl.where(tl.program_id(0) * BH < num_tokens * num_heads, stop, start)
    # tokens of the range that a row may see
    seen = tl.minimum(length - num_tokens + 1 + row // num_heads, stop)
    if P > 0:
        shared = R + tl.arange(0, BP)
        is_here = is_row[None, :] & (shared < R + P)[:, None]
        q_shared = tl.load(q_place + shared[:, None], mask=is_here, other=0.0)  # [BP, BH]
        kv_shared = load_rows(
            latents, table, start, stop, shared, R + P, page_stride, page_size, R + P, BN,
            IS_ALIGNED,
        )  # fmt: skip
    highest = tl.full([BH], LOWEST, tl.float32)
    total = tl.zeros([BH], tl.float32)
    acc = tl.zeros([BR, BH], tl.float32)
    for position in tl.range(start, stop, BN, num_stages=STAGES):
        kv = load_rows(
            latents, table, position, stop, values, R, page_stride, page_size, R + P, BN, IS_ALIGNED
        )
        s = tl.zeros([BN, BH], tl.float32)
        if P > 0:
            next_shared = load_rows(
                latents, table, position + BN, stop, shared, R + P, page_stride, page_size, R + P,
                BN, IS_ALIGNED,
            )  # fmt: skip
            s = tl.dot(kv_shared, q_shared, s)
            kv_shared = next_shared
        s = tl.dot(kv, q, s)  # [BN, BH]
        is_seen = (position + tl.arange(0, BN))[:, None] < seen[None, :]
        s = tl.where(is_seen, s * log2_scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(s, 0))
        p = tl.exp2(s - higher[None, :])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(p, 0)
        acc *= shrink[None, :]
        acc = tl.dot(tl.trans(kv), p.to(kv.dtype), acc)  # [BR, BH]
        highest = higher
    has = total > 0.0
    acc *= tl.where(has, 1.0 / tl.where(has, total, 1.0), 0.0)[None, :]
    if IS_WHOLE:
        is_here = is_row[None, :] & (values < R)[:, None]
        target = out + place[None, :] * R + values[:, None]
    else:
        is_here = (is_row & has)[None, :] & (values < R)[:, None]
        target = out + (place * num_splits + split)[None, :] * R + values[:, None]
        L = tl.where(has, highest + tl.log2(tl.where(has, total, 1.0)), float("-inf"))
        tl.store(sums + place * num_splits + split, L, mask=is_row)
    tl.store(target, acc.to(out.dtype.element_ty), mask=is_here)


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    parts, sums, out, num_splits, R: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr
):  # fmt: skip
    """Means of the ranges of one row, weighed by their sums; ranges without tokens have no mean."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BR)
    highest = tl.full([BS], LOWEST, tl.float32)
    for first in range(0, num_splits, BS):
        splits = first + tl.arange(0, BS)
        is_split = splits < num_splits
        L = tl.load(sums + row * num_splits + splits, mask=is_split, other=float("-inf"))
        highest = tl.maximum(highest, L)
    top = tl.max(highest, 0)
    total = tl.zeros([BS], tl.float32)
    acc = tl.zeros([BR], tl.float32)
    for first in range(0, num_splits, BS):
        splits = first + tl.arange(0, BS)
        is_split = splits < num_splits
        L = tl.load(sums + row * num_splits + splits, mask=is_split, other=float("-inf"))
        weight = tl.exp2(L - top)
        total += weight
        place = parts + (row * num_splits + splits)[:, None] * R + columns[None, :]
        is_here = (weight > 0.0)[:, None] & (columns < R)[None, :]
        acc += tl.sum(weight[:, None] * tl.load(place, mask=is_here, other=0.0), 0)
    whole = tl.sum(total, 0)
    acc *= tl.where(whole > 0.0, 1.0 / tl.where(whole > 0.0, whole, 1.0), 0.0)
    tl.store(out + row * R + columns, acc.to(out.dtype.element_ty), mask=columns < R)


def paged_latent_attention(
    q_latent: Tensor,
    latents: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    cu_seqlens: Tensor | None,
    max_tokens: int,
    kv_lora_rank: int,
    scale: float,
) -> Tensor:
    """`baltoro.ops.mla.paged.paged_latent_attention`, whose checks have passed."""
    refuse_unserved("paged_latent_attention", q_latent, latents, dtypes=DTYPES)
    T, H, width = q_latent.shape
    N, max_pages = page_table.shape
    page_size, R = latents.shape[1], kv_lora_rank
    if latents.stride()[1:] != (width, 1) or page_table.stride(1) != 1:
        raise ImplError(
            "paged_latent_attention: impl='triton' needs contiguous pages and rows of page_table, "
            f"not strides {latents.stride()} and {page_table.stride()}"
        )
    if R > MAX_RANK or width - R > MAX_SHARED:
        raise ImplError(
            f"paged_latent_attention: impl='triton' serves kv_lora_rank up to {MAX_RANK} and up to "
            f"{MAX_SHARED} columns more, not {R} and {width - R}"
        )
    out = q_latent.new_empty(T, H, R)
    if T == 0:
        return out
    shape = shape_of(max_tokens * H)
    row_blocks = cdiv(max_tokens * H, shape.rows)
    splits = num_splits_of(row_blocks * N, cdiv(max_pages * page_size, shape.tokens))
    is_whole = splits == 1
    parts = out if is_whole else q_latent.new_empty(T * H, splits, R, dtype=torch.float32)
    sums = q_latent.new_empty(0 if is_whole else T * H, splits, dtype=torch.float32)
    split_kernel[(row_blocks, splits, N)](
        q_latent.contiguous(), latents, page_table, lengths, cu_seqlens, parts, sums,
        latents.stride(0), page_table.stride(0), page_size, H, splits, scale * LOG2E,
        R=R, P=width - R, BR=max(16, padded_width(R)), BP=max(16, padded_width(width - R)),
        BH=shape.rows, BN=shape.tokens, STAGES=shape.num_stages,
        IS_ONE=cu_seqlens is None, IS_ALIGNED=max_pages == 1 or page_size % shape.tokens == 0,
        IS_WHOLE=is_whole, num_warps=shape.num_warps,
    )  # fmt: skip
    if not is_whole:
        merge_kernel[(T * H,)](
            parts, sums, out, splits, R=R, BR=padded_width(R), BS=MERGED, num_warps=4
        )
    return out
