"""Second and third kernel: the state scan over a sequence's chunks, and its mirror in reverse.

    forward   X = v - kp S      v_new = beta X + Ainv_below (beta X)     o = qp S + Aqk v_new
              S <- gamma S + kc' v_new
    reverse   y = Aqk' do + kc dS      dv = beta (y + Ainv_below' y)
              dS <- gamma dS + qp' do - kp' dv

A program owns one sequence, one head and BV value columns; the state stays in fp32 registers. With
few heads it owns one segment of a sequence (`segments.py`).
"""

import triton
import triton.language as tl

from .segments import SEQUENCES, run_of_chunks
from .tiles import CHUNK


@triton.jit(do_not_specialize=["num_heads", "num_sequences", "length"])
def forward_scan_kernel(
    kp, kc, qp, ainv, aqk, gamma, chunk_beta, v, initial_state, offsets, cu_seqlens,
    o, v_new, states, final_state, ends, num_heads, num_sequences, length,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, HAS_INITIAL: tl.constexpr,
    IS_KEPT: tl.constexpr, IS_CUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (H * V / BV, N). `states` [M, H, K, V] receives the state entering each chunk.

    Cut into segments of `length` chunks: grid (H * V / BV, slots).
    """
    h = tl.program_id(0) // (V // BV)
    columns = tl.program_id(0) % (V // BV) * BV + tl.arange(0, BV)
    rows = tl.arange(0, CHUNK)
    cols = tl.arange(0, CHUNK)
    channels = tl.arange(0, K)
    low = kp.dtype.element_ty
    n, first, count, start, end, place, segments = run_of_chunks(
        tl.program_id(1), tl.arange(0, SEQUENCES), offsets, cu_seqlens, num_sequences, length,
        IS_CUT,
    )  # fmt: skip
    if IS_CUT and n < 0:
        return

    tile = rows[:, None] * K + channels[None, :]
    tile_t = rows[None, :] * K + channels[:, None]
    square = rows[:, None] * CHUNK + cols[None, :]
    state = channels[:, None] * V + columns[None, :]
    values = rows[:, None] * V + columns[None, :]
    tokens = rows[:, None] * (num_heads * V) + columns[None, :]
    boundary = (n * num_heads + h) * K * V
    S = tl.zeros([K, BV], tl.float32)
    if HAS_INITIAL and place == 0:
        S = tl.load(initial_state + boundary + state)
    end_state = columns[None, :] * K + channels[:, None]
    if IS_CUT and place > 0:
        before = (tl.program_id(1) - 1).to(tl.int64) * num_heads + h
        S = tl.load(ends + before * (V * K) + end_state)
    for i in tl.range(0, count, num_stages=1):
        chunk = (first + i) * num_heads + h
        token = start + i * CHUNK
        is_valid = (rows < end - token)[:, None] & (columns >= 0)[None, :]
        here = (token * num_heads + h) * V + tokens
        kp_CK = tl.load(kp + chunk * CHUNK * K + tile)
        v_CV = tl.load(v + here, mask=is_valid, other=0.0)
        ainv_CC = tl.load(ainv + chunk * CHUNK * CHUNK + square)
        kc_KC = tl.load(kc + chunk * CHUNK * K + tile_t)
        qp_CK = tl.load(qp + chunk * CHUNK * K + tile)
        aqk_CC = tl.load(aqk + chunk * CHUNK * CHUNK + square)
        beta_C = tl.load(chunk_beta + chunk * CHUNK + rows)
        gamma_K = tl.load(gamma + chunk * K + channels)
        S_low = S.to(low)
        if IS_KEPT:
            tl.store(states + chunk * K * V + state, S_low)
        written = v_CV.to(tl.float32) - tl.dot(kp_CK, S_low, input_precision=PRECISION)
        written *= beta_C[:, None]
        written += tl.dot(ainv_CC, written.to(low), input_precision=PRECISION)
        written_low = written.to(low)
        if IS_KEPT:
            tl.store(v_new + chunk * CHUNK * V + values, written_low)
        o_CV = tl.dot(qp_CK, S_low, input_precision=PRECISION)
        o_CV = tl.dot(aqk_CC, written_low, o_CV, input_precision=PRECISION)
        tl.store(o + here, o_CV.to(o.dtype.element_ty), mask=is_valid)
        S = tl.dot(kc_KC, written_low, S * gamma_K[:, None], input_precision=PRECISION)
    if place == segments - 1:
        tl.store(final_state + boundary + state, S)


@triton.jit(do_not_specialize=["num_heads", "num_sequences", "length"])
def reverse_scan_kernel(
    kp, kc, qp, ainv, aqk, gamma, chunk_beta, do, d_final_state, offsets, cu_seqlens,
    dv, d_states, d_initial_state, ends, num_heads, num_sequences, length,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, HAS_FINAL: tl.constexpr,
    PASS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (H * V / BV, N). `d_states` [M, H, K, V]: gradient of each chunk's last state.

    Cut into segments, grid (H * V / BV, slots): pass 1 gives what leaves each segment at its start
    to `ends` [slots, H, V, K] fp32, from zero or the sequence's own; pass 2 the outputs.
    """
    h = tl.program_id(0) // (V // BV)
    columns = tl.program_id(0) % (V // BV) * BV + tl.arange(0, BV)
    rows = tl.arange(0, CHUNK)
    cols = tl.arange(0, CHUNK)
    channels = tl.arange(0, K)
    low = kp.dtype.element_ty
    n, first, count, start, end, place, segments = run_of_chunks(
        tl.program_id(1), tl.arange(0, SEQUENCES), offsets, cu_seqlens, num_sequences, length,
        PASS > 0,
    )  # fmt: skip
    if PASS > 0 and (n < 0) | ((PASS == 1) & (place == 0)):
        return

    tile = rows[:, None] * K + channels[None, :]
    tile_t = rows[None, :] * K + channels[:, None]
    square_t = rows[None, :] * CHUNK + cols[:, None]
    state = channels[:, None] * V + columns[None, :]
    tokens = rows[:, None] * (num_heads * V) + columns[None, :]
    boundary = (n * num_heads + h) * K * V
    dS = tl.zeros([K, BV], tl.float32)
    if HAS_FINAL and place == segments - 1:
        dS = tl.load(d_final_state + boundary + state)
    end_state = columns[None, :] * K + channels[:, None]
    if PASS == 2 and place < segments - 1:
        after = (tl.program_id(1) + 1).to(tl.int64) * num_heads + h
        dS = tl.load(ends + after * (V * K) + end_state)
    for back in tl.range(0, count, num_stages=1):
        i = count - 1 - back
        chunk = (first + i) * num_heads + h
        token = start + i * CHUNK
        is_valid = (rows < end - token)[:, None] & (columns >= 0)[None, :]
        here = (token * num_heads + h) * V + tokens
        kc_CK = tl.load(kc + chunk * CHUNK * K + tile)
        do_CV = tl.load(do + here, mask=is_valid, other=0.0).to(low)
        aqk_t = tl.load(aqk + chunk * CHUNK * CHUNK + square_t)
        ainv_t = tl.load(ainv + chunk * CHUNK * CHUNK + square_t)
        kp_KC = tl.load(kp + chunk * CHUNK * K + tile_t)
        qp_KC = tl.load(qp + chunk * CHUNK * K + tile_t)
        beta_C = tl.load(chunk_beta + chunk * CHUNK + rows)
        gamma_K = tl.load(gamma + chunk * K + channels)
        dS_low = dS.to(low)
        if PASS != 1:
            tl.store(d_states + chunk * K * V + state, dS_low)
        y = tl.dot(aqk_t, do_CV, input_precision=PRECISION)
        y = tl.dot(kc_CK, dS_low, y, input_precision=PRECISION)
        y += tl.dot(ainv_t, y.to(low), input_precision=PRECISION)
        dv_CV = y * beta_C[:, None]
        if PASS != 1:
            tl.store(dv + here, dv_CV.to(dv.dtype.element_ty), mask=is_valid)
        dS = tl.dot(qp_KC, do_CV, dS * gamma_K[:, None], input_precision=PRECISION)
        dS = tl.dot(kp_KC, (-dv_CV).to(low), dS, input_precision=PRECISION)
    if PASS == 1:
        segment = tl.program_id(1).to(tl.int64) * num_heads + h
        tl.store(ends + segment * (V * K) + end_state, dS)
    elif place == 0:
        tl.store(d_initial_state + boundary + state, dS)
