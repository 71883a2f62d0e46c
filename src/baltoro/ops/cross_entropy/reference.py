"""Cross entropy on all logits at once, written as the formula reads."""

import torch
from torch import Tensor


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    high = torch.promote_types(hidden.dtype, torch.float32)
    logits_TW = (hidden @ weight.T).to(high)
    target_T = logits_TW.gather(1, targets.unsqueeze(1)).squeeze(1)
    return torch.logsumexp(logits_TW, dim=1) - target_T
