"""Fourth kernel: gradients of q, k, g and beta, parallel over chunks, heads and strips of channels.

    dAqk = low1(do v_new')    dAkk = -low1(dv v_new')    dbeta = <dv, v_new> / beta^2
    rq = 2^G (do S_in')    rk = -2^G (dv S_in')    wk = 2^(G_end - G) (v_new dS_out')

and the pair terms tq, tk, tw with the factors of `tiles`. The gradient of g at row r is the sum
over all pairs (write j, read i) with j < r <= i: state reads at i >= r, state writes at j < r, and
for pairs inside the chunk what is read at i >= r less what is written at j >= r. A pair with both
ends there occurs twice and must cancel, so the same rounded factors stand on both sides of the
products: its two terms are then the same number and bf16 leaves no residue. (With unrounded factors
outside the products the error of dg was 1.3e-2 instead of 2.9e-3 at fast gates.)

With `NORMALIZE`, <q, dq> = <o, do> and <k, dk> = 2 <dv, v_new> / beta - <v, dv> give the row
products of the L2 norm's backward, which a strip of channels cannot see.
"""

import triton
import triton.language as tl

from .tiles import CHUNK, HALF, half_factors, load_log2_gate


@triton.jit
def row_products(a, b, offsets, is_valid):
    """<a, b> of each row, fp32, with 0 in padded rows."""
    a_CV = tl.load(a + offsets, mask=is_valid, other=0.0).to(tl.float32)
    return tl.sum(a_CV * b.to(tl.float32), 1)


@triton.jit
def gradients_kernel(
    q, k, g, v, o, do, dv, v_new, states, d_states, gamma, chunk_beta, norms, a_log, dt_bias, table,
    dq, dk, dg, dbeta, d_bias_parts, d_rate_parts,
    scale, lower_bound, num_heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, FROM_LOGITS: tl.constexpr,
    NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One strip of BK channels of one chunk of one head; grid (H * K / BK, M)."""
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
    columns = tl.arange(0, V)
    low = v_new.dtype.element_ty
    is_row = rows < length

    # pairs of rows: dAqk and -dAkk, and their transposes as products of their own
    values = (start * num_heads + h) * V + rows[:, None] * (num_heads * V) + columns[None, :]
    is_value = is_row[:, None] & (columns >= 0)[None, :]
    do_CV = tl.load(do + values, mask=is_value, other=0.0).to(low)
    dv_CV = tl.load(dv + values, mask=is_value, other=0.0).to(low)
    v_new_CV = tl.load(v_new + chunk * CHUNK * V + rows[:, None] * V + columns[None, :])
    beta_C = tl.load(chunk_beta + chunk * CHUNK + rows)
    inverse_beta = 1.0 / tl.where(is_row, beta_C, 1.0)
    if NORMALIZE:
        read_q = row_products(o, do_CV, values, is_value)
        read_k = -row_products(v, dv_CV, values, is_value)
    below = rows[:, None] > cols[None, :]
    above = rows[:, None] < cols[None, :]
    same_half = (rows // HALF)[:, None] == (cols // HALF)[None, :]
    is_same = rows[:, None] == cols[None, :]
    pair = tl.dot(do_CV, tl.trans(v_new_CV), input_precision=PRECISION)  # [C, C]
    own_C = tl.sum(tl.where(is_same, pair, 0.0), 1)
    below_q = tl.where(below, pair, 0.0).to(low)
    near_q = tl.where(same_half, below_q, 0.0)
    pair = tl.dot(dv_CV, tl.trans(v_new_CV), input_precision=PRECISION)
    write_C = tl.sum(tl.where(is_same, pair, 0.0), 1) * inverse_beta
    below_k = tl.where(below, -pair, 0.0).to(low)
    near_k = tl.where(same_half, below_k, 0.0)
    pair = tl.dot(v_new_CV, tl.trans(do_CV), input_precision=PRECISION)
    above_q = tl.where(above, pair, 0.0).to(low)
    near_q_t = tl.where(same_half, above_q, 0.0)
    pair = tl.dot(v_new_CV, tl.trans(dv_CV), input_precision=PRECISION)
    above_k = tl.where(above, -pair, 0.0).to(low)
    near_k_t = tl.where(same_half, above_k, 0.0)
    if strip == 0:
        dbeta_C = write_C * inverse_beta
        if FROM_LOGITS:
            dbeta_C *= beta_C * (1.0 - beta_C)
        out = dbeta + (start + rows) * num_heads + h
        tl.store(out, dbeta_C.to(dbeta.dtype.element_ty), mask=is_row)

    # reads of the incoming state, writes that reach the outgoing one
    state = channels[:, None] * V + columns[None, :]
    S_KV = tl.load(states + chunk * K * V + state)
    dS_KV = tl.load(d_states + chunk * K * V + state)
    through = tl.sum(S_KV.to(tl.float32) * dS_KV.to(tl.float32), 1)  # [BK]
    through *= tl.load(gamma + chunk * K + channels)
    dq_CK = tl.dot(do_CV, tl.trans(S_KV), input_precision=PRECISION)
    dk_CK = tl.dot(dv_CV, tl.trans(S_KV), input_precision=PRECISION)
    wk_CK = tl.dot(v_new_CV, tl.trans(dS_KV), input_precision=PRECISION)

    head = start * num_heads * K + h * K
    offsets = rows[:, None] * (num_heads * K) + channels[None, :]
    is_valid = is_row[:, None] & (channels >= 0)[None, :]
    bias = 0.0
    rate = 1.0
    if FROM_LOGITS:
        bias = tl.load(dt_bias + h * K + channels)[None, :]
        rate = tl.exp(tl.load(a_log + h))
    gate = load_log2_gate(g + head, offsets, is_valid, bias, rate, lower_bound, FROM_LOGITS)
    first = channels[None, :] + tl.arange(0, 1)[:, None]
    first_lo = load_log2_gate(
        g + head, first, first >= 0, bias, rate, lower_bound, FROM_LOGITS
    )  # [1, BK]
    first_hi = load_log2_gate(
        g + head, first + HALF * num_heads * K, (first >= 0) & (length > HALF), bias, rate,
        lower_bound, FROM_LOGITS,
    )  # fmt: skip
    G, _, end, row, col, cross = half_factors(gate, tl.sum(first_lo, 0), tl.sum(first_hi, 0), rows)
    q_CK = tl.load(q + head + offsets, mask=is_valid, other=0.0).to(tl.float32)
    k_CK = tl.load(k + head + offsets, mask=is_valid, other=0.0).to(tl.float32)
    if NORMALIZE:
        q_norm = tl.load(norms + chunk * 2 * CHUNK + rows)
        k_norm = tl.load(norms + chunk * 2 * CHUNK + CHUNK + rows)
        q_CK *= q_norm[:, None]
        k_CK *= k_norm[:, None]
    q_CK *= scale
    decay = tl.exp2(G)
    dq_CK *= decay
    dk_CK *= -decay
    wk_CK *= tl.exp2(end[None, :] - G)
    read = q_CK * dq_CK + k_CK * dk_CK
    write = k_CK * wk_CK

    # pairs across the halves: rows of the second, columns of the first
    is_hi = rows[:, None] >= HALF
    hi_factor = tl.where(is_hi, cross, 0.0)
    lo_factor = tl.where(is_hi, 0.0, cross)
    lo_k = (k_CK * lo_factor).to(low)
    hi_q = (q_CK * hi_factor).to(low)
    hi_k = (k_CK * hi_factor).to(low)
    tq = tl.dot(below_q, lo_k, input_precision=PRECISION)
    tk = tl.dot(below_k, lo_k, input_precision=PRECISION)
    tw = tl.dot(above_q, hi_q, input_precision=PRECISION)
    tw = tl.dot(above_k, hi_k, tw, input_precision=PRECISION)
    dq_CK += hi_factor * tq
    dk_CK += hi_factor * tk + lo_factor * tw + wk_CK
    pairs = hi_q.to(tl.float32) * tq + hi_k.to(tl.float32) * tk - lo_k.to(tl.float32) * tw

    # pairs inside a half
    col_k = (k_CK * col).to(low)
    row_q = (q_CK * row).to(low)
    row_k = (k_CK * row).to(low)
    tq = tl.dot(near_q, col_k, input_precision=PRECISION)
    tk = tl.dot(near_k, col_k, input_precision=PRECISION)
    tw = tl.dot(near_q_t, row_q, input_precision=PRECISION)
    tw = tl.dot(near_k_t, row_k, tw, input_precision=PRECISION)
    dq_CK += row * tq + own_C[:, None] * k_CK
    dk_CK += row * tk + col * tw + own_C[:, None] * q_CK
    pairs += row_q.to(tl.float32) * tq + row_k.to(tl.float32) * tk - col_k.to(tl.float32) * tw

    reads = read + pairs
    steps = write - reads
    dg_CK = (through + tl.sum(reads, 0))[None, :] + tl.cumsum(steps, 0) - steps
    if FROM_LOGITS:
        y = tl.load(g + head + offsets, mask=is_valid, other=0.0).to(tl.float32) + bias
        dg_CK *= lower_bound * rate * tl.sigmoid(rate * y) * tl.sigmoid(-rate * y)
        dg_CK = tl.where(is_valid, dg_CK, 0.0)
        tl.store(d_bias_parts + chunk * K + channels, tl.sum(dg_CK, 0))
        tl.store(d_rate_parts + chunk * K + channels, tl.sum(dg_CK * y, 0))
    tl.store(dg + head + offsets, dg_CK.to(dg.dtype.element_ty), mask=is_valid)
    if NORMALIZE:
        read_k += 2.0 * write_C
        dq_CK = q_norm[:, None] * (scale * dq_CK - q_CK * (read_q / scale)[:, None])
        dk_CK = k_norm[:, None] * (dk_CK - k_CK * read_k[:, None])
    tl.store(dq + head + offsets, dq_CK.to(dq.dtype.element_ty), mask=is_valid)
    tl.store(dk + head + offsets, dk_CK.to(dk.dtype.element_ty), mask=is_valid)
