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
    HALF,
    LEVELS,
    LOG2E,
    is_second,
    joins,
    level_steps,
    lifted,
    load_log2_gate,
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
def half_gradients(q, k, gate, pair, own, rows, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """Pairs inside one half: gradients of q, k and the steps; the steps since it began, until it
    ends. All [R, BK].
    """
    square = rows[:, None] * CHUNK + rows[None, :]
    dA_q = tl.load(pair + square)
    dA_k = tl.load(pair + CHUNK * CHUNK + square)
    low = dA_q.dtype
    dq = own[:, None] * k
    dk = own[:, None] * q
    dg = tl.zeros_like(gate)
    since = gate
    until = tl.zeros_like(gate)
    for level in tl.range(0, LEVELS, num_stages=1):
        second = is_second(rows, level)
        factor = tl.exp2(tl.where(second, since, until))
        is_pair = joins(rows, level)
        # second rows take dAqk from the keys of first ones, first rows from the queries of second
        other = tl.where(second, q, k)
        dA = tl.where(is_pair, dA_q, 0.0)
        t = tl.dot(dA, (other * factor).to(low), input_precision=PRECISION) * factor
        dA = tl.where(is_pair, dA_k, 0.0)
        tk = tl.dot(dA, (k * factor).to(low), input_precision=PRECISION) * factor
        dg += level_steps(other * t + k * tk, rows, level, PARTS)
        dq += tl.where(second, t, 0.0)
        dk += tl.where(second, 0.0, t) + tk
        since, until = lifted(since, until, rows, level)
    return dq, dk, dg, since, until


@triton.jit
def crossing_sum(reads, writes, rows, PARTS: tl.constexpr):
    """Gradient of the steps: what is read at a row or after it, and written before it."""
    dg = sum_where(rows[None, :] >= rows[:, None], reads, PARTS)
    return dg + sum_where(rows[None, :] < rows[:, None], writes, PARTS)


@triton.jit
def logit_gradients(
    dg, log2_gate, logits, is_valid, bias, rate, lower_bound, FROM_LOGITS: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
):  # fmt: skip
    """Gradients of the logits, and of the logarithm of the rate token by token."""
    d_rate = dg
    if FROM_LOGITS:
        y = tl.load(logits, mask=is_valid, other=0.0).to(tl.float32) + bias
        if IS_BOUNDED:
            dg *= lower_bound * rate * tl.sigmoid(rate * y) * tl.sigmoid(-rate * y)
            d_rate = dg * y
        else:
            d_rate = dg * log2_gate / LOG2E
            dg *= tl.sigmoid(y) * -rate
    return tl.where(is_valid, dg, 0.0), tl.where(is_valid, d_rate, 0.0)


@triton.jit
def through_norm(dx, x, norm, read, scale):
    """Gradient of raw rows from that of x = scale * norm * rows, and the row products of both."""
    return norm[:, None] * (scale * dx - x * (read / scale)[:, None])


@triton.jit
def row_norms(norms, rows, NORMALIZE: tl.constexpr):
    if NORMALIZE:
        return tl.load(norms + rows)
    return tl.full([HALF], 1.0, tl.float32)


@triton.jit
def half_inputs(
    q, k, g, norm, place, is_valid, rows, bias, rate, lower_bound, scale,
    FROM_LOGITS: tl.constexpr, IS_BOUNDED: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Of the half at `place`: its steps, inverse norms of q and k, both at their final length."""
    gate = load_log2_gate(g, place, is_valid, bias, rate, lower_bound, FROM_LOGITS, IS_BOUNDED)
    q_norm = row_norms(norm, rows, NORMALIZE)
    k_norm = row_norms(norm + CHUNK, rows, NORMALIZE)
    q = tl.load(q + place, mask=is_valid, other=0.0).to(tl.float32) * (q_norm * scale)[:, None]
    k = tl.load(k + place, mask=is_valid, other=0.0).to(tl.float32) * k_norm[:, None]
    return gate, q_norm, k_norm, q, k


@triton.jit
def far_gradients(pair, k_lo, q_hi, k_hi, far, since, rows, PRECISION: tl.constexpr):
    """Pairs of a row in the second half and one in the first: of its q and k, and of the first's k.

    `far` and `since`: what decays until the first half's end, and from there.
    """
    low = pair.dtype.element_ty
    square = rows[:, None] * CHUNK + rows[None, :]
    below = pair + HALF * CHUNK + square
    above = pair + HALF + square
    x = (k_lo * far).to(low)
    read_q = tl.dot(tl.load(below), x, input_precision=PRECISION) * since
    read_k = tl.dot(tl.load(below + CHUNK * CHUNK), x, input_precision=PRECISION) * since
    x = (q_hi * since).to(low)
    write = tl.dot(tl.load(above), x, input_precision=PRECISION)
    x = (k_hi * since).to(low)
    write = tl.dot(tl.load(above + CHUNK * CHUNK), x, write, input_precision=PRECISION) * far
    return read_q, read_k, write


@triton.jit
def state_gradients(
    do, dv, v_new, states, d_states, channels, rows, is_lo, is_hi, num_heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Reads of the incoming state by q and k, writes that reach the outgoing one, of either half.

    First of all the sum of products of both states, [BK].
    """
    low = v_new.dtype.element_ty
    through = tl.zeros([BK], tl.float32)
    rq_lo = tl.zeros([HALF, BK], tl.float32)
    rk_lo = rq_lo
    wk_lo = rq_lo
    rq_hi = rq_lo
    rk_hi = rq_lo
    wk_hi = rq_lo
    for part in tl.range(0, V // BV, num_stages=1):
        columns = part * BV + tl.arange(0, BV)
        state = columns[:, None] * (1 if not IS_TRANSPOSED else K)
        state += channels[None, :] * (V if not IS_TRANSPOSED else 1)
        S_VK = tl.load(states + state)
        dS_VK = tl.load(d_states + state)
        through += tl.sum(S_VK.to(tl.float32) * dS_VK.to(tl.float32), 0)
        value = rows[:, None] * (num_heads * V) + columns[None, :]
        next_value = value + HALF * num_heads * V
        has_lo = is_lo[:, None] & (columns >= 0)[None, :]
        has_hi = is_hi[:, None] & (columns >= 0)[None, :]
        here = v_new + rows[:, None] * V + columns[None, :]
        d = tl.load(do + value, mask=has_lo, other=0.0).to(low)
        rq_lo = tl.dot(d, S_VK, rq_lo, input_precision=PRECISION)
        d = tl.load(do + next_value, mask=has_hi, other=0.0).to(low)
        rq_hi = tl.dot(d, S_VK, rq_hi, input_precision=PRECISION)
        d = tl.load(dv + value, mask=has_lo, other=0.0).to(low)
        rk_lo = tl.dot(d, S_VK, rk_lo, input_precision=PRECISION)
        d = tl.load(dv + next_value, mask=has_hi, other=0.0).to(low)
        rk_hi = tl.dot(d, S_VK, rk_hi, input_precision=PRECISION)
        wk_lo = tl.dot(tl.load(here), dS_VK, wk_lo, input_precision=PRECISION)
        wk_hi = tl.dot(tl.load(here + HALF * V), dS_VK, wk_hi, input_precision=PRECISION)
    return through, rq_lo, rk_lo, wk_lo, rq_hi, rk_hi, wk_hi


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
    rows = tl.arange(0, HALF)
    low = v_new.dtype.element_ty
    is_lo = rows < length
    is_hi = rows + HALF < length

    head = start * num_heads * K + h * K
    q += head
    k += head
    g += head
    dq += head
    dk += head
    dg += head
    lo = rows[:, None] * (num_heads * K) + channels[None, :]
    hi = lo + HALF * num_heads * K
    in_lo = is_lo[:, None] & (channels >= 0)[None, :]
    in_hi = is_hi[:, None] & (channels >= 0)[None, :]
    bias = 0.0
    rate = 1.0
    if FROM_LOGITS:
        bias = tl.load(dt_bias + h * K + channels)[None, :]
        rate = tl.exp(tl.load(a_log + h))
    norm = norms + chunk * 2 * CHUNK
    pair = pairs + chunk * 2 * CHUNK * CHUNK
    product = products + chunk * 3 * CHUNK + rows

    gate_lo, q_norm_lo, k_norm_lo, q_lo, k_lo = half_inputs(
        q, k, g, norm, lo, in_lo, rows, bias, rate, lower_bound, scale,
        FROM_LOGITS, IS_BOUNDED, NORMALIZE,
    )  # fmt: skip
    dq_lo, dk_lo, dg_lo, since_lo, until_lo = half_gradients(
        q_lo, k_lo, gate_lo, pair, tl.load(product), rows, PARTS, PRECISION
    )
    gate_hi, q_norm_hi, k_norm_hi, q_hi, k_hi = half_inputs(
        q, k, g, norm + HALF, hi, in_hi, rows, bias, rate, lower_bound, scale,
        FROM_LOGITS, IS_BOUNDED, NORMALIZE,
    )  # fmt: skip
    dq_hi, dk_hi, dg_hi, since_hi, until_hi = half_gradients(
        q_hi, k_hi, gate_hi, pair + HALF * CHUNK + HALF, tl.load(product + HALF), rows, PARTS,
        PRECISION,
    )  # fmt: skip

    since_hi = tl.exp2(since_hi)
    far = tl.exp2(until_lo)
    read_q, read_k, write = far_gradients(pair, k_lo, q_hi, k_hi, far, since_hi, rows, PRECISION)
    dq_hi += read_q
    dk_hi += read_k
    dk_lo += write
    reads_hi = q_hi * read_q + k_hi * read_k
    writes_lo = k_lo * write

    value = (start * num_heads + h) * V
    through, rq_lo, rk_lo, wk_lo, rq_hi, rk_hi, wk_hi = state_gradients(
        do + value, dv + value, v_new + chunk * CHUNK * V, states + chunk * K * V,
        d_states + chunk * K * V, channels, rows, is_lo, is_hi, num_heads,
        K, V, BK, BV, IS_TRANSPOSED, PRECISION,
    )  # fmt: skip
    through *= tl.load(gamma + chunk * K + channels)
    end_lo = tl.sum(gate_lo, 0)
    end_hi = tl.sum(gate_hi, 0)
    since_lo = tl.exp2(since_lo)
    since_hi *= tl.exp2(end_lo)[None, :]
    rq_lo *= since_lo
    rk_lo *= -since_lo
    wk_lo *= far * tl.exp2(end_hi)[None, :]
    rq_hi *= since_hi
    rk_hi *= -since_hi
    wk_hi *= tl.exp2(until_hi)
    dq_lo += rq_lo
    dk_lo += rk_lo + wk_lo
    dq_hi += rq_hi
    dk_hi += rk_hi + wk_hi
    reads = q_hi * rq_hi + k_hi * rk_hi
    writes = k_lo * wk_lo
    dg_lo += crossing_sum(q_lo * rq_lo + k_lo * rk_lo, writes_lo + writes, rows, PARTS)
    dg_hi += crossing_sum(reads_hi + reads, k_hi * wk_hi, rows, PARTS)
    dg_lo += (through + tl.sum(reads, 0))[None, :]
    dg_hi += (through + tl.sum(writes, 0))[None, :]

    dg_lo, rate_lo = logit_gradients(
        dg_lo, gate_lo, g + lo, in_lo, bias, rate, lower_bound, FROM_LOGITS, IS_BOUNDED
    )
    dg_hi, rate_hi = logit_gradients(
        dg_hi, gate_hi, g + hi, in_hi, bias, rate, lower_bound, FROM_LOGITS, IS_BOUNDED
    )
    if FROM_LOGITS:
        tl.store(d_bias_parts + chunk * K + channels, tl.sum(dg_lo + dg_hi, 0))
        tl.store(d_rate_parts + chunk * K + channels, tl.sum(rate_lo + rate_hi, 0))
    tl.store(dg + lo, dg_lo.to(dg.dtype.element_ty), mask=in_lo)
    tl.store(dg + hi, dg_hi.to(dg.dtype.element_ty), mask=in_hi)
    if NORMALIZE:
        dq_lo = through_norm(dq_lo, q_lo, q_norm_lo, tl.load(product + CHUNK), scale)
        dq_hi = through_norm(dq_hi, q_hi, q_norm_hi, tl.load(product + CHUNK + HALF), scale)
        dk_lo = through_norm(dk_lo, k_lo, k_norm_lo, tl.load(product + 2 * CHUNK), 1.0)
        dk_hi = through_norm(dk_hi, k_hi, k_norm_hi, tl.load(product + 2 * CHUNK + HALF), 1.0)
    tl.store(dq + lo, dq_lo.to(low), mask=in_lo)
    tl.store(dq + hi, dq_hi.to(low), mask=in_hi)
    tl.store(dk + lo, dk_lo.to(low), mask=in_lo)
    tl.store(dk + hi, dk_hi.to(low), mask=in_hi)
