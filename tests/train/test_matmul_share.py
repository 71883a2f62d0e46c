"""The share of a step's time in matrix products: measured, and without a trace in the step."""

import time
from types import SimpleNamespace

import pytest
import torch
from model.tiny import tiny_k3
from train.batch import tiny_batch

from baltoro.model.model import Model
from baltoro.optim.config import OptimConfig
from baltoro.train import matmul_share
from baltoro.train.config import StepConfig
from baltoro.train.learner import build_learner
from baltoro.train.matmul_share import is_product, time_products
from baltoro.train.step import train_step

CPU = torch.device("cpu")


def test_products_count_forward_and_backward_and_nothing_else_does():
    a = torch.randn(300, 300, requires_grad=True)
    with time_products(CPU) as nothing:
        (a.exp() + a).sum().backward()
    with time_products(CPU) as forward:
        loss = (a @ a).sum()
    with time_products(CPU) as backward:
        loss.backward()
    assert nothing.seconds == 0.0
    assert forward.seconds > 0.0 and backward.seconds > 0.0


def test_products_and_the_rest_fill_the_time():
    a = torch.randn(700, 700)
    start = time.perf_counter()
    with time_products(CPU) as products:
        for _ in range(10):
            torch.mm(a, a)
    elapsed = time.perf_counter() - start
    assert 0.2 * elapsed < products.seconds <= elapsed


@pytest.mark.parametrize("shape", [(2, 64, 16), (2, 3, 64, 16)])
def test_attention_counts(shape):
    q = torch.randn(shape)
    with time_products(CPU) as products:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert products.seconds > 0.0


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("aten::mm", True),
        ("aten::_grouped_mm", True),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", True),
        ("torch_attn::_varlen_attn", False),  # a door: what it calls is counted
        ("aten::_flash_attention_forward", True),
        ("aten::mul", False),
        ("aten::linalg_solve_triangular", False),
        ("sm90_attention_kernel", False),  # a kernel of an operator already counted
    ],
)
def test_operators_are_told_by_name(operator, expected):
    assert is_product(operator) == expected


def test_a_timed_step_is_the_same_step():
    found = []
    for is_timed in (False, True):
        torch.manual_seed(0)
        learner = build_learner(Model(tiny_k3()), OptimConfig(), StepConfig(recompute=is_timed))
        if is_timed:
            with time_products(CPU) as products:
                result = train_step(learner, [tiny_batch()], lr=1e-2)
            assert products.seconds > 0.0
        else:
            result = train_step(learner, [tiny_batch()], lr=1e-2)
        found.append((result.numbers, learner.model.state_dict()))
    assert found[0][0] == found[1][0]
    for name, tensor in found[0][1].items():
        assert torch.equal(tensor, found[1][1][name]), name


def test_on_a_gpu_the_kernels_of_products_are_added_up(monkeypatch):
    events = [("aten::mm", 3e6), ("aten::mul", 5e6), ("aten::_grouped_mm", 1e6), ("gemm_x", 4e6)]

    class Profiler:
        def __init__(self, activities):
            self.activities = activities

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def key_averages(self):
            return [SimpleNamespace(key=k, self_device_time_total=t) for k, t in events]

    monkeypatch.setattr(matmul_share, "profile", Profiler)
    with time_products(torch.device("cuda")) as products:
        pass
    assert products.seconds == pytest.approx(4.0)
