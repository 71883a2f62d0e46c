"""The fourth kernel for Hopper (bf16, K and V of 64 or 128): `gradients.py`, its layouts chosen.

One warpgroup owns a strip of 64 channels of a chunk and works channel-major: every [channels,
tokens] tile is a wgmma accumulator of 32 tokens, so sums along time stay inside four neighbouring
lanes, the decayed factors are left operands straight from registers, and only dA, do, dv, v_new
and the states pass through shared memory. Each half of the chunk is its own tile, and what waits
for the second half waits in shared memory, since registers are what this kernel is short of.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .pairs_sm90 import (
    NEAR_Q0,
    NEAR_Q1,
    add_far_reads,
    add_near_pairs,
    far_writes,
    put_tiles,
    value_pairs,
)
from .tiles_sm90 import (
    ACC,
    CHANNELS,
    CHUNK,
    COPY64,
    COPY64F,
    COPY128,
    HALF,
    LOG2E,
    PAIR,
    SQUARE_COLUMNS,
    SQUARE_ROWS,
    STRIP,
    TILE,
    TILE32,
    TOKENS,
    VECTOR,
    barrier,
    copy_tile,
    half_gate,
    half_tile,
    inverse,
    normed_half,
    ones_where,
    rounded,
    store_half,
    store_tile,
    sum_where,
    tile_offsets,
    times,
)


@gluon.jit
def crossing_sum(base, reads, writes, from_here, before):
    """Gradient of g: `base` [64], what is read at or after a token, and written before it."""
    acc = gl.zeros([STRIP, HALF], gl.float32, layout=ACC) + base[:, None]
    acc = sum_where(reads, from_here, acc, 2)
    acc = sum_where(writes, before, acc, 2)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def read_products(pointer, b, row_stride, length, V: gl.constexpr, layout: gl.constexpr):
    """Row sums of the product of a tile [R, V] in global memory and one in shared memory."""
    total = gl.zeros([CHUNK], gl.float32, layout=gl.SliceLayout(1, layout))
    offsets, i = tile_offsets(row_stride, CHUNK, 64, layout)
    for part in gl.static_range(V // 64):
        x = gl.load(pointer + part * 64 + offsets, mask=(i < length) & (offsets >= 0), other=0.0)
        x = x.to(gl.float32) * b.slice(part * 64, 64, 1).load(layout).to(gl.float32)
        total += gl.sum(x, 1)
    return total


@gluon.jit
def copy_values(
    do, dv, v_new, states, d_states, chunk, value, state, num_heads, length,
    K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Start the copies of a chunk's do, dv and v_new, and of a strip of the states beside it."""
    COPY_V: gl.constexpr = COPY128 if V == 128 else COPY64
    do_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, V], TILE)
    dv_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, V], TILE)
    v_new_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, V], TILE)
    S_s = gl.allocate_shared_memory(gl.bfloat16, [V, STRIP], TILE)
    dS_s = gl.allocate_shared_memory(gl.bfloat16, [V, STRIP], TILE)
    copy_tile(do_s, do + value, num_heads * V, length, COPY_V)
    copy_tile(v_new_s, v_new + chunk * CHUNK * V, V, CHUNK, COPY_V)
    copy_tile(dv_s, dv + value, num_heads * V, length, COPY_V)
    copy_tile(S_s, states + state, K, V, COPY64)
    copy_tile(dS_s, d_states + state, K, V, COPY64)
    async_copy.commit_group()
    return do_s, dv_s, v_new_s, S_s, dS_s


@gluon.jit
def copy_heads(q, k, g, head, num_heads, length, K: gl.constexpr, COPY_G: gl.constexpr):
    """Start the copies of a strip of a chunk's q, k and g."""
    TILE_G: gl.constexpr = TILE if g.dtype.element_ty == gl.bfloat16 else TILE32
    g_s = gl.allocate_shared_memory(g.dtype.element_ty, [CHUNK, STRIP], TILE_G)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, STRIP], TILE)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, STRIP], TILE)
    copy_tile(g_s, g + head, num_heads * K, length, COPY_G)
    copy_tile(k_s, k + head, num_heads * K, length, COPY64)
    copy_tile(q_s, q + head, num_heads * K, length, COPY64)
    async_copy.commit_group()
    return g_s, q_s, k_s


@gluon.jit
def triangles():
    """Ones [32, 32] where a column is at a row or after it, after it, at it or before it."""
    i = gl.arange(0, HALF, layout=SQUARE_ROWS)[:, None]
    r = gl.arange(0, HALF, layout=SQUARE_COLUMNS)[None, :]
    return ones_where(i <= r), ones_where(i < r), ones_where(i >= r)


@gluon.jit
def store_dbeta(
    dbeta, d, beta, start, token, length, h, num_heads, FROM_LOGITS: gl.constexpr
):  # fmt: skip
    """Store the gradient of beta, or of its logits."""
    if FROM_LOGITS:
        d *= beta * (1.0 - beta)
    out = dbeta + (start + token) * num_heads + h
    gl.store(out, d.to(dbeta.dtype.element_ty), mask=token < length)


@gluon.jit
def put_vector(x, N: gl.constexpr):
    """A vector [N] in shared memory."""
    vector = gl.allocate_shared_memory(gl.float32, [N], VECTOR)
    vector.store(x)
    return vector


@gluon.jit
def through_norms(
    dq, dk, q, k, norm, scale, read_q_s, read_k_s, write_s, first: gl.constexpr
):  # fmt: skip
    """Gradients of the raw q and k of the half that begins at `first`."""
    read_q = read_q_s.slice(first, HALF, 0).load(TOKENS)
    read_k = 2.0 * write_s.slice(first, HALF, 0).load(TOKENS)
    read_k -= read_k_s.slice(first, HALF, 0).load(TOKENS)
    dq = gl.load(norm + first)[None, :] * (scale * dq - q * (read_q / scale)[None, :])
    return dq, gl.load(norm + CHUNK + first)[None, :] * (dk - k * read_k[None, :])


@gluon.jit
def gate_slope(y, rate, lower_bound):
    """Derivative of lower_bound * sigmoid(rate * y) by y."""
    rest = gl.exp2(gl.minimum(-rate * LOG2E * y, 126.0))
    p = inverse(1.0 + rest)
    return lower_bound * rate * p * p * rest


@gluon.jit
def logit_gradients(
    g_s, dg0, dg1, d_bias_parts, d_rate_parts, chunk, channels, length, spot, bias, rate,
    lower_bound, K: gl.constexpr,
):  # fmt: skip
    """From gradients of the gate to those of its logits; their sums over the chunk are stored."""
    y0 = half_tile(g_s, 0) + bias[:, None]
    y1 = half_tile(g_s, 1) + bias[:, None]
    dg0 = gl.where(spot[None, :] < length, dg0 * gate_slope(y0, rate, lower_bound), 0.0)
    dg1 = gl.where(spot[None, :] < length - HALF, dg1 * gate_slope(y1, rate, lower_bound), 0.0)
    gl.store(d_bias_parts + chunk * K + channels, gl.sum(dg0 + dg1, 1))
    gl.store(d_rate_parts + chunk * K + channels, gl.sum(dg0 * y0 + dg1 * y1, 1))
    return dg0, dg1


@gluon.jit
def gradients_sm90_kernel(
    q, k, g, v, o, do, dv, v_new, states, d_states, gamma, chunk_beta, norms, a_log, dt_bias, table,
    dq, dk, dg, dbeta, d_bias_parts, d_rate_parts,
    scale, lower_bound, num_heads,
    K: gl.constexpr, V: gl.constexpr, FROM_LOGITS: gl.constexpr, NORMALIZE: gl.constexpr,
):  # fmt: skip
    """One strip of 64 channels of one chunk of one head; grid (H * K / 64, M), 4 warps."""
    h = gl.program_id(0) // (K // STRIP)
    m = gl.program_id(1)
    strip = gl.program_id(0) % (K // STRIP)
    chunk = m.to(gl.int64) * num_heads + h
    channels = strip * STRIP + gl.arange(0, STRIP, layout=CHANNELS)
    if gl.load(table + m * 3) < 0:
        if FROM_LOGITS:
            zero = gl.zeros([STRIP], gl.float32, layout=CHANNELS)
            gl.store(d_bias_parts + chunk * K + channels, zero)
            gl.store(d_rate_parts + chunk * K + channels, zero)
        return
    start = gl.load(table + m * 3 + 1).to(gl.int64)
    length = gl.load(table + m * 3 + 2)
    COPY_G: gl.constexpr = COPY64 if g.dtype.element_ty == gl.bfloat16 else COPY64F
    value = (start * num_heads + h) * V
    state = chunk * K * V + strip * STRIP
    head = (start * num_heads + h) * K + strip * STRIP
    do_s, dv_s, v_new_s, S_s, dS_s = copy_values(
        do, dv, v_new, states, d_states, chunk, value, state, num_heads, length, K, V
    )
    g_s, q_s, k_s = copy_heads(q, k, g, head, num_heads, length, K, COPY_G)

    column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, PAIR))[None, :]
    token = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, PAIR))
    beta = gl.load(chunk_beta + chunk * CHUNK + token)
    inverse_beta = 1.0 / gl.where(token < length, beta, 1.0)
    bias = gl.zeros([STRIP], gl.float32, layout=CHANNELS)
    rate = 1.0
    if FROM_LOGITS:
        bias = gl.load(dt_bias + h * K + channels)
        rate = gl.exp(gl.load(a_log + h))

    async_copy.wait_group(1)
    fence_async_shared()
    barrier()
    own, write, below_q, below_k = value_pairs(do_s, dv_s, v_new_s, inverse_beta, token, column)
    S_t = S_s.permute((1, 0))
    dS_t = dS_s.permute((1, 0))
    rq0 = times(S_t, do_s.slice(0, HALF, 0).permute((1, 0)))
    rk0 = times(S_t, dv_s.slice(0, HALF, 0).permute((1, 0)))
    wk0 = times(dS_t, v_new_s.slice(0, HALF, 0).permute((1, 0)))
    rq1 = times(S_t, do_s.slice(HALF, HALF, 0).permute((1, 0)))
    rk1 = times(S_t, dv_s.slice(HALF, HALF, 0).permute((1, 0)))
    wk1 = times(dS_t, v_new_s.slice(HALF, HALF, 0).permute((1, 0)))
    if strip == 0:
        store_dbeta(
            dbeta, write * inverse_beta, beta, start, token, length, h, num_heads, FROM_LOGITS
        )
    rq0, rk0, wk0, rq1, rk1, wk1 = warpgroup_mma_wait(0, deps=[rq0, rk0, wk0, rq1, rk1, wk1])
    if NORMALIZE:
        barrier()
        read_q = read_products(o + value, do_s, num_heads * V, length, V, COPY64)
        read_k = read_products(v + value, dv_s, num_heads * V, length, V, COPY64)
    rq0_s = gl.allocate_shared_memory(gl.float32, [STRIP, HALF], TILE32, rq0)
    rk0_s = gl.allocate_shared_memory(gl.float32, [STRIP, HALF], TILE32, rk0)
    wk0_s = gl.allocate_shared_memory(gl.float32, [STRIP, HALF], TILE32, wk0)

    pair_zero = gl.zeros([CHUNK, CHUNK], gl.float32, layout=PAIR)
    through = warpgroup_mma(S_t, dS_s, pair_zero, use_acc=False, is_async=True)
    through = warpgroup_mma_wait(0, deps=[through])
    through = gl.sum(gl.where(token[:, None] == column, through, 0.0), 1)
    tiles = put_tiles(below_q, below_k)
    up_to, before, from_here = triangles()
    own_s = put_vector(own, CHUNK)
    through_s = put_vector(through, STRIP)
    if NORMALIZE:
        read_q_s = put_vector(read_q, CHUNK)
        read_k_s = put_vector(read_k, CHUNK)
        write_s = put_vector(write, CHUNK)
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    through = through_s.load(CHANNELS) * gl.load(gamma + chunk * K + channels)

    first1, L1, end1 = half_gate(g_s, 1, up_to, length, bias, rate, lower_bound, FROM_LOGITS)
    first0, L0, end0 = half_gate(g_s, 0, up_to, length, bias, rate, lower_bound, FROM_LOGITS)
    spot = gl.arange(0, HALF, layout=TOKENS)
    norm = norms + chunk * (2 * CHUNK) + spot

    # what the second half needs of the first
    k0 = normed_half(k_s, 0, norm + CHUNK, 1.0, NORMALIZE)
    cross0 = gl.exp2(end0[:, None] - L0)
    lo_k = rounded(k0 * cross0)
    after0 = gl.exp2(first1 + end1)[:, None]
    written0 = gl.sum(k0 * (cross0 * after0 * wk0_s.load(ACC)), 1)
    L0_s = gl.allocate_shared_memory(gl.float32, [STRIP, HALF], TILE32, L0)

    # second half
    q1 = normed_half(q_s, 1, norm + HALF, scale, NORMALIZE)
    k1 = normed_half(k_s, 1, norm + CHUNK + HALF, 1.0, NORMALIZE)
    cross1 = gl.exp2(L1 + first1[:, None])
    hi_q = rounded(q1 * cross1)
    hi_k = rounded(k1 * cross1)
    decay = gl.exp2(first0 + end0)[:, None] * cross1
    rq1 *= decay
    rk1 *= -decay
    wk1 *= gl.exp2(end1[:, None] - L1)
    reads1 = q1 * rq1 + k1 * rk1
    writes1 = k1 * wk1
    rq1, rk1, reads1 = add_far_reads(tiles, lo_k, hi_q, hi_k, cross1, wk1, rq1, rk1, reads1)
    own1 = own_s.slice(HALF, HALF, 0).load(TOKENS)[None, :]
    rq1, rk1, reads1 = add_near_pairs(L1, q1, k1, own1, tiles, NEAR_Q1, rq1, rk1, reads1)
    if NORMALIZE:
        rq1, rk1 = through_norms(
            rq1, rk1, q1, k1, norm, scale, read_q_s, read_k_s, write_s, HALF
        )  # fmt: skip
    store_half(q_s, 1, rq1)
    store_half(k_s, 1, rk1)
    through1 = gl.sum(reads1, 1)
    dg1 = crossing_sum(through + written0, reads1, writes1, from_here, before)

    # first half
    q0 = normed_half(q_s, 0, norm, scale, NORMALIZE)
    k0 = normed_half(k_s, 0, norm + CHUNK, 1.0, NORMALIZE)
    tw = far_writes(tiles, hi_q, hi_k)
    L0 = L0_s.load(ACC)
    decay = gl.exp2(L0 + first0[:, None])
    cross0 = gl.exp2(end0[:, None] - L0)
    rq0 = rq0_s.load(ACC) * decay
    rk0 = rk0_s.load(ACC) * -decay
    wk0 = wk0_s.load(ACC) * (cross0 * after0)
    reads0 = q0 * rq0 + k0 * rk0 - lo_k * tw
    writes0 = k0 * wk0
    rk0 += wk0 + cross0 * tw
    own0 = own_s.slice(0, HALF, 0).load(TOKENS)[None, :]
    rq0, rk0, reads0 = add_near_pairs(L0, q0, k0, own0, tiles, NEAR_Q0, rq0, rk0, reads0)
    if NORMALIZE:
        rq0, rk0 = through_norms(rq0, rk0, q0, k0, norm, scale, read_q_s, read_k_s, write_s, 0)
    store_half(q_s, 0, rq0)
    store_half(k_s, 0, rk0)
    dg0 = crossing_sum(through + through1, reads0, writes0, from_here, before)

    if FROM_LOGITS:
        dg0, dg1 = logit_gradients(
            g_s, dg0, dg1, d_bias_parts, d_rate_parts, chunk, channels, length, spot, bias, rate,
            lower_bound, K,
        )  # fmt: skip
    store_half(g_s, 0, dg0)
    store_half(g_s, 1, dg1)
    barrier()
    store_tile(dq + head, q_s, num_heads * K, length, COPY64)
    store_tile(dk + head, k_s, num_heads * K, length, COPY64)
    store_tile(dg + head, g_s, num_heads * K, length, COPY_G)
