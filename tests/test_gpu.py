"""The model and its verbs on a CUDA device: on plain PyTorch, and on kernels beside it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import baltoro
from baltoro.doctor import operators
from baltoro.model.config import ImplConfig, gpu_impl
from baltoro.model.model import Model
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


# Times the error of the torch operators on the same card. The nine layers of k3-mini multiply
# rounding by a thousand: in fp32 every correct order of summation lands elsewhere.
BANDS = {torch.float32: 4.0, torch.bfloat16: 1.5}


def logits_in_its_dtype(model: Model, held: dict[str, torch.Tensor]) -> torch.Tensor:
    """`baltoro.logits` without its detour through fp64."""
    ids_BT = held["input_ids"].cuda()
    batch, length = ids_BT.shape
    bounds = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device="cuda")
    features = held.get("features")
    if features is not None:
        features = features.to(model.lm_head.weight)
    with torch.no_grad():
        hidden_TD = model(ids_BT.flatten(), bounds, image_features=features).hidden
        return model.lm_head(hidden_TD).float().view(batch, length, -1).cpu()


@pytest.mark.parametrize("dtype", BANDS)
@pytest.mark.parametrize(
    "case", ["k3-mini", "k3-mini-long", "k3-vision-mini", "kimi-linear-mini", "k3-mxfp4-mini"]
)
def test_golden_logits_with_kernels(case, dtype):
    held = load_file(GOLDEN / case / "golden.safetensors")

    def error(impl: ImplConfig) -> float:
        model = baltoro.load(GOLDEN / case, dtype=dtype, device="cuda", impl=impl)
        return float((logits_in_its_dtype(model, held) - held["logits"]).square().mean().sqrt())

    kernels = gpu_impl(baltoro.load(GOLDEN / case).config)
    if dtype == torch.float32:  # two operators have kernels for bf16 alone
        kernels = replace(kernels, attention="torch", moe="torch")
    assert kernels.kda == "triton"
    assert error(kernels) <= BANDS[dtype] * error(ImplConfig.all("torch"))


def test_golden_logits_with_experts_that_stay_packed():
    held = load_file(GOLDEN / "k3-mxfp4-mini" / "golden.safetensors")

    def error(impl: str, experts: str) -> float:
        model = baltoro.load(
            GOLDEN / "k3-mxfp4-mini", dtype=torch.bfloat16, device="cuda", impl=impl,
            experts=experts,
        )  # fmt: skip
        assert impl == "torch" or model.config.impl.moe == "triton"
        return float((logits_in_its_dtype(model, held) - held["logits"]).square().mean().sqrt())

    assert error("gpu", "packed") <= BANDS[torch.bfloat16] * error("torch", "decoded")


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
