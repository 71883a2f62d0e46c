"""Constants and the orientation that forms of Newton-Schulz use unchanged."""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c; source in the docstring of the room's door
NORM_EPS = 1e-7  # added to the Frobenius norm, as in Moonlight
SQUARE_SIDE = 128  # of the tiles of a symmetric matrix in the loop on a GPU
MAX_GRAM_STEPS = 5  # from one Gram matrix: each step multiplies what rounding left below 0 by a^2


def as_wide(x_BRC: Tensor) -> Tensor:
    """`x`, or its transpose where it has more rows than columns."""
    return x_BRC.mT if x_BRC.shape[1] > x_BRC.shape[2] else x_BRC


def normed(x_BRC: Tensor, norm_dtype: torch.dtype) -> Tensor:
    """`x` over the Frobenius norms of its matrices, taken in `norm_dtype`."""
    norm_B11 = torch.linalg.vector_norm(x_BRC, dim=(1, 2), keepdim=True, dtype=norm_dtype)
    return x_BRC / (norm_B11 + NORM_EPS)
