"""The first kernel for Hopper (bf16, K of 64 or 128): `prep.py` with its layouts chosen.

One warpgroup owns a chunk of a head. Strips of 64 channels are decayed channel-major and put down
in shared memory as operands of the [64, 64] products. Pairs inside a half and pairs across the
halves have accumulators of their own, because a masked pair may overflow. The inverse is joined
level by level with tf32 products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .tiles_sm90 import (
    ACC,
    CHANNELS,
    CHUNK,
    COPY64,
    COPY64F,
    HALF,
    PAIR,
    SHIFT,
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
    ones_where,
    sigmoid,
    store_half,
    store_tile,
)

PAIR_TF32: gl.constexpr = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 8])
)
MIN_BETA: gl.constexpr = gl.constexpr(2.0**-40)


@gluon.jit
def put_half(smem, h: gl.constexpr, value):
    """Write the columns of one half of an operand [64 channels, 64 tokens]."""
    smem.slice(h * HALF, HALF, 1).store(value.to(gl.bfloat16))


@gluon.jit
def tf32(x):
    """x rounded to the 10 bits that a tf32 product keeps."""
    bits = x.to(gl.int32, bitcast=True)
    return ((bits + 0x1000) & -0x2000).to(gl.float32, bitcast=True)


@gluon.jit
def square_product(a_s, b_s, a, b):
    """a [64, 64] times b [64, 64] in tf32, through two buffers; b's holds it transposed."""
    barrier()
    a_s.store(tf32(a))
    b_s.permute((1, 0)).store(tf32(b))
    fence_async_shared()
    barrier()
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, layout=PAIR_TF32)
    product = warpgroup_mma(a_s, b_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    product = warpgroup_mma_wait(0, deps=[product])
    return gl.convert_layout(product, PAIR, assert_trivial=True)


@gluon.jit
def joined_block(L, row, column, B: gl.constexpr):
    """The part of L [64, 64] that joins blocks of B rows: second's rows, first's columns."""
    is_joint = (row // (2 * B) == column // (2 * B)) & ((row // B) % 2 == 1)
    return gl.where(is_joint & ((column // B) % 2 == 0), L, 0.0)


@gluon.jit
def inverse_below_diagonal(L, row, column, a_s, b_s):
    """(I + L)^-1 - I of a strictly lower L [64, 64], blocks of 1, 2 .. 32 rows joined in pairs."""
    E = -joined_block(L, row, column, 1)
    for level in gl.static_range(1, 6):
        block = joined_block(L, row, column, 2**level)
        product = block + square_product(a_s, b_s, block, E)
        E -= product + square_product(a_s, b_s, E, product)
    return E


@gluon.jit
def row_norm(sums, eps, NORMALIZE: gl.constexpr):
    """The factors that bring rows to unit length."""
    if NORMALIZE:
        return gl.rsqrt(sums + eps)
    return gl.full([CHUNK], 1.0, gl.float32, layout=gl.SliceLayout(1, COPY64))


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
    row_q = gl.allocate_shared_memory(gl.bfloat16, [STRIP, CHUNK], TILE)
    row_k = gl.allocate_shared_memory(gl.bfloat16, [STRIP, CHUNK], TILE)
    col_k = gl.allocate_shared_memory(gl.bfloat16, [STRIP, CHUNK], TILE)
    hi_q = gl.allocate_shared_memory(gl.bfloat16, [STRIP, CHUNK], TILE)
    hi_k = gl.allocate_shared_memory(gl.bfloat16, [STRIP, CHUNK], TILE)
    lo_k = gl.allocate_shared_memory(gl.bfloat16, [STRIP, CHUNK], TILE)
    nothing = gl.zeros([STRIP, HALF], gl.float32, layout=ACC)
    put_half(hi_q, 0, nothing)
    put_half(hi_k, 0, nothing)
    put_half(lo_k, 1, nothing)
    i = gl.arange(0, HALF, layout=SQUARE_ROWS)[:, None]
    up_to = ones_where(i <= gl.arange(0, HALF, layout=SQUARE_COLUMNS)[None, :])

    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, PAIR))
    beta_C = gl.load(beta + (start + row) * num_heads + h, mask=row < length, other=0.0)
    beta_C = beta_C.to(gl.float32)
    if FROM_LOGITS:
        beta_C = sigmoid(beta_C)
    beta_C = gl.where(row < length, gl.maximum(beta_C, MIN_BETA), 0.0)
    gl.store(chunk_beta + chunk * CHUNK + row, beta_C)
    rate = 1.0
    if FROM_LOGITS:
        rate = gl.exp(gl.load(a_log + h))

    async_copy.wait_group(0)
    barrier()
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
    fence_async_shared()
    barrier()

    near_q = gl.zeros([CHUNK, CHUNK], gl.float32, layout=PAIR)
    near_k = near_q
    far_q = near_q
    far_k = near_q
    for s in gl.static_range(STRIPS):
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
        cross = k_CH * gl.exp2(end0[:, None] - L0)
        put_half(lo_k, 0, cross)
        store_half(g_s.index(s), 0, cross * gl.exp2(first1 + end1)[:, None])
        put_half(col_k, 0, k_CH * gl.exp2(-L0 - SHIFT))
        factor = gl.exp2(L0 + SHIFT)
        put_half(row_k, 0, k_CH * factor)
        decay = gl.exp2(L0 + first0[:, None])
        store_half(k_s.index(s), 0, k_CH * decay)
        q_CH = half_tile(q_s.index(s), 0) * q_norm_s.slice(0, HALF, 0).load(TOKENS)[None, :]
        put_half(row_q, 0, q_CH * factor)
        store_half(q_s.index(s), 0, q_CH * decay)

        k_CH = half_tile(k_s.index(s), 1) * k_norm_s.slice(HALF, HALF, 0).load(TOKENS)[None, :]
        store_half(g_s.index(s), 1, k_CH * gl.exp2(end1[:, None] - L1))
        put_half(col_k, 1, k_CH * gl.exp2(-L1 - SHIFT))
        factor = gl.exp2(L1 + SHIFT)
        put_half(row_k, 1, k_CH * factor)
        decay = gl.exp2(L1 + first1[:, None])
        cross = k_CH * decay
        put_half(hi_k, 1, cross)
        before = gl.exp2(first0 + end0)[:, None]
        store_half(k_s.index(s), 1, cross * before)
        q_CH = half_tile(q_s.index(s), 1) * q_norm_s.slice(HALF, HALF, 0).load(TOKENS)[None, :]
        put_half(row_q, 1, q_CH * factor)
        cross = q_CH * decay
        put_half(hi_q, 1, cross)
        store_half(q_s.index(s), 1, cross * before)
        fence_async_shared()
        barrier()

        near_q = warpgroup_mma(row_q.permute((1, 0)), col_k, near_q, is_async=True)
        near_k = warpgroup_mma(row_k.permute((1, 0)), col_k, near_k, is_async=True)
        far_q = warpgroup_mma(hi_q.permute((1, 0)), lo_k, far_q, is_async=True)
        far_k = warpgroup_mma(hi_k.permute((1, 0)), lo_k, far_k, is_async=True)
        tile = chunk * CHUNK * K + s * STRIP
        store_tile(qp + tile, q_s.index(s), K, CHUNK, COPY64)
        store_tile(kp + tile, k_s.index(s), K, CHUNK, COPY64)
        store_tile(kc + tile, g_s.index(s), K, CHUNK, COPY_G)
        near_q, near_k, far_q, far_k = warpgroup_mma_wait(0, deps=[near_q, near_k, far_q, far_k])
        barrier()

    rows = row[:, None]
    columns = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, PAIR))[None, :]
    is_near = (rows // HALF == columns // HALF) & (rows > columns)
    own = own_s.load(gl.SliceLayout(1, PAIR))
    pair = gl.where(is_near, near_q, far_q)
    pair = gl.where(rows == columns, own[:, None], pair)
    out_s = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], TILE, pair.to(gl.bfloat16))
    square = chunk * CHUNK * CHUNK
    barrier()
    store_tile(aqk + square, out_s, CHUNK, CHUNK, COPY64)
    pair = gl.where(is_near, near_k, far_k) * beta_C[:, None]
    a_s = gl.allocate_shared_memory(gl.float32, [CHUNK, CHUNK], TILE32)
    b_s = gl.allocate_shared_memory(gl.float32, [CHUNK, CHUNK], TILE32)
    pair = inverse_below_diagonal(pair, rows, columns, a_s, b_s)
    barrier()
    out_s.store(pair.to(gl.bfloat16))
    barrier()
    store_tile(ainv + square, out_s, CHUNK, CHUNK, COPY64)
