"""The attention-residual mixture of bf16 rows on Hopper: rows wait in a ring in shared memory.

`triton.py` has the formulas. A program takes every n-th token. The rows that it will read, a
token's one after another and then the next token's, are copied ahead into the slots of a ring, so
that memory is busy while sums over a row are on their way between threads; a slot is filled again
as soon as its row is done with. The backward pass reads a token's sources twice, both times there.
Numbers come in pairs, two bf16 to an int32. A thread copies what it will read itself.
"""

from functools import cache
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..launch_table import Launch, derived, launch

LINE: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SHARED_BYTES = 228 * 1024  # of a multiprocessor
PROGRAM_BYTES = 2 * 1024  # of a program, for sums and what the device keeps there
WIDTHS = (768, 1024, 2048, 4096)  # the widest rows of a class; one more is for wider ones


class RingShape(NamedTuple):
    """How programs take the rows of a token."""

    num_warps: int
    pairs: int  # of a copy by all threads; the last of a row may be cut
    slots: int
    programs: int  # of a multiprocessor
    group: int  # rows whose sums go between threads at once


@derived
def forward_shape(width: int, device: torch.device) -> RingShape | None:
    """For rows of `width` numbers; None if a multiprocessor has no room for them."""
    shape = launch("attn_res_ring_forward", _class_of(width), device)
    return _fitted(shape, shape["slots"], 1, width)


@derived
def backward_shape(num_sources: int, width: int, device: torch.device) -> RingShape | None:
    """The same; the slots are more than the rows of a token, by one at least."""
    shape = launch("attn_res_ring_backward", _class_of(width), device)
    slots = max(shape["slots"], num_sources + 1 + shape["spare"])
    return _fitted(shape, slots, shape["group"], width)


def _class_of(width: int) -> str:
    return next((f"w{most}" for most in WIDTHS if width <= most), "wider")


def _fitted(shape: Launch, slots: int, group: int, width: int) -> RingShape | None:
    """With as many programs, up to the shape's, as a multiprocessor has room for."""
    pairs = shape["pairs"]
    row_bytes = -(-width // (2 * pairs)) * pairs * 4
    room = SHARED_BYTES // (slots * row_bytes + PROGRAM_BYTES)
    programs = min(shape["programs"], room)
    return RingShape(shape["num_warps"], pairs, slots, programs, group) if programs > 0 else None


@cache
def num_multiprocessors(device: int) -> int:
    """Of a device whose multiprocessors have Hopper's shared memory; 0 of another."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if properties.major in (9, 10) else 0


@gluon.jit
def even(pairs):
    return (pairs << 16).to(gl.float32, bitcast=True)


@gluon.jit
def odd(pairs):
    return (pairs & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def rounded(x_even, x_odd):
    """Pairs of two fp32 each, rounded to bf16."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x_even, x_odd],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def pairs_of(row, t, D: gl.constexpr):
    return (row + t.to(gl.int64) * D).to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def columns_of(c: gl.constexpr, P: gl.constexpr, LAYOUT: gl.constexpr):
    return c * P + gl.arange(0, P, layout=LAYOUT)


@gluon.jit
def load_weight(
    weight, c: gl.constexpr, D: gl.constexpr, P: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Even and odd numbers of a part of a weight, which may be fp32."""
    columns = columns_of(c, P, LAYOUT)
    is_column = columns < D // 2
    if weight.dtype.element_ty == gl.bfloat16:
        place = weight.to(gl.pointer_type(gl.int32), bitcast=True) + columns
        pairs = gl.load(place, mask=is_column, other=0)
        w_even, w_odd = even(pairs), odd(pairs)
    else:
        w_even = gl.load(weight + 2 * columns, mask=is_column, other=0.0)
        w_odd = gl.load(weight + 2 * columns + 1, mask=is_column, other=0.0)
    return w_even, w_odd


@gluon.jit
def load_query(
    norm_weight, proj_weight, D: gl.constexpr, P: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """The product of the weights, a pair of tensors for each part of a row."""
    query: gl.tuple = ()
    for c in gl.static_range((D // 2 + P - 1) // P):
        norm_even, norm_odd = load_weight(norm_weight, c, D, P, LAYOUT)
        proj_even, proj_odd = load_weight(proj_weight, c, D, P, LAYOUT)
        query += ((norm_even * proj_even, norm_odd * proj_odd),)
    return query


@gluon.jit
def ring_of(D: gl.constexpr, P: gl.constexpr, SLOTS: gl.constexpr):
    """Room for `SLOTS` rows, each part of a row by itself."""
    ring: gl.tuple = ()
    for _ in gl.static_range((D // 2 + P - 1) // P):
        ring += (gl.allocate_shared_memory(gl.int32, [SLOTS, P], LINE),)
    return ring


@gluon.jit
def token_of(i):
    """The `i`th token of this program."""
    return gl.program_id(0) + i * gl.num_programs(0)


@gluon.jit
def count_of(num_tokens):
    """Tokens of this program."""
    return gl.cdiv(num_tokens - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def copy_row(
    ring, slot, row, i, count, D: gl.constexpr, P: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Start the copy of the `i`th of this program's `count` tokens from one source."""
    if i < count:
        pairs = pairs_of(row, token_of(i), D)
        for c in gl.static_range(len(ring)):
            columns = columns_of(c, P, LAYOUT)
            place = ring[c].index(slot)
            if (c + 1) * P <= D // 2:
                async_copy.async_copy_global_to_shared(place, pairs + columns)
            else:
                async_copy.async_copy_global_to_shared(
                    place, pairs + columns, mask=columns < D // 2
                )
    async_copy.commit_group()


@gluon.jit
def load_row(ring, slot, LAYOUT: gl.constexpr):
    row: gl.tuple = ()
    for c in gl.static_range(len(ring)):
        row += (ring[c].index(slot).load(LAYOUT),)
    return row


@gluon.jit
def store_part(
    row, t, c: gl.constexpr, pairs, D: gl.constexpr, P: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    columns = columns_of(c, P, LAYOUT)
    place = pairs_of(row, t, D) + columns
    if (c + 1) * P <= D // 2:
        gl.store(place, pairs)
    else:
        gl.store(place, pairs, mask=columns < D // 2)


@gluon.jit
def add_2(a_0, b_0, a_1, b_1):
    return a_0 + a_1, b_0 + b_1


@gluon.jit
def add_3(a_0, b_0, c_0, a_1, b_1, c_1):
    return a_0 + a_1, b_0 + b_1, c_0 + c_1


@gluon.jit
def square_and_dot(row, query):
    """A thread's parts of the sums of a row's squares and of its product with the query."""
    r_even, r_odd = even(row[0]), odd(row[0])
    q_even, q_odd = query[0]
    square = r_even * r_even + r_odd * r_odd
    dot = r_even * q_even + r_odd * q_odd
    for c in gl.static_range(1, len(query)):
        r_even, r_odd = even(row[c]), odd(row[c])
        q_even, q_odd = query[c]
        square += r_even * r_even + r_odd * r_odd
        dot += r_even * q_even + r_odd * q_odd
    return square, dot


@gluon.jit(do_not_specialize=["num_tokens"])
def ring_forward_kernel(
    sources, norm_weight, proj_weight, out, stats, num_tokens, eps,
    S: gl.constexpr, D: gl.constexpr, P: gl.constexpr, SLOTS: gl.constexpr, IS_KEPT: gl.constexpr,
):  # fmt: skip
    """An online softmax over the sources of each token."""
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([P // (32 * WARPS)], [32], [WARPS], [0])
    ring = ring_of(D, P, SLOTS)
    query = load_query(norm_weight, proj_weight, D, P, LAYOUT)
    count = count_of(num_tokens)
    for n in gl.static_range(SLOTS):
        copy_row(ring, n, sources[n % S], n // S, count, D, P, LAYOUT)
    first_slot = 0
    for i in range(count):
        t = token_of(i)
        mixed: gl.tuple = ()
        for _ in gl.static_range(len(ring)):
            zero = gl.zeros([P], gl.float32, layout=LAYOUT)
            mixed += ((zero, zero),)
        top = float("-inf")
        total = 0.0
        for j in gl.static_range(S):
            slot = (first_slot + j) % SLOTS
            async_copy.wait_group(SLOTS - 1)
            row = load_row(ring, slot, LAYOUT)
            copy_row(
                ring, slot, sources[(j + SLOTS) % S], i + (j + SLOTS) // S, count, D, P, LAYOUT
            )
            square, dot = gl.reduce(square_and_dot(row, query), 0, add_2)
            rstd = gl.rsqrt(square / D + eps)
            score = dot * rstd
            if IS_KEPT:
                gl.store(stats + t.to(gl.int64) * (2 * S) + j, rstd)
                gl.store(stats + t.to(gl.int64) * (2 * S) + (S + j), score)
            new_top = gl.maximum(top, score)
            scale = gl.exp(top - new_top)
            total *= scale
            weight = gl.exp(score - new_top)
            total += weight
            before = mixed
            mixed = ()
            for c in gl.static_range(len(ring)):
                m_even, m_odd = before[c]
                m_even = m_even * scale + weight * even(row[c])
                m_odd = m_odd * scale + weight * odd(row[c])
                mixed += ((m_even, m_odd),)
            top = new_top
        inverse = 1.0 / total
        for c in gl.static_range(len(ring)):
            m_even, m_odd = mixed[c]
            store_part(out, t, c, rounded(m_even * inverse, m_odd * inverse), D, P, LAYOUT)
        first_slot = (first_slot + S) % SLOTS


@gluon.jit
def load_stats(stats, i, count, S: gl.constexpr):
    """1/rms and scores of this program's `i`th token."""
    found: gl.tuple = ()
    for j in gl.static_range(2 * S):
        place = stats + token_of(i).to(gl.int64) * (2 * S) + j
        found += (gl.load(place, mask=i < count, other=0.0),)
    return found


@gluon.jit
def dot_in_thread(d_mixed, ring, slot, LAYOUT: gl.constexpr):
    """A thread's part of dout . v."""
    row = load_row(ring, slot, LAYOUT)
    dot = even(d_mixed[0]) * even(row[0]) + odd(d_mixed[0]) * odd(row[0])
    for c in gl.static_range(1, len(ring)):
        dot += even(d_mixed[c]) * even(row[c]) + odd(d_mixed[c]) * odd(row[c])
    return dot


@gluon.jit
def dots_of(
    d_mixed, ring, slot, j: gl.constexpr, NUMBER: gl.constexpr, SLOTS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """dout . v of `NUMBER` sources from the `j`th on, up to 3; the first is in `slot`."""
    async_copy.wait_group(SLOTS - j - NUMBER)
    parts: gl.tuple = ()
    for n in gl.static_range(NUMBER):
        parts += (dot_in_thread(d_mixed, ring, (slot + j + n) % SLOTS, LAYOUT),)
    if NUMBER == 3:
        dots = gl.reduce(parts, 0, add_3)
    elif NUMBER == 2:
        dots = gl.reduce(parts, 0, add_2)
    else:
        dots = (gl.sum(parts[0], 0),)
    return dots


@gluon.jit(do_not_specialize=["num_tokens"])
def ring_backward_kernel(
    sources, d_sources, norm_weight, proj_weight, d_out, stats, d_query_parts, num_tokens,
    S: gl.constexpr, D: gl.constexpr, P: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Gradients of the sources, and this program's part of the query's."""
    ROWS: gl.constexpr = S + 1  # of a token: that of the output's gradient comes first
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([P // (32 * WARPS)], [32], [WARPS], [0])
    rows: gl.tuple = (d_out,)
    rows += sources
    ring = ring_of(D, P, SLOTS)
    query = load_query(norm_weight, proj_weight, D, P, LAYOUT)
    count = count_of(num_tokens)
    for n in gl.static_range(SLOTS):
        copy_row(ring, n, rows[n % ROWS], n // ROWS, count, D, P, LAYOUT)
    d_query: gl.tuple = ()
    for _ in gl.static_range(len(ring)):
        zero = gl.zeros([P], gl.float32, layout=LAYOUT)
        d_query += ((zero, zero),)
    following = load_stats(stats, 0, count, S)
    first_slot = 0
    for i in range(count):
        t = token_of(i)
        stat = following
        following = load_stats(stats, i + 1, count, S)
        top = stat[S]
        for j in gl.static_range(1, S):
            top = gl.maximum(top, stat[S + j])
        total = 0.0
        weights: gl.tuple = ()
        for j in gl.static_range(S):
            weight = gl.exp(stat[S + j] - top)
            total += weight
            weights += (weight,)
        inverse = 1.0 / total
        async_copy.wait_group(SLOTS - 1)
        d_mixed = load_row(ring, first_slot, LAYOUT)
        copy_row(ring, first_slot, rows[SLOTS % ROWS], i + SLOTS // ROWS, count, D, P, LAYOUT)
        dots: gl.tuple = ()
        for j in gl.static_range(0, S, GROUP):
            dots += dots_of(
                d_mixed, ring, first_slot + 1, j, GROUP if j + GROUP <= S else S - j, SLOTS, LAYOUT
            )
        mean = 0.0
        for j in gl.static_range(S):
            mean += weights[j] * inverse * dots[j]
        for j in gl.static_range(S):
            slot = (first_slot + 1 + j) % SLOTS
            prob = weights[j] * inverse
            along_query = prob * (dots[j] - mean) * stat[j]
            along_value = -along_query * stat[j] * stat[S + j] / D
            before = d_query
            d_query = ()
            for c in gl.static_range(len(ring)):
                pairs = ring[c].index(slot).load(LAYOUT)
                v_even, v_odd = even(pairs), odd(pairs)
                q_even, q_odd = query[c]
                dq_even, dq_odd = before[c]
                d_query += ((dq_even + along_query * v_even, dq_odd + along_query * v_odd),)
                d_value = rounded(
                    prob * even(d_mixed[c]) + along_query * q_even + along_value * v_even,
                    prob * odd(d_mixed[c]) + along_query * q_odd + along_value * v_odd,
                )
                store_part(d_sources[j], t, c, d_value, D, P, LAYOUT)
            copy_row(
                ring, slot, rows[(1 + j + SLOTS) % ROWS], i + (1 + j + SLOTS) // ROWS, count, D, P,
                LAYOUT,
            )  # fmt: skip
        first_slot = (first_slot + ROWS) % SLOTS
    for c in gl.static_range(len(ring)):
        columns = columns_of(c, P, LAYOUT)
        part = d_query_parts + gl.program_id(0) * D + 2 * columns
        dq_even, dq_odd = d_query[c]
        gl.store(part, dq_even, mask=columns < D // 2)
        gl.store(part + 1, dq_odd, mask=columns < D // 2)
