"""AdamW against torch's own."""

import pytest
import torch

from baltoro.optim.adamw import AdamwState, adamw_step
from baltoro.optim.config import OptimConfig

CONFIG = OptimConfig(beta1=0.8, beta2=0.9, eps=1e-6)


def fresh(weight: torch.Tensor) -> AdamwState:
    return AdamwState(mean=torch.zeros_like(weight), square=torch.zeros_like(weight))


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_it_equals_torch_s_adamw(decay: float) -> None:
    weights = [torch.randn(3, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)]
    twins = [weight.clone().requires_grad_() for weight in weights]
    theirs = torch.optim.AdamW(twins, lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=decay)
    states = [fresh(weight) for weight in weights]
    for _ in range(7):
        grads = [torch.randn_like(weight) for weight in weights]
        for twin, grad in zip(twins, grads, strict=True):
            twin.grad = grad.clone()
        theirs.step()
        adamw_step(weights, grads, states, lr=0.02, weight_decay=decay, config=CONFIG)
    for weight, twin in zip(weights, twins, strict=True):
        torch.testing.assert_close(weight, twin.detach(), rtol=1e-12, atol=1e-12)


def test_each_parameter_counts_its_own_steps() -> None:
    old, new = torch.zeros(2), torch.zeros(2)
    states = [fresh(old), fresh(new)]
    ones = torch.ones(2)
    for _ in range(3):
        adamw_step([old], [ones], states[:1], lr=0.1, weight_decay=0.0, config=CONFIG)
    adamw_step([old, new], [ones, ones], states, lr=0.1, weight_decay=0.0, config=CONFIG)
    # a constant gradient moves by lr per step only if the bias correction uses the right count
    torch.testing.assert_close(old, torch.full((2,), -0.4))
    torch.testing.assert_close(new, torch.full((2,), -0.1))


def test_nothing_to_update_is_fine() -> None:
    adamw_step([], [], [], lr=0.1, weight_decay=0.1, config=CONFIG)
