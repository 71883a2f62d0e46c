"""Fourth and fifth kernel: gradients of q, k, g and beta, parallel over chunks and heads.

    dAqk = low1(do v_new')    dAkk = -low1(dv v_new')    dbeta = <dv, v_new> / beta^2
    rq = 2^G (do S_in')    rk = -2^G (dv S_in')    wk = 2^(G_end - G) (v_new dS_out')

The fourth kernel has the products of rows, the fifth takes strips of channels: the reads and writes
of states, and the pairs, level by level with the factors of `tiles`. The gradient of g at row r is
the sum over all pairs (write j, read i) with j < r <= i. At its level a pair belongs to the steps
up to i in the second block and to those after j in the first, so nothing is subtracted, and a step
of -200, which no pair survives, gets 0.

With `NORMALIZE`, <q, dq> = <o, do> and <k, dk> = 2 <dv, v_new> / beta - <v, dv> give the row
products of the L2 norm's backward, which a strip of channels cannot see.
"""

import triton
import triton.language as tl

from .tiles import (
    CHUNK,
    LEVELS,
    is_second,
    joins,
    level_steps,
    lifted,
    load_log2_gate,
    softplus,
    sum_where,
)


@triton.jit
def row_gradients_kernel(
    v, o, do, dv, v_new, chunk_beta, table,
    dbeta, pairs, products, num_heads,
    V: tl.constexpr, BV: tl.constexpr, FROM_LOGITS: tl.constexpr, NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one head in strips of BV value columns; grid (H, M).

    `pairs` [M, H, 2, C, C] receives dAqk and dAkk, mirrored at the diagonal; `products`
    [M, H, 3, C] <do, v_new>, and <q, dq> and <k, dk> with `NORMALIZE`.
    """
    h = tl.program_id(0)
    m = tl.program_id(1)
    if tl.load(table + m * 3) < 0:
        return
    start = tl.load(table + m * 3 + 1).to(tl.int64)
    length = tl.load(table + m * 3 + 2)
    chunk = m.to(tl.int64) * num_heads + h
    rows = tl.arange(0, CHUNK)
    cols = tl.arange(0, CHUNK)
    low = v_new.dtype.element_ty
    is_row = rows < length
    dA_q = tl.zeros([CHUNK, CHUNK], tl.float32)
    dA_k = tl.zeros([CHUNK, CHUNK], tl.float32)
    read_q = tl.zeros([CHUNK], tl.float32)
    read_k = tl.zeros([CHUNK], tl.float32)
    for strip in tl.range(0, V // BV, num_stages=1):
        columns = strip * BV + tl.arange(0, BV)
        value = (start * num_heads + h) * V + rows[:, None] * (num_heads * V) + columns[None, :]
        is_value = is_row[:, None] & (columns >= 0)[None, :]
        do_CV = tl.load(do + value, mask=is_value, other=0.0).to(low)
        dv_CV = tl.load(dv + value, mask=is_value, other=0.0).to(low)
        v_new_CV = tl.load(v_new + chunk * CHUNK * V + rows[:, None] * V + columns[None, :])
        if NORMALIZE:
            o_CV = tl.load(o + value, mask=is_value, other=0.0).to(tl.float32)
            read_q += tl.sum(o_CV * do_CV.to(tl.float32), 1)
            v_CV = tl.load(v + value, mask=is_value, other=0.0).to(tl.float32)
            read_k -= tl.sum(v_CV * dv_CV.to(tl.float32), 1)
        dA_q = tl.dot(do_CV, tl.trans(v_new_CV), dA_q, input_precision=PRECISION)
        dA_k = tl.dot(dv_CV, tl.trans(v_new_CV), dA_k, input_precision=PRECISION)

    beta_C = tl.load(chunk_beta + chunk * CHUNK + rows)
    inverse_beta = 1.0 / tl.where(is_row, beta_C, 1.0)
    is_same = rows[:, None] == cols[None, :]
    write_C = tl.sum(tl.where(is_same, dA_k, 0.0), 1) * inverse_beta
    product = products + chunk * 3 * CHUNK + rows
    tl.store(product, tl.sum(tl.where(is_same, dA_q, 0.0), 1))
    if NORMALIZE:
        tl.store(product + CHUNK, read_q)
        tl.store(product + 2 * CHUNK, read_k + 2.0 * write_C)
    is_below = rows[:, None] > cols[None, :]
    pair = pairs + chunk * 2 * CHUNK * CHUNK + rows[:, None] * CHUNK + cols[None, :]
    tl.store(pair, tl.where(is_below, dA_q, tl.trans(dA_q)).to(low))
    tl.store(pair + CHUNK * CHUNK, tl.where(is_below, -dA_k, -tl.trans(dA_k)).to(low))
    dbeta_C = write_C * inverse_beta
    if FROM_LOGITS:
        dbeta_C *= beta_C * (1.0 - beta_C)
    out = dbeta + (start + rows) * num_heads + h
    tl.store(out, dbeta_C.to(dbeta.dtype.element_ty), mask=is_row)


@triton.jit
def gradients_kernel(
    q, k, g, do, dv, v_new, states, d_states, gamma, norms, pairs, products, a_log, dt_bias, table,
    dq, dk, dg, d_bias_parts, d_rate_parts,
    scale, lower_bound, num_heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FROM_LOGITS: tl.constexpr, IS_BOUNDED: tl.constexpr, NORMALIZE: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One strip of BK channels of one chunk of one head; grid (H * K / BK, M).

    `IS_TRANSPOSED`: the states are [V, K]. `PARTS`: bf16 parts of what is summed for dg.
    """
    h = tl.program_id(0) // (K // BK)
    m = tl.program_id(1)
    strip = tl.program_id(0) % (K // BK)
    channels = strip * BK + tl.arange(0, BK)
    chunk = m.to(tl.int64) * num_heads + h
    if tl.load(table + m * 3) < 0:
        if FROM_LOGITS:
            zero = tl.zeros([BK], tl.float32)
            tl.store(d_bias_parts + chunk * K + channels, zero)
            tl.store(d_rate_parts + chunk * K + channels, zero)
        return
    start = tl.load(table + m * 3 + 1).to(tl.int64)
    length = tl.load(table + m * 3 + 2)
    rows = tl.arange(0, CHUNK)
    cols = tl.arange(0, CHUNK)
    low = v_new.dtype.element_ty
    is_row = rows < length

    through = tl.zeros([BK], tl.float32)
    dq_CK = tl.zeros([CHUNK, BK], tl.float32)
    dk_CK = tl.zeros([CHUNK, BK], tl.float32)
    wk_CK = tl.zeros([CHUNK, BK], tl.float32)
    for part in tl.range(0, V // BV, num_stages=1):
        columns = part * BV + tl.arange(0, BV)
        value = (start * num_heads + h) * V + rows[:, None] * (num_heads * V) + columns[None, :]
        is_value = is_row[:, None] & (columns >= 0)[None, :]
        do_CV = tl.load(do + value, mask=is_value, other=0.0).to(low)
        dv_CV = tl.load(dv + value, mask=is_value, other=0.0).to(low)
        v_new_CV = tl.load(v_new + chunk * CHUNK * V + rows[:, None] * V + columns[None, :])
        state = channels[:, None] * V + columns[None, :]
        if IS_TRANSPOSED:
            state = channels[:, None] + columns[None, :] * K
        S_KV = tl.load(states + chunk * K * V + state)
        dS_KV = tl.load(d_states + chunk * K * V + state)
        through += tl.sum(S_KV.to(tl.float32) * dS_KV.to(tl.float32), 1)
        dq_CK = tl.dot(do_CV, tl.trans(S_KV), dq_CK, input_precision=PRECISION)
        dk_CK = tl.dot(dv_CV, tl.trans(S_KV), dk_CK, input_precision=PRECISION)
        wk_CK = tl.dot(v_new_CV, tl.trans(dS_KV), wk_CK, input_precision=PRECISION)
    through *= tl.load(gamma + chunk * K + channels)

    head = start * num_heads * K + h * K
    offsets = rows[:, None] * (num_heads * K) + channels[None, :]
    is_valid = is_row[:, None] & (channels >= 0)[None, :]
    bias = 0.0
    rate = 1.0
    if FROM_LOGITS:
        bias = tl.load(dt_bias + h * K + channels)[None, :]
        rate = tl.exp(tl.load(a_log + h))
    gate = load_log2_gate(
        g + head, offsets, is_valid, bias, rate, lower_bound, FROM_LOGITS, IS_BOUNDED
    )
    q_CK = tl.load(q + head + offsets, mask=is_valid, other=0.0).to(tl.float32)
    k_CK = tl.load(k + head + offsets, mask=is_valid, other=0.0).to(tl.float32)
    if NORMALIZE:
        q_norm = tl.load(norms + chunk * 2 * CHUNK + rows)
        k_norm = tl.load(norms + chunk * 2 * CHUNK + CHUNK + rows)
        q_CK *= q_norm[:, None]
        k_CK *= k_norm[:, None]
    q_CK *= scale

    # second rows of a level take dAqk from the keys of first ones, first rows from their queries
    pair = pairs + chunk * 2 * CHUNK * CHUNK + rows[:, None] * CHUNK + cols[None, :]
    own_C = tl.load(products + chunk * 3 * CHUNK + rows)
    pair_q = own_C[:, None] * k_CK
    pair_k = own_C[:, None] * q_CK
    dg_CK = tl.zeros([CHUNK, BK], tl.float32)
    since = gate
    until = tl.zeros_like(gate)
    for level in tl.range(0, LEVELS, num_stages=1):
        second = is_second(rows, level)
        factor = tl.exp2(tl.where(second, since, until))
        is_pair = joins(rows, cols, level)
        other_CK = tl.where(second, q_CK, k_CK)
        dA = tl.load(pair, mask=is_pair, other=0.0)
        t = tl.dot(dA, (other_CK * factor).to(low), input_precision=PRECISION) * factor
        dA = tl.load(pair + CHUNK * CHUNK, mask=is_pair, other=0.0)
        tk = tl.dot(dA, (k_CK * factor).to(low), input_precision=PRECISION) * factor
        dg_CK += level_steps(other_CK * t + k_CK * tk, rows, cols, level, PARTS)
        pair_q += tl.where(second, t, 0.0)
        pair_k += tl.where(second, 0.0, t) + tk
        since, until = lifted(since, until, rows, level)

    decay = tl.exp2(since)
    dq_CK *= decay
    dk_CK *= -decay
    wk_CK *= tl.exp2(until)
    dg_CK += sum_where(cols[None, :] >= rows[:, None], q_CK * dq_CK + k_CK * dk_CK, PARTS)
    dg_CK += sum_where(cols[None, :] < rows[:, None], k_CK * wk_CK, PARTS) + through[None, :]
    dq_CK += pair_q
    dk_CK += pair_k + wk_CK
    if FROM_LOGITS:
        y = tl.load(g + head + offsets, mask=is_valid, other=0.0).to(tl.float32) + bias
        if IS_BOUNDED:
            dg_CK *= lower_bound * rate * tl.sigmoid(rate * y) * tl.sigmoid(-rate * y)
            d_rate = dg_CK * y
        else:
            d_rate = dg_CK * softplus(y) * -rate
            dg_CK *= tl.sigmoid(y) * -rate
        dg_CK = tl.where(is_valid, dg_CK, 0.0)
        tl.store(d_bias_parts + chunk * K + channels, tl.sum(dg_CK, 0))
        tl.store(d_rate_parts + chunk * K + channels, tl.sum(tl.where(is_valid, d_rate, 0.0), 0))
    tl.store(dg + head + offsets, dg_CK.to(dg.dtype.element_ty), mask=is_valid)
    if NORMALIZE:
        read_q = tl.load(products + chunk * 3 * CHUNK + CHUNK + rows)
        read_k = tl.load(products + chunk * 3 * CHUNK + 2 * CHUNK + rows)
        dq_CK = q_norm[:, None] * (scale * dq_CK - q_CK * (read_q / scale)[:, None])
        dk_CK = k_norm[:, None] * (dk_CK - k_CK * read_k[:, None])
    tl.store(dq + head + offsets, dq_CK.to(dq.dtype.element_ty), mask=is_valid)
    tl.store(dk + head + offsets, dk_CK.to(dk.dtype.element_ty), mask=is_valid)
