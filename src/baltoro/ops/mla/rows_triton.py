"""`rows` on an NVIDIA GPU: a program takes a token, or looks where many go."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..impl import ImplError
from ..triton import cdiv, padded_width, refuse_unserved

NUM_WARPS = 2
ROWS = 128  # whose places a program looks up


@triton.jit
def next_kernel(
    positions, steps, page_table, pages, places, lengths, num_rows, table_stride,
    SIZE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * B + tl.arange(0, B)
    is_row = n < num_rows
    position = tl.load(positions + n, mask=is_row, other=0)
    after = position + tl.load(steps + n, mask=is_row, other=0)
    page = tl.load(page_table + n * table_stride + position // SIZE, mask=is_row, other=0)
    tl.store(pages + n, page.to(tl.int64), mask=is_row)
    tl.store(places + n, position % SIZE, mask=is_row)
    tl.store(lengths + n, after.to(tl.int32), mask=is_row)
    tl.store(positions + n, after, mask=is_row)


@triton.jit
def append_kernel(
    raw, weight, latents, pages, places, raw_stride, page_stride, row_stride, eps,
    R: tl.constexpr, P: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    row = latents + tl.load(pages + t) * page_stride + tl.load(places + t) * row_stride
    columns = tl.arange(0, BR)
    is_column = columns < R
    x = tl.load(raw + t * raw_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    w = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    low = latents.dtype.element_ty
    # the weight multiplies the rounded quotient
    normed = (x * tl.rsqrt(tl.sum(x * x, 0) / R + eps)).to(low).to(tl.float32)
    tl.store(row + columns, (normed * w).to(low), mask=is_column)
    shared = tl.arange(0, BP)
    is_shared = shared < P
    value = tl.load(raw + t * raw_stride + R + shared, mask=is_shared, other=0.0)
    tl.store(row + R + shared, value, mask=is_shared)


@triton.jit
def gate_kernel(
    y, gate_logits, out, token_stride, head_stride, gate_stride,
    H: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BH)[:, None]
    values = tl.arange(0, BV)[None, :]
    is_here = (heads < H) & (values < V)
    places = heads * V + values
    x = tl.load(y + t * token_stride + heads * head_stride + values, mask=is_here, other=0.0)
    gate = tl.load(gate_logits + t * gate_stride + places, mask=is_here, other=0.0)
    low = out.dtype.element_ty
    gate = tl.sigmoid(gate.to(tl.float32)).to(low).to(tl.float32)
    tl.store(out + t * (H * V) + places, (x.to(tl.float32) * gate).to(low), mask=is_here)


def next_rows(
    positions: Tensor, steps: Tensor, page_table: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`baltoro.ops.mla.rows.next_rows`, whose checks have passed."""
    integers = (torch.int32, torch.int64)
    refuse_unserved("next_rows", positions, steps, page_table, dtypes=integers)
    if not positions.is_contiguous() or page_table.stride(1) != 1:
        raise ImplError("next_rows: impl='triton' needs contiguous positions and table rows")
    steps = steps.contiguous()
    num_rows = len(positions)
    pages, places = positions.new_empty(num_rows), positions.new_empty(num_rows)
    lengths = page_table.new_empty(num_rows)
    if num_rows:
        next_kernel[(cdiv(num_rows, ROWS),)](
            positions, steps, page_table, pages, places, lengths, num_rows, page_table.stride(0),
            SIZE=page_size, B=ROWS, num_warps=ROWS // 32,
        )  # fmt: skip
    return pages, places, lengths


def append_rows(
    raw: Tensor, weight: Tensor, latents: Tensor, pages: Tensor, places: Tensor, eps: float
) -> None:
    """`baltoro.ops.mla.rows.append_rows`, whose checks have passed."""
    refuse_unserved("append_rows", raw, weight, latents)
    if latents.stride(2) != 1:
        raise ImplError("append_rows: impl='triton' needs latents whose rows are contiguous")
    raw = raw if raw.stride(1) == 1 else raw.contiguous()
    pages, places = pages.contiguous(), places.contiguous()
    R, P = weight.shape[0], raw.shape[1] - weight.shape[0]
    if len(raw):
        append_kernel[(len(raw),)](
            raw, weight.contiguous(), latents, pages, places,
            raw.stride(0), latents.stride(0), latents.stride(1), eps,
            R=R, P=P, BR=padded_width(R), BP=padded_width(max(P, 1)), num_warps=NUM_WARPS,
        )  # fmt: skip


def sigmoid_gated(y: Tensor, gate_logits: Tensor) -> Tensor:
    """`baltoro.ops.mla.rows.sigmoid_gated`, whose checks have passed."""
    refuse_unserved("sigmoid_gated", y, gate_logits)
    y = y if y.stride(2) == 1 else y.contiguous()
    gate_logits = gate_logits if gate_logits.stride(1) == 1 else gate_logits.contiguous()
    T, H, V = y.shape
    out = y.new_empty((T, H * V))
    if T:
        gate_kernel[(T,)](
            y, gate_logits, out, y.stride(0), y.stride(1), gate_logits.stride(0),
            H=H, V=V, BH=padded_width(H), BV=padded_width(V), num_warps=NUM_WARPS,
        )  # fmt: skip
    return out
