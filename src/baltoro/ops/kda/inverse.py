"""Inverse of unit lower triangular matrices, by substitution and exact merges.

The entries of the inverse stay in [-1, 1] for KDA, but powers of the matrix do not (near-equal keys
reach 3e17 over 64 rows), so there is no Neumann series here: 16-row tiles by substitution, then
A21 = -A22 L21 A11 from 16 to 32 rows, and so on.
"""

import torch
import torch.nn.functional as F

from .pairs import NEGLIGIBLE, TILE, diagonal_blocks


def unit_lower_inverse(lower: torch.Tensor) -> torch.Tensor:
    """`(I + lower)^-1` for strictly lower `lower` `[B, C, C]`; C is a power of two from 16."""
    size = lower.shape[-1]
    inverse = torch.zeros_like(lower)
    tiles = diagonal_blocks(lower, TILE)
    eye = torch.eye(TILE, dtype=lower.dtype, device=lower.device)
    solved = torch.linalg.solve_triangular(
        tiles, eye.expand(tiles.shape), upper=False, unitriangular=True
    )
    diagonal_blocks(inverse, TILE).copy_(F.hardshrink(solved, NEGLIGIBLE))
    half = TILE
    while half < size:
        block = diagonal_blocks(inverse, 2 * half)
        below = diagonal_blocks(lower, 2 * half)[..., half:, :half]
        merged = F.hardshrink(torch.matmul(below, block[..., :half, :half]), NEGLIGIBLE)
        merged = torch.matmul(block[..., half:, half:], merged).neg_()
        block[..., half:, :half].copy_(F.hardshrink(merged, NEGLIGIBLE))
        half *= 2
    return inverse
