"""The attention-residual mixture of wide bf16 rows, two numbers to a register.

`triton.py` has the formulas. Rows this wide leave no room for a token's sources, and as single bf16
they would take twice the registers between a load and its use. So they come as pairs in int32, and
a queue of `ahead` of them is always on its way: through the forward pass, which needs each source
once, and the backward pass, which reads a token's sources twice, the second time from cache; and
from one token of a program to the next.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..triton import add_pairs, cdiv, enqueue, padded_width

NUM_WARPS = 16


class PackedShape(NamedTuple):
    """How programs take the rows of a token."""

    ahead: int  # rows on their way
    num_programs: int
    group: int = 1  # dot products of the backward pass that are summed over threads at once; 1 or 3
    is_query_held: bool = True  # in registers, or read again for every source


@triton.jit
def load_pairs(row, start, columns, is_column):
    """Numbers 2 i and 2 i + 1 of a row in one int32."""
    pairs = row.to(tl.pointer_type(tl.int32), bitcast=True)
    return tl.load(pairs + start // 2 + columns, mask=is_column, other=0)


@triton.jit
def even(pairs):
    return (pairs << 16).to(tl.float32, bitcast=True)


@triton.jit
def odd(pairs):
    return (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def store_pairs(row, start, columns, is_column, x_even, x_odd):
    low = x_even.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 65535
    high = x_odd.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    pairs = row.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(pairs + start // 2 + columns, low | high, mask=is_column)


@triton.jit
def load_weight(weight, columns, is_column):
    """Even and odd numbers of a weight, which may be fp32."""
    if weight.dtype.element_ty == tl.bfloat16:
        pairs = load_pairs(weight, 0, columns, is_column)
        weight_even, weight_odd = even(pairs), odd(pairs)
    else:
        weight_even = tl.load(weight + 2 * columns, mask=is_column, other=0.0)
        weight_odd = tl.load(weight + 2 * columns + 1, mask=is_column, other=0.0)
    return weight_even, weight_odd


@triton.jit
def load_query(norm_weight, proj_weight, columns, is_column):
    norm_even, norm_odd = load_weight(norm_weight, columns, is_column)
    proj_even, proj_odd = load_weight(proj_weight, columns, is_column)
    return norm_even * proj_even, norm_odd * proj_odd


@triton.jit
def range_of(num_tokens, tokens_per_program):
    """First and last token of this program."""
    first = tl.program_id(0) * tokens_per_program
    return first, tl.minimum(first + tokens_per_program, num_tokens) - 1


@triton.jit
def nth_row(sources, n: tl.constexpr, S: tl.constexpr, READS: tl.constexpr, start, following,
            columns, is_column):  # fmt: skip
    """The row that a token at `start` reads as its `n`th of `READS`, or the token after it."""
    if n < READS:
        row = load_pairs(sources[n % S], start, columns, is_column)
    else:
        row = load_pairs(sources[(n - READS) % S], following, columns, is_column)
    return row


@triton.jit(do_not_specialize=["num_tokens", "tokens_per_program"])
def packed_forward_kernel(
    sources, norm_weight, proj_weight, out, stats, num_tokens, tokens_per_program, eps,
    S: tl.constexpr, D: tl.constexpr, BP: tl.constexpr, AHEAD: tl.constexpr,
    IS_KEPT: tl.constexpr,
):  # fmt: skip
    """An online softmax over the sources of each token of a range."""
    columns = tl.arange(0, BP)
    is_column = columns < D // 2
    query_even, query_odd = load_query(norm_weight, proj_weight, columns, is_column)
    first, last = range_of(num_tokens, tokens_per_program)
    begin = first.to(tl.int64) * D
    rows: tl.tuple = ()
    for j in tl.static_range(AHEAD):
        rows += (nth_row(sources, j, S, S, begin, begin, columns, is_column),)
    for i in range(last - first + 1):
        t = (first + i).to(tl.int64)
        start = t * D
        following = tl.minimum(first + i + 1, last).to(tl.int64) * D
        mixed_even = tl.zeros([BP], tl.float32)
        mixed_odd = tl.zeros([BP], tl.float32)
        top = float("-inf")
        total = 0.0
        for j in tl.static_range(S):
            value_even = even(rows[j])
            value_odd = odd(rows[j])
            square, dot = tl.reduce(
                (
                    value_even * value_even + value_odd * value_odd,
                    value_even * query_even + value_odd * query_odd,
                ),
                0,
                add_pairs,
            )
            rstd = tl.rsqrt(square / D + eps)
            score = dot * rstd
            if IS_KEPT:
                tl.store(stats + t * (2 * S) + j, rstd)
                tl.store(stats + t * (2 * S) + S + j, score)
            new_top = tl.maximum(top, score)
            weight = tl.exp(score - new_top)
            scale = tl.exp(top - new_top)
            mixed_even = mixed_even * scale + weight * value_even
            mixed_odd = mixed_odd * scale + weight * value_odd
            total = total * scale + weight
            top = new_top
            rows += (nth_row(sources, j + AHEAD, S, S, start, following, columns, is_column),)
        store_pairs(out, start, columns, is_column, mixed_even / total, mixed_odd / total)
        rows = rows[S:]


@triton.jit
def dot_of(a, b):
    return even(a) * even(b) + odd(a) * odd(b)


@triton.jit
def add_triples(a_0, b_0, c_0, a_1, b_1, c_1):
    return a_0 + a_1, b_0 + b_1, c_0 + c_1


@triton.jit(do_not_specialize=["num_tokens", "tokens_per_program"])
def packed_backward_kernel(
    sources, d_sources, norm_weight, proj_weight, d_out, stats, d_query_parts,
    num_tokens, tokens_per_program,
    S: tl.constexpr, D: tl.constexpr, BP: tl.constexpr, AHEAD: tl.constexpr, GROUP: tl.constexpr,
    IS_QUERY_HELD: tl.constexpr,
):  # fmt: skip
    """Gradients of the sources for a range of tokens, and its part of the query's."""
    columns = tl.arange(0, BP)
    is_column = columns < D // 2
    if IS_QUERY_HELD:
        query_even, query_odd = load_query(norm_weight, proj_weight, columns, is_column)
    d_query_even = tl.zeros([BP], tl.float32)
    d_query_odd = tl.zeros([BP], tl.float32)
    first, last = range_of(num_tokens, tokens_per_program)
    begin = first.to(tl.int64) * D
    rows: tl.tuple = ()
    for n in tl.static_range(AHEAD):
        rows += (nth_row(sources, n, S, 2 * S, begin, begin, columns, is_column),)
    d_mixed = load_pairs(d_out, begin, columns, is_column)
    for i in range(last - first + 1):
        t = (first + i).to(tl.int64)
        start = t * D
        following = tl.minimum(first + i + 1, last).to(tl.int64) * D
        stat = stats + t * (2 * S)
        top = float("-inf")
        for j in tl.static_range(S):
            top = tl.maximum(top, tl.load(stat + S + j))
        total = 0.0
        for j in tl.static_range(S):
            total += tl.exp(tl.load(stat + S + j) - top)
        dots: tl.tuple = ()
        for j in tl.static_range(0, S, GROUP):
            if GROUP == 3:
                products = (
                    dot_of(d_mixed, rows[j]),
                    dot_of(d_mixed, rows[j + 1]),
                    dot_of(d_mixed, rows[j + 2]),
                )
                dots += tl.reduce(products, 0, add_triples)
            else:
                dots += (tl.sum(dot_of(d_mixed, rows[j]), 0),)
            for n in tl.static_range(GROUP):
                rows += (
                    nth_row(sources, j + n + AHEAD, S, 2 * S, start, following, columns, is_column),
                )
        mean = 0.0
        for j in tl.static_range(S):
            mean += tl.exp(tl.load(stat + S + j) - top) / total * dots[j]
        for j in tl.static_range(S):
            if not IS_QUERY_HELD:
                query_even, query_odd = load_query(norm_weight, proj_weight, columns, is_column)
            value_even = even(rows[S + j])
            value_odd = odd(rows[S + j])
            rstd = tl.load(stat + j)
            score = tl.load(stat + S + j)
            prob = tl.exp(score - top) / total
            along_query = prob * (dots[j] - mean) * rstd
            along_value = -along_query * rstd * score / D
            d_query_even += along_query * value_even
            d_query_odd += along_query * value_odd
            store_pairs(
                d_sources[j], start, columns, is_column,
                prob * even(d_mixed) + along_query * query_even + along_value * value_even,
                prob * odd(d_mixed) + along_query * query_odd + along_value * value_odd,
            )  # fmt: skip
            rows += (
                nth_row(sources, S + j + AHEAD, S, 2 * S, start, following, columns, is_column),
            )
        rows = rows[2 * S :]
        d_mixed = load_pairs(d_out, following, columns, is_column)
    part = d_query_parts + tl.program_id(0) * D + 2 * columns
    tl.store(part, d_query_even, mask=is_column)
    tl.store(part + 1, d_query_odd, mask=is_column)


def tokens_per_program(num_tokens: int, shape: PackedShape) -> int:
    """Tokens of each program."""
    return max(1, cdiv(num_tokens, shape.num_programs))


def launch_forward(
    sources: tuple[Tensor, ...], norm_weight: Tensor, proj_weight: Tensor, out: Tensor,
    stats: Tensor, eps: float, is_kept: bool, shape: PackedShape,
) -> None:  # fmt: skip
    """Fill the mixture `[T, D]` and, where kept, 1/rms and scores `[T, 2 S]`."""
    (T, D), S = out.shape, len(sources)
    tokens = tokens_per_program(T, shape)
    enqueue(
        packed_forward_kernel, (cdiv(T, tokens),),
        sources, norm_weight, proj_weight, out, stats, T, tokens, eps,
        S=S, D=D, BP=padded_width(D) // 2, AHEAD=min(shape.ahead, S), IS_KEPT=is_kept,
        num_warps=NUM_WARPS,
    )  # fmt: skip


def launch_backward(
    sources: tuple[Tensor, ...], d_sources: tuple[Tensor, ...], norm_weight: Tensor,
    proj_weight: Tensor, d_out: Tensor, stats: Tensor, d_query_parts: Tensor, shape: PackedShape,
) -> None:  # fmt: skip
    """Fill the gradients of the sources, and one part of the query's for each program."""
    (T, D), S = d_out.shape, len(sources)
    group = shape.group if S % shape.group == 0 else 1
    enqueue(
        packed_backward_kernel, (len(d_query_parts),),
        sources, d_sources, norm_weight, proj_weight, d_out, stats, d_query_parts,
        T, tokens_per_program(T, shape),
        S=S, D=D, BP=padded_width(D) // 2, AHEAD=min(max(shape.ahead, group), S), GROUP=group,
        IS_QUERY_HELD=shape.is_query_held, num_warps=NUM_WARPS,
    )  # fmt: skip
