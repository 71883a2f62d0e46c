"""Absorbed attention over pages for Hopper: a tile of latents is keys and values at once.

Tokens and latent columns are the rows of every product of warp groups, heads their width:

    s = kv q'    p = 2^(s - max)    out' <- out' 2^(old max - max) + kv' p

so few heads waste nothing, and a tile is copied once, by the copy engine, in chunks of columns.

The tiles of all sequences stand in one line, of which each program takes an equal part. Parts of a
sequence that lies in several programs are means and the logarithms of their sums, to be weighed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
LOWEST: gl.constexpr = gl.constexpr(-1e30)  # of a running maximum: finite, so differences are
SPARE: gl.constexpr = gl.constexpr(3)  # tiles; it costs as much to walk two parts and merge them
SLACK: gl.constexpr = gl.constexpr(8.0)  # probabilities stay below 2^8
TILE: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
CHUNK: gl.constexpr = gl.constexpr(64)  # columns of a swizzled row of shared memory


@gluon.jit
def at(tiles, i):
    """Tile i of an array, its address computed here and now.

    Addresses known in advance are kept in uniform registers; when those run out, the ptxas of CUDA
    12.8 reads the wrong one.
    """
    zero = gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    return tiles.index(zero + i)


@gluon.jit
def with_value(values, k: gl.constexpr, value):
    """The tuple with `value` in place k, or behind all."""
    new = (value,)
    return values[:k] + new + values[k + 1 :]


@gluon.jit
def copy_columns(
    smem, rows, table, position, stop, column, bar, page_rows, page_size, BOX: gl.constexpr
):  # fmt: skip
    """Start the copy of some columns of a tile, from `column` on."""
    BN: gl.constexpr = smem.shape[0]
    for piece in gl.static_range(BN // BOX):
        token = position + piece * BOX
        page = gl.load(table + token // page_size, mask=token < stop, other=0)
        row = page * page_rows + token % page_size
        for c in gl.static_range(smem.shape[1] // CHUNK):
            chunk = smem.slice(c * CHUNK, CHUNK, 1)
            tma.async_copy_global_to_shared(
                rows, [row, column + c * CHUNK], bar,
                chunk if BOX == BN else chunk.slice(piece * BOX, BOX),
            )  # fmt: skip


@gluon.jit
def copy_part(
    k: gl.constexpr, kv_s, tail_s, bars, rows, table, position, stop, stage, page_rows, page_size,
    PARTS: gl.constexpr, HAS_TAIL: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Start the copies of part k of a tile into a stage; the tail goes with the last part."""
    LAST: gl.constexpr = len(PARTS) - 1
    BN: gl.constexpr = tail_s.shape[1]
    column = 0
    for j in gl.static_range(k):
        column += PARTS[j]
    bar = at(bars, stage * (LAST + 1) + k)
    mbarrier.expect(bar, BN * (PARTS[k] + CHUNK if HAS_TAIL and k == LAST else PARTS[k]) * 2)
    copy_columns(
        at(kv_s[k], stage), rows, table, position, stop, column, bar, page_rows, page_size, BOX
    )
    if HAS_TAIL and k == LAST:
        copy_columns(
            at(tail_s, stage), rows, table, position, stop, column + PARTS[k], bar, page_rows,
            page_size, BOX,
        )  # fmt: skip


@gluon.jit
def copy_query(
    q_s, q_tail_s, queries, row, bar, PARTS: gl.constexpr, HAS_TAIL: gl.constexpr
):  # fmt: skip
    """Start the copy of a block of queries, from `row` on."""
    H: gl.constexpr = q_tail_s.shape[1]
    WIDTH: gl.constexpr = sum_of(PARTS)
    mbarrier.expect(bar, H * (WIDTH + CHUNK if HAS_TAIL else WIDTH) * 2)
    column = 0
    for k in gl.static_range(len(PARTS)):
        for c in gl.static_range(PARTS[k] // CHUNK):
            tma.async_copy_global_to_shared(
                queries, [row, column], bar, q_s[k].index(0).slice(c * CHUNK, CHUNK, 1)
            )
            column += CHUNK
    if HAS_TAIL:
        tma.async_copy_global_to_shared(queries, [row, WIDTH], bar, q_tail_s.index(0))


@gluon.jit
def copy_ahead(
    kv_s, tail_s, bars, rows, table, start, stop, counter, page_rows, page_size,
    PARTS: gl.constexpr, HAS_TAIL: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start the copies of the first tiles of a range, one for each stage."""
    BN: gl.constexpr = tail_s.shape[1]
    for j in gl.static_range(STAGES):
        if start + j * BN < stop:
            for k in gl.static_range(len(PARTS)):
                copy_part(
                    k, kv_s, tail_s, bars, rows, table, start + j * BN, stop,
                    (counter + j) % STAGES, page_rows, page_size, PARTS, HAS_TAIL, BOX,
                )  # fmt: skip


@gluon.jit
def clear_rows(smem, count, layout: gl.constexpr):
    """Zeros behind the first `count` rows: a probability of 0 does not hide a NaN."""
    row = gl.arange(0, smem.shape[0], layout=gl.SliceLayout(1, layout))
    for c in gl.static_range(smem.shape[1] // CHUNK):
        chunk = smem.slice(c * CHUNK, CHUNK, 1)
        x = chunk.load(layout)
        chunk.store(gl.where((row < count)[:, None], x, gl.zeros_like(x)))


@gluon.jit
def store_mean(
    place, target, acc, weight, is_row, PARTS: gl.constexpr, R: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Store acc times `weight` in the rows `target` of R columns."""
    start = 0
    for k in gl.static_range(len(PARTS)):
        column = start + gl.arange(0, PARTS[k], layout=gl.SliceLayout(1, layout))
        gl.store(
            place + target[None, :] * R + column[:, None],
            (acc[k] * weight[None, :]).to(place.dtype.element_ty),
            mask=is_row[None, :] & (column < R)[:, None],
        )
        start += PARTS[k]


@gluon.jit
def zeros(rows: gl.constexpr, columns: gl.constexpr, layout: gl.constexpr):
    return gl.zeros([rows, columns], gl.float32, layout)


@gluon.constexpr_function
def sum_of(widths):
    return sum(widths)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def wait_all(products, outstanding: gl.constexpr):
    """The products, of which all but the last `outstanding` have ended."""
    if len(products) == 1:
        return (warpgroup_mma_wait(outstanding, deps=[products[0]]),)
    else:
        return warpgroup_mma_wait(outstanding, deps=products)


@gluon.jit
def lane_sums(p, NUM_WARPS: gl.constexpr):
    """Sums of p [BN, H] over the tokens that a lane holds: they need no exchange."""
    return gl.sum(p.reshape([NUM_WARPS, 2, 8, p.shape[1]]), 1)


@gluon.jit
def per_lane(x, BN: gl.constexpr, NUM_WARPS: gl.constexpr, layout: gl.constexpr):
    """x [H] at the places of `lane_sums`."""
    rows = gl.zeros([BN, x.shape[0]], gl.float32, layout) + x[None, :]
    return gl.max(rows.reshape([NUM_WARPS, 2, 8, x.shape[0]]), 1)


@gluon.jit
def raised(highest, s, log2_scale):
    """The maximum that probabilities refer to: the old one, unless a score lies far above."""
    local = gl.max(s, 0) * log2_scale
    return gl.where(local > highest + SLACK, local, highest)


@gluon.jit
def rescaled(acc, total, shrink, BN: gl.constexpr, NUM_WARPS: gl.constexpr, layout: gl.constexpr):
    """acc and total times `shrink`, which seldom is other than 1."""
    if gl.min(shrink, 0) < 1.0:
        total = total * per_lane(shrink, BN, NUM_WARPS, layout)
        for c in gl.static_range(len(acc)):
            acc = with_value(acc, c, acc[c] * shrink[None, :])
    return acc, total


@gluon.jit
def masked(s, tokens, seen):
    return gl.where(tokens[:, None] < seen[None, :], s, float("-inf"))


@gluon.jit
def rows_of(cu_seqlens, n, IS_ONE: gl.constexpr):
    """First token of sequence n and how many it has."""
    if IS_ONE:
        first = n.to(gl.int64)
        num_tokens = n - n + 1
    else:
        first = gl.load(cu_seqlens + n).to(gl.int64)
        num_tokens = (gl.load(cu_seqlens + n + 1) - first).to(gl.int32)
    return first, num_tokens


@gluon.jit
def walk_of(
    lengths, cu_seqlens, num_sequences, first_row, num_heads,
    BN: gl.constexpr, BS: gl.constexpr, IS_ONE: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """The program's first sequence, the tile at which that begins, and the tiles to walk."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    program = gl.program_id(1)
    sequence = gl.arange(0, BS, layout=LINE)
    is_sequence = sequence < num_sequences
    if not IS_ONE:
        counts = gl.load(cu_seqlens + sequence + 1, mask=is_sequence, other=0)
        counts -= gl.load(cu_seqlens + sequence, mask=is_sequence, other=0)
        is_sequence = is_sequence & (first_row < counts * num_heads)
    tiles = (gl.load(lengths + sequence, mask=is_sequence, other=0) + (BN - 1)) // BN
    ends = gl.associative_scan(tiles, 0, add)
    num_tiles = gl.max(ends, 0)
    share = gl.cdiv(num_tiles, gl.num_programs(1))
    low = gl.minimum(program * share, num_tiles)
    high = gl.minimum(low + share, num_tiles)
    if (num_sequences <= gl.num_programs(1)) & (gl.max(tiles, 0) <= share + SPARE):
        high = gl.sum(gl.where(sequence == program, ends, 0), 0)
        low = high - gl.sum(gl.where(sequence == program, tiles, 0), 0)
    n = gl.sum((ends <= low).to(gl.int32), 0)
    begin = gl.max(gl.where(ends <= low, ends, 0), 0)
    return n, gl.where(low < high, begin, high), low, high


@gluon.jit(do_not_specialize=[
    "num_sequences", "table_stride", "page_size", "num_heads", "page_rows", "block_rows"
])  # fmt: skip
def walk_sm90_kernel(
    queries, rows, page_table, lengths, cu_seqlens, out, parts, sums,
    num_sequences, page_rows, table_stride, page_size, num_heads, block_rows, log2_scale,
    R: gl.constexpr, W: gl.constexpr, H: gl.constexpr, BN: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr, BS: gl.constexpr,
    IS_ONE: gl.constexpr, NUM_WARPS: gl.constexpr, P_IN_TAIL: gl.constexpr,
):  # fmt: skip
    """Grid (row blocks, programs)."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, H, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NUM_WARPS, 1], [1, 0])
    NUM_PARTS: gl.constexpr = len(PARTS)
    HAS_TAIL: gl.constexpr = sum_of(PARTS) < W
    dtype: gl.constexpr = rows.dtype
    program = gl.program_id(1)
    first_row = gl.program_id(0) * block_rows

    kv_s = (gl.allocate_shared_memory(dtype, [STAGES, BN, PARTS[0]], TILE),)
    q_s = (gl.allocate_shared_memory(dtype, [1, H, PARTS[0]], TILE),)
    for k in gl.static_range(1, NUM_PARTS):
        kv_s = with_value(kv_s, k, gl.allocate_shared_memory(dtype, [STAGES, BN, PARTS[k]], TILE))
        q_s = with_value(q_s, k, gl.allocate_shared_memory(dtype, [1, H, PARTS[k]], TILE))
    if HAS_TAIL:
        tail_s = gl.allocate_shared_memory(dtype, [STAGES, BN, CHUNK], TILE)
        q_tail_s = gl.allocate_shared_memory(dtype, [1, H, CHUNK], TILE)
    else:
        tail_s = kv_s[0]
        q_tail_s = q_s[0]
    if P_IN_TAIL:
        p_s = tail_s._reinterpret(dtype, [STAGES, H, BN], TILE)
    else:
        p_s = gl.allocate_shared_memory(dtype, [1, H, BN], TILE)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES * NUM_PARTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES * NUM_PARTS):
        mbarrier.init(bars.index(i), count=1)
    q_bar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(q_bar, count=1)

    n, begin, low, high = walk_of(
        lengths, cu_seqlens, num_sequences, first_row, num_heads, BN, BS, IS_ONE, NUM_WARPS
    )
    barrier()
    row = gl.arange(0, H, layout=gl.SliceLayout(0, ACC))
    token = gl.arange(0, BN, layout=gl.SliceLayout(1, ACC))
    counter = 0
    segment = 0
    length = 0
    start = 0
    stop = 0
    if low < high:
        length = gl.load(lengths + n)
        start = (low - begin) * BN
        stop = gl.minimum(length, (high - begin) * BN)
        copy_ahead(
            kv_s, tail_s, bars, rows, page_table + n.to(gl.int64) * table_stride, start, stop,
            counter, page_rows, page_size, PARTS, HAS_TAIL, BOX, STAGES,
        )  # fmt: skip
    while begin < high:
        table = page_table + n.to(gl.int64) * table_stride
        first, num_tokens = rows_of(cu_seqlens, n, IS_ONE)
        num_rows = num_tokens * num_heads
        q_place = (first * num_heads).to(gl.int32) + first_row
        copy_query(q_s, q_tail_s, queries, q_place, q_bar, PARTS, HAS_TAIL)
        lowest_seen = length - num_tokens + 1  # tokens that rows of the first query see
        highest = gl.full([H], LOWEST, gl.float32, gl.SliceLayout(0, ACC))
        total = lane_sums(gl.zeros([BN, H], gl.float32, ACC), NUM_WARPS)
        acc = ()
        for k in gl.static_range(NUM_PARTS):
            acc = with_value(acc, k, zeros(PARTS[k], H, ACC))
        mbarrier.wait(q_bar, segment & 1)
        segment += 1
        for position in range(start, stop, BN):
            stage = counter % STAGES
            phase = (counter // STAGES) & 1
            counter += 1
            s = gl.zeros([BN, H], gl.float32, ACC)
            for k in gl.static_range(NUM_PARTS):
                mbarrier.wait(at(bars, stage * NUM_PARTS + k), phase)
                s = warpgroup_mma(
                    at(kv_s[k], stage), at(q_s[k], 0).permute((1, 0)), s, use_acc=k > 0,
                    is_async=True,
                )  # fmt: skip
            if HAS_TAIL:
                s = warpgroup_mma(
                    at(tail_s, stage), at(q_tail_s, 0).permute((1, 0)), s, is_async=True
                )
            s = warpgroup_mma_wait(0, deps=[s])
            if position + BN > gl.minimum(lowest_seen, stop):
                seen = gl.minimum(lowest_seen + (first_row + row) // num_heads, stop)
                s = masked(s, position + token, seen)
                if position + BN > stop:
                    for k in gl.static_range(NUM_PARTS):
                        clear_rows(at(kv_s[k], stage), stop - position, COPY)
            higher = raised(highest, s, log2_scale)
            p = gl.exp2(s * log2_scale - higher[None, :])
            shrink = gl.exp2(highest - higher)
            highest = higher
            acc, total = rescaled(acc, total, shrink, BN, NUM_WARPS, ACC)
            total += lane_sums(p, NUM_WARPS)
            slot = stage if P_IN_TAIL else 0
            if P_IN_TAIL:
                barrier()
            at(p_s, slot).permute((1, 0)).store(p.to(dtype))
            fence_async_shared()
            barrier()
            for k in gl.static_range(NUM_PARTS):
                product = warpgroup_mma(
                    at(kv_s[k], stage).permute((1, 0)), at(p_s, slot).permute((1, 0)), acc[k],
                    is_async=True,
                )  # fmt: skip
                acc = with_value(acc, k, product)
            ahead = position + STAGES * BN
            for k in gl.static_range(NUM_PARTS):
                acc = wait_all(acc, NUM_PARTS - 1 - k)
                barrier()
                if ahead < stop:
                    copy_part(
                        k, kv_s, tail_s, bars, rows, table, ahead, stop, stage, page_rows,
                        page_size, PARTS, HAS_TAIL, BOX,
                    )  # fmt: skip
        is_whole = (start == 0) & (stop == length)
        part = 2 * program + gl.where(start == 0, 1, 0)
        begin = begin + gl.cdiv(length, BN)
        n = n + 1
        start = 0
        if begin < high:
            length = gl.load(lengths + n)
            if not IS_ONE:
                _, next_tokens = rows_of(cu_seqlens, n, IS_ONE)
                length = gl.where(first_row < next_tokens * num_heads, length, 0)
            stop = gl.minimum(length, (high - begin) * BN)
            copy_ahead(
                kv_s, tail_s, bars, rows, page_table + n.to(gl.int64) * table_stride, start, stop,
                counter, page_rows, page_size, PARTS, HAS_TAIL, BOX, STAGES,
            )  # fmt: skip
        whole = gl.convert_layout(gl.sum(gl.sum(total, 1), 0), gl.SliceLayout(0, ACC))
        has = whole > 0.0
        weight = gl.where(has, 1.0 / gl.where(has, whole, 1.0), 0.0)
        is_row = (row < block_rows) & (first_row + row < num_rows)
        if is_whole:
            target = first * num_heads + first_row + row
            store_mean(out, target, acc, weight, is_row, PARTS, R, ACC)
        else:
            target = (part.to(gl.int64) * gl.num_programs(0) + gl.program_id(0)) * block_rows + row
            store_mean(parts, target, acc, weight, is_row & has, PARTS, R, ACC)
            L = gl.where(has, highest + gl.log2(gl.where(has, whole, 1.0)), float("-inf"))
            gl.store(sums + target, L, mask=is_row)
