"""The loss of the language-model head without its logits ever being held at once.

loss_t = log sum_w exp(hidden_t . weight_w) - hidden_t . weight_{targets_t}.
"""

import torch
from torch import Tensor

from baltoro.ops.cross_entropy import dense, reference
from baltoro.ops.impl import choose

__all__ = ["linear_cross_entropy"]

_LINEAR_CROSS_ENTROPY = {
    "reference": reference.linear_cross_entropy,
    "torch": dense.linear_cross_entropy,
}


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, impl: str
) -> Tensor:
    """Cross entropy of `targets` under softmax(hidden weight^T), per token: `[T]`.

    `hidden` `[T, D]` and `weight` `[W, D]` of one dtype, `targets` int64 `[T]`. Logits are a
    product in that dtype; from there on everything is fp32 (fp64 for fp64 input), the dtype of the
    result. Tokens whose target is `ignore_index` have loss 0 and their hidden row is never used.
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
    kept = torch.nonzero(targets != ignore_index).squeeze(1)
    kept_targets = targets[kept]
    if kept.numel() > 0:
        low, top = (int(bound) for bound in torch.aminmax(kept_targets))
        if low < 0 or top >= weight.shape[0]:
            raise ValueError(
                f"linear_cross_entropy: targets holds {low if low < 0 else top}; ids must be in "
                f"[0, {weight.shape[0]}) or ignore_index={ignore_index}"
            )
    loss_of_kept = choose("cross_entropy", impl, _LINEAR_CROSS_ENTROPY)
    if kept.numel() == targets.numel():
        return loss_of_kept(hidden, weight, targets)
    loss = loss_of_kept(hidden.index_select(0, kept), weight, kept_targets)
    return torch.zeros(targets.shape, dtype=loss.dtype, device=loss.device).index_copy(
        0, kept, loss
    )
