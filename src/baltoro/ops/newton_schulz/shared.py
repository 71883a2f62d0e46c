"""Constants that every form of Newton-Schulz uses unchanged."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c; source in the docstring of the room's door
NORM_EPS = 1e-7  # added to the Frobenius norm, as in Moonlight
