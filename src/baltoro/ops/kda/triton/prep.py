"""First kernel: everything of a chunk that does not depend on the state or the values.

From q, k, g, beta it makes kp = k 2^G, qp = q 2^G, kc = k 2^(G_end - G), 2^G_end, the decayed
products Aqk (j <= r) and Ainv = (I + diag(beta) Akk)^-1 - I. The inverse is built by block
substitution, exact in algebra: blocks of 1, 2, 4 .. 32 rows join in pairs, A21 = -A22 L21 A11,
so that nothing grows: every entry of the inverse is in [-1, 1].
"""

import triton
import triton.language as tl

from .tiles import CHUNK, HALF, LEVELS, MIN_BETA, is_second, joins, lifted, load_log2_gate


@triton.jit
def inverse_below_diagonal(L, rows, PRECISION: tl.constexpr):
    """(I + L)^-1 - I of a strictly lower L [R, R], fp32. The unit diagonal never meets rounding."""
    E = tl.where(joins(rows, 0), -L, 0.0)
    for level in tl.range(1, LEVELS, num_stages=1):
        E = joined_inverse(tl.where(joins(rows, level), L, 0.0), E, E, PRECISION) + E
    return E


@triton.jit
def joined_inverse(L, first, second, PRECISION: tl.constexpr):
    """What a block L below two inverses, both without their unit diagonal, has as its own."""
    product = L + tl.dot(L, first, input_precision=PRECISION)
    return -product - tl.dot(second, product, input_precision=PRECISION)


@triton.jit
def inverse_norms(x, rows, is_row, num_heads, eps, K: tl.constexpr):
    """1 / sqrt(sum(x^2) + eps) of each row."""
    channels = tl.arange(0, K)
    offsets = rows[:, None] * (num_heads * K) + channels[None, :]
    is_valid = is_row[:, None] & (channels >= 0)[None, :]
    x_RK = tl.load(x + offsets, mask=is_valid, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x_RK * x_RK, 1) + eps)


@triton.jit
def load_beta(beta, chunk_beta, rows, is_row, num_heads, FROM_LOGITS: tl.constexpr):
    """The write strengths of some rows, 0 where there is none; stored for the other kernels."""
    beta_R = tl.load(beta + rows * num_heads, mask=is_row, other=0.0).to(tl.float32)
    if FROM_LOGITS:
        beta_R = tl.sigmoid(beta_R)
    beta_R = tl.where(is_row, tl.maximum(beta_R, MIN_BETA), 0.0)
    tl.store(chunk_beta + rows, beta_R)
    return beta_R


@triton.jit
def half_pairs(q, k, gate, aqk, akk, rows, LOW: tl.constexpr, PRECISION: tl.constexpr):
    """Add the pairs inside one half to Aqk and Akk [R, R]; the steps since it began, until it ends.

    What is above the diagonal is not meant.
    """
    since = gate
    until = tl.zeros_like(gate)
    for level in tl.range(0, LEVELS, num_stages=1):
        factor = tl.exp2(tl.where(is_second(rows, level), since, until))
        low_k = (k * factor).to(LOW)
        is_pair = joins(rows, level)
        pair = tl.dot((q * factor).to(LOW), tl.trans(low_k), input_precision=PRECISION)
        aqk += tl.where(is_pair, pair, 0.0)
        pair = tl.dot(low_k, tl.trans(low_k), input_precision=PRECISION)
        akk += tl.where(is_pair, pair, 0.0)
        since, until = lifted(since, until, rows, level)
    return aqk, akk, since, until


@triton.jit
def store_blocks(place, first, far, second):
    """A lower [C, C] matrix from its blocks [C / 2, C / 2]."""
    low = place.dtype.element_ty
    tl.store(place, first.to(low))
    tl.store(place + HALF, tl.zeros_like(far).to(low))
    tl.store(place + HALF * CHUNK, far.to(low))
    tl.store(place + HALF * CHUNK + HALF, second.to(low))


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
    rows = tl.arange(0, HALF)
    low = kp.dtype.element_ty
    chunk = m.to(tl.int64) * num_heads + h
    head = start * num_heads * K + h * K
    half = HALF * num_heads * K
    is_lo = rows < length
    is_hi = rows + HALF < length

    place = beta + start * num_heads + h
    beta_lo = load_beta(place, chunk_beta + chunk * CHUNK, rows, is_lo, num_heads, FROM_LOGITS)
    place += HALF * num_heads
    out = chunk_beta + chunk * CHUNK + HALF
    beta_hi = load_beta(place, out, rows, is_hi, num_heads, FROM_LOGITS)
    q_norm_lo = tl.full([HALF], 1.0, tl.float32)
    q_norm_hi = q_norm_lo
    k_norm_lo = q_norm_lo
    k_norm_hi = q_norm_lo
    if NORMALIZE:
        q_norm_lo = inverse_norms(q + head, rows, is_lo, num_heads, eps, K)
        q_norm_hi = inverse_norms(q + head + half, rows, is_hi, num_heads, eps, K)
        k_norm_lo = inverse_norms(k + head, rows, is_lo, num_heads, eps, K)
        k_norm_hi = inverse_norms(k + head + half, rows, is_hi, num_heads, eps, K)
        out = norms + chunk * 2 * CHUNK + rows
        tl.store(out, q_norm_lo)
        tl.store(out + HALF, q_norm_hi)
        tl.store(out + CHUNK, k_norm_lo)
        tl.store(out + CHUNK + HALF, k_norm_hi)

    q += head
    k += head
    g += head
    kp += chunk * CHUNK * K
    kc += chunk * CHUNK * K
    qp += chunk * CHUNK * K
    rate = 1.0
    if FROM_LOGITS:
        rate = tl.exp(tl.load(a_log + h))
    own_lo = tl.zeros([HALF], tl.float32)
    own_hi = tl.zeros([HALF], tl.float32)
    aqk_lo = tl.zeros([HALF, HALF], tl.float32)
    aqk_hi = aqk_lo
    aqk_far = aqk_lo
    akk_lo = aqk_lo
    akk_hi = aqk_lo
    akk_far = aqk_lo
    for strip in tl.range(0, K // BK, num_stages=1):
        channels = strip * BK + tl.arange(0, BK)
        bias = 0.0
        if FROM_LOGITS:
            bias = tl.load(dt_bias + h * K + channels)[None, :]
        lo = rows[:, None] * (num_heads * K) + channels[None, :]
        hi = lo + half
        in_lo = is_lo[:, None] & (channels >= 0)[None, :]
        in_hi = is_hi[:, None] & (channels >= 0)[None, :]
        gate_lo = load_log2_gate(g, lo, in_lo, bias, rate, lower_bound, FROM_LOGITS, IS_BOUNDED)
        gate_hi = load_log2_gate(g, hi, in_hi, bias, rate, lower_bound, FROM_LOGITS, IS_BOUNDED)
        q_lo = tl.load(q + lo, mask=in_lo, other=0.0).to(tl.float32) * q_norm_lo[:, None]
        k_lo = tl.load(k + lo, mask=in_lo, other=0.0).to(tl.float32) * k_norm_lo[:, None]
        q_hi = tl.load(q + hi, mask=in_hi, other=0.0).to(tl.float32) * q_norm_hi[:, None]
        k_hi = tl.load(k + hi, mask=in_hi, other=0.0).to(tl.float32) * k_norm_hi[:, None]
        own_lo += tl.sum(q_lo * k_lo, 1)
        own_hi += tl.sum(q_hi * k_hi, 1)
        aqk_lo, akk_lo, since_lo, until_lo = half_pairs(
            q_lo, k_lo, gate_lo, aqk_lo, akk_lo, rows, low, PRECISION
        )
        aqk_hi, akk_hi, since_hi, until_hi = half_pairs(
            q_hi, k_hi, gate_hi, aqk_hi, akk_hi, rows, low, PRECISION
        )

        # the halves meet: rows of the second, columns of the first
        until_lo = tl.exp2(until_lo)
        since_hi = tl.exp2(since_hi)
        kc_lo = k_lo * until_lo
        qp_hi = q_hi * since_hi
        kp_hi = k_hi * since_hi
        columns = tl.trans(kc_lo.to(low))
        aqk_far = tl.dot(qp_hi.to(low), columns, aqk_far, input_precision=PRECISION)
        akk_far = tl.dot(kp_hi.to(low), columns, akk_far, input_precision=PRECISION)

        end_lo = tl.sum(gate_lo, 0)
        end_hi = tl.sum(gate_hi, 0)
        tl.store(gamma + chunk * K + channels, tl.exp2(end_lo + end_hi))
        through_lo = tl.exp2(end_lo)[None, :]
        through_hi = tl.exp2(end_hi)[None, :]
        since_lo = tl.exp2(since_lo)
        tile = rows[:, None] * K + channels[None, :]
        tl.store(qp + tile, (q_lo * since_lo * scale).to(low))
        tl.store(kp + tile, (k_lo * since_lo).to(low))
        tl.store(kc + tile, (kc_lo * through_hi).to(low))
        tile += HALF * K
        tl.store(qp + tile, (qp_hi * through_lo * scale).to(low))
        tl.store(kp + tile, (kp_hi * through_lo).to(low))
        tl.store(kc + tile, (k_hi * tl.exp2(until_hi)).to(low))

    below = rows[:, None] > rows[None, :]
    is_own = rows[:, None] == rows[None, :]
    aqk_lo = tl.where(is_own, own_lo[:, None], tl.where(below, aqk_lo, 0.0))
    aqk_hi = tl.where(is_own, own_hi[:, None], tl.where(below, aqk_hi, 0.0))
    square = chunk * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :]
    store_blocks(aqk + square, aqk_lo * scale, aqk_far * scale, aqk_hi * scale)
    akk_lo = tl.where(below, beta_lo[:, None] * akk_lo, 0.0)
    akk_hi = tl.where(below, beta_hi[:, None] * akk_hi, 0.0)
    first = inverse_below_diagonal(akk_lo, rows, PRECISION)
    second = inverse_below_diagonal(akk_hi, rows, PRECISION)
    far = joined_inverse(beta_hi[:, None] * akk_far, first, second, PRECISION)
    store_blocks(ainv + square, first, far, second)
