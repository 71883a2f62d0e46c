"""First kernel: everything of a chunk that does not depend on the state or the values.

From q, k, g, beta it makes kp = k 2^G, qp = q 2^G, kc = k 2^(G_end - G), 2^G_end, the decayed
products Aqk (j <= r) and Ainv = (I + diag(beta) Akk)^-1 - I. The inverse is built by block
substitution, exact in algebra: blocks of 1, 2, 4 .. 32 rows join in pairs, A21 = -A22 L21 A11,
so that nothing grows: every entry of the inverse is in [-1, 1].
"""

import triton
import triton.language as tl

from .tiles import CHUNK, LEVELS, MIN_BETA, is_second, joins, lifted, load_log2_gate


@triton.jit
def inverse_below_diagonal(L, rows, cols, PRECISION: tl.constexpr):
    """(I + L)^-1 - I of a strictly lower L [C, C], fp32. The unit diagonal never meets rounding."""
    E = tl.where(joins(rows, cols, 0), -L, 0.0)
    for level in tl.range(1, LEVELS, num_stages=1):
        block = tl.where(joins(rows, cols, level), L, 0.0)
        product = block + tl.dot(block, E, input_precision=PRECISION)
        E -= product + tl.dot(E, product, input_precision=PRECISION)
    return E


@triton.jit
def inverse_norms(x, rows, is_row, num_heads, eps, K: tl.constexpr):
    """1 / sqrt(sum(x^2) + eps) of each row."""
    channels = tl.arange(0, K)
    offsets = rows[:, None] * (num_heads * K) + channels[None, :]
    is_valid = is_row[:, None] & (channels >= 0)[None, :]
    x_CK = tl.load(x + offsets, mask=is_valid, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x_CK * x_CK, 1) + eps)


@triton.jit
def prep_kernel(
    q, k, g, beta, a_log, dt_bias, table,
    kp, kc, qp, ainv, aqk, gamma, chunk_beta, norms,
    scale, eps, lower_bound, num_heads,
    K: tl.constexpr, BK: tl.constexpr, FROM_LOGITS: tl.constexpr, IS_BOUNDED: tl.constexpr,
    NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one head in strips of BK channels; grid (H, M)."""
    h = tl.program_id(0)
    m = tl.program_id(1)
    if tl.load(table + m * 3) < 0:
        return
    start = tl.load(table + m * 3 + 1).to(tl.int64)
    length = tl.load(table + m * 3 + 2)
    rows = tl.arange(0, CHUNK)
    cols = tl.arange(0, CHUNK)
    low = kp.dtype.element_ty
    chunk = m.to(tl.int64) * num_heads + h
    head = start * num_heads * K + h * K
    is_row = rows < length

    beta_C = tl.load(beta + (start + rows) * num_heads + h, mask=is_row, other=0.0)
    beta_C = beta_C.to(tl.float32)
    if FROM_LOGITS:
        beta_C = tl.sigmoid(beta_C)
    beta_C = tl.where(is_row, tl.maximum(beta_C, MIN_BETA), 0.0)
    tl.store(chunk_beta + chunk * CHUNK + rows, beta_C)
    q_norm = tl.full([CHUNK], 1.0, tl.float32)
    k_norm = q_norm
    if NORMALIZE:
        q_norm = inverse_norms(q + head, rows, is_row, num_heads, eps, K)
        k_norm = inverse_norms(k + head, rows, is_row, num_heads, eps, K)
        tl.store(norms + chunk * 2 * CHUNK + rows, q_norm)
        tl.store(norms + chunk * 2 * CHUNK + CHUNK + rows, k_norm)

    rate = 1.0
    if FROM_LOGITS:
        rate = tl.exp(tl.load(a_log + h))
    own_C = tl.zeros([CHUNK], tl.float32)
    aqk_CC = tl.zeros([CHUNK, CHUNK], tl.float32)
    akk_CC = tl.zeros([CHUNK, CHUNK], tl.float32)
    for strip in tl.range(0, K // BK, num_stages=1):
        channels = strip * BK + tl.arange(0, BK)
        offsets = rows[:, None] * (num_heads * K) + channels[None, :]
        is_valid = is_row[:, None] & (channels >= 0)[None, :]
        bias = 0.0
        if FROM_LOGITS:
            bias = tl.load(dt_bias + h * K + channels)[None, :]
        gate = load_log2_gate(
            g + head, offsets, is_valid, bias, rate, lower_bound, FROM_LOGITS, IS_BOUNDED
        )
        q_CK = tl.load(q + head + offsets, mask=is_valid, other=0.0).to(tl.float32)
        k_CK = tl.load(k + head + offsets, mask=is_valid, other=0.0).to(tl.float32)
        q_CK *= q_norm[:, None]
        k_CK *= k_norm[:, None]
        own_C += tl.sum(q_CK * k_CK, 1)
        since = gate
        until = tl.zeros_like(gate)
        for level in tl.range(0, LEVELS, num_stages=1):
            factor = tl.exp2(tl.where(is_second(rows, level), since, until))
            q_low = (q_CK * factor).to(low)
            k_low = (k_CK * factor).to(low)
            is_pair = joins(rows, cols, level)
            pair = tl.dot(q_low, tl.trans(k_low), input_precision=PRECISION)
            aqk_CC += tl.where(is_pair, pair, 0.0)
            pair = tl.dot(k_low, tl.trans(k_low), input_precision=PRECISION)
            akk_CC += tl.where(is_pair, pair, 0.0)
            since, until = lifted(since, until, rows, level)
        tile = chunk * CHUNK * K + rows[:, None] * K + channels[None, :]
        decay = tl.exp2(since)
        tl.store(qp + tile, (q_CK * decay * scale).to(low))
        tl.store(kp + tile, (k_CK * decay).to(low))
        tl.store(kc + tile, (k_CK * tl.exp2(until)).to(low))
        tl.store(gamma + chunk * K + channels, tl.exp2(tl.sum(gate, 0)))

    below = rows[:, None] > cols[None, :]
    aqk_CC = tl.where(below, aqk_CC, 0.0)
    akk_CC = tl.where(below, akk_CC, 0.0)
    aqk_CC = tl.where(rows[:, None] == cols[None, :], own_C[:, None], aqk_CC) * scale
    square = chunk * CHUNK * CHUNK + rows[:, None] * CHUNK + cols[None, :]
    tl.store(aqk + square, aqk_CC.to(low))
    below_CC = inverse_below_diagonal(beta_C[:, None] * akk_CC, rows, cols, PRECISION)
    tl.store(ainv + square, below_CC.to(low))
