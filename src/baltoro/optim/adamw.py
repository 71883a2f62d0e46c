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
    for state in states:
        state.num_steps += 1
    kinds: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
    for place, (weight, state) in enumerate(zip(weights, states, strict=True)):
        kinds.setdefault((state.num_steps, weight.dtype, weight.device), []).append(place)
    wide = _as_dtypes_of([state.mean for state in states], grads)
    for (num_steps, _, device), places in kinds.items():
        # which a kernel takes from memory, so that it can be told by the device
        count = torch.full((), float(num_steps), device=device)
        torch._fused_adamw_(
            [weights[place] for place in places],
            [wide[place] for place in places],
            [states[place].mean for place in places],
            [states[place].square for place in places],
            [],
            [count] * len(places),
            lr=lr,
            beta1=config.beta1,
            beta2=config.beta2,
            weight_decay=weight_decay,
            eps=config.eps,
            amsgrad=False,
            maximize=False,
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
