"""The loss of the language-model head without its logits ever being held at once.

loss_t = log sum_w exp(hidden_t . weight_w) - hidden_t . weight_{targets_t}.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from baltoro.ops.cross_entropy import dense, reference
from baltoro.ops.impl import ImplError, choose

__all__ = ["linear_cross_entropy"]

_Run = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def _of_kept(loss_of_kept: Callable[[Tensor, Tensor, Tensor], Tensor]) -> _Run:
    """The loss of the tokens that are not ignored, once their targets are known to be ids."""

    def run(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        kept = torch.nonzero(targets != ignore_index).squeeze(1)
        kept_targets = targets[kept]
        if kept.numel() > 0:
            low, top = (int(bound) for bound in torch.aminmax(kept_targets))
            if low < 0 or top >= weight.shape[0]:
                raise ValueError(
                    f"linear_cross_entropy: targets holds {low if low < 0 else top}; ids must be "
                    f"in [0, {weight.shape[0]}) or ignore_index={ignore_index}"
                )
        if kept.numel() == targets.numel():
            return loss_of_kept(hidden, weight, targets)
        loss = loss_of_kept(hidden.index_select(0, kept), weight, kept_targets)
        return torch.zeros(targets.shape, dtype=loss.dtype, device=loss.device).index_copy(
            0, kept, loss
        )

    return run


def _triton(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    try:
        from .triton import linear_cross_entropy
    except ModuleNotFoundError as error:
        raise ImplError(f"cross_entropy: impl='triton' needs triton ({error})") from error
    return linear_cross_entropy(hidden, weight, targets, ignore_index)


_LINEAR_CROSS_ENTROPY: dict[str, _Run] = {
    "reference": _of_kept(reference.linear_cross_entropy),
    "torch": _of_kept(dense.linear_cross_entropy),
    "triton": _triton,
}


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, impl: str
) -> Tensor:
    """Cross entropy of `targets` under softmax(hidden weight^T), per token: `[T]`.

    `hidden` `[T, D]` and `weight` `[W, D]` of one dtype, `targets` int64 `[T]`. Logits are a
    product in that dtype; from there on everything is fp32 (fp64 for fp64 input), the dtype of the
    result. Tokens whose target is `ignore_index` have loss 0 and their hidden row is never used.

    A target that is no id raises `ValueError`, which waits for the stream on a GPU; `triton` reads
    no values on the host, and gives such a token the loss NaN.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"linear_cross_entropy: hidden {list(hidden.shape)} and weight {list(weight.shape)} "
            "do not fit [T, D] and [W, D]"
        )
    if weight.dtype != hidden.dtype:
        raise ValueError(
            f"linear_cross_entropy: hidden is {hidden.dtype}, weight is {weight.dtype}; cast one"
        )
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"linear_cross_entropy: targets is {targets.dtype} {list(targets.shape)}; "
            f"expected torch.int64 [{hidden.shape[0]}]"
        )
    run = choose("cross_entropy", impl, _LINEAR_CROSS_ENTROPY)
    return run(hidden, weight, targets, ignore_index)
