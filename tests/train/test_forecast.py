"""What is said of memory before the first step, against what is there after it."""

import dataclasses

import pytest
import torch
from model.tiny import tiny_k3
from train.batch import tiny_batch

from baltoro.model.config import ImplConfig
from baltoro.model.model import Model
from baltoro.model.presets import preset
from baltoro.optim.config import OptimConfig
from baltoro.train import forecast
from baltoro.train.config import StepConfig
from baltoro.train.forecast import (
    activation_bytes,
    available_bytes,
    matmul_rate,
    saved_bytes,
    state_bytes,
)
from baltoro.train.learner import build_learner
from baltoro.train.step import train_step


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_is_counted_to_the_byte(dtype, num_microbatches):
    config = tiny_k3()
    learner = build_learner(Model(config).cast(getattr(torch, dtype)), OptimConfig(), StepConfig())
    train_step(learner, [tiny_batch()] * num_microbatches, lr=1e-3)
    held = {}
    for name, parameter in learner.model.named_parameters():
        held[f"weight.{name}"], held[f"grad.{name}"] = parameter, parameter.grad
    for name, tensor in learner.optimizer.state_dict().items():
        if not name.startswith("num_steps"):
            held[name] = tensor
    found = state_bytes(config, dtype, num_microbatches=num_microbatches)
    assert found == sum(tensor.nbytes for tensor in held.values())


def test_activations_of_layers_add_up_to_those_of_the_model():
    """`nano` has a dense first layer and eight layers; the forecast takes all for MoE layers."""
    config = dataclasses.replace(preset("nano"), vision=None)
    measured = saved_bytes(Model(config).train(), 256) / 256
    assert activation_bytes(config, recompute=False) == pytest.approx(measured, rel=0.2)


def test_operators_of_a_gpu_need_no_gpu_to_be_forecast():
    config = tiny_k3()
    on_gpu = dataclasses.replace(config, impl=ImplConfig.all("triton"))
    expected = activation_bytes(config, recompute=False)
    assert activation_bytes(on_gpu, recompute=False) == expected


def test_a_layer_keeps_nothing_that_does_not_grow_with_its_tokens(monkeypatch):
    found = []
    for num_tokens in (64, 256):
        monkeypatch.setattr(forecast, "_PROBE_TOKENS", num_tokens)
        found.append(activation_bytes(preset("nano"), recompute=False))
    assert found[0] == pytest.approx(found[1], rel=0.02)


def test_recompute_needs_less():
    config = tiny_k3()
    assert activation_bytes(config, recompute=True) < activation_bytes(config, recompute=False)


def test_the_machine_has_memory_and_multiplies():
    assert available_bytes(torch.device("cpu")) > 0
    assert matmul_rate(torch.device("cpu"), torch.float32, seconds=0.01) > 1e6
