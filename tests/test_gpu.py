"""The model and its verbs on a CUDA device, with the implementations that plain PyTorch gives."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import baltoro
from baltoro.doctor import operators
from baltoro.serve.generate import generate_tokens
from baltoro.serve.sampler import Sampling

pytestmark = pytest.mark.gpu

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("case", ["k3-mini", "k3-mini-long", "kimi-linear-mini", "k3-mxfp4-mini"])
def test_golden_logits_on_the_gpu(case):
    golden = load_file(GOLDEN / case / "golden.safetensors")
    model = baltoro.load(GOLDEN / case, dtype=torch.float32, device="cuda").double()
    with torch.no_grad():
        logits_BTW = baltoro.logits(model, golden["input_ids"]).cpu()
    assert (logits_BTW - golden["logits"]).abs().max() < 1e-4


def test_every_parameter_gets_a_finite_gradient_on_the_gpu():
    model = baltoro.load(GOLDEN / "k3-mini", dtype=torch.float32, device="cuda").train()
    ids_BT = torch.randint(1, 256, (2, 70))
    baltoro.logits(model, ids_BT).logsumexp(-1).mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_decoding_on_the_gpu_gives_the_tokens_of_the_cpu():
    ids = {}
    for device in ("cpu", "cuda"):
        model = baltoro.load(GOLDEN / "kimi-linear-mini", dtype=torch.float32, device=device)
        tokens = generate_tokens(
            model, [5, 9, 33], max_new_tokens=24, sampling=Sampling(temperature=0.0)
        )
        ids[device] = [token.id for token in tokens]
    assert ids["cuda"] == ids["cpu"]


def test_the_doctor_runs_every_operator_on_the_gpu():
    found = operators(torch.device("cuda"))
    assert all("torch runs on cuda" in words for words in found.values()), found
