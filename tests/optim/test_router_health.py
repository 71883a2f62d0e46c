"""Alarms of a router that looks balanced or is not."""

import warnings

import pytest
import torch

from baltoro.optim.balancing import LayerBalance
from baltoro.optim.router_health import (
    HealthLimits,
    RouterWarning,
    router_alarms,
    warn_if_router_cannot_learn,
)


def balance(loads: list[int]) -> LayerBalance:
    return LayerBalance(loads=torch.tensor(loads), num_tokens=sum(loads), bias_drift=0.0)


def names(loads: list[int], grad_norm: float, limits: HealthLimits | None = None) -> list[str]:
    found = router_alarms(
        "layers.3",
        balance(loads),
        router_grad_norm=grad_norm,
        limits=HealthLimits() if limits is None else limits,
    )
    assert all(alarm.layer == "layers.3" for alarm in found)
    return [alarm.name for alarm in found]


def test_even_loads_do_not_hide_a_router_without_gradient() -> None:
    # case Q06
    assert names([241, 263, 247, 249], 7e-10) == ["zero_router_gradient"]
    assert names([241, 263, 247, 249], 0.0) == ["zero_router_gradient"]
    assert names([241, 263, 247, 249], 1e-3) == []


@pytest.mark.parametrize("grad_norm", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_has_its_own_name(grad_norm: float) -> None:
    assert names([250, 250], grad_norm) == ["router_gradient_not_finite"]


def test_dead_experts_and_a_busy_one_are_named_apart() -> None:
    assert names([500, 0, 500, 500], 0.1) == ["dead_experts"]
    assert names([1000, 20, 20, 20, 20, 20, 20, 20], 0.1) == ["imbalance"]
    assert names([4000] + [0] * 15, 0.1) == ["dead_experts", "imbalance"]


def test_the_message_counts_the_dead() -> None:
    (alarm,) = router_alarms("layers.1", balance([90, 0, 0, 90]), router_grad_norm=0.1)
    assert alarm.message == "2 of 4 experts got none of 180 tokens"


def test_a_step_too_small_to_tell_raises_no_load_alarm() -> None:
    assert names([30, 0, 3, 2], 0.1) == []
    assert names([30, 0, 3, 2], 0.1, HealthLimits(min_fair_share=5.0)) == ["dead_experts"]


def test_one_expert_per_token_with_renormalised_weights_warns() -> None:
    # case Q05
    with pytest.warns(RouterWarning, match="router gets no gradient"):
        warn_if_router_cannot_learn(num_experts_per_token=1, renormalize=True)


@pytest.mark.parametrize(("num_experts_per_token", "renormalize"), [(1, False), (2, True)])
def test_other_routers_do_not_warn(num_experts_per_token: int, renormalize: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_router_cannot_learn(
            num_experts_per_token=num_experts_per_token, renormalize=renormalize
        )
