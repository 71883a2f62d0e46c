"""AdamW with decoupled weight decay (arXiv 1711.05101) over lists of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baltoro.optim.config import OptimConfig


@dataclass(kw_only=True, slots=True)
class AdamwState:
    """Moments of one parameter, in the dtype of its master, and the updates it has had."""

    mean: Tensor
    square: Tensor
    num_steps: int = 0


def adamw_step(
    weights: list[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[AdamwState],
    *,
    lr: float,
    weight_decay: float,
    config: OptimConfig,
) -> None:
    """Update `weights` and `states` in place from `grads`, all in the same order.

    Parameters that have had different numbers of updates may be mixed.
    """
    if not weights:
        return
    for state in states:
        state.num_steps += 1
    means = [state.mean for state in states]
    squares = [state.square for state in states]
    grads = _as_dtypes_of(means, grads)
    torch._foreach_lerp_(means, grads, 1.0 - config.beta1)
    torch._foreach_mul_(squares, config.beta2)
    torch._foreach_addcmul_(squares, grads, grads, value=1.0 - config.beta2)
    denominators = torch._foreach_sqrt(squares)
    torch._foreach_div_(
        denominators, [(1.0 - config.beta2**state.num_steps) ** 0.5 for state in states]
    )
    torch._foreach_add_(denominators, config.eps)
    torch._foreach_mul_(weights, 1.0 - lr * weight_decay)
    torch._foreach_addcdiv_(
        weights,
        means,
        denominators,
        [-lr / (1.0 - config.beta1**state.num_steps) for state in states],
    )


def _as_dtypes_of(means: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """The gradients in the dtypes of their moments, one launch for all of one dtype."""
    wide = list(grads)
    for dtype in {grad.dtype for grad in grads}:
        places = [
            place
            for place, (grad, mean) in enumerate(zip(grads, means, strict=True))
            if grad.dtype == dtype != mean.dtype
        ]
        if places:
            copies = [torch.empty_like(means[place]) for place in places]
            torch._foreach_copy_(copies, [grads[place] for place in places])
            for place, copy in zip(places, copies, strict=True):
                wide[place] = copy
    return wide
