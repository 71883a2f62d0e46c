import pytest
import torch
from ops.earned import assert_earned, randn
from torch.autograd import gradcheck

from baltoro.ops.situ import situ_glu, swiglu


def situ(impl, gate, up):
    return situ_glu(gate, up, beta=4.0, linear_beta=25.0, impl=impl)


def situ_open(impl, gate, up):
    return situ_glu(gate, up, beta=4.0, linear_beta=None, impl=impl)


def swi(impl, gate, up):
    return swiglu(gate, up, impl=impl)


OPS = [situ, situ_open, swi]


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("op", OPS)
def test_gradients_equal_finite_differences(op, impl):
    inputs = [(5 * t).requires_grad_() for t in (randn(3, 7), randn(3, 7, seed=1))]
    assert gradcheck(lambda *t: op(impl, *t), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
@pytest.mark.parametrize("op", OPS)
def test_the_dense_form_earns_its_tolerance(op, num_tokens, dtype):
    assert_earned(op, [4 * randn(num_tokens, 33), 20 * randn(num_tokens, 33, seed=1)], dtype)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_the_output_is_capped_and_the_gate_still_learns_when_saturated(impl):
    gate = torch.tensor([10.0, 1e4, -1e4], requires_grad=True)
    up = torch.tensor([1.0, 1e4, 1e4])
    out = situ(impl, gate, up)
    assert out.abs().max() <= 100
    out.sum().backward()
    assert gate.grad[0] > 0
    assert torch.isfinite(gate.grad).all()


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_the_sigmoid_takes_the_uncapped_gate(impl):
    gate, up = torch.tensor([6.0], dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    expected = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
    torch.testing.assert_close(situ(impl, gate, up), expected)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_wide_caps_give_swiglu(impl):
    gate, up = randn(4, 9), randn(4, 9, seed=1)
    out = situ_glu(gate, up, beta=1e6, linear_beta=1e6, impl=impl)
    torch.testing.assert_close(out, swiglu(gate, up, impl=impl))


def test_halves_of_one_projection_are_served():
    both = randn(5, 12).requires_grad_()
    assert gradcheck(lambda t: situ("torch", *t.chunk(2, -1)), [both])
    assert gradcheck(lambda t: swi("torch", *t.chunk(2, -1)), [both])


def test_wrong_inputs_name_the_field():
    with pytest.raises(ValueError, match="same dtype and shape"):
        situ("torch", randn(3, 5), randn(3, 4))
    with pytest.raises(ValueError, match=r"beta=0\.0 must be positive"):
        situ_glu(randn(3), randn(3), beta=0.0, linear_beta=25.0, impl="torch")
    with pytest.raises(ValueError, match=r"linear_beta=-1\.0 must be None or positive"):
        situ_glu(randn(3), randn(3), beta=4.0, linear_beta=-1.0, impl="torch")
