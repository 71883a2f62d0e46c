"""`normed_read` on an NVIDIA GPU: a program reads a token's sources once and keeps them.

Its outputs are rounded where separate kernels would round them: the sum before it is mixed, the
mixture before it is normalised.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from baltoro.ops.residual import Query
from baltoro.ops.triton import add_pairs, enqueue, padded_width, refuse_unserved

MAX_NUMBERS = 6144  # of a token's sources


@triton.jit
def read_kernel(
    sources, pending, norm_weight, proj_weight, weight, summed, mixture, normed, query_eps, eps,
    S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, IS_MIXED: tl.constexpr,
    HAS_PENDING: tl.constexpr, IS_MIXTURE_KEPT: tl.constexpr,
):  # fmt: skip
    """One token; the last of the sources is the running sum."""
    columns = tl.arange(0, BD)
    is_column = columns < D
    start = tl.program_id(0).to(tl.int64) * D
    low = normed.dtype.element_ty
    rows: tl.tuple = ()
    for j in tl.static_range(S):
        rows += (tl.load(sources[j] + start + columns, mask=is_column, other=0.0),)
    scale = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    last = rows[S - 1]
    if HAS_PENDING:
        added = tl.load(pending + start + columns, mask=is_column, other=0.0)
        last = (last.to(tl.float32) + added.to(tl.float32)).to(low)
        tl.store(summed + start + columns, last, mask=is_column)
    if IS_MIXED:
        query = tl.load(norm_weight + columns, mask=is_column, other=0.0).to(tl.float32)  # [BD]
        query *= tl.load(proj_weight + columns, mask=is_column, other=0.0).to(tl.float32)
        top = float("-inf")
        scores: tl.tuple = ()
        for j in tl.static_range(S):
            value = (last if j == S - 1 else rows[j]).to(tl.float32)
            square, dot = tl.reduce((value * value, value * query), 0, add_pairs)
            score = dot * tl.rsqrt(square / D + query_eps)
            scores += (score,)
            top = tl.maximum(top, score)
        mixed = tl.zeros([BD], tl.float32)
        total = 0.0
        for j in tl.static_range(S):
            share = tl.exp(scores[j] - top)
            mixed += share * (last if j == S - 1 else rows[j]).to(tl.float32)
            total += share
        last = (mixed / total).to(low)
    if IS_MIXTURE_KEPT:
        tl.store(mixture + start + columns, last, mask=is_column)
    value = last.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    # the weight multiplies the rounded quotient
    y = (value * rstd).to(low).to(tl.float32) * scale
    tl.store(normed + start + columns, y.to(low), mask=is_column)


def fits(num_sources: int, width: int) -> bool:
    """Whether a token's sources stay in registers."""
    return num_sources * padded_width(width) <= MAX_NUMBERS


def num_warps_of(num_sources: int) -> int:
    """One warp holds several sources whole: it sums without waiting for others."""
    return 4 if num_sources == 1 else 1


def normed_read(
    blocks: Sequence[Tensor],
    partial_sum: Tensor,
    pending: Tensor | None,
    query: Query | None,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`normed`, mixture and sum of `baltoro.ops.residual.normed_read`."""
    vectors = (weight,) if query is None else (weight, query.norm_weight, query.proj_weight)
    sources = tuple(source.contiguous() for source in (*blocks, partial_sum))
    refuse_unserved("normed_read", *sources, *vectors)
    T, D = partial_sum.shape
    normed = torch.empty_like(sources[-1])
    summed = sources[-1] if pending is None else torch.empty_like(normed)
    mixture = summed if query is None else torch.empty_like(normed)
    if T > 0:
        enqueue(
            read_kernel, (T,),
            sources, None if pending is None else pending.contiguous(),
            None if query is None else query.norm_weight.contiguous(),
            None if query is None else query.proj_weight.contiguous(),
            weight.contiguous(), summed, mixture, normed,
            0.0 if query is None else query.eps, eps,
            S=len(sources), D=D, BD=padded_width(D), IS_MIXED=query is not None,
            HAS_PENDING=pending is not None, IS_MIXTURE_KEPT=query is not None,
            num_warps=num_warps_of(len(sources)),
        )  # fmt: skip
    return normed, mixture, summed
