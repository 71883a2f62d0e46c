"""The dial: what a size fixes."""

import pytest

from baltoro.model.counts import parameter_counts
from baltoro.model.presets import preset
from baltoro.recipes import ladder
from baltoro.recipes.pretrain import pretrain_config


@pytest.mark.parametrize("size", ladder.LADDER)
@pytest.mark.parametrize("is_gpu", [False, True])
def test_every_size_is_a_complete_configuration(size, is_gpu):
    config = pretrain_config(size, is_gpu=is_gpu)
    assert config.model.hidden_size == preset(size).hidden_size
    assert config.dtype == ("bfloat16" if is_gpu else "float32")
    assert config.num_tokens == pytest.approx(ladder.LADDER[size].num_tokens, rel=0.01)
    assert config.schedule.kind == "cosine" and config.schedule.warmup_fraction == 0.01


def test_a_longer_run_has_a_larger_batch_and_a_smaller_rate():
    short, long = (pretrain_config("mini", num_tokens=n) for n in (10**7, 10**10))
    assert short.data.tokens_per_step < long.data.tokens_per_step
    assert short.schedule.peak > long.schedule.peak


def test_the_laws_meet_moonlight_s_points():
    """Active parameters, tokens, rate, batch in 8K sequences; `k3-recipe` 6.1."""
    for num_active, num_tokens, rate, batch in (
        (399e6, 8.92e9, 9.503e-4, 96),
        (822e6, 20.76e9, 8.825e-4, 160),
        (1.5e9, 38.91e9, 8.305e-4, 256),
    ):
        assert ladder.peak_learning_rate(num_active, num_tokens) == pytest.approx(rate, rel=0.05)
        found = ladder.tokens_per_step(num_active, num_tokens, 2)
        assert 0.5 <= found / (batch * 8192) <= 2.0


def test_the_context_grows_as_k3_s_does():
    lengths = [stage.seq_len for stage in ladder.context_stages(65536)]
    assert lengths == [512, 4096, 16384, 65536]
    short = ladder.context_stages(2048)
    assert [stage.seq_len for stage in short] == [512, 2048]
    assert sum(stage.fraction for stage in short) == pytest.approx(1.0)


def test_an_unknown_size_names_the_nearest():
    with pytest.raises(ValueError, match="small"):
        ladder.rung("smal")


def test_a_measured_rate_corrects_the_law_s_and_still_falls_with_the_horizon():
    assert pretrain_config("nano").schedule.peak == pytest.approx(0.01, rel=0.01)
    small = pretrain_config("small", num_tokens=40_040_000)
    assert small.schedule.peak == pytest.approx(0.003, rel=0.02)
    assert pretrain_config("small").schedule.peak < small.schedule.peak
    mini = pretrain_config("mini")
    active = parameter_counts(mini.model).active
    assert mini.schedule.peak == ladder.peak_learning_rate(active, ladder.rung("mini").num_tokens)
