"""Projections of one input as one product: the same numbers, and parameters that stay."""

import pytest
import torch
from model.tiny import tiny_k3, tiny_kimi_linear

import baltoro
from baltoro.model.config import ModelConfig
from baltoro.model.model import Model

BOUNDS = torch.tensor([0, 9, 14], dtype=torch.int32)


def made(config: ModelConfig) -> Model:
    torch.manual_seed(0)
    return Model(config).eval().double()


def hidden(model: Model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(14), BOUNDS).hidden


@pytest.mark.parametrize("config", [tiny_k3(), tiny_kimi_linear()], ids=["k3", "kimi-linear"])
def test_joined_projections_give_what_they_gave(config: ModelConfig) -> None:
    model = made(config)
    expected = hidden(model)
    model.join_projections()
    assert torch.allclose(hidden(model), expected, atol=1e-12)
    calls = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda *_: calls.append(1))
    hidden(model)
    joined = len(calls)
    calls.clear()
    hidden_with_gradients = model(torch.arange(14), BOUNDS).hidden
    assert torch.allclose(hidden_with_gradients, expected, atol=1e-12)
    assert joined < len(calls) / 2


def test_weights_written_in_place_are_those_of_the_product() -> None:
    model = made(tiny_k3())
    model.join_projections()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    other = made(tiny_k3())
    other.load_state_dict(model.state_dict())
    assert torch.allclose(hidden(model), hidden(other), atol=1e-12)


def test_weights_that_became_other_tensors_are_noticed() -> None:
    model = made(tiny_k3())
    expected = hidden(model)
    model.join_projections()
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5
    changed = hidden(model)
    assert not torch.allclose(changed, expected)
    model.join_projections()
    assert torch.allclose(hidden(model), changed, atol=1e-12)


def test_a_joined_model_trains_and_is_saved_as_any_other(tmp_path) -> None:
    model = made(tiny_k3())
    model.join_projections()
    model(torch.arange(14), BOUNDS).hidden.sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "q_proj" in n)
    model.float()
    model.join_projections()
    baltoro.save(model, tmp_path / "model")
    again = baltoro.load(tmp_path / "model")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
