"""The attention-residual mixture on an NVIDIA GPU: one pass over the sources each way.

Forward: an online softmax over the sources of a token. Backward: with the row sum
delta = dout . out, which is sum_j p_j dout . v_j, each source needs only itself,

    ds_j = p_j (dout . v_j - delta)    dv_j = p_j dout + ds_j (r_j q - s_j r_j^2 v_j / D)

so `out` is kept beside the sources (the norm that follows keeps it anyway), and 2 S + 1 numbers a
token: r_j = 1/rms(v_j), the scores s_j and their log-sum-exp. A program takes a range of tokens and
adds up its part of dq = sum_tj ds_j r_j v_j; a last kernel sums the parts in a fixed order.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton import add_pairs, refuse_unserved

MAX_TOKENS_PER_PROGRAM = 16  # of a forward program, which reads the query once for all of them
MAX_PROGRAMS = 132 * 8  # of the backward pass, and parts of dq
SUM_COLUMNS = 16
AHEAD = 2  # sources on their way while one is worked on


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
    S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, AHEAD: tl.constexpr, IS_KEPT: tl.constexpr,
):  # fmt: skip
    """A range of tokens."""
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
        stat = stats + t * (2 * S + 1)
        for j in tl.static_range(S):
            if j + AHEAD < S:
                rows += (load_row(sources[j + AHEAD], start, columns, is_column),)
            value = rows[j].to(tl.float32)
            square, dot = tl.reduce((value * value, value * query), 0, add_pairs)
            rstd = tl.rsqrt(square / D + eps)
            score = dot * rstd
            new_top = tl.maximum(top, score)
            scale = tl.exp(top - new_top)
            weight = tl.exp(score - new_top)
            mixed = mixed * scale + weight * value
            total = total * scale + weight
            top = new_top
            if IS_KEPT:
                tl.store(stat + j, rstd)
                tl.store(stat + S + j, score)
        mixed = mixed / total
        tl.store(out + start + columns, mixed.to(out.dtype.element_ty), mask=is_column)
        if IS_KEPT:
            tl.store(stat + 2 * S, top + tl.log(total))


@triton.jit(do_not_specialize=["num_tokens", "tokens_per_program"])
def backward_kernel(
    sources, d_sources, norm_weight, proj_weight, out, d_out, stats, d_query_parts,
    num_tokens, tokens_per_program,
    S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, AHEAD: tl.constexpr,
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
        rows: tl.tuple = ()
        for j in tl.static_range(AHEAD):
            rows += (load_row(sources[j], start, columns, is_column),)
        d_mixed = load_row(d_out, start, columns, is_column).to(tl.float32)
        delta = tl.sum(d_mixed * load_row(out, start, columns, is_column).to(tl.float32), 0)
        stat = stats + t * (2 * S + 1)
        lse = tl.load(stat + 2 * S)
        for j in tl.static_range(S):
            if j + AHEAD < S:
                rows += (load_row(sources[j + AHEAD], start, columns, is_column),)
            rstd = tl.load(stat + j)
            score = tl.load(stat + S + j)
            value = rows[j].to(tl.float32)
            prob = tl.exp(score - lse)
            d_score = prob * (tl.sum(d_mixed * value, 0) - delta)
            along_query = d_score * rstd
            along_value = -along_query * rstd * score / D
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


def num_warps_of(width: int) -> int:
    """Warps that share a row: 16 numbers a lane up to a width of 8192."""
    return min(16, max(1, width // 512))


@torch.library.custom_op("baltoro::attn_res_forward", mutates_args=())
def _forward(
    sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float, is_kept: bool
) -> tuple[Tensor, Tensor]:
    out, stats = _outputs(sources, is_kept)
    T, D = out.shape
    if T > 0:
        BD = triton.next_power_of_2(D)
        tokens_per_program = min(MAX_TOKENS_PER_PROGRAM, triton.cdiv(T, MAX_PROGRAMS))
        forward_kernel[(triton.cdiv(T, tokens_per_program),)](
            tuple(sources), norm_weight, proj_weight, out, stats, T, tokens_per_program, eps,
            S=len(sources), D=D, BD=BD, AHEAD=min(len(sources), AHEAD), IS_KEPT=is_kept,
            num_warps=num_warps_of(BD),
        )  # fmt: skip
    return out, stats


def _outputs(sources: Sequence[Tensor], is_kept: bool) -> tuple[Tensor, Tensor]:
    """Unfilled mixture `[T, D]`, and 1/rms, scores and log-sum-exp `[T, 2 S + 1]`."""
    first = sources[0]
    kept = 2 * len(sources) + 1 if is_kept else 0
    stats = first.new_empty(first.shape[0], kept, dtype=torch.float32)
    return torch.empty_like(first), stats


@_forward.register_fake
def _(sources, norm_weight, proj_weight, eps, is_kept):
    return _outputs(sources, is_kept)


@torch.library.custom_op("baltoro::attn_res_backward", mutates_args=())
def _backward(
    sources: Sequence[Tensor],
    norm_weight: Tensor,
    proj_weight: Tensor,
    out: Tensor,
    stats: Tensor,
    d_out: Tensor,
) -> list[Tensor]:
    d_norm, d_proj, *d_sources = _gradients(sources, norm_weight, proj_weight)
    T, D = out.shape
    BD = triton.next_power_of_2(D)
    tokens_per_program = max(1, triton.cdiv(T, MAX_PROGRAMS))
    num_programs = triton.cdiv(T, tokens_per_program)
    parts = out.new_empty(num_programs, D, dtype=torch.float32)
    if T > 0:
        backward_kernel[(num_programs,)](
            tuple(sources), tuple(d_sources), norm_weight, proj_weight, out, d_out, stats, parts,
            T, tokens_per_program,
            S=len(sources), D=D, BD=BD, AHEAD=min(len(sources), AHEAD), num_warps=num_warps_of(BD),
        )  # fmt: skip
    query_kernel[(triton.cdiv(D, SUM_COLUMNS),)](
        parts, norm_weight, proj_weight, d_norm, d_proj, num_programs, D=D, BP=128, BD=SUM_COLUMNS
    )
    return [d_norm, d_proj, *d_sources]


def _gradients(sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor) -> list[Tensor]:
    """Unfilled gradients of the two weights and of the sources."""
    return [torch.empty_like(x) for x in (norm_weight, proj_weight, *sources)]


@_backward.register_fake
def _(sources, norm_weight, proj_weight, out, stats, d_out):
    return _gradients(sources, norm_weight, proj_weight)


class _AttnResMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, eps, norm_weight, proj_weight, *sources):
        out, stats = _forward(sources, norm_weight, proj_weight, eps, True)
        ctx.save_for_backward(norm_weight, proj_weight, out, stats, *sources)
        return out

    @staticmethod
    def backward(ctx, d_out):
        norm_weight, proj_weight, out, stats, *sources = ctx.saved_tensors
        grads = _backward(sources, norm_weight, proj_weight, out, stats, d_out.contiguous())
        return None, *grads


def attn_res_mix(
    sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float
) -> Tensor:
    """The mixture of `baltoro.ops.attn_res.attn_res_mix`, whose checks have passed."""
    refuse_unserved("attn_res", *sources, norm_weight, proj_weight)
    values = [source.contiguous() for source in sources]
    weights = (norm_weight.contiguous(), proj_weight.contiguous())
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*values, *weights)):
        return _AttnResMix.apply(eps, *weights, *values)
    return _forward(values, *weights, eps, False)[0]
