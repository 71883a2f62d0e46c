"""What stands between the experts' products as kernels: equal to the plain forms."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from ops.earned import assert_earned, randn
from ops.harness import poisoned_memory, relative_error
from torch import Tensor

from baltoro.ops.moe import dense, grouped, moe_experts, pieces
from baltoro.ops.moe.shared import Glu, sorted_pairs

gpu = pytest.mark.gpu


def check_gated_unit(device: str, num_tokens: int, num_active: int, width: int) -> None:
    """The activation and what its backward makes of a pair's weight, as the plain form in fp32."""
    ids = randn(num_tokens, 8, seed=4).argsort(-1)[:, :num_active]
    _, pair, _ = (each.to(device) for each in sorted_pairs(ids))
    inner = (3 * randn(pair.shape[0], 2 * width)).to(device).float()
    d_act = randn(pair.shape[0], width, seed=1).to(device).float()
    weights = randn(num_tokens, num_active, seed=2).to(device).float()
    for glu in (Glu("situ", 4.0, 25.0), Glu("situ", 4.0, None), Glu("silu", 4.0, 25.0)):
        expected = grouped._weighted_backward(d_act, inner, weights, pair, glu)
        found = pieces.activate_backward(d_act, inner, weights, pair, glu)
        for one, other in zip(found, expected, strict=True):
            assert relative_error(one, other) < 2e-6
        assert relative_error(pieces.activate(inner, glu), dense.activate(inner, glu)) < 2e-6


@gpu
@pytest.mark.parametrize("num_tokens", [1, 37, 500])
@pytest.mark.parametrize("width", [48, 448, 640])
def test_the_gated_unit_is_that_of_the_plain_form(num_tokens, width):
    with poisoned_memory():
        check_gated_unit("cuda", num_tokens, 3, width)


@gpu
@pytest.mark.parametrize("kind", ["spread", "odd", "one"])
@pytest.mark.parametrize("num_tokens", [1, 37, 4100])
def test_experts_in_training_earn_their_tolerance_and_give_the_same_bits_again(num_tokens, kind):
    ids = randn(num_tokens, 8, seed=4).argsort(-1)[:, :3]
    if kind == "one":
        ids = torch.arange(3).repeat(num_tokens, 1)
    elif kind == "odd":
        ids = ids // 2 * 2 + 1

    def op(impl: str, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        wide = weights.mT.to(torch.promote_types(x.dtype, torch.float32))
        return moe_experts(
            x, ids.to(x.device), wide, gate_up, down,
            activation="situ", situ_beta=4.0, situ_linear_beta=25.0, impl=impl,
        )  # fmt: skip

    tensors = [
        randn(num_tokens, 64), randn(3, num_tokens), randn(8, 96, 64) / 8, randn(8, 64, 48) / 7
    ]  # fmt: skip
    assert_earned(op, tensors, torch.bfloat16, device="cuda", impl="triton")
    runs = []
    for _ in range(2):
        leaves = [each.cuda().bfloat16().requires_grad_() for each in tensors]
        with poisoned_memory():
            out = op("triton", *leaves)
            runs.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
