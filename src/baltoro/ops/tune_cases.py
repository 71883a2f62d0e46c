"""What `baltoro bench tune` tries: for every kernel and class inputs, a call and candidates.

Sizes are those of the larger presets in training. A call goes to the operator that the kernel's
module registers, so that a backward pass is timed without its forward.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from .cross_entropy import linear_cross_entropy
from .launch_table import dtype_class, width_class
from .newton_schulz import newton_schulz
from .rms_norm import rms_norm
from .short_conv import short_conv
from .situ import situ_glu
from .tune_case import BF16, Case, normal, used
from .tune_layers import (
    attn_res_cases,
    decode_cases,
    kda_cases,
    moe_cases,
    portable_cases,
)

LANES = 32
NORM_NUMBERS = 65536 * 768  # of an input
CONV_TOKENS = 65536
UNIT_TOKENS = 32768
LOSS_NUMBERS = 2**27  # logits
MATRICES = 96


def norm_cases(device: torch.device) -> Iterator[Callable[[], Case]]:
    for width in (128, 512, 768, 2048, 7168):
        for kernel in ("rms_norm_forward", "rms_norm_backward"):
            yield partial(norm_case, kernel, width, device)


def norm_case(kernel: str, width: int, device: torch.device) -> Case:
    """Heads of 128 with gates, as KDA has them, other widths without."""
    padded = 1 << (width - 1).bit_length()
    x, d_out = (normal(NORM_NUMBERS // width, width, device=device) for _ in range(2))
    gate = normal(*x.shape, device=device) if width == 128 else None
    weight = normal(width, device=device)
    rms_norm(x[:1], weight, eps=1e-5, impl="triton")  # which registers the operators
    operators: Any = torch.ops.baltoro
    runs = {
        "rms_norm_forward": lambda: [operators.rms_norm_forward(x, weight, gate, 1e-5)],
        "rms_norm_backward": lambda: used(
            operators.rms_norm_backward(x, weight, gate, d_out, 1e-5)
        ),
    }
    return Case(
        kernel=kernel,
        shape_class=f"{dtype_class(x.dtype)} {width_class(width, 16, 16384)}",
        run=runs[kernel],
        candidates=[
            {"rows": rows, "num_warps": warps}
            for rows, warps in product((1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16))
            if 8 <= rows * padded // (LANES * warps) <= 32 and rows * padded <= 8192
        ],
    )


def conv_cases(device: torch.device) -> Iterator[Callable[[], Case]]:
    for channels in (768, 2304):
        for kernel in ("short_conv_forward", "short_conv_backward"):
            yield partial(conv_case, kernel, channels, device)


def conv_case(kernel: str, channels: int, device: torch.device) -> Case:
    """A pack of three sequences."""
    T = CONV_TOKENS
    x, d_y = (normal(T, channels, device=device) for _ in range(2))
    weight = torch.randn(channels, 4, device=device)
    bounds = torch.tensor([0, T // 50, T // 3, T], dtype=torch.int32, device=device)
    first = torch.tensor([0, 1], dtype=torch.int32, device=device)
    short_conv(x[:1], weight, cu_seqlens=first, impl="triton")
    operators: Any = torch.ops.baltoro
    table = operators.short_conv_forward(x, weight, bounds, None)[2]
    runs = {
        "short_conv_forward": lambda: operators.short_conv_forward(x, weight, bounds, None)[:2],
        "short_conv_backward": lambda: used(
            operators.short_conv_backward(x, weight, bounds, None, table, d_y, None)
        ),
    }
    return Case(
        kernel=kernel,
        shape_class=f"{dtype_class(x.dtype)} {width_class(channels, 1024, 2048)}",
        run=runs[kernel],
        candidates=[
            {"channels": 128 * warps, "rows": rows, "strip": strip, "num_warps": warps}
            for warps, rows, strip in product((1, 2), (4, 8), (64, 128, 256))
        ],
    )


def unit_cases(device: torch.device) -> Iterator[Callable[[], Case]]:
    for kernel in ("situ_glu_forward", "situ_glu_backward"):
        yield partial(unit_case, kernel, device)


def unit_case(kernel: str, device: torch.device) -> Case:
    """Gate and up side by side, as one product gives them."""
    gate, up = normal(UNIT_TOKENS, 2 * 3072, device=device).chunk(2, -1)
    d_out = normal(*gate.shape, device=device)
    situ_glu(gate[:1], up[:1], beta=4.0, linear_beta=25.0, impl="triton")
    operators: Any = torch.ops.baltoro
    runs = {
        "situ_glu_forward": lambda: [operators.situ_glu_forward(gate, up, 4.0, 25.0)],
        "situ_glu_backward": lambda: operators.situ_glu_backward(d_out, gate, up, 4.0, 25.0),
    }
    return Case(
        kernel=kernel,
        shape_class=dtype_class(gate.dtype),
        run=runs[kernel],
        candidates=[
            {"block": numbers * LANES * warps, "num_warps": warps}
            for numbers, warps in product((8, 16, 32), (1, 2, 4))
        ],
    )


def loss_cases(device: torch.device) -> Iterator[Callable[[], Case]]:
    for num_words in (32768, 163840):
        for kernel in ("cross_entropy_loss", "cross_entropy_gradient"):
            yield partial(loss_case, kernel, num_words, device)


def loss_case(kernel: str, num_words: int, device: torch.device) -> Case:
    """Narrow hidden states, so that products take little of the time."""
    T, D = LOSS_NUMBERS // num_words, 64
    hidden, weight = normal(T, D, device=device), normal(num_words, D, device=device)
    targets = torch.arange(T, device=device) * 7 % num_words
    d_losses = torch.rand(T, device=device)
    linear_cross_entropy(hidden[:1], weight, targets[:1], impl="triton")
    operators: Any = torch.ops.baltoro
    lse = operators.linear_cross_entropy_forward(hidden, weight, targets, -100)[1]
    runs = {
        "cross_entropy_loss": lambda: operators.linear_cross_entropy_forward(
            hidden, weight, targets, -100
        ),
        "cross_entropy_gradient": lambda: operators.linear_cross_entropy_backward(
            hidden, weight, targets, lse, d_losses, -100
        ),
    }
    return Case(
        kernel=kernel,
        shape_class=f"{dtype_class(weight.dtype)} {width_class(num_words, 32768, 65536)}",
        run=runs[kernel],
        candidates=[
            {"block": block, "num_warps": warps}
            for block, warps in product((1024, 2048, 4096, 8192), (2, 4, 8, 16))
            if 16 <= block // (LANES * warps) <= 32
        ],
    )


def newton_schulz_cases(device: torch.device) -> Iterator[Callable[[], Case]]:
    for rows, columns in ((128, 7168), (64, 768)):
        for part in ("factor", "gram", "apply"):
            yield partial(newton_schulz_case, f"newton_schulz_{part}", rows, columns, device)


def newton_schulz_case(kernel: str, rows: int, columns: int, device: torch.device) -> Case:
    """The three kernels run together; one of them changes. A matrix of fp32 takes more memory."""
    x = normal(MATRICES, rows, columns, device=device)
    one = x[:1].float()
    if kernel == "newton_schulz_factor":
        candidates = [{"num_warps": warps} for warps in (4, 8)]
    else:
        candidates = [
            {"columns": width, "num_warps": warps, "num_stages": stages, "part": part}
            for width, warps, stages, part in product((64, 128), (4, 8), (2, 3, 4), (896, 1792))
        ]
    return Case(
        kernel=kernel,
        shape_class=f"r{rows}",
        run=lambda: [newton_schulz(each, compute_dtype=BF16, impl="triton") for each in (x, one)],
        candidates=candidates,
    )


_CASES = {
    "rms_norm": norm_cases,
    "short_conv": conv_cases,
    "situ_glu": unit_cases,
    "cross_entropy": loss_cases,
    "newton_schulz": newton_schulz_cases,
    "kda": kda_cases,
    "kda_decode": decode_cases,
    "moe": moe_cases,
    "attn_res": attn_res_cases,
    "portable": portable_cases,
}
KERNELS = tuple(_CASES)


def cases(only: Sequence[str], device: torch.device) -> list[Callable[[], Case]]:
    """What builds each case of the operators named."""
    return [build for name in only for build in _CASES[name](device)]
