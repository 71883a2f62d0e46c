"""Few heads: a sequence's scan in segments side by side, joined by exact transitions.

A run of chunks takes a state S to P S + E: P [K, K] is the product of its chunks' transitions, E
its end from zero. Both come from the scan without outputs, on values beside start 0 and on no
values beside start I (the columns of P). The fold, in order, makes E what truly leaves each
segment, and the second pass scans all segments from there. The reverse scan does the same with P'.
No step is left out, and no decay is counted on.

A segment has `length` chunks, a sequence's last one what is left. Where they lie follows from the
table of chunks: sequence n has the slots from offsets[n] // length + n on, one at least; no two
sequences share a slot, and some slots are empty.
"""

import triton
import triton.language as tl

from .tiles import CHUNK

SEQUENCES = tl.constexpr(64)  # most that a cut scan serves


@triton.jit
def segment_at(slot, n, offsets, num_sequences, length):
    """Of the segment in a slot: its sequence (-1: none), its place there, the segments there.

    `n` counts to `SEQUENCES`; Gluon, which calls this too, wants a layout for that.
    """
    has = n < num_sequences
    first = tl.load(offsets + n, mask=has, other=0)
    count = tl.load(offsets + n + 1, mask=has, other=0) - first
    base = first // length + n
    segments = tl.maximum((count + length - 1) // length, 1)
    is_here = has & (base <= slot) & (slot < base + segments)
    sequence = tl.sum(tl.where(is_here, n + 1, 0), 0) - 1
    place = slot - tl.sum(tl.where(is_here, base, 0), 0)
    return sequence, place, tl.sum(tl.where(is_here, segments, 0), 0)


@triton.jit
def run_of_chunks(
    slot, numbers, offsets, cu_seqlens, num_sequences, length, IS_CUT: tl.constexpr
):  # fmt: skip
    """Sequence (-1: none), first chunk, chunks, first token, the sequence's end, place, segments.

    Of the segment in a slot; if nothing is cut, slot n is sequence n. `numbers` count to
    `SEQUENCES`.
    """
    n = slot
    place = 0
    segments = 1
    if IS_CUT:
        n, place, segments = segment_at(slot, numbers, offsets, num_sequences, length)
    here = tl.maximum(n, 0)
    first = tl.load(offsets + here)
    count = tl.load(offsets + here + 1) - first
    start = tl.load(cu_seqlens + here).to(tl.int64)
    if IS_CUT:
        first += place * length
        start += place * length * CHUNK
        count = tl.minimum(count - place * length, length)
    end = tl.load(cu_seqlens + here + 1)
    return n.to(tl.int64), first.to(tl.int64), count, start, end, place, segments


@triton.jit(do_not_specialize=["num_heads", "num_sequences", "length"])
def segment_ends_kernel(
    kp, kc, ainv, gamma, chunk_beta, v, initial_state, offsets, cu_seqlens, ends, transitions,
    num_heads, num_sequences, length,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, HAS_INITIAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (H * (V + K) / BV, slots): E, and P' where a segment has others on both sides.

    `ends` [slots, H, V, K] fp32, that of a sequence's first segment from its initial state;
    `transitions` [slots, H, K, K] fp32.
    """
    h = tl.program_id(0) // ((V + K) // BV)
    column = tl.program_id(0) % ((V + K) // BV) * BV
    slot = tl.program_id(1)
    n, first, count, start, _end, place, segments = run_of_chunks(
        slot, tl.arange(0, SEQUENCES), offsets, cu_seqlens, num_sequences, length, True
    )
    if (n < 0) | (place == segments - 1) | ((place == 0) & (column >= V)):
        return
    columns = column + tl.arange(0, BV)
    rows = tl.arange(0, CHUNK)
    cols = tl.arange(0, CHUNK)
    channels = tl.arange(0, K)
    low = kp.dtype.element_ty
    tile = rows[:, None] * K + channels[None, :]
    tile_t = rows[None, :] * K + channels[:, None]
    square = rows[:, None] * CHUNK + cols[None, :]
    is_value = (columns < V)[None, :] & (rows >= 0)[:, None]
    S = tl.where((columns - V)[None, :] == channels[:, None], 1.0, 0.0)
    if HAS_INITIAL and place == 0:
        boundary = (n * num_heads + h) * K * V
        S = tl.load(initial_state + boundary + channels[:, None] * V + columns[None, :])
    for i in tl.range(0, count, num_stages=1):
        chunk = (first + i) * num_heads + h
        tokens = (start + i * CHUNK + rows)[:, None] * num_heads + h
        v_CV = tl.load(v + tokens * V + columns[None, :], mask=is_value, other=0.0)
        kp_CK = tl.load(kp + chunk * CHUNK * K + tile)
        ainv_CC = tl.load(ainv + chunk * CHUNK * CHUNK + square)
        kc_KC = tl.load(kc + chunk * CHUNK * K + tile_t)
        beta_C = tl.load(chunk_beta + chunk * CHUNK + rows)
        gamma_K = tl.load(gamma + chunk * K + channels)
        written = v_CV.to(tl.float32) - tl.dot(kp_CK, S.to(low), input_precision=PRECISION)
        written *= beta_C[:, None]
        written += tl.dot(ainv_CC, written.to(low), input_precision=PRECISION)
        S = tl.dot(kc_KC, written.to(low), S * gamma_K[:, None], input_precision=PRECISION)
    segment = slot.to(tl.int64) * num_heads + h
    if column < V:
        tl.store(ends + segment * (V * K) + columns[None, :] * K + channels[:, None], S)
    else:
        here = transitions + segment * (K * K)
        tl.store(here + (columns - V)[None, :] * K + channels[:, None], S)


@triton.jit(do_not_specialize=["num_heads", "length"])
def fold_kernel(
    ends, transitions, offsets, num_heads, length,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, IS_REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (H * V / BV, N). Adds to each segment's end what came through it from those before."""
    h = tl.program_id(0) // (V // BV)
    n = tl.program_id(1)
    columns = tl.program_id(0) % (V // BV) * BV + tl.arange(0, BV)
    channels = tl.arange(0, K)
    others = tl.arange(0, K)
    first = tl.load(offsets + n)
    segments = (tl.load(offsets + n + 1) - first + length - 1) // length
    slot = (first // length + n).to(tl.int64)
    step = 1
    if IS_REVERSE:
        slot += tl.maximum(segments - 1, 0)
        step = -1
    state = columns[:, None] * K + channels[None, :]
    square = others[:, None] * K + channels[None, :]
    S = tl.load(ends + (slot * num_heads + h) * (V * K) + state)
    for _ in tl.range(1, segments - 1):
        slot += step
        segment = slot * num_heads + h
        P = tl.load(transitions + segment * (K * K) + square)
        if IS_REVERSE:
            P = tl.trans(P)
        S = tl.dot(S, P, tl.load(ends + segment * (V * K) + state), input_precision=PRECISION)
        tl.store(ends + segment * (V * K) + state, S)
