import math

import pytest
import torch
from model.tiny import VISION, tiny_k3

from baltoro.model.init import init_weights
from baltoro.model.model import Model


def test_values_follow_the_report() -> None:
    torch.manual_seed(0)
    model = Model(tiny_k3(vision=VISION, num_mtp_layers=1))
    for name, tensor in model.named_parameters():
        if name.endswith(("A_log", "_res_proj.weight")):
            assert not tensor.any(), name
        elif "norm" in name:
            assert (tensor == 1).all(), name
        else:
            assert tensor.std() > 0, name
    assert 0.018 < model.embed_tokens.weight[:60].std() < 0.022
    assert 0.018 < model.layers[1].block_sparse_moe.experts.gate_up_proj.std() < 0.022


def test_softplus_of_dt_bias_is_log_uniform_between_its_bounds() -> None:
    torch.manual_seed(0)
    model = Model(tiny_k3())
    bias = torch.cat([m.dt_bias for n, m in model.named_modules() if hasattr(m, "dt_bias")])
    step = torch.nn.functional.softplus(bias.double())
    assert step.min() > 0.99e-3 and step.max() < 1.01e-1
    middle = math.log(1e-2)
    assert abs(step.log().mean().item() - middle) < 0.35


def test_equal_seeds_give_equal_weights() -> None:
    torch.manual_seed(0)
    a, b = Model(tiny_k3()), Model(tiny_k3())
    for model in (a, b):
        init_weights(model, generator=torch.Generator().manual_seed(7))
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y), name


def test_a_tensor_without_a_rule_is_named() -> None:
    model = Model(tiny_k3())
    model.register_parameter("mystery", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match="mystery: no initial value"):
        init_weights(model)
