"""Pairs of a chunk's tokens in the gradients for Hopper: dA as six squares, and what meets it.

Pairs inside the first half, inside the second, and across; of each kind one square from the queries
and one from the keys, in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .tiles_sm90 import CHUNK, HALF, ONES, PAIR, SHIFT, SQUARE, again, barrier, left, rounded, times

# places of the tiles of dA: pairs inside the first and second half, and across
NEAR_Q0: gl.constexpr = gl.constexpr(0)
NEAR_K0: gl.constexpr = gl.constexpr(1)
NEAR_Q1: gl.constexpr = gl.constexpr(2)
NEAR_K1: gl.constexpr = gl.constexpr(3)
FAR_Q: gl.constexpr = gl.constexpr(4)
FAR_K: gl.constexpr = gl.constexpr(5)


@gluon.jit
def value_pairs(do_s, dv_s, v_new_s, inverse_beta, row, column):
    """dA from values: its diagonals [64], the second over beta, and what is below them [64, 64]."""
    zero = gl.zeros([CHUNK, CHUNK], gl.float32, layout=PAIR)
    v_new_t = v_new_s.permute((1, 0))
    pq = warpgroup_mma(do_s, v_new_t, zero, use_acc=False, is_async=True)
    pk = warpgroup_mma(dv_s, v_new_t, zero, use_acc=False, is_async=True)
    pq, pk = warpgroup_mma_wait(0, deps=[pq, pk])
    is_same = row[:, None] == column
    is_below = row[:, None] > column
    own = gl.sum(gl.where(is_same, pq, 0.0), 1)
    write = gl.sum(gl.where(is_same, pk, 0.0), 1) * inverse_beta
    below_q = gl.where(is_below, pq, 0.0).to(gl.bfloat16)
    below_k = gl.where(is_below, -pk, 0.0).to(gl.bfloat16)
    return own, write, below_q, below_k


@gluon.jit
def put_tile(tiles, i: gl.constexpr, square, r: gl.constexpr, c: gl.constexpr):
    """Copy one 32 x 32 tile of `square` to place i."""
    tile = square.slice(r * HALF, HALF, 0).slice(c * HALF, HALF, 1).load(ONES)
    tiles.index(i).store(tile)


@gluon.jit
def put_tiles(below_q, below_k):
    """The squares that dA is made of, in shared memory."""
    pair_q = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], SQUARE, below_q)
    pair_k = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], SQUARE, below_k)
    barrier()
    tiles = gl.allocate_shared_memory(gl.bfloat16, [6, HALF, HALF], SQUARE)
    put_tile(tiles, NEAR_Q0, pair_q, 0, 0)
    put_tile(tiles, NEAR_K0, pair_k, 0, 0)
    put_tile(tiles, NEAR_Q1, pair_q, 1, 1)
    put_tile(tiles, NEAR_K1, pair_k, 1, 1)
    put_tile(tiles, FAR_Q, pair_q, 1, 0)
    put_tile(tiles, FAR_K, pair_k, 1, 0)
    return tiles


@gluon.jit
def place(tiles, i: gl.constexpr):
    """Tile i of an array, its address computed here and now.

    Addresses known in advance are kept in uniform registers; when those run out, the ptxas of CUDA
    12.8 reads the wrong one.
    """
    zero = gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    return tiles.index(zero + i)


@gluon.jit
def add_near_pairs(L, q, k, own, tiles, Q: gl.constexpr, dq, dk, reads):
    """Add the pairs inside one half to dq, dk and what its tokens read (less what they write)."""
    lhs = left(rounded(k * gl.exp2(-L - SHIFT)))
    t = warpgroup_mma_wait(0, deps=[times(lhs, place(tiles, Q).permute((1, 0)))])
    row = gl.exp2(L + SHIFT)
    row_q = rounded(q * row)
    dq += row * t + own * k
    reads += row_q * t
    t = warpgroup_mma_wait(0, deps=[times(lhs, place(tiles, Q + 1).permute((1, 0)))])
    row_k = rounded(k * row)
    dk += row * t + own * q
    reads += row_k * t
    t = times(left(row_q), place(tiles, Q))
    t = warpgroup_mma(left(row_k), place(tiles, Q + 1), t, is_async=True)
    t = warpgroup_mma_wait(0, deps=[t])
    col = gl.exp2(-again(L) - SHIFT)
    return dq, dk + col * t, reads - rounded(k * col) * t


@gluon.jit
def add_far_reads(tiles, lo_k, hi_q, hi_k, cross, written, dq, dk, reads):
    """Add to dq, dk and reads of the second half its pairs with the first; to dk also `written`."""
    lhs = left(lo_k)
    t = warpgroup_mma_wait(0, deps=[times(lhs, place(tiles, FAR_Q).permute((1, 0)))])
    dq += cross * t
    reads += hi_q * t
    t = warpgroup_mma_wait(0, deps=[times(lhs, place(tiles, FAR_K).permute((1, 0)))])
    return dq, dk + (cross * t + written), reads + hi_k * t


@gluon.jit
def far_writes(tiles, hi_q, hi_k):
    """What the first half's keys meet of the second's queries and keys."""
    lhs_q = left(hi_q)
    lhs_k = left(hi_k)
    t = times(lhs_q, place(tiles, FAR_Q))
    t = warpgroup_mma(lhs_k, place(tiles, FAR_K), t, is_async=True)
    return warpgroup_mma_wait(0, deps=[t])
