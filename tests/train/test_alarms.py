"""Alarms by name, raised when they begin."""

import math

import torch

from baltoro.optim.balancing import LayerBalance
from baltoro.optim.router_health import router_alarms
from baltoro.train.alarms import AlarmWatch
from baltoro.train.step import StepResult


def result(loss=2.0, **changes):
    numbers = {"train/loss": loss, "train/grad_norm": 1.0}
    return StepResult(**({"numbers": numbers, "is_skipped": False} | changes))


def watch():
    return AlarmWatch(qk_clip_tau=100.0)


def names(alarms):
    return [alarm.name for alarm in alarms]


def test_a_healthy_step_raises_nothing():
    assert watch().check(1, result()) == []


def test_a_step_that_was_skipped_is_named():
    (alarm,) = watch().check(7, result(math.nan, is_skipped=True))
    assert (alarm.name, alarm.step, alarm.where) == ("not_finite", 7, "")
    assert "nan" in alarm.message


def test_a_condition_that_lasts_is_raised_once_and_again_after_a_pause():
    alarms = watch()
    bad = result(math.nan, is_skipped=True)
    assert names(alarms.check(1, bad)) == ["not_finite"]
    assert [names(alarms.check(step, bad)) for step in range(2, 30)] == [[]] * 28
    assert names(alarms.check(60, bad)) == ["not_finite"]


def test_a_loss_far_above_its_recent_median_is_a_spike():
    alarms = watch()
    for step in range(40):
        assert alarms.check(step, result(2.0 + 0.01 * (step % 3))) == []
    assert names(alarms.check(40, result(2.2))) == []
    assert names(alarms.check(41, result(3.0))) == ["loss_spike"]


def test_the_limit_of_a_spike_is_known_before_the_step():
    alarms = watch()
    assert alarms.spike_limit() == math.inf
    for step in range(40):
        alarms.check(step, result(2.0))
    assert alarms.spike_limit() == 2.3
    (alarm,) = alarms.check(40, result(2.31, is_skipped=True, is_spike=True))
    assert alarm.name == "loss_spike" and "not applied" in alarm.message


def test_a_watch_that_starts_again_knows_the_losses_and_names_what_is_still_wrong():
    alarms, bad = watch(), result(math.nan, is_skipped=True)
    alarms.check(1, bad)
    alarms.restart([2.0] * 30)
    assert alarms.spike_limit() == 2.3
    assert names(alarms.check(2, bad)) == ["not_finite"]


def test_the_first_losses_are_never_spikes():
    alarms = watch()
    assert [alarms.check(step, result(5.0 * step)) for step in range(10)] == [[]] * 10


def test_attention_logits_beyond_twice_the_clip_limit_are_named_by_mixer():
    found = watch().check(3, result(max_logits={"layers.3.self_attn": [1.0, 250.0]}))
    assert [(alarm.name, alarm.where) for alarm in found] == [
        ("logit_blow_up", "layers.3.self_attn")
    ]
    assert "head 1" in found[0].message
    assert watch().check(3, result(max_logits={"layers.3.self_attn": [1.0, 150.0]})) == []


def test_even_loads_do_not_hide_a_router_that_gets_no_gradient():
    balance = LayerBalance(loads=torch.tensor([241, 263, 247, 249]), num_tokens=1000, bias_drift=0)
    alarms = router_alarms("layers.1", balance, router_grad_norm=7e-10)
    (found,) = watch().check(5, result(router_alarms=alarms))
    assert (found.name, found.where) == ("zero_router_gradient", "layers.1")


def test_layers_are_watched_apart():
    balance = LayerBalance(loads=torch.tensor([0, 500]), num_tokens=500, bias_drift=0)
    both = [
        alarm
        for layer in ("layers.1", "layers.2")
        for alarm in router_alarms(layer, balance, router_grad_norm=1.0)
    ]
    alarms = watch()
    assert len(alarms.check(1, result(router_alarms=both[:1]))) == 1
    assert [alarm.where for alarm in alarms.check(2, result(router_alarms=both))] == ["layers.2"]
