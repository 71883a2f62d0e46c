"""First kernel: everything of a chunk that does not depend on the state or the values.

From q, k, g, beta it makes kp = k 2^G, qp = q 2^G, kc = k 2^(G_end - G), 2^G_end, the decayed
products Aqk (j <= r) and Ainv = (I + diag(beta) Akk)^-1 - I. The inverse is built by block
substitution, exact in algebra: blocks of 1, 2, 4 .. 32 rows join in pairs, A21 = -A22 L21 A11,
so that nothing grows: every entry of the inverse is in [-1, 1].
"""

import triton
import triton.language as tl

from .tiles import CHUNK, HALF, MIN_BETA, half_factors, load_log2_gate


@triton.jit
def joined_block(L, rows, cols, B: tl.constexpr):
    """The part of L [C, C] that joins blocks of B rows: second's rows, first's columns."""
    is_pair = (rows // (2 * B))[:, None] == (cols // (2 * B))[None, :]
    is_lower = ((rows // B) % 2 == 1)[:, None] & ((cols // B) % 2 == 0)[None, :]
    return tl.where(is_pair & is_lower, L, 0.0)


@triton.jit
def inverse_below_diagonal(L, rows, cols, PRECISION: tl.constexpr):
    """(I + L)^-1 - I of a strictly lower L [C, C], fp32. The unit diagonal never meets rounding."""
    E = -joined_block(L, rows, cols, 1)
    for level in tl.static_range(1, 6):
        block = joined_block(L, rows, cols, 2**level)
        product = block + tl.dot(block, E, input_precision=PRECISION)
        E -= product + tl.dot(E, product, input_precision=PRECISION)
    return E


@triton.jit
def prep_kernel(
    q, k, g, beta, a_log, dt_bias, table,
    kp, kc, qp, ainv, aqk, gamma, chunk_beta, norms,
    scale, eps, lower_bound, num_heads,
    K: tl.constexpr, FROM_LOGITS: tl.constexpr, NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one head; grid (H, M)."""
    h = tl.program_id(0)
    m = tl.program_id(1)
    if tl.load(table + m * 3) < 0:
        return
    start = tl.load(table + m * 3 + 1).to(tl.int64)
    length = tl.load(table + m * 3 + 2)
    rows = tl.arange(0, CHUNK)
    cols = tl.arange(0, CHUNK)
    channels = tl.arange(0, K)
    low = kp.dtype.element_ty

    head = start * num_heads * K + h * K
    offsets = rows[:, None] * (num_heads * K) + channels[None, :]
    is_valid = (rows < length)[:, None] & (channels >= 0)[None, :]
    q_CK = tl.load(q + head + offsets, mask=is_valid, other=0.0).to(tl.float32)
    k_CK = tl.load(k + head + offsets, mask=is_valid, other=0.0).to(tl.float32)
    bias = 0.0
    rate = 1.0
    if FROM_LOGITS:
        bias = tl.load(dt_bias + h * K + channels)[None, :]
        rate = tl.exp(tl.load(a_log + h))
    gate = load_log2_gate(g + head, offsets, is_valid, bias, rate, lower_bound, FROM_LOGITS)
    first = channels[None, :] + tl.arange(0, 1)[:, None]
    first_lo = load_log2_gate(
        g + head, first, first >= 0, bias, rate, lower_bound, FROM_LOGITS
    )  # [1, K]
    first_hi = load_log2_gate(
        g + head, first + HALF * num_heads * K, (first >= 0) & (length > HALF), bias, rate,
        lower_bound, FROM_LOGITS,
    )  # fmt: skip
    first_lo = tl.sum(first_lo, 0)
    first_hi = tl.sum(first_hi, 0)

    chunk = m.to(tl.int64) * num_heads + h
    beta_C = tl.load(beta + (start + rows) * num_heads + h, mask=rows < length, other=0.0)
    beta_C = beta_C.to(tl.float32)
    if FROM_LOGITS:
        beta_C = tl.sigmoid(beta_C)
    beta_C = tl.where(rows < length, tl.maximum(beta_C, MIN_BETA), 0.0)
    tl.store(chunk_beta + chunk * CHUNK + rows, beta_C)
    if NORMALIZE:
        q_norm = tl.rsqrt(tl.sum(q_CK * q_CK, 1) + eps)
        k_norm = tl.rsqrt(tl.sum(k_CK * k_CK, 1) + eps)
        tl.store(norms + chunk * 2 * CHUNK + rows, q_norm)
        tl.store(norms + chunk * 2 * CHUNK + CHUNK + rows, k_norm)
        q_CK *= q_norm[:, None]
        k_CK *= k_norm[:, None]

    G, mid, end, row, col, cross = half_factors(gate, first_lo, first_hi, rows)
    is_hi = rows[:, None] >= HALF
    same_half = (rows // HALF)[:, None] == (cols // HALF)[None, :]
    below = rows[:, None] > cols[None, :]
    col_k = tl.trans((k_CK * col).to(low))
    aqk_CC = tl.dot((q_CK * row).to(low), col_k, input_precision=PRECISION)
    akk_CC = tl.dot((k_CK * row).to(low), col_k, input_precision=PRECISION)
    aqk_CC = tl.where(same_half & below, aqk_CC, 0.0)
    akk_CC = tl.where(same_half & below, akk_CC, 0.0)
    k_cross = k_CK * cross
    lo_k = tl.trans(tl.where(is_hi, 0.0, k_cross).to(low))
    q_cross = q_CK * cross
    aqk_CC += tl.dot(tl.where(is_hi, q_cross, 0.0).to(low), lo_k, input_precision=PRECISION)
    akk_CC += tl.dot(tl.where(is_hi, k_cross, 0.0).to(low), lo_k, input_precision=PRECISION)
    diagonal = tl.sum(q_CK * k_CK, 1)
    aqk_CC = tl.where(rows[:, None] == cols[None, :], diagonal[:, None], aqk_CC) * scale

    tile = chunk * CHUNK * K + rows[:, None] * K + channels[None, :]
    rest = tl.exp2(tl.where(is_hi, end[None, :] - G, G))
    to_mid = tl.exp2(mid)[None, :]
    tl.store(qp + tile, (tl.where(is_hi, q_cross * to_mid, q_CK * rest) * scale).to(low))
    tl.store(kp + tile, tl.where(is_hi, k_cross * to_mid, k_CK * rest).to(low))
    from_mid = tl.exp2(end - mid)[None, :]
    tl.store(kc + tile, tl.where(is_hi, k_CK * rest, k_cross * from_mid).to(low))
    tl.store(gamma + chunk * K + channels, tl.exp2(end))

    square = chunk * CHUNK * CHUNK + rows[:, None] * CHUNK + cols[None, :]
    tl.store(aqk + square, aqk_CC.to(low))
    below_CC = inverse_below_diagonal(beta_C[:, None] * akk_CC, rows, cols, PRECISION)
    tl.store(ainv + square, below_CC.to(low))
