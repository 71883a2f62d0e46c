"""The attention-residual mixture on an NVIDIA GPU: one read of the sources from memory each way.

    ds_j = p_j (dout . v_j - sum_i p_i dout . v_i)
    dv_j = p_j dout + ds_j (r_j q - s_j r_j^2 v_j / D)

Rows of bf16 on Hopper go through a ring in shared memory (`ring.py`); the kernels here serve all
other rows. The sources of a token stay in registers (`IS_HELD`) where they fit. Where they do not,
the forward pass is an online softmax, and the backward pass, which needs dout . v_j of all sources
first, reads a token's sources twice, the second time from cache. Kept are r_j = 1/rms(v_j) and the
scores s_j. A program takes some tokens and adds up its part of dq = sum_tj ds_j r_j v_j; a last
kernel sums the parts in a fixed order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..derivatives import no_second_derivatives
from ..launch_table import derived, launch, width_class
from ..triton import (
    add_pairs,
    allocator,
    as_operator,
    cdiv,
    enqueue,
    enqueue_aligned,
    padded_width,
    record,
    refuse_unserved,
)
from . import ring

MAX_TOKENS_PER_PROGRAM = 4  # of a forward program, which reads the query once for all of them
MAX_PROGRAMS = 132 * 8  # of the forward pass, for fewer tokens than fill the device
MAX_PROGRAM_WARPS = 132 * 16  # of the backward pass; each program has a part of dq
SUM_COLUMNS = 8  # of a program of the last kernel


@triton.jit
def load_row(source, start, columns, is_column):
    return tl.load(source + start + columns, mask=is_column, other=0.0)


@triton.jit
def load_query(norm_weight, proj_weight, columns, is_column):
    norm = tl.load(norm_weight + columns, mask=is_column, other=0.0).to(tl.float32)
    return norm * tl.load(proj_weight + columns, mask=is_column, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens", "tokens_per_program"])
def forward_kernel(
    sources, norm_weight, proj_weight, out, stats, num_tokens, tokens_per_program, eps,
    S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, AHEAD: tl.constexpr,
    IS_HELD: tl.constexpr, IS_KEPT: tl.constexpr,
):  # fmt: skip
    """A range of tokens; `AHEAD` sources are on their way while one is worked on."""
    columns = tl.arange(0, BD)
    is_column = columns < D
    query = load_query(norm_weight, proj_weight, columns, is_column)  # [BD]
    first = tl.program_id(0) * tokens_per_program
    for i in range(tl.minimum(tokens_per_program, num_tokens - first)):
        t = (first + i).to(tl.int64)
        start = t * D
        rows: tl.tuple = ()
        for j in tl.static_range(AHEAD):
            rows += (load_row(sources[j], start, columns, is_column),)
        mixed = tl.zeros([BD], tl.float32)
        top = float("-inf")
        total = 0.0
        scores: tl.tuple = ()
        for j in tl.static_range(S):
            if j + AHEAD < S:
                rows += (load_row(sources[j + AHEAD], start, columns, is_column),)
            value = rows[j].to(tl.float32)
            square, dot = tl.reduce((value * value, value * query), 0, add_pairs)
            rstd = tl.rsqrt(square / D + eps)
            score = dot * rstd
            if IS_KEPT:
                tl.store(stats + t * (2 * S) + j, rstd)
                tl.store(stats + t * (2 * S) + S + j, score)
            new_top = tl.maximum(top, score)
            if IS_HELD:
                scores += (score,)
            else:
                weight = tl.exp(score - new_top)
                scale = tl.exp(top - new_top)
                mixed = mixed * scale + weight * value
                total = total * scale + weight
            top = new_top
        if IS_HELD:
            for j in tl.static_range(S):
                weight = tl.exp(scores[j] - top)
                mixed += weight * rows[j].to(tl.float32)
                total += weight
        mixed = mixed / total
        tl.store(out + start + columns, mixed.to(out.dtype.element_ty), mask=is_column)


@triton.jit(do_not_specialize=["num_tokens", "tokens_per_program"])
def backward_kernel(
    sources, d_sources, norm_weight, proj_weight, d_out, stats, d_query_parts,
    num_tokens, tokens_per_program,
    S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, AHEAD: tl.constexpr,
    IS_HELD: tl.constexpr,
):  # fmt: skip
    """Gradients of the sources for a range of tokens, and its part of the query's."""
    columns = tl.arange(0, BD)
    is_column = columns < D
    query = load_query(norm_weight, proj_weight, columns, is_column)  # [BD]
    d_query = tl.zeros([BD], tl.float32)
    first = tl.program_id(0) * tokens_per_program
    for i in range(tl.minimum(tokens_per_program, num_tokens - first)):
        t = (first + i).to(tl.int64)
        start = t * D
        d_mixed = load_row(d_out, start, columns, is_column).to(tl.float32)
        rows: tl.tuple = ()
        for j in tl.static_range(AHEAD):
            rows += (load_row(sources[j], start, columns, is_column),)
        top = float("-inf")
        scores: tl.tuple = ()
        for j in tl.static_range(S):
            scores += (tl.load(stats + t * (2 * S) + S + j),)
            top = tl.maximum(top, scores[j])
        total = 0.0
        weights: tl.tuple = ()
        for j in tl.static_range(S):
            weights += (tl.exp(scores[j] - top),)
            total += weights[j]
        mean = 0.0
        dots: tl.tuple = ()
        for j in tl.static_range(S):
            if j + AHEAD < S:
                rows += (load_row(sources[j + AHEAD], start, columns, is_column),)
            dots += (tl.sum(d_mixed * rows[j].to(tl.float32), 0),)
            mean += weights[j] / total * dots[j]
        for j in tl.static_range(S):
            if IS_HELD:
                value = rows[j].to(tl.float32)
            else:
                value = load_row(sources[j], start, columns, is_column).to(tl.float32)
            rstd = tl.load(stats + t * (2 * S) + j)
            prob = weights[j] / total
            along_query = prob * (dots[j] - mean) * rstd
            along_value = -along_query * rstd * scores[j] / D
            d_query += along_query * value
            d_value = prob * d_mixed + along_query * query + along_value * value
            d_source = d_sources[j]
            tl.store(
                d_source + start + columns, d_value.to(d_source.dtype.element_ty), mask=is_column
            )
    tl.store(d_query_parts + tl.program_id(0) * D + columns, d_query, mask=is_column)


@triton.jit(do_not_specialize=["num_parts"])
def query_kernel(
    d_query_parts, norm_weight, proj_weight, d_norm, d_proj, num_parts,
    D: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Sum the parts of dq; gradients of both weights."""
    columns = tl.program_id(0) * BD + tl.arange(0, BD)
    is_column = columns < D
    total = tl.zeros([BP, BD], tl.float32)
    for first in range(0, num_parts, BP):
        parts = first + tl.arange(0, BP)
        total += tl.load(
            d_query_parts + parts[:, None] * D + columns[None, :],
            mask=(parts < num_parts)[:, None] & is_column[None, :],
            other=0.0,
        )
    d_query = tl.sum(total, 0)
    norm = tl.load(norm_weight + columns, mask=is_column, other=0.0).to(tl.float32)
    proj = tl.load(proj_weight + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(d_norm + columns, (d_query * proj).to(d_norm.dtype.element_ty), mask=is_column)
    tl.store(d_proj + columns, (d_query * norm).to(d_proj.dtype.element_ty), mask=is_column)


class Shape(NamedTuple):
    """How programs take the rows of a token."""

    num_warps: int
    ahead: int  # sources on their way
    is_held: bool


def forward_shape(num_sources: int, padded: int, device: torch.device) -> Shape:
    """For `num_sources` rows of `padded` numbers."""
    return _shape("attn_res_forward", num_sources, padded, device)


def backward_shape(num_sources: int, padded: int, device: torch.device) -> Shape:
    """For `num_sources` rows of `padded` numbers."""
    return _shape("attn_res_backward", num_sources, padded, device)


@derived
def _shape(kernel: str, num_sources: int, padded: int, device: torch.device) -> Shape:
    shape = launch(kernel, width_class(padded, 512, 8192), device)
    if num_sources * padded <= shape["held"]:  # numbers of a token's sources that registers hold
        return Shape(shape["held_warps"], num_sources, True)
    return Shape(shape["num_warps"], min(num_sources, shape["ahead"]), False)


def _forward(
    sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float, is_kept: bool
) -> tuple[Tensor, Tensor]:
    out, stats = _outputs(sources, norm_weight, proj_weight, eps, is_kept)
    (T, D), S = out.shape, len(sources)
    if T == 0:
        return out, stats
    arguments = (tuple(sources), norm_weight, proj_weight, out, stats, T)
    if out.dtype is torch.bfloat16 and out.is_cuda:
        at = forward_ring(S, D, is_kept, out.get_device())
        if at is not None:
            grid = (min(T, at.num_programs),)
            if enqueue_aligned(at.kernel, grid, (*arguments, eps), at.constants):
                return out, stats
    refuse_unserved("attn_res", *sources, norm_weight, proj_weight)
    BD = padded_width(D)
    shape = forward_shape(S, BD, out.device)
    tokens_per_program = min(MAX_TOKENS_PER_PROGRAM, cdiv(T, MAX_PROGRAMS))
    enqueue(
        forward_kernel, (cdiv(T, tokens_per_program),), *arguments, tokens_per_program, eps,
        S=S, D=D, BD=BD, AHEAD=shape.ahead, IS_HELD=shape.is_held, IS_KEPT=is_kept,
        num_warps=shape.num_warps,
    )  # fmt: skip
    return out, stats


class Ring(NamedTuple):
    """A kernel of `ring.py` for some number of sources and width on a device."""

    kernel: Any
    num_programs: int  # at most
    constants: dict[str, Any]


@derived
def forward_ring(num_sources: int, width: int, is_kept: bool, device: int) -> Ring | None:
    """None where no ring serves the rows."""
    shape = ring.forward_shape(width, torch.device("cuda", device))
    return _ring(ring.ring_forward_kernel, shape, num_sources, width, device, IS_KEPT=is_kept)


@derived
def backward_ring(num_sources: int, width: int, device: int) -> Ring | None:
    """None where no ring serves the rows."""
    shape = ring.backward_shape(num_sources, width, torch.device("cuda", device))
    group = 1 if shape is None else shape.group
    return _ring(ring.ring_backward_kernel, shape, num_sources, width, device, GROUP=group)


def _ring(
    kernel: Any, shape: ring.RingShape | None, num_sources: int, width: int, device: int,
    **constants: Any,
) -> Ring | None:  # fmt: skip
    multiprocessors = ring.num_multiprocessors(device)
    if shape is None or multiprocessors == 0 or width % 8 > 0:  # a thread copies 16 bytes
        return None
    constants |= {"S": num_sources, "D": width, "P": shape.pairs, "SLOTS": shape.slots}
    constants["num_warps"] = shape.num_warps
    return Ring(kernel, shape.programs * multiprocessors, constants)


def _outputs(
    sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float, is_kept: bool
) -> tuple[Tensor, Tensor]:
    """Unfilled mixture `[T, D]`, and 1/rms and scores `[T, 2 S]`."""
    first = sources[0]
    T, D = first.shape
    allocate, kept = allocator(first), 2 * len(sources) if is_kept else 0
    out = allocate((T, D), (D, 1), first.dtype)
    return out, allocate((T, kept), (max(kept, 1), 1), torch.float32)


def _backward(
    sources: Sequence[Tensor],
    norm_weight: Tensor,
    proj_weight: Tensor,
    stats: Tensor,
    d_out: Tensor,
) -> list[Tensor]:
    d_norm, d_proj, *d_sources = grads = _gradients(sources, norm_weight, proj_weight, stats, d_out)
    (T, D), S = d_out.shape, len(sources)
    inputs = (tuple(sources), tuple(d_sources), norm_weight, proj_weight, d_out, stats)
    parts = None
    if T > 0 and d_out.dtype is torch.bfloat16 and d_out.is_cuda:
        at = backward_ring(S, D, d_out.get_device())
        if at is not None:
            grid = (min(T, at.num_programs),)
            room = allocator(d_out)((*grid, D), (D, 1), torch.float32)
            if enqueue_aligned(at.kernel, grid, (*inputs, room, T), at.constants):
                parts = room
    if parts is None:
        BD = padded_width(D)
        shape = backward_shape(S, BD, d_out.device)
        tokens_per_program = max(1, cdiv(T * shape.num_warps, MAX_PROGRAM_WARPS))
        parts = d_out.new_empty(cdiv(T, tokens_per_program), D, dtype=torch.float32)
        if T > 0:
            enqueue(
                backward_kernel, (parts.shape[0],), *inputs, parts, T, tokens_per_program,
                S=S, D=D, BD=BD, AHEAD=shape.ahead, IS_HELD=shape.is_held,
                num_warps=shape.num_warps,
            )  # fmt: skip
    enqueue(
        query_kernel, (cdiv(D, SUM_COLUMNS),), parts, norm_weight, proj_weight, d_norm, d_proj,
        parts.shape[0], D=D, BP=256 if parts.shape[0] <= 256 else 1024, BD=SUM_COLUMNS,
        num_warps=8,
    )  # fmt: skip
    return grads


def _gradients(
    sources: Sequence[Tensor],
    norm_weight: Tensor,
    proj_weight: Tensor,
    stats: Tensor,
    d_out: Tensor,
) -> list[Tensor]:
    """Unfilled gradients of the two weights and of the sources."""
    T, D = d_out.shape
    allocate, shape, strides, dtype = allocator(d_out), (T, D), (D, 1), d_out.dtype
    d_weights = [allocate((D,), (1,), weight.dtype) for weight in (norm_weight, proj_weight)]
    return [*d_weights, *[allocate(shape, strides, dtype) for _ in sources]]


_forward_operator = as_operator("attn_res_forward", _forward, _outputs)
_backward_operator = as_operator("attn_res_backward", _backward, _gradients)


class _AttnResMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, eps, norm_weight, proj_weight, *sources):
        out, stats = _forward_operator(sources, norm_weight, proj_weight, eps, True)
        ctx.save_for_backward(norm_weight, proj_weight, stats, *sources)
        return out

    @staticmethod
    @no_second_derivatives("attn_res: impl='triton'")
    def backward(ctx, saved, d_out):
        norm_weight, proj_weight, stats, *sources = saved
        grads = _backward_operator(sources, norm_weight, proj_weight, stats, d_out.contiguous())
        return None, *grads


def attn_res_mix(
    sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float
) -> Tensor:
    """The mixture of `baltoro.ops.attn_res.attn_res_mix`, whose checks have passed."""
    # the launch looks at the devices of the other sources
    refuse_unserved("attn_res", sources[0], norm_weight, proj_weight)
    values = [source.contiguous() for source in sources]
    norm, proj = norm_weight.contiguous(), proj_weight.contiguous()
    if torch.is_grad_enabled() and (
        norm.requires_grad or proj.requires_grad or any(x.requires_grad for x in values)
    ):
        return record(_AttnResMix, eps, norm, proj, *values)
    out: Tensor = _forward_operator(values, norm, proj, eps, False)[0]
    return out
