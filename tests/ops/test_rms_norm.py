import pytest
import torch
from ops.earned import assert_earned, randn
from torch.autograd import gradcheck

from baltoro.ops import blocks
from baltoro.ops.impl import ImplError
from baltoro.ops.rms_norm import gated_rms_norm, rms_norm

EPS = 1e-5


def norm(impl, x, weight):
    return rms_norm(x, weight, eps=EPS, impl=impl)


def gated(impl, x, weight, gate_logits):
    return gated_rms_norm(x, weight, gate_logits, eps=EPS, impl=impl)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_gradients_equal_finite_differences(impl):
    inputs = [t.requires_grad_() for t in (randn(3, 5), randn(5))]
    assert gradcheck(lambda *t: norm(impl, *t), inputs)
    inputs = [t.requires_grad_() for t in (randn(3, 2, 5), randn(5), randn(3, 2, 5, seed=1))]
    assert gradcheck(lambda *t: gated(impl, *t), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 131])
def test_the_dense_norm_earns_its_tolerance(num_tokens, dtype):
    assert_earned(norm, [3 * randn(num_tokens, 96), randn(96)], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 131])
def test_the_dense_gated_norm_earns_its_tolerance(num_tokens, dtype):
    inputs = [randn(num_tokens, 3, 32), randn(32), 2 * randn(num_tokens, 3, 32, seed=1)]
    assert_earned(gated, inputs, dtype)


def test_blocks_do_not_change_the_gradients(monkeypatch):
    inputs = [randn(67, 3, 32), randn(32), randn(67, 3, 32, seed=1)]
    monkeypatch.setattr(blocks, "_CPU_BYTES", 5 * 3 * 32 * 4)
    assert_earned(gated, inputs, torch.float32)
    assert_earned(norm, inputs[:2], torch.float32)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_the_weight_multiplies_the_rounded_quotient(impl):
    x, weight = randn(64, 96).bfloat16(), randn(96).bfloat16()
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    rounded_first = normed.bfloat16() * weight
    rounded_last = (normed * weight.float()).bfloat16()
    assert not torch.equal(rounded_first, rounded_last)
    assert torch.equal(norm(impl, x, weight), rounded_first)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_the_gate_comes_after_the_norm_and_the_weight_stays_fp32(impl):
    x, gate_logits = randn(9, 2, 32).bfloat16(), randn(9, 2, 32, seed=1).bfloat16()
    weight = 1 + randn(32).float() / 1000  # bf16 would round most of it to 1
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    expected = normed * weight * torch.sigmoid(gate_logits.float())
    out = gated(impl, x, weight, gate_logits)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected.bfloat16(), rtol=2**-8, atol=0)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_epsilon_stands_inside_the_root_of_the_mean(impl):
    x = torch.full((1, 4), 1e-3)
    expected = x / (1e-6 + 1e-5) ** 0.5
    torch.testing.assert_close(norm(impl, x, torch.ones(4)), expected)


def test_inference_gives_the_bits_of_training():
    x, weight, gate_logits = randn(5, 2, 8).float(), randn(8).float(), randn(5, 2, 8).float()
    with torch.no_grad():
        plain = norm("torch", x, weight), gated("torch", x, weight, gate_logits)
    assert torch.equal(plain[0], norm("torch", x, weight))
    assert torch.equal(plain[1], gated("torch", x, weight, gate_logits))


def test_strided_inputs_are_served():
    x, weight = randn(6, 4, 5).transpose(0, 1).requires_grad_(), randn(5)
    gate_logits = randn(6, 4, 5, seed=1).transpose(0, 1).requires_grad_()
    assert gradcheck(lambda t: norm("torch", t, weight), [x])
    assert gradcheck(lambda *t: gated("torch", t[0], weight, t[1]), [x, gate_logits])


def test_wrong_inputs_name_the_field():
    with pytest.raises(ValueError, match=r"weight has shape \[4\]"):
        norm("torch", randn(3, 5), randn(4))
    with pytest.raises(ValueError, match=r"gate_logits has shape \[3, 5\]"):
        gated("torch", randn(3, 1, 5), randn(5), randn(3, 5))
    with pytest.raises(ImplError, match="rms_norm: impl='fast' is unknown"):
        norm("fast", randn(3, 5), randn(5))
