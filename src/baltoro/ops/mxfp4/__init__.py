"""MXFP4, the format of the released experts: 4-bit codes and one power of two per 32 inputs.

A code is a sign bit and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 (E2M1); the scale byte s means
2^(s - 127) (E8M0). Two codes share a byte, the even input in the low nibble (k3-facts 4).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from baltoro.ops.mxfp4 import dense

__all__ = ["GROUP_SIZE", "Mxfp4Tensor", "decode_mxfp4", "encode_mxfp4"]

GROUP_SIZE = 32  # inputs under one scale

_DECODED = (torch.bfloat16, torch.float32, torch.float64)
_ENCODED = (torch.float16, *_DECODED)


class Mxfp4Tensor(NamedTuple):
    """A weight `[..., out, in]` in MXFP4; indexing of the leading dims is done on both fields."""

    packed: Tensor  # uint8 [..., out, in / 2]
    scale: Tensor  # uint8 [..., out, in / 32]


def decode_mxfp4(weight: Mxfp4Tensor, dtype: torch.dtype) -> Tensor:
    """The values `[..., out, in]` in `dtype` (bfloat16, float32 or float64), without rounding.

    In fp32 they are the bits that the released decoder (compressed-tensors 0.20) gives; its factor
    for scale byte 254 is one unit above 2^127.
    Subnormal values and -0 are kept. Codes too large for `dtype` (scale byte 254 in bfloat16 and
    float32) become infinite with their sign. Scale byte 255 is NaN for its whole group, as the MX
    specification says.
    """
    check_mxfp4("decode_mxfp4", weight)
    if dtype not in _DECODED:
        raise ValueError(
            f"decode_mxfp4: dtype={dtype} cannot hold every value; "
            "choose torch.bfloat16, torch.float32 or torch.float64"
        )
    return dense.decode(weight.packed, weight.scale, dtype)


def encode_mxfp4(weight: Tensor, scale_hint: Tensor | None = None) -> Mxfp4Tensor:
    """Round a finite floating-point weight `[..., out, in]` to MXFP4, groups along `in`.

    The scale of a group is 2^(floor(log2 of its largest magnitude) - 2), its byte held within
    [0, 254]; codes are rounded to nearest, ties to the even code, and saturate at 6. A group of
    zeros gets scale byte 0. Signs are kept, that of zero too.

    A group whose largest magnitude was 3 or less in units of its old scale is written under a
    smaller one, with the same values and other bytes. `scale_hint` (uint8 `[..., out, in / 32]`)
    keeps the bytes: a group that is exactly representable under its hint is written under it, so
    decoding and encoding with the old scales gives back the old bytes.
    """
    if weight.dtype not in _ENCODED:
        raise ValueError(
            f"encode_mxfp4: weight has dtype {weight.dtype}; cast it to floating point"
        )
    if weight.dim() < 1 or weight.shape[-1] % GROUP_SIZE != 0:
        raise ValueError(
            f"encode_mxfp4: weight has shape {list(weight.shape)}; "
            f"its last dim must be a multiple of {GROUP_SIZE}"
        )
    scale_shape = (*weight.shape[:-1], weight.shape[-1] // GROUP_SIZE)
    if scale_hint is not None and (
        scale_hint.dtype != torch.uint8 or scale_hint.shape != scale_shape
    ):
        raise ValueError(
            f"encode_mxfp4: scale_hint is {scale_hint.dtype} {list(scale_hint.shape)}; "
            f"it must be torch.uint8 {list(scale_shape)}"
        )
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("encode_mxfp4: weight holds NaN or infinity, which E2M1 has no code for")
    return Mxfp4Tensor(*dense.encode(weight, scale_hint))


def check_mxfp4(op: str, weight: Mxfp4Tensor) -> None:
    """Raise `ValueError` unless the two fields have the dtype and shapes of one MXFP4 weight."""
    packed, scale = weight
    for name, field in (("packed", packed), ("scale", scale)):
        if field.dtype != torch.uint8:
            raise ValueError(f"{op}: {name} has dtype {field.dtype}; it must be torch.uint8")
    if packed.dim() < 1 or packed.shape[-1] % 16 != 0:
        raise ValueError(
            f"{op}: packed has shape {list(packed.shape)}; its last dim must be in / 2, "
            f"a multiple of {GROUP_SIZE // 2}"
        )
    expected = (*packed.shape[:-1], packed.shape[-1] // 16)
    if scale.shape != expected:
        raise ValueError(
            f"{op}: scale has shape {list(scale.shape)}; "
            f"with packed {list(packed.shape)} it must be {list(expected)}"
        )
