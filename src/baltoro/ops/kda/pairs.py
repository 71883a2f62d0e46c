"""Decayed products of all pairs of rows in a chunk, and their gradients, with bounded exponents.

For rows j < r of a chunk the operator needs sum over channels of a_r k_j exp(g_(j+1) + .. + g_r).
The decay is split as row_r * col_j around an anchor, so that a tile of pairs is one product:

- Two neighbouring blocks of n rows, anchor at the last row of the first: `row` is the decay since
  the second block began, `col` the decay until the first ends. Both are at most 1 for any g <= 0,
  and where one underflows so does the true weight. Doubling n from 1 to C/2 meets every pair once.
- A bounded gate (g >= -5) starts with whole tiles of 16 rows instead: anchor at the first row and
  a factor of 2^54, which keeps all factors and products, also of the masked half, in fp32's range.

No anchor is a later token: a result never depends on the future, not even in its last bit.
"""

import torch
import torch.nn.functional as F

TILE = 16
_SHIFT = 2.0**54
# Smaller factors and products become 0. Such a weight is below rounding beside the weight 1 of a
# row itself, while products of still smaller ones are denormal, which a CPU computes very slowly.
NEGLIGIBLE = 2.0**-54


def pair_products(
    q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, is_bounded: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Strictly lower `Aqk`, `Akk` `[B, C, C]` and the chunk-wide factors `row`, `col` `[B, C, K]`.

    `q`, `k`, `g` are `[B, C, K]`. `row` is the decay from the chunk's start through a row, `col`
    the decay after a row until the chunk's end.
    """
    num_chunks, chunk_size, _ = k.shape
    aqk = k.new_zeros(num_chunks, chunk_size, chunk_size)
    akk = torch.zeros_like(aqk)
    if is_bounded:
        row, col = _tile_factors(g)
        cols = _blocks(k, TILE) * col
        for a, x in ((aqk, q), (akk, k)):
            tile = torch.bmm(_blocks(x, TILE) * row, cols.mT)
            diagonal_blocks(a, TILE).copy_(tile.tril_(-1).view(num_chunks, -1, TILE, TILE))
        row, col = _unshift(row, col, g)
        half = TILE
    else:
        row, col, half = g.exp(), torch.ones_like(g), 1
    while half < chunk_size:
        cols = first_half(k, half) * first_half(col, half)
        factor = second_half(row, half)
        for a, x in ((aqk, q), (akk, k)):
            tile = torch.bmm(second_half(x, half) * factor, cols.mT)
            target = diagonal_blocks(a, 2 * half)[..., half:, :half]
            target.copy_(tile.view(target.shape))
        _lift(row, col, half)
        half *= 2
    return aqk, akk, row, col


def pair_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    daqk: torch.Tensor,
    dakk: torch.Tensor,
    is_bounded: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients `dq`, `dk`, `dg` `[B, C, K]` of `pair_products`' two matrices.

    `daqk` and `dakk` must be zero on and above the diagonal. A pair (j, r) carries the decay of the
    rows j+1 .. r: its part of dg goes to r and the rows before it in the second block, and to the
    rows after j in the first. Nothing is subtracted but inside whole 16-row tiles.
    """
    dq, dk, dg = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(g)
    if is_bounded:
        row, col = _tile_factors(g)
        q_tile, k_tile = _blocks(q, TILE), _blocks(k, TILE)
        daqk_tile = diagonal_blocks(daqk, TILE).flatten(0, 1)
        dakk_tile = diagonal_blocks(dakk, TILE).flatten(0, 1)
        cols = k_tile * col
        tq = torch.bmm(daqk_tile, cols).mul_(row)
        tk = torch.bmm(dakk_tile, cols).mul_(row)
        tw = torch.bmm(daqk_tile.mT, q_tile * row)
        tw = torch.baddbmm(tw, dakk_tile.mT, k_tile * row).mul_(col)
        flow = (q_tile * tq).addcmul_(k_tile, tk - tw)
        torch.matmul(_sum_from(TILE, g), flow, out=_blocks(dg, TILE))
        _blocks(dq, TILE).copy_(tq)
        torch.add(tk, tw, out=_blocks(dk, TILE))
        row, col = _unshift(row, col, g)
        half = TILE
    else:
        row, col, half = g.exp(), torch.ones_like(g), 1
    while half < k.shape[1]:
        q_row, k_row, k_col = second_half(q, half), second_half(k, half), first_half(k, half)
        row_factor, col_factor = second_half(row, half), first_half(col, half)
        daqk_tile = diagonal_blocks(daqk, 2 * half)[..., half:, :half].flatten(0, 1)
        dakk_tile = diagonal_blocks(dakk, 2 * half)[..., half:, :half].flatten(0, 1)
        cols = k_col * col_factor
        tq = torch.bmm(daqk_tile, cols).mul_(row_factor)
        tk = torch.bmm(dakk_tile, cols).mul_(row_factor)
        tw = torch.bmm(daqk_tile.mT, q_row * row_factor)
        tw = torch.baddbmm(tw, dakk_tile.mT, k_row * row_factor).mul_(col_factor)
        second_half(dq, half).add_(tq)
        second_half(dk, half).add_(tk)
        first_half(dk, half).add_(tw)
        read = (q_row * tq).addcmul_(k_row, tk)
        second_half(dg, half).add_(torch.matmul(_sum_from(half, g), read))
        first_half(dg, half).add_(torch.matmul(_sum_before(half, g), tw.mul_(k_col)))
        _lift(row, col, half)
        half *= 2
    return dq, dk, dg


def state_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    dq: torch.Tensor,
    dk_read: torch.Tensor,
    dk_write: torch.Tensor,
) -> torch.Tensor:
    """Part of dg `[B, C, K]` from reading the entering state and writing the leaving one."""
    size = k.shape[1]
    dg = torch.matmul(_sum_from(size, k), (q * dq).addcmul_(k, dk_read))
    return dg.add_(torch.matmul(_sum_before(size, k), k * dk_write))


def diagonal_blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """View `[B, C / size, size, size]` of the square blocks on the diagonal of `x` `[B, C, C]`."""
    num_blocks = x.shape[1] // size
    tiled = x.view(x.shape[0], num_blocks, size, num_blocks, size)
    return tiled.diagonal(dim1=1, dim2=3).movedim(-1, 1)


def first_half(x: torch.Tensor, half: int) -> torch.Tensor:
    """View `[B * C / (2 * half), half, X]`: the first of every two neighbouring blocks of rows."""
    return _blocks(x, 2 * half)[:, :half]


def second_half(x: torch.Tensor, half: int) -> torch.Tensor:
    """View `[B * C / (2 * half), half, X]`: the second of every two neighbouring blocks of rows."""
    return _blocks(x, 2 * half)[:, half:]


def _blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.view(-1, size, x.shape[-1])


def _lift(row: torch.Tensor, col: torch.Tensor, half: int) -> None:
    """From blocks of `half` rows to blocks of twice as many, in place."""
    decay_of_second = second_half(row, half)[:, -1:].clone()
    _flush(second_half(row, half).mul_(first_half(row, half)[:, -1:]))
    _flush(first_half(col, half).mul_(decay_of_second))


def _flush(factor: torch.Tensor) -> None:
    F.threshold(factor, NEGLIGIBLE, 0.0, inplace=True)


def _tile_factors(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Shifted factors `[B * C / 16, 16, K]` of whole tiles, anchored at each tile's first row.

    Products of decays, not exponentials of sums: those lose digits with the size of the sum.
    """
    row, half = g.exp(), 1
    while half < TILE:
        second_half(row, half).mul_(first_half(row, half)[:, -1:])
        half *= 2
    row = _blocks(row, TILE)
    row.mul_(row[:, :1].reciprocal().mul_(_SHIFT))
    return row, row.reciprocal()


def _unshift(
    row: torch.Tensor, col: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tile factors turned, in place, into those of a block of 16 rows; `[B, C, K]`."""
    last = row[:, -1:].clone()
    _flush(row.mul_(_blocks(g, TILE)[:, :1].exp().div_(_SHIFT)))
    _flush(col.mul_(last))
    return row.view(g.shape), col.view(g.shape)


def _sum_from(size: int, like: torch.Tensor) -> torch.Tensor:
    """Matrix that sums each row with the rows after it."""
    return torch.ones(size, size, dtype=like.dtype, device=like.device).triu_()


def _sum_before(size: int, like: torch.Tensor) -> torch.Tensor:
    """Matrix that sums the rows strictly before each row."""
    return torch.ones(size, size, dtype=like.dtype, device=like.device).tril_(-1)
