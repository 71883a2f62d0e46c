"""One token per row of logits, from the whole distribution or the likeliest.

    p = softmax(logits / temperature)        id = argmax(log p - log(-log u))        (Gumbel)

u is `uniform`: a number of a row's seed and step and of the token alone, so that a draw does not
depend on what is drawn beside it, nor on the device.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from baltoro.ops.draw.noise import uniform
from baltoro.ops.impl import ImplError, choose

__all__ = ["Drawn", "Noise", "draw_tokens", "uniform"]


class Noise(NamedTuple):
    """What a row's draw depends on besides its logits."""

    is_drawn: Tensor  # [N, 1] bool; other rows take the likeliest token, the lowest id of several
    seeds: Tensor  # [N] int64
    steps: Tensor  # [N] int64


class Drawn(NamedTuple):
    """A token of each row."""

    ids: Tensor  # [N] int64
    # [3, N] fp64, in one piece for the host: the id, its log-probability after the temperature in
    # fp32, and 1 where all logits and that are finite, else 0
    numbers: Tensor


def _torch(logits_NW: Tensor, scale: Tensor | None, noise: Noise | None) -> Drawn:
    lowest_N = logits_NW.amin(-1)  # NaN if there is one
    logits_NW = logits_NW.float()
    if scale is not None:
        logits_NW = logits_NW / scale
    logprobs_NW = logits_NW.log_softmax(-1)
    ids_N = perturbed(logprobs_NW, noise).argmax(-1)
    logprobs_N = logprobs_NW.gather(-1, ids_N[:, None]).squeeze(-1)
    return Drawn(ids_N, as_numbers(ids_N, logprobs_N, lowest_N))


def as_numbers(ids_N: Tensor, logprobs_N: Tensor, lowest_N: Tensor) -> Tensor:
    """`Drawn.numbers`; `lowest_N` are the lowest logits, NaN if one is."""
    is_sound_N = lowest_N.isfinite() & logprobs_N.isfinite()
    return torch.stack([ids_N.double(), logprobs_N.double(), is_sound_N.double()])


def perturbed(logprobs_NW: Tensor, noise: Noise | None) -> Tensor:
    """Log-probabilities whose largest is a draw, fp64 where there is noise."""
    if noise is None:
        return logprobs_NW
    uniform_NW = uniform(noise.seeds, noise.steps, logprobs_NW.shape[-1])
    noise_NW = uniform_NW.log_().neg_().log_().neg_().masked_fill_(~noise.is_drawn, 0.0)
    return noise_NW.add_(logprobs_NW)


def _triton(logits_NW: Tensor, scale: Tensor | None, noise: Noise | None) -> Drawn:
    try:
        from .triton import draw_tokens
    except ModuleNotFoundError as error:
        raise ImplError(f"draw_tokens: impl='triton' needs triton ({error})") from error
    return Drawn(*draw_tokens(logits_NW, scale, noise))


_IMPLS: dict[str, Callable[[Tensor, Tensor | None, Noise | None], Drawn]] = {
    "torch": _torch,
    "triton": _triton,
}


def draw_tokens(logits: Tensor, scale: Tensor | None, noise: Noise | None, *, impl: str) -> Drawn:
    """Draw from each row of `logits` `[N, W]` fp32 or bf16; fp64 is rounded to fp32 (`torch`).

    `scale` `[N, 1]` fp32 are temperatures, None for 1. Without `noise` every row takes the
    likeliest token. Does not wait for the device.
    """
    num_rows = logits.shape[0]
    if logits.dim() != 2 or logits.shape[1] < 1:
        raise ValueError(f"logits: {list(logits.shape)}; expected [N, W] with W >= 1")
    if scale is not None and (scale.shape != (num_rows, 1) or scale.dtype != torch.float32):
        raise ValueError(
            f"scale: expected fp32 [{num_rows}, 1], got {scale.dtype} {list(scale.shape)}"
        )
    if noise is not None:
        expected = (
            ("is_drawn", noise.is_drawn, torch.bool, (num_rows, 1)),
            ("seeds", noise.seeds, torch.int64, (num_rows,)),
            ("steps", noise.steps, torch.int64, (num_rows,)),
        )
        for name, x, dtype, shape in expected:
            if x.shape != shape or x.dtype != dtype:
                raise ValueError(
                    f"noise.{name}: expected {dtype} {list(shape)}, got {x.dtype} {list(x.shape)}"
                )
    return choose("draw_tokens", impl, _IMPLS)(logits, scale, noise)
