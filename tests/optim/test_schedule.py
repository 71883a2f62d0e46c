"""Learning-rate schedules."""

import itertools

import pytest

from baltoro.optim.schedule import ScheduleConfig, cosine, learning_rate


def rates(**fields: object) -> list[float]:
    config = ScheduleConfig(**fields)  # type: ignore[arg-type]
    return [learning_rate(config, step) for step in range(config.num_steps)]


def test_one_percent_of_the_steps_warm_up_in_a_line() -> None:
    lr = rates(num_steps=1000, peak=1.0)
    assert lr[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert lr[10] < lr[9]


def test_cosine_falls_to_the_floor_on_the_last_step() -> None:
    lr = rates(num_steps=1000, peak=1.0, floor=0.1)
    assert lr[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(lr[9:]))
    assert lr[9 + 495] == pytest.approx(0.55)


def test_wsd_stays_at_the_peak_until_its_last_part() -> None:
    lr = rates(kind="wsd", num_steps=100, peak=2.0, floor=0.0, decay_fraction=0.3)
    assert lr[0] == 2.0 and set(lr[:70]) == {2.0}
    assert all(a > b for a, b in itertools.pairwise(lr[69:]))
    assert lr[-1] == pytest.approx(0.0)


def test_no_warm_up_starts_below_the_peak_and_no_decay_stays_there() -> None:
    assert rates(num_steps=4, peak=1.0, warmup_fraction=0.0)[0] == cosine(0.25, start=1.0, end=0.0)
    assert rates(kind="wsd", num_steps=3, peak=1.0, decay_fraction=0.0) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 99, 101])
def test_every_step_of_a_short_run_has_a_rate_within_bounds(kind: str, num_steps: int) -> None:
    lr = rates(kind=kind, num_steps=num_steps, peak=1.0, floor=0.01)
    assert len(lr) == num_steps and all(0.01 <= rate <= 1.0 for rate in lr)
    assert max(lr) == 1.0


def test_warm_up_and_decay_may_fill_the_run() -> None:
    lr = rates(kind="wsd", num_steps=10, peak=1.0, warmup_fraction=0.5, decay_fraction=0.9)
    assert lr[4] == 1.0
    assert lr[5:] == [cosine(part / 5, start=1.0, end=0.0) for part in range(1, 6)]


@pytest.mark.parametrize("step", [-1, 10])
def test_a_step_outside_the_run_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match=f"step={step}: the schedule has 10 steps"):
        learning_rate(ScheduleConfig(num_steps=10, peak=1.0), step)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "linear"}, "kind='linear'"),
        ({"num_steps": 0}, "num_steps=0"),
        ({"peak": 0.0}, "peak=0.0"),
        ({"peak": float("inf")}, "peak=inf"),
        ({"floor": 2.0}, "floor=2.0: must be between 0 and peak=1.0"),
        ({"warmup_fraction": 1.5}, "warmup_fraction=1.5"),
        ({"decay_fraction": -0.1}, "decay_fraction=-0.1"),
    ],
)
def test_settings_outside_their_range_are_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rates(**({"num_steps": 10, "peak": 1.0} | fields))
