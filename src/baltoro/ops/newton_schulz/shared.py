"""Constants and the orientation that forms of Newton-Schulz use unchanged."""

from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c; source in the docstring of the room's door
NORM_EPS = 1e-7  # added to the Frobenius norm, as in Moonlight
MAX_GRAM_STEPS = 5  # from one Gram matrix: each step multiplies what rounding left below 0 by a^2


def as_wide(x_BRC: Tensor) -> Tensor:
    """`x`, or its transpose where it has more rows than columns."""
    return x_BRC.mT if x_BRC.shape[1] > x_BRC.shape[2] else x_BRC
