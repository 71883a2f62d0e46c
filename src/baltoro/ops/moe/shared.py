"""What both forms of the experts take: the gated unit inside an expert."""

from typing import Literal, NamedTuple


class Glu(NamedTuple):
    """The gated unit of an expert; the caps belong to `situ` and are ignored by `silu`."""

    activation: Literal["situ", "silu"]
    beta: float
    linear_beta: float | None
