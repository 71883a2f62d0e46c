"""What the report is told of the inside of a model."""

import dataclasses
import math

import pytest
import torch
from model.tiny import tiny_k3
from train.batch import tiny_batch

from baltoro.model.model import Model
from baltoro.ops import attn_res, residual
from baltoro.train.probe import mean_weights, probe_model


def test_half_lives_follow_from_the_log_decay():
    model = Model(tiny_k3())
    kda = model.layers[0].self_attn
    with torch.no_grad():
        kda.f_b_proj.weight.zero_()
        kda.dt_bias.zero_()  # sigmoid(0) = 1/2: g = -2.5
    found = probe_model(model, tiny_batch())["kda/half_life"]["layers.0.self_attn"]
    assert len(found) == 3
    assert found[0] == pytest.approx([math.log(2) / 2.5] * 3, rel=1e-5)


def test_residual_weights_are_those_of_the_reads():
    """The mixture of the sources by the weights is the operator's, for a single token."""
    model = Model(tiny_k3())
    sources = [torch.randn(1, 32) for _ in range(3)]
    norm, proj = model.layers[2].mlp_res_norm, model.layers[2].mlp_res_proj
    torch.nn.init.normal_(proj.weight)
    weights = mean_weights(sources, norm, proj)
    mixed = sum(weight * source for weight, source in zip(weights, sources, strict=True))
    expected = attn_res.attn_res_mix(
        sources, norm.weight, proj.weight[0], eps=norm.eps, impl="reference"
    )
    torch.testing.assert_close(mixed, expected)


def test_reads_are_uniform_before_training_over_all_sources_so_far():
    found = probe_model(Model(tiny_k3()), tiny_batch())["attn_res/weights"]
    sizes = {name: len(weights) for name, weights in found.items()}
    # blocks of two layers: the embedding and finished blocks, and the running sum
    assert sizes["layers.0.self_attention"] == 1 and sizes["layers.0.mlp"] == 2
    assert sizes["layers.4.self_attention"] == 3 and sizes["layers.4.mlp"] == 4
    assert found["layers.4.mlp"] == pytest.approx([0.25] * 4)


def test_residual_weights_are_taken_from_the_sources_of_the_forward(monkeypatch):
    model, seen = Model(tiny_k3()), []
    for name, parameter in model.named_parameters():
        if name.endswith("res_proj.weight"):
            torch.nn.init.normal_(parameter)

    def spy(sources, norm_weight, proj_weight, *, eps, impl):
        stacked = torch.stack(list(sources))
        scores = (stacked / (stacked.square().mean(-1, keepdim=True) + eps).sqrt()) @ (
            norm_weight * proj_weight
        )
        seen.append(scores.softmax(0).mean(1).tolist())
        return attn_res.attn_res_mix(sources, norm_weight, proj_weight, eps=eps, impl=impl)

    monkeypatch.setattr(residual, "attn_res_mix", spy)
    found = probe_model(model, tiny_batch())["attn_res/weights"]
    reads = [f"layers.{index}.{part}" for index in range(5) for part in ("self_attention", "mlp")]
    for name, expected in zip(reads, seen, strict=False):
        assert found[name] == pytest.approx(expected, rel=1e-4), name
    assert len(seen) == 11


def test_sizes_and_saturation_are_told_by_layer():
    config = dataclasses.replace(tiny_k3(), situ_beta=1e-6)
    found = probe_model(Model(config), tiny_batch())
    assert len(found["rms/partial_sum"]) == 5
    assert all(value == pytest.approx(1.0, abs=0.05) for value in found["situ/saturated"].values())


def test_the_model_is_as_before():
    model = Model(tiny_k3()).train()
    probe_model(model, tiny_batch())
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
