"""Numbers in (0, 1) by splitmix64, the same on every device."""

import torch
from torch import Tensor

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64; the increment of splitmix64
MIX = ((30, -4658895280553007687), (27, -7723592293110705685))  # its shifts and multipliers


def uniform(seeds_N: Tensor, steps_N: Tensor, width: int) -> Tensor:
    """`[N, W]` fp64 in (0, 1): of each row's seed and step, int64 `[N]`, and of the token."""
    start_N = row_start(seeds_N, steps_N)
    tokens_W = torch.arange(1, width + 1, device=seeds_N.device)
    bits_NW = _shifted(_mixed(start_N[:, None] + tokens_W * GOLDEN), 11)
    return (bits_NW.double() + 0.5) * 2.0**-53


def row_start(seeds_N: Tensor, steps_N: Tensor) -> Tensor:
    """Where the numbers of each row begin, int64 `[N]`."""
    return _mixed(_mixed(seeds_N) + steps_N * GOLDEN)


def _mixed(x: Tensor) -> Tensor:
    for shift, factor in MIX:
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
