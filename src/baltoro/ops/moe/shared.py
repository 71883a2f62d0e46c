"""What the forms of the experts share: the gated unit inside an expert, and the order of pairs."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Glu(NamedTuple):
    """The gated unit of an expert; the caps belong to `situ` and are ignored by `silu`."""

    activation: Literal["situ", "silu"]
    beta: float
    linear_beta: float | None


def sorted_pairs(expert_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Token-expert pairs of `expert_ids` `[T, A]` in the order of experts, then of tokens.

    Each int64 `[T A]`: the token of a sorted pair, its unsorted position, and the sorted position
    of an unsorted pair.
    """
    pair = expert_ids.flatten().argsort(stable=True)
    row = torch.empty_like(pair)
    row[pair] = torch.arange(pair.shape[0], device=pair.device)
    token = torch.div(pair, expert_ids.shape[1], rounding_mode="floor")
    return token, pair, row
