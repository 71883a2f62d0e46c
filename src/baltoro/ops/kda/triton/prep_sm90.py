"""The first kernel for Hopper (bf16, K of 64 or 128): `prep.py` with its layouts chosen.

One warpgroup owns a chunk of a head. Strips of 64 channels are decayed channel-major and put down
in shared memory as operands. A product has 32 queries and 32 keys as its rows, 32 earlier keys as
its columns: pairs inside the first half, inside the second, and across. The inverse is joined level
by level with products of bf16 pairs. Loops stay loops, for the instruction cache, and registers
are few enough for three programs a multiprocessor: most of a program's time is waiting.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .tiles import MIN_BETA
from .tiles_sm90 import (
    ACC,
    CHANNELS,
    CHUNK,
    COPY64,
    COPY64F,
    COPY128,
    HALF,
    PAIR,
    SHIFT,
    SQUARE,
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
    left_rows,
    ones_where,
    sigmoid,
    store_half,
    store_tile,
    truncated,
)


@gluon.jit
def put_half(smem, h: gl.constexpr, value):
    """Write the columns of one half of an operand [64 channels, 64 tokens]."""
    smem.slice(h * HALF, HALF, 1).store(value.to(gl.bfloat16))


@gluon.jit
def plus_product(acc, a, b, high_s, low_s):
    """acc + a b, all [64, 64]; a and b as sums of two bf16 parts."""
    barrier()
    high = truncated(b)
    high_s.store(high.to(gl.bfloat16))
    low_s.store((b - high).to(gl.bfloat16))
    high = truncated(a)
    low = left_rows(a - high)
    high = left_rows(high)
    fence_async_shared()
    barrier()
    acc = warpgroup_mma(high, high_s, acc, is_async=True)
    acc = warpgroup_mma(low, high_s, acc, is_async=True)
    acc = warpgroup_mma(high, low_s, acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def joined_block(L, row, column, level):
    """The part of L [64, 64] that joins blocks of 2^level rows: second's rows, first's columns."""
    is_joint = ((row ^ column) >> level) == 1
    return gl.where(is_joint & (row > column), L, 0.0)


@gluon.jit
def inverse_below_diagonal(L, row, column, high_s, low_s):
    """(I + L)^-1 - I of a strictly lower L [64, 64], blocks of 1, 2 .. 32 rows joined in pairs."""
    E = -joined_block(L, row, column, 0)
    for level in range(1, 6):
        block = joined_block(L, row, column, level)
        product = plus_product(block, block, E, high_s, low_s)
        E = plus_product(E - product, -E, product, high_s, low_s)
    return E


@gluon.jit
def row_norm(sums, eps, NORMALIZE: gl.constexpr):
    """The factors that bring rows to unit length."""
    if NORMALIZE:
        return gl.rsqrt(sums + eps)
    return gl.full([CHUNK], 1.0, gl.float32, layout=gl.SliceLayout(1, COPY64))


@gluon.jit
def load_beta(
    beta, chunk_beta, row, start, length, chunk, h, num_heads, FROM_LOGITS: gl.constexpr
):  # fmt: skip
    """The write strengths of a chunk, 0 behind its end; stored for the other kernels."""
    beta_C = gl.load(beta + (start + row) * num_heads + h, mask=row < length, other=0.0)
    beta_C = beta_C.to(gl.float32)
    if FROM_LOGITS:
        beta_C = sigmoid(beta_C)
    beta_C = gl.where(row < length, gl.maximum(beta_C, MIN_BETA), 0.0)
    gl.store(chunk_beta + chunk * CHUNK + row, beta_C)
    return beta_C


@gluon.jit
def row_factors(q_s, k_s, norms, chunk, scale, eps, STRIPS: gl.constexpr, NORMALIZE: gl.constexpr):
    """What brings rows of q and k to their lengths, and their products <q, k>, in shared memory."""
    sum_qq = gl.zeros([CHUNK], gl.float32, layout=gl.SliceLayout(1, COPY64))
    sum_kk = sum_qq
    sum_qk = sum_qq
    for s in gl.static_range(STRIPS):
        q_CK = q_s.index(s).load(COPY64).to(gl.float32)
        k_CK = k_s.index(s).load(COPY64).to(gl.float32)
        sum_qq += gl.sum(q_CK * q_CK, 1)
        sum_kk += gl.sum(k_CK * k_CK, 1)
        sum_qk += gl.sum(q_CK * k_CK, 1)
    q_norm = row_norm(sum_qq, eps, NORMALIZE)
    k_norm = row_norm(sum_kk, eps, NORMALIZE)
    q_norm_s = gl.allocate_shared_memory(gl.float32, [CHUNK], VECTOR, q_norm * scale)
    k_norm_s = gl.allocate_shared_memory(gl.float32, [CHUNK], VECTOR, k_norm)
    own_s = gl.allocate_shared_memory(gl.float32, [CHUNK], VECTOR, sum_qk * q_norm * k_norm * scale)
    if NORMALIZE:
        place = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, COPY64))
        gl.store(norms + chunk * (2 * CHUNK) + place, q_norm)
        gl.store(norms + chunk * (2 * CHUNK) + CHUNK + place, k_norm)
    return q_norm_s, k_norm_s, own_s


@gluon.jit
def put_queries(aqk, pairs_s, own_s):
    """Store Aqk. Rows of `pairs_s`: 32 queries, 32 keys; columns: 64 of each half of the chunk."""
    i = gl.arange(0, HALF, layout=gl.SliceLayout(1, COPY128))[:, None]
    c = gl.arange(0, 2 * CHUNK, layout=gl.SliceLayout(0, COPY128))[None, :]
    r = i + c // CHUNK * HALF
    c = c % CHUNK
    own_lo = own_s.slice(0, HALF, 0).load(gl.SliceLayout(1, COPY128))[:, None]
    own_hi = own_s.slice(HALF, HALF, 0).load(gl.SliceLayout(1, COPY128))[:, None]
    x = pairs_s.slice(0, HALF, 0).load(COPY128)
    own = gl.where(r < HALF, own_lo, own_hi)
    x = gl.where(r > c, x, gl.where(r == c, own, 0.0))
    gl.store(aqk + r * CHUNK + c, x.to(gl.bfloat16))


@gluon.jit
def key_pairs(pairs_s):
    """Rows of keys as [64, 64]."""
    x = pairs_s.slice(HALF, HALF, 0).load(COPY128).reshape([HALF, 2, CHUNK])
    return gl.convert_layout(x.permute((1, 0, 2)).reshape([CHUNK, CHUNK]), PAIR)


@gluon.jit
def prep_sm90_kernel(
    q, k, g, beta, a_log, dt_bias, table,
    kp, kc, qp, ainv, aqk, gamma, chunk_beta, norms,
    scale, eps, lower_bound, num_heads,
    K: gl.constexpr, FROM_LOGITS: gl.constexpr, NORMALIZE: gl.constexpr,
):  # fmt: skip
    """One chunk of one head; grid (H, M), 4 warps."""
    h = gl.program_id(0)
    m = gl.program_id(1)
    if gl.load(table + m * 3) < 0:
        return
    start = gl.load(table + m * 3 + 1).to(gl.int64)
    length = gl.load(table + m * 3 + 2)
    chunk = m.to(gl.int64) * num_heads + h
    head = (start * num_heads + h) * K
    STRIPS: gl.constexpr = K // STRIP
    COPY_G: gl.constexpr = COPY64 if g.dtype.element_ty == gl.bfloat16 else COPY64F
    TILE_G: gl.constexpr = TILE if g.dtype.element_ty == gl.bfloat16 else TILE32

    q_s = gl.allocate_shared_memory(gl.bfloat16, [STRIPS, CHUNK, STRIP], TILE)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STRIPS, CHUNK, STRIP], TILE)
    g_s = gl.allocate_shared_memory(g.dtype.element_ty, [STRIPS, CHUNK, STRIP], TILE_G)
    for s in gl.static_range(STRIPS):
        copy_tile(k_s.index(s), k + head + s * STRIP, num_heads * K, length, COPY64)
        copy_tile(q_s.index(s), q + head + s * STRIP, num_heads * K, length, COPY64)
        copy_tile(g_s.index(s), g + head + s * STRIP, num_heads * K, length, COPY_G)
    async_copy.commit_group()
    row_s = gl.allocate_shared_memory(gl.bfloat16, [STRIP, CHUNK], TILE)
    far_s = gl.allocate_shared_memory(gl.bfloat16, [STRIP, CHUNK], TILE)
    col_s = gl.allocate_shared_memory(gl.bfloat16, [STRIP, HALF], SQUARE)
    lo_s = gl.allocate_shared_memory(gl.bfloat16, [STRIP, HALF], SQUARE)
    i = gl.arange(0, HALF, layout=SQUARE_ROWS)[:, None]
    up_to = ones_where(i <= gl.arange(0, HALF, layout=SQUARE_COLUMNS)[None, :])

    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, PAIR))
    beta_C = load_beta(beta, chunk_beta, row, start, length, chunk, h, num_heads, FROM_LOGITS)
    rate = 1.0
    if FROM_LOGITS:
        rate = gl.exp(gl.load(a_log + h))

    async_copy.wait_group(0)
    barrier()
    q_norm_s, k_norm_s, own_s = row_factors(q_s, k_s, norms, chunk, scale, eps, STRIPS, NORMALIZE)
    fence_async_shared()
    barrier()

    lo = gl.zeros([CHUNK, HALF], gl.float32, layout=ACC)
    hi = lo
    far = lo
    for s in range(STRIPS):
        channels = s * STRIP + gl.arange(0, STRIP, layout=CHANNELS)
        bias = gl.zeros([STRIP], gl.float32, layout=CHANNELS)
        if FROM_LOGITS:
            bias = gl.load(dt_bias + h * K + channels)
        first0, L0, end0 = half_gate(
            g_s.index(s), 0, up_to, length, bias, rate, lower_bound, FROM_LOGITS
        )
        first1, L1, end1 = half_gate(
            g_s.index(s), 1, up_to, length, bias, rate, lower_bound, FROM_LOGITS
        )
        gl.store(gamma + chunk * K + channels, gl.exp2(first0 + end0 + first1 + end1))

        k_CH = half_tile(k_s.index(s), 0) * k_norm_s.slice(0, HALF, 0).load(TOKENS)[None, :]
        column = k_CH * gl.exp2(-L0 - SHIFT)
        col_s.store(column.to(gl.bfloat16))
        cross = column * gl.exp2(end0 + SHIFT)[:, None]
        lo_s.store(cross.to(gl.bfloat16))
        store_half(g_s.index(s), 0, cross * gl.exp2(first1 + end1)[:, None])
        factor = gl.exp2(L0 + SHIFT)
        to_start = gl.exp2(first0 - SHIFT)[:, None]
        k_CH *= factor
        put_half(row_s, 1, k_CH)
        store_half(k_s.index(s), 0, k_CH * to_start)
        q_CH = half_tile(q_s.index(s), 0) * q_norm_s.slice(0, HALF, 0).load(TOKENS)[None, :]
        q_CH *= factor
        put_half(row_s, 0, q_CH)
        store_half(q_s.index(s), 0, q_CH * to_start)
        fence_async_shared()
        barrier()
        lo = warpgroup_mma(row_s.permute((1, 0)), col_s, lo, is_async=True)

        k_CH = half_tile(k_s.index(s), 1) * k_norm_s.slice(HALF, HALF, 0).load(TOKENS)[None, :]
        column = k_CH * gl.exp2(-L1 - SHIFT)
        store_half(g_s.index(s), 1, column * gl.exp2(end1 + SHIFT)[:, None])
        factor = gl.exp2(L1 + SHIFT)
        to_start = gl.exp2(first1 - SHIFT)[:, None]
        before = gl.exp2(first0 + end0)[:, None]
        lo = warpgroup_mma_wait(0, deps=[lo])
        barrier()
        col_s.store(column.to(gl.bfloat16))
        k_CH *= factor
        put_half(row_s, 1, k_CH)
        k_CH *= to_start
        put_half(far_s, 1, k_CH)
        store_half(k_s.index(s), 1, k_CH * before)
        q_CH = half_tile(q_s.index(s), 1) * q_norm_s.slice(HALF, HALF, 0).load(TOKENS)[None, :]
        q_CH *= factor
        put_half(row_s, 0, q_CH)
        q_CH *= to_start
        put_half(far_s, 0, q_CH)
        store_half(q_s.index(s), 1, q_CH * before)
        fence_async_shared()
        barrier()
        hi = warpgroup_mma(row_s.permute((1, 0)), col_s, hi, is_async=True)
        far = warpgroup_mma(far_s.permute((1, 0)), lo_s, far, is_async=True)
        tile = chunk * CHUNK * K + s * STRIP
        store_tile(qp + tile, q_s.index(s), K, CHUNK, COPY64)
        store_tile(kp + tile, k_s.index(s), K, CHUNK, COPY64)
        store_tile(kc + tile, g_s.index(s), K, CHUNK, COPY_G)
        hi, far = warpgroup_mma_wait(0, deps=[hi, far])
        barrier()

    pairs_s = gl.allocate_shared_memory(gl.float32, [CHUNK, 2 * CHUNK], TILE32)
    pairs_s.slice(0, HALF, 1).store(lo)
    pairs_s.slice(CHUNK, HALF, 1).store(far)
    pairs_s.slice(CHUNK + HALF, HALF, 1).store(hi)
    barrier()
    square = chunk * CHUNK * CHUNK
    put_queries(aqk + square, pairs_s, own_s)
    rows = row[:, None]
    columns = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, PAIR))[None, :]
    pair = gl.where(rows > columns, key_pairs(pairs_s), 0.0)
    pair *= beta_C[:, None]
    high_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], TILE)
    low_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], TILE)
    pair = inverse_below_diagonal(pair, rows, columns, high_s, low_s)
    out_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], TILE)
    barrier()
    out_s.store(pair.to(gl.bfloat16))
    barrier()
    store_tile(ainv + square, out_s, CHUNK, CHUNK, COPY64)
