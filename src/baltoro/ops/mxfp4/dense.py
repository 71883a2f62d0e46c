"""MXFP4 in plain tensor operations: look-up one way, comparisons with midpoints the other."""

import math

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
_MAX_BYTE = 254  # 255 is NaN
# 2^127 and one unit in its last place: what compressed-tensors takes for byte 254 in fp32
_FP32_LAST_FACTOR = float.fromhex("0x1.000002p127")
_GROUP_SIZE = 32
# A pair of values as one item, which is faster to look up than two.
_PAIR_DTYPES = {
    torch.bfloat16: torch.int32,
    torch.float32: torch.int64,
    torch.float64: torch.complex128,
}

# Between each code and the one below, and whether a tie goes up: to the even code.
_MIDDLES = tuple(
    ((_MAGNITUDES[code - 1] + _MAGNITUDES[code]) / 2, code % 2 == 0) for code in range(1, 8)
)


def decode(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 `[..., in / 2]` and `[..., in / 32]` to values `[..., in]`."""
    values = _MAGNITUDES + tuple(-value for value in _MAGNITUDES)
    pairs = [(values[byte % 16], values[byte // 16]) for byte in range(256)]
    pair_table = torch.tensor(pairs, dtype=dtype, device=packed.device)
    # Scale bytes up to 253 are powers of two that fp32 and bf16 hold exactly, 0 as a subnormal.
    factors = [2.0 ** (byte - _BIAS) for byte in range(_MAX_BYTE + 1)] + [math.nan]
    if dtype == torch.float32:
        factors[_MAX_BYTE] = _FP32_LAST_FACTOR
    factor_table = torch.tensor(factors, dtype=dtype, device=packed.device)
    pairs_of_bytes = pair_table.view(_PAIR_DTYPES[dtype]).flatten()
    decoded = pairs_of_bytes.index_select(0, packed.flatten().int()).view(dtype)
    factor = factor_table.index_select(0, scale.flatten().int())
    decoded.view(-1, _GROUP_SIZE).mul_(factor.unsqueeze(-1))
    return decoded.view(*packed.shape[:-1], packed.shape[-1] * 2)


def encode(weight: Tensor, scale_hint: Tensor | None) -> tuple[Tensor, Tensor]:
    """Values `[..., in]` to uint8 `[..., in / 2]` and `[..., in / 32]`."""
    high = torch.promote_types(weight.dtype, torch.float32)
    magnitude = weight.unflatten(-1, (-1, _GROUP_SIZE)).abs().to(high)
    largest = magnitude.amax(-1)
    # frexp: largest = m 2^e with m in [0.5, 1), so floor(log2 largest) = e - 1.
    exponent = torch.frexp(largest).exponent - 3
    exponent = torch.where(largest == 0, -_BIAS, exponent).clamp(-_BIAS, _MAX_BYTE - _BIAS)
    if scale_hint is not None:
        hint = scale_hint.int() - _BIAS
        exponent = torch.where(_is_exact(magnitude, hint), hint, exponent)
    code = torch.zeros(magnitude.shape, dtype=torch.uint8, device=weight.device)
    scaled = _scaled(magnitude, exponent)
    for middle, tie_is_up in _MIDDLES:
        code += scaled >= middle if tie_is_up else scaled > middle
    code |= torch.signbit(weight).view_as(code).to(torch.uint8) << 3
    packed = (code[..., ::2] | (code[..., 1::2] << 4)).flatten(-2)
    return packed, (exponent + _BIAS).to(torch.uint8)


def _scaled(magnitude: Tensor, exponent: Tensor) -> Tensor:
    """Divide groups by 2^exponent: exact, or far below the smallest code."""
    factors = [2.0 ** (_BIAS - byte) for byte in range(_MAX_BYTE + 1)] + [math.nan]
    factor_table = torch.tensor(factors, dtype=magnitude.dtype, device=magnitude.device)
    return magnitude * factor_table[exponent + _BIAS].unsqueeze(-1)


def _is_exact(magnitude: Tensor, exponent: Tensor) -> Tensor:
    """Which groups hold only values of the grid under 2^exponent."""
    grid = torch.tensor(_MAGNITUDES, dtype=magnitude.dtype, device=magnitude.device)
    scaled = _scaled(magnitude, exponent)
    vanished = (scaled == 0) & (magnitude != 0)
    return (torch.isin(scaled, grid) & ~vanished).all(-1)
