"""MXFP4 in plain tensor operations: a table look-up one way, a search of midpoints the other."""

import math

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
_MAX_BYTE = 254  # 255 is NaN
_GROUP_SIZE = 32


def _code_starts() -> tuple[float, ...]:
    """The smallest magnitude that rounds to each of codes 1 to 7; a tie goes to the even code."""
    starts = []
    for code in range(1, 8):
        middle = (_MAGNITUDES[code - 1] + _MAGNITUDES[code]) / 2
        starts.append(middle if code % 2 == 0 else math.nextafter(middle, math.inf))
    return tuple(starts)


_CODE_STARTS = _code_starts()


def decode(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 `[..., in / 2]` and `[..., in / 32]` to values `[..., in]`."""
    values = _MAGNITUDES + tuple(-value for value in _MAGNITUDES)
    pairs = [(values[byte % 16], values[byte // 16]) for byte in range(256)]
    pair_table = torch.tensor(pairs, dtype=dtype, device=packed.device)
    # Scale bytes up to 254 are powers of two that fp32 and bf16 hold exactly, 0 as a subnormal.
    factors = [2.0 ** (byte - _BIAS) for byte in range(_MAX_BYTE + 1)] + [math.nan]
    factor_table = torch.tensor(factors, dtype=dtype, device=packed.device)
    decoded = pair_table.index_select(0, packed.flatten().int())
    factor = factor_table.index_select(0, scale.flatten().int())
    decoded = decoded.view(-1, _GROUP_SIZE).mul_(factor.unsqueeze(-1))
    return decoded.view(*packed.shape[:-1], packed.shape[-1] * 2)


def encode(weight: Tensor, scale_hint: Tensor | None) -> tuple[Tensor, Tensor]:
    """Values `[..., in]` to uint8 `[..., in / 2]` and `[..., in / 32]`."""
    # fp64 divides by every scale exactly, subnormal ones too.
    magnitude = weight.unflatten(-1, (-1, _GROUP_SIZE)).abs().double()
    largest = magnitude.amax(-1)
    # frexp: largest = m 2^e with m in [0.5, 1), so floor(log2 largest) = e - 1.
    exponent = torch.frexp(largest).exponent - 3
    exponent = torch.where(largest == 0, -_BIAS, exponent).clamp(-_BIAS, _MAX_BYTE - _BIAS)
    if scale_hint is not None:
        hint = scale_hint.int() - _BIAS
        exact = _is_exact(magnitude, hint) & (scale_hint <= _MAX_BYTE)
        exponent = torch.where(exact, hint, exponent)
    starts = torch.tensor(_CODE_STARTS, dtype=torch.float64, device=weight.device)
    code = torch.bucketize(_scaled(magnitude, exponent), starts, right=True).to(torch.uint8)
    code = code | (torch.signbit(weight).view_as(code).to(torch.uint8) << 3)
    pair = code.view(*weight.shape[:-1], -1, 2)
    packed = pair[..., 0] | (pair[..., 1] << 4)
    return packed, (exponent + _BIAS).to(torch.uint8)


def _scaled(magnitude: Tensor, exponent: Tensor) -> Tensor:
    return torch.ldexp(magnitude, -exponent.unsqueeze(-1))


def _is_exact(magnitude: Tensor, exponent: Tensor) -> Tensor:
    """Which groups hold only values of the grid under 2^exponent."""
    grid = torch.tensor(_MAGNITUDES, dtype=torch.float64, device=magnitude.device)
    return torch.isin(_scaled(magnitude, exponent), grid).all(-1)
