import pytest
import torch
from ops.earned import randn

from baltoro.ops.moe import moe_experts, moe_experts_mxfp4
from baltoro.ops.mxfp4 import Mxfp4Tensor, decode_mxfp4, encode_mxfp4

GLU = {"activation": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0}


def packed_experts():
    return encode_mxfp4(randn(5, 2 * 32, 64) / 8), encode_mxfp4(randn(5, 64, 32) / 6)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 11])
def test_packed_experts_give_the_bits_of_decoded_ones(num_tokens, dtype, impl):
    gate_up, down = packed_experts()
    x, weights = randn(num_tokens, 64).to(dtype), randn(num_tokens, 2).float()
    ids = randn(num_tokens, 5).argsort(-1)[:, :2]
    packed = moe_experts_mxfp4(x, ids, weights, gate_up, down, **GLU, impl=impl)
    decoded = [decode_mxfp4(weight, dtype) for weight in (gate_up, down)]
    with torch.no_grad():
        expected = moe_experts(x, ids, weights, *decoded, **GLU, impl=impl)
    assert torch.equal(packed, expected)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_unused_packed_experts_are_not_decoded(num_tokens):
    gate_up, down = packed_experts()
    gate_up.scale[::2] = 255  # NaN
    down.scale[::2] = 255
    ids = torch.tensor([[1, 3]]).expand(num_tokens, 2)
    x, weights = randn(num_tokens, 64).float(), randn(num_tokens, 2).float()
    out = moe_experts_mxfp4(x, ids, weights, gate_up, down, **GLU, impl="torch")
    assert torch.isfinite(out).all()


def test_a_wanted_gradient_is_refused():
    gate_up, down = packed_experts()
    x, weights = randn(2, 64).float().requires_grad_(), randn(2, 2).float()
    ids = torch.tensor([[0, 1], [1, 2]])
    with pytest.raises(ValueError, match="packed experts have none"):
        moe_experts_mxfp4(x, ids, weights, gate_up, down, **GLU, impl="torch")
    with torch.no_grad():
        moe_experts_mxfp4(x, ids, weights, gate_up, down, **GLU, impl="torch")


def test_wrong_inputs_name_the_field():
    gate_up, down = packed_experts()
    x, weights = randn(2, 64).float(), randn(2, 2).float()
    ids = torch.tensor([[0, 1], [1, 2]])
    short = Mxfp4Tensor(gate_up.packed, gate_up.scale[..., :1])
    with pytest.raises(
        ValueError, match=r"moe_experts_mxfp4: gate_up: scale has shape \[5, 64, 1\]"
    ):
        moe_experts_mxfp4(x, ids, weights, short, down, **GLU, impl="torch")
    with pytest.raises(ValueError, match=r"down weight has shape \[5, 64, 64\]"):
        moe_experts_mxfp4(x, ids, weights, gate_up, gate_up, **GLU, impl="torch")
