"""The router's choice and the order of pairs as kernels: equal to the plain forms."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from ops.earned import randn
from ops.harness import poisoned_memory, relative_error
from torch import Tensor

from baltoro.model.config import MoeConfig
from baltoro.model.moe import Router
from baltoro.ops.impl import ImplError
from baltoro.ops.moe import route, router_logits
from baltoro.ops.moe.pairs import choose_experts, sort
from baltoro.ops.moe.shared import sorted_pairs

gpu = pytest.mark.gpu
OPTIONS = {"activation": "sigmoid", "renormalize": True, "scaling_factor": 2.5}


def logits_of(num_tokens: int, num_experts: int, device: str) -> Tensor:
    """Scores among which many are equal, so that the order of ids decides."""
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randint(-8, 8, (num_tokens, num_experts), generator=generator) / 4
    return logits.to(device)


def check_choice(device: str, num_tokens: int, num_experts: int, num_active: int) -> None:
    logits = logits_of(num_tokens, num_experts, device)
    bias = (torch.arange(num_experts, device=device) % 3) / 8
    for activation in ("sigmoid", "softmax"):
        for each in (None, bias):
            options = {**OPTIONS, "activation": activation, "num_experts_per_token": num_active}
            expected = route(logits, each, **options, impl="torch")
            found = route(logits, each, **options, impl="triton")
            # rounding of a softmax may part or join two equal scores
            if activation == "sigmoid":
                assert torch.equal(found.expert_ids, expected.expert_ids)
                assert torch.allclose(found.weights, expected.weights, rtol=1e-5, atol=1e-7)
            assert torch.allclose(found.scores, expected.scores, rtol=1e-5, atol=1e-7)
            assert torch.allclose(found.weights.sum(-1), expected.weights.sum(-1), rtol=1e-5)


def check_choice_gradients(device: str, num_tokens: int, num_experts: int, num_active: int) -> None:
    """Of weights, and of scores if asked for, against autograd in fp64 on the same choice."""
    logits = randn(num_tokens, num_experts).to(device).float()
    probes = [
        randn(num_tokens, width, seed=1).to(device).float() for width in (num_experts, num_active)
    ]
    for activation in ("sigmoid", "softmax"):
        for renormalize in (False, True):
            for has_score_gradient in (False, True):
                options = {
                    "activation": activation, "renormalize": renormalize, "scaling_factor": 2.5,
                    "num_experts_per_token": num_active, "has_score_gradient": has_score_gradient,
                }  # fmt: skip
                gradients = []
                for dtype, impl in ((torch.float64, "torch"), (torch.float32, "triton")):
                    leaf = logits.to(dtype).requires_grad_()
                    found = route(leaf, None, **options, impl=impl)
                    assert found.scores.requires_grad == has_score_gradient
                    loss = (found.weights * probes[1]).sum()
                    if has_score_gradient:
                        loss = loss + (found.scores * probes[0]).sum()
                    gradients += torch.autograd.grad(loss, leaf)
                assert relative_error(gradients[1], gradients[0]) < 2e-6


def check_sort(device: str, num_tokens: int, num_experts: int, num_active: int) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(-1)[:, :num_active]
    ids = ids.to(device).contiguous()
    token, pair, row, stops = sort(ids, num_experts)
    for found, expected in zip((token, pair, row), sorted_pairs(ids), strict=True):
        assert torch.equal(found, expected)
    counts = torch.bincount(ids.flatten(), minlength=num_experts)
    assert torch.equal(stops.long(), counts.cumsum(0))


@gpu
@pytest.mark.parametrize("num_tokens", [1, 7, 256, 1000])
@pytest.mark.parametrize(("num_experts", "num_active"), [(8, 2), (64, 6), (96, 8), (896, 16)])
def test_experts_are_chosen_as_by_the_plain_form(num_tokens, num_experts, num_active):
    with poisoned_memory():
        check_choice("cuda", num_tokens, num_experts, num_active)


@gpu
@pytest.mark.parametrize("num_tokens", [1, 33, 1000])
@pytest.mark.parametrize(("num_experts", "num_active"), [(8, 2), (64, 6), (896, 16)])
def test_the_gradient_of_a_choice_is_that_of_the_plain_form(num_tokens, num_experts, num_active):
    with poisoned_memory():
        check_choice_gradients("cuda", num_tokens, num_experts, num_active)


@gpu
@pytest.mark.parametrize("num_tokens", [1, 5, 256, 512, 8191])
@pytest.mark.parametrize(("num_experts", "num_active"), [(8, 2), (64, 6), (896, 16)])
def test_pairs_are_sorted_as_by_the_plain_form(num_tokens, num_experts, num_active):
    with poisoned_memory():
        check_sort("cuda", num_tokens, num_experts, num_active)


@gpu
def test_a_router_in_bf16_has_the_scores_of_fp32():
    torch.manual_seed(0)
    router = Router(MoeConfig(
        num_experts=64, num_experts_per_token=6, num_shared_experts=1, expert_intermediate_size=8
    ), 768, "triton").cuda()  # fmt: skip
    torch.nn.init.normal_(router.weight, std=0.05)
    router.weight.data = router.weight.data.bfloat16()
    x = torch.randn(256, 768, device="cuda").bfloat16()
    wide = (x.double() @ router.weight.double().T).sigmoid()
    with torch.no_grad():
        assert (router(x).scores - wide).abs().max() < 1e-5


@gpu
@pytest.mark.parametrize("num_tokens", [1, 1001])
def test_router_logits_of_bf16_and_their_gradients_are_those_of_fp32(num_tokens):
    x, weight, probe = (
        randn(num_tokens, 768).cuda(), randn(64, 768).cuda() / 28, randn(num_tokens, 64).cuda()
    )  # fmt: skip
    leaves = [each.bfloat16().requires_grad_() for each in (x, weight)]
    wide = [each.detach().double().requires_grad_() for each in leaves]
    logits, exact = router_logits(*leaves), wide[0] @ wide[1].T
    assert logits.dtype == torch.float32
    assert relative_error(logits.detach(), exact.detach()) < 1e-6
    found = torch.autograd.grad(logits, leaves, probe.float())
    expected = torch.autograd.grad(exact, wide, probe)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 2**-8 / 2


@gpu
def test_scores_that_are_not_numbers_choose_existing_experts():
    logits = torch.full((3, 6), torch.nan, device="cuda")
    ids = route(logits, None, num_experts_per_token=2, **OPTIONS, impl="triton").expert_ids
    assert ids.min() >= 0 and ids.max() < 6


def test_groups_and_too_many_experts_are_refused():
    logits = torch.zeros(2, 8)
    with pytest.raises(ImplError, match="not those of 1 of 2 groups"):
        route(
            logits,
            None,
            num_experts_per_token=2,
            num_groups=2,
            topk_groups=1,
            **OPTIONS,
            impl="triton",
        )
    with torch.no_grad(), pytest.raises(ImplError, match="at most 1024 experts"):
        choose_experts(torch.zeros(1, 2048), None, 2, False, True, 1.0)
