"""Absorbed attention over pages on a Hopper GPU: how launches are cut, and how parts are merged.

Rows, each one head of one query of a sequence, are taken in blocks of at most 64. Programs share
the tiles of all sequences evenly (`walk_sm90`): where a part begins depends on all lengths, but on
nothing else, and parts are merged in order, so a call repeats to the bit. The host reads no length.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baltoro.ops.impl import ImplError
from baltoro.ops.triton import cdiv, padded_width, refuse_unserved

from .walk_sm90 import LOWEST, SPARE, walk_sm90_kernel

LOG2E = 1.4426950408889634
NUM_SMS = 132
SM_BYTES = 228 * 1024  # shared memory, of which a program takes RESERVED beside its own
RESERVED = 1024 + 3 * 1024  # by the driver; for exchanges and barriers
MERGED = 4  # parts that are merged at a time
CHUNK = 64  # columns of one copy
MIN_BOX = 8  # rows of one copy: what swizzling repeats after
MAX_RANK, MAX_SHARED = 512, 64
DTYPES = (torch.bfloat16, torch.float16)


class Shape(NamedTuple):
    """How a launch cuts its work."""

    rows: int  # the width of the products
    num_warps: int  # of 16 tokens of a tile each
    num_stages: int
    parts: tuple[int, ...]  # columns of a tile that are worked on and copied together
    has_tail: bool  # 64 columns behind the parts
    num_programs: int

    @property
    def tokens(self) -> int:
        return 16 * self.num_warps


@functools.cache
def shape_of(num_rows: int, rank: int, width: int) -> Shape:
    """The launch for `num_rows` rows a sequence at most, and cached rows of `width`."""
    rows = min(64, max(8, padded_width(num_rows)))
    num_warps, num_stages = (4, 2) if rows <= 16 else (8, 1)
    least = 16 * num_warps
    left = cdiv(rank, least) * least
    parts: tuple[int, ...] = ()
    while left > 0:
        largest = min(padded_width(left + 1) // 2, 512 if num_warps == 4 else 128)
        parts, left = (*parts, largest), left - largest
    has_tail = sum(parts) < width
    columns = sum(parts) + CHUNK * has_tail
    elements = (num_stages * least + rows) * columns + rows * least
    per_sm = max(1, SM_BYTES // (2 * elements + RESERVED))
    return Shape(rows, num_warps, num_stages, parts, has_tail, min(per_sm, 2) * NUM_SMS)


@triton.jit(do_not_specialize=[
    "num_sequences", "num_programs", "num_heads", "num_blocks", "block_rows"
])  # fmt: skip
def merge_kernel(
    parts, sums, out, lengths, cu_seqlens, num_sequences, num_programs, num_heads, num_blocks,
    block_rows, R: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
    BP: tl.constexpr, IS_ONE: tl.constexpr,
):  # fmt: skip
    """Grid (rows of a sequence, N). Rows whose sequence lies in one program are there already."""
    n = tl.program_id(1)
    row = tl.program_id(0)
    block = row // block_rows
    sequence = tl.arange(0, BS)
    is_sequence = sequence < num_sequences
    if IS_ONE:
        place = (n * num_heads + row).to(tl.int64)
        is_row = True
    else:
        num_tokens = tl.load(cu_seqlens + sequence + 1, mask=is_sequence, other=0)
        num_tokens -= tl.load(cu_seqlens + sequence, mask=is_sequence, other=0)
        is_sequence = is_sequence & (block * block_rows < num_tokens * num_heads)
        first = tl.load(cu_seqlens + n).to(tl.int64)
        is_row = row < (tl.load(cu_seqlens + n + 1) - first) * num_heads
        place = first * num_heads + row
    tiles = tl.cdiv(tl.load(lengths + sequence, mask=is_sequence, other=0), BN)
    share = tl.cdiv(tl.sum(tiles), num_programs)
    begin = tl.sum(tl.where(sequence < n, tiles, 0))
    count = tl.cdiv(tl.load(lengths + n), BN)
    columns = tl.arange(0, BR)
    low = begin // tl.maximum(share, 1)
    high = (begin + count - 1) // tl.maximum(share, 1)
    if is_row & (count == 0):
        tl.store(out + place * R + columns, tl.zeros([BR], out.dtype.element_ty), mask=columns < R)
    longest = tl.max(tiles)
    is_divided = (num_sequences > num_programs) | (longest > share + SPARE)
    if is_row & is_divided & (low < high):
        highest = tl.full([BP], LOWEST, tl.float32)
        for p in range(low, high + 1, BP):
            program = p + tl.arange(0, BP)
            part = 2 * program + (program == low).to(tl.int32)
            slot = (part.to(tl.int64) * num_blocks + block) * block_rows + row % block_rows
            L = tl.load(sums + slot, mask=program <= high, other=float("-inf"))
            highest = tl.maximum(highest, L)
        top = tl.max(highest, 0)
        total = tl.zeros([BP], tl.float32)
        acc = tl.zeros([BR], tl.float32)
        for p in range(low, high + 1, BP):
            program = p + tl.arange(0, BP)
            part = 2 * program + (program == low).to(tl.int32)
            slot = (part.to(tl.int64) * num_blocks + block) * block_rows + row % block_rows
            L = tl.load(sums + slot, mask=program <= high, other=float("-inf"))
            weight = tl.exp2(L - top)
            total += weight
            is_here = (weight > 0.0)[:, None] & (columns < R)[None, :]
            x = tl.load(parts + slot[:, None] * R + columns[None, :], mask=is_here, other=0.0)
            acc += tl.sum(weight[:, None] * x, 0)
        whole = tl.sum(total, 0)
        acc *= tl.where(whole > 0.0, 1.0 / tl.where(whole > 0.0, whole, 1.0), 0.0)
        tl.store(out + place * R + columns, acc.to(out.dtype.element_ty), mask=columns < R)


def refuse_unservable(
    q_latent: Tensor, latents: Tensor, page_table: Tensor, kv_lora_rank: int, scale: float
) -> None:
    """Raise `ImplError` with the reason for inputs that the kernels do not serve."""
    name = "paged_latent_attention: impl='triton'"
    refuse_unserved("paged_latent_attention", q_latent, latents, dtypes=DTYPES)
    width, page_size = q_latent.shape[2], latents.shape[1]
    if latents.stride()[1:] != (width, 1) or page_table.stride(1) != 1:
        raise ImplError(
            f"{name} needs contiguous pages and rows of page_table, "
            f"not strides {latents.stride()} and {page_table.stride()}"
        )
    if kv_lora_rank > MAX_RANK or width - kv_lora_rank > MAX_SHARED or width % 8:
        raise ImplError(
            f"{name} serves kv_lora_rank up to {MAX_RANK} and up to {MAX_SHARED} columns more, a "
            f"multiple of 8 in all, not {kv_lora_rank} and {width - kv_lora_rank}"
        )
    if page_table.shape[1] > 1 and page_size % MIN_BOX:
        raise ImplError(
            f"{name} serves pages of a multiple of {MIN_BOX} tokens, or one page a sequence, not "
            f"page_size={page_size}"
        )
    if latents.stride(0) % width or latents.stride(0) // width * len(latents) >= 2**31:
        raise ImplError(
            f"{name} needs pages that lie a whole number of rows apart, below 2**31 rows in all, "
            f"not {len(latents)} of stride {latents.stride(0)} with rows of {width}"
        )
    if not scale > 0.0:
        raise ImplError(f"{name} needs a positive scale, not {scale}")
    if q_latent.is_cuda and torch.cuda.get_device_capability(q_latent.device) != (9, 0):
        raise ImplError(
            f"{name} serves Hopper (compute capability 9.0); this device has "
            f"{torch.cuda.get_device_capability(q_latent.device)}"
        )


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
    refuse_unservable(q_latent, latents, page_table, kv_lora_rank, scale)
    (T, H, width), (N, max_pages) = q_latent.shape, page_table.shape
    page_size, R = latents.shape[1], kv_lora_rank
    if T == 0 or N == 0:
        return q_latent.new_zeros(T, H, R)
    shape = shape_of(max_tokens * H, R, width)
    row_blocks = cdiv(max_tokens * H, shape.rows)
    block_rows = cdiv(max_tokens * H, row_blocks)
    programs = cdiv(shape.num_programs, row_blocks)
    box = shape.tokens
    while max_pages > 1 and page_size % box:
        box //= 2
    page_rows = latents.stride(0) // width
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    queries = TensorDescriptor(
        q_latent.contiguous(), [T * H, width], [width, 1], [shape.rows, CHUNK], layout
    )
    num_rows = (len(latents) - 1) * page_rows + page_size
    rows = TensorDescriptor(latents, [num_rows, width], [width, 1], [box, CHUNK], layout)
    span = max(256, padded_width(N))
    out = q_latent.new_empty(T, H, R)
    num_parts = 2 * programs * row_blocks * block_rows
    parts = q_latent.new_empty(num_parts, R, dtype=torch.float32)
    sums = q_latent.new_empty(num_parts, dtype=torch.float32)
    walk_sm90_kernel[(row_blocks, programs)](
        queries, rows, page_table, lengths, cu_seqlens, out, parts, sums, N, page_rows,
        page_table.stride(0), page_size, H, block_rows, scale * LOG2E, R=R, W=width, H=shape.rows,
        BN=shape.tokens, PARTS=shape.parts, STAGES=shape.num_stages, BOX=box, BS=span,
        IS_ONE=cu_seqlens is None, NUM_WARPS=shape.num_warps,
        P_IN_TAIL=shape.has_tail and shape.rows == 64, num_warps=shape.num_warps,
    )  # fmt: skip
    columns = padded_width(R)
    merge_kernel[(max_tokens * H, N)](
        parts, sums, out, lengths, cu_seqlens, N, programs, H, row_blocks, block_rows, R=R,
        BR=columns, BN=shape.tokens, BS=span, BP=MERGED, IS_ONE=cu_seqlens is None,
        num_warps=max(1, columns // 128),
    )  # fmt: skip
    return out
