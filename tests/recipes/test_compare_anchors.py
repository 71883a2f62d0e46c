"""The anchors of `baltoro compare`: what they measure, on models of minutes' size."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from baltoro.cli import main
from baltoro.config import replace
from baltoro.data.build import build
from baltoro.data.recipes import tiny
from baltoro.model.model import Model
from baltoro.ops.moe import Routing
from baltoro.recipes import anchor_optim
from baltoro.recipes.anchor_balance import (
    BALANCE,
    judge_balance,
    measure_balance,
    sharded_bias,
    shardings_of,
    skewed_scores,
)
from baltoro.recipes.anchor_depth import RESIDUALS, depth_profile, growth, measure_residuals
from baltoro.recipes.anchor_optim import HEADS, LOGITS, MUON, judge_muon, measure_heads
from baltoro.recipes.anchor_record import Arm, Study, Trial, values
from baltoro.recipes.anchor_trial import train_arm, trial_data, trial_learner
from baltoro.recipes.anchor_width import ACTIVATIONS, activation_peaks, largest_glu
from baltoro.train.probe import probe_model

MINUTE = {
    "model.hidden_size": 32,
    "model.intermediate_size": 48,
    "model.mixers": ["kda", "mla"],
    "data.tokens_per_step": 256,
    "data.stages": [{"seq_len": 128, "fraction": 1.0}],
    "run.num_eval_batches": 1,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("anchors")
    build(tiny(), folder, report=lambda line: None)
    return folder


def minute(
    study: Study, arm: str, data: Path, *, seed: int = 0, num_steps: int = 2, **changes: object
) -> Trial:
    """The trial of an arm on a model of two narrow layers."""
    chosen = next(item for item in study.arms if item.name == arm)
    config = replace(study.base(num_steps), MINUTE | changes)
    return dataclasses.replace(study, base=lambda _: config).trial(chosen, seed, num_steps, data)


def test_an_arm_and_a_seed_fix_every_loss(data):
    first = train_arm(minute(RESIDUALS, "block", data))
    again = train_arm(minute(RESIDUALS, "block", data))
    other = train_arm(minute(RESIDUALS, "block", data, seed=1))
    assert first.losses == again.losses and first.loss == again.loss
    assert first.losses[0] != other.losses[0]
    assert len(first.losses) == 2 and 3.0 < first.loss < 7.0


def test_arms_of_one_seed_start_from_the_same_weights(data):
    plain, full = (
        dict(trial_learner(minute(RESIDUALS, arm, data)).model.named_parameters())
        for arm in ("base", "full")
    )
    assert full.keys() > plain.keys()
    assert all(torch.equal(full[name], plain[name]) for name in plain)


def test_a_run_that_diverges_has_no_loss(data):
    arm = Arm(name="block", what="", changes={"schedule.peak": 1e30, "schedule.floor": 0.0})
    trial = minute(dataclasses.replace(RESIDUALS, arms=(arm,)), "block", data, num_steps=4)
    trained = train_arm(trial)
    assert len(trained.losses) == 4 and math.isnan(trained.loss)
    assert math.isnan(trained.numbers["train loss"])


def test_the_arm_says_what_updates_the_matrices(data):
    name = "layers.0.self_attn.q_proj.weight"
    rows = {
        arm: trial_learner(minute(study, arm, data)).optimizer.rows[name]
        for study, arm in ((HEADS, "by head"), (HEADS, "whole"), (MUON, "adamw 0.01"))
    }
    assert rows["by head"].blocks.num_groups == 4
    assert rows["whole"].blocks.num_groups == 1
    assert rows["adamw 0.01"].group == "adamw"


def test_sizes_over_depth_are_those_of_the_report_and_gradients_are_dropped(data):
    trial = minute(RESIDUALS, "block", data)
    model, batch = trial_learner(trial).model, trial_data(trial).held_out[0]
    sizes, gradients = depth_profile(model, batch)
    expected = list(probe_model(model, batch)["rms/partial_sum"].values())
    assert sizes == pytest.approx(expected, rel=1e-5)
    assert len(gradients) == 2 and min(gradients) > 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_gradient_of_a_layer_is_that_of_its_outputs(data):
    trial = minute(RESIDUALS, "base", data)
    model, batch = trial_learner(trial).model, trial_data(trial).held_out[0]
    found = []
    for factor in (1e-3, 2.0):  # near zero, logits and all gradients go with the last norm's gain
        with torch.no_grad():
            model.norm.weight.mul_(factor)
        found.append(depth_profile(model, batch)[1])
    assert found[1] == pytest.approx([2 * value for value in found[0]], rel=1e-2)


def test_growth_compares_the_halves_of_the_depth():
    assert growth([1.0, 2.0, 3.0, 4.0]) == 2.0
    assert growth([1.0, 2.0, 1.0, 2.0]) == 1.0


def test_residuals_are_measured_by_layer(data):
    numbers = measure_residuals(minute(RESIDUALS, "full", data))
    assert len(numbers["output RMS"]) == len(numbers["gradient RMS"]) == 2
    assert numbers["output growth"] == numbers["output RMS"][1] / numbers["output RMS"][0]


@pytest.mark.parametrize(("arm", "is_bounded"), [("SiTU", True), ("neither", False)])
def test_only_situ_bounds_the_gated_units(data, arm, is_bounded):
    trial = minute(ACTIVATIONS, arm, data)
    model, batch = trial_learner(trial).model, trial_data(trial).held_out[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate_proj" in name or "up_proj" in name:
                parameter.mul_(1e4)
    peaks = activation_peaks(model, batch)
    assert (peaks["GLU"] <= 100.001) == is_bounded and peaks["GLU"] > 99.0
    assert peaks["routed"] > 0.0


def test_the_largest_value_in_experts_is_that_of_chosen_ones(data):
    trial = minute(ACTIVATIONS, "both", data)
    experts = trial_learner(trial).model.layers[1].block_sparse_moe.experts
    with torch.no_grad():
        experts.gate_up_proj.fill_(0.0)
        experts.gate_up_proj[3] = 1.0
        x_TZ = torch.zeros(2, 64)
        x_TZ[0, 0] = 2.0
    ids = torch.tensor([[3], [0]])
    routing = Routing(scores=torch.ones(2, 8), expert_ids=ids, weights=torch.ones(2, 1))
    silu = nn.functional.sigmoid(torch.tensor(2.0))
    expected = 4 * math.tanh(0.5) * float(silu) * 25 * math.tanh(2 / 25)
    with torch.no_grad():
        assert largest_glu(experts, x_TZ, routing) == pytest.approx(expected)
        assert largest_glu(experts, x_TZ, routing._replace(expert_ids=ids.flip(0))) == 0.0


def test_a_rule_begins_at_the_switch(data):
    found = {}
    for arm in ("quantile", "sign .01", "aux .001"):
        trial = minute(BALANCE, arm, data, num_steps=10)
        found[arm] = measure_balance(trial)["mean by step"]
    # the bias of step 4 is in use from step 5 on
    assert found["quantile"][:5] == found["sign .01"][:5] == found["aux .001"][:5]
    assert found["quantile"][5] != found["sign .01"][5]
    assert found["sign .01"][6:] != found["aux .001"][6:]


def test_a_bias_does_not_depend_on_who_counted_its_tokens():
    (scores_TE, bias_E) = skewed_scores(0, 2)[1]
    scores_TE = scores_TE[:500]
    whole_E = sharded_bias([[scores_TE]], bias_E, 4)
    for ranks in shardings_of(scores_TE):
        assert sum(len(part) for rank in ranks for part in rank) == 500
        assert torch.equal(sharded_bias(ranks, bias_E, 4), whole_E)
    assert not torch.equal(sharded_bias([[scores_TE[:499]]], bias_E, 4), whole_E)


def test_the_histogram_holds_what_it_promises_from_the_command_line(tmp_path, capsys):
    out = tmp_path / "out"
    args = ["compare", "A13", "--seeds", "1", "--steps", "1", "--jobs", "1", "--out", str(out)]
    assert main(args) == 0
    assert "**holds**" in capsys.readouterr().out
    assert json.loads((out / "A13.json").read_text())["verdict"] == "holds"


def test_muon_by_head_makes_the_updates_of_heads_alike(data):
    numbers = {arm.name: measure_heads(minute(HEADS, arm.name, data)) for arm in HEADS.arms}
    assert numbers["by head"]["gradient ratio"] > 4.0
    assert numbers["by head"]["ratio"] < 1.2 < 1.5 < numbers["whole"]["ratio"]
    flops = [numbers[arm]["Newton-Schulz Mflop"] for arm in ("by head", "whole")]
    assert flops[0] < flops[1]


def test_clips_are_counted_by_step(data):
    trial = minute(LOGITS, "clipped", data, **{"step.qk_clip_tau": 1.0})
    trial = dataclasses.replace(trial, config=replace(trial.config, {"step.qk_clip_tau": 0.001}))
    numbers = anchor_optim.measure_logits(trial)
    assert len(numbers["logit by step"]) == 2 and numbers["clips by step"][0] == 4.0
    free = anchor_optim.measure_logits(minute(LOGITS, "free", data))
    assert free["clips"] == 0.0 and free["last active step"] == 0.0


def muon_results(**losses: float):
    """Every arm with three seeds, at 3.0 unless said otherwise."""
    found = {}
    for arm in MUON.arms:
        loss = losses.get(arm.name.replace(" ", "_"), 3.0)
        found[arm.name] = [{"loss": loss + 0.01 * seed} for seed in range(3)]
    return found


def test_each_optimiser_is_judged_at_the_best_rate_of_its_grid():
    results = muon_results(**{"muon_0.005": 1.0, "adamw_0.02": 2.0, "rms_0.4": 0.9})
    assert [item.verdict for item in judge_muon(results)] == [
        "holds",
        "holds",
        "does not hold",  # AdamW is best at the end of its grid
        "holds",
    ]
    results = muon_results(**{"adamw_0.005": 2.0, "muon_0.01": 2.5, "rms_0.8": 2.0})
    assert [item.verdict for item in judge_muon(results)] == [
        "does not hold",
        "holds",
        "holds",
        "does not hold",
    ]


def test_every_rival_of_quantile_is_judged_twice():
    numbers = {"after 5 / before": 0.4, "after 5": 1.0, "last 10": 1.0}
    results = {arm.name: [numbers, numbers] for arm in BALANCE.arms}
    assert len(judge_balance(results)) == 1 + 2 * (len(BALANCE.arms) - 1)


def test_no_arm_changes_the_size_of_the_model_but_by_the_vectors_of_residuals(data):
    sizes = {}
    for arm in RESIDUALS.arms:
        trial = RESIDUALS.trial(arm, 0, 10, data)
        with torch.device("meta"):
            sizes[arm.name] = sum(p.numel() for p in Model(trial.config.model).parameters())
    assert sizes["block"] == sizes["full"]
    assert 0 < sizes["block"] - sizes["base"] < 0.003 * sizes["base"]


def in_four_layers(study: Study, *arms: str, num_steps: int) -> Study:
    """Some arms of a study on half of nano's depth."""
    chosen = tuple(arm for arm in study.arms if arm.name in arms)
    mixers = {"model.mixers": ["kda", "kda", "kda", "mla"], "run.num_eval_batches": 2}
    config = replace(study.base(num_steps), mixers)
    return dataclasses.replace(study, arms=chosen, base=lambda _: config)


def measured(study: Study, data: Path, *, num_steps: int, seeds: int = 2):
    return {
        arm.name: [study.measure(study.trial(arm, seed, num_steps, data)) for seed in range(seeds)]
        for arm in study.arms
    }


@pytest.mark.slow
def test_quantile_balancing_is_even_before_the_sign_rule_has_moved(data):
    study = in_four_layers(BALANCE, "quantile", "sign .001", num_steps=28)
    results = measured(study, data, num_steps=28)
    assert min(values(results, "quantile", "before")) > 2.0
    assert [item.verdict for item in judge_balance(results)] == ["holds"] * 3


@pytest.mark.slow
def test_clipped_heads_stay_near_the_limit_that_free_ones_pass(data):
    study = in_four_layers(LOGITS, "clipped", "free", num_steps=50)
    low = dataclasses.replace(study.arms[0], changes={"step.qk_clip_tau": 0.4})
    study = dataclasses.replace(study, arms=(low, study.arms[1]))
    (clipped,), (free,) = measured(study, data, num_steps=50, seeds=1).values()
    assert free["max logit"] > 0.8 and clipped["max logit"] < 0.6
    assert clipped["clips"] > 0 == free["clips"]
    assert abs(clipped["loss"] - free["loss"]) < 0.1


@pytest.mark.slow
def test_muon_is_far_below_adamw_at_equal_tokens(data):
    """A14 on two narrow layers; found 1.86 and 1.86 against 2.57 and 2.42 nats."""
    for seed in (0, 1):
        muon, adamw = (
            train_arm(minute(MUON, arm, data, seed=seed, num_steps=120)).loss
            for arm in ("muon 0.01", "adamw 0.01")
        )
        assert muon < adamw - 0.3
