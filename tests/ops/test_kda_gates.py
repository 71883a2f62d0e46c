"""The two decay maps and the unit length of queries and keys."""

import math

import pytest
import torch

from baltoro.ops.kda import bounded_gate, l2_normalize, softplus_gate

H, K = 2, 3


def gate_inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    logits = 4 * torch.randn(5, H, K, dtype=torch.float64)
    a_log, dt_bias = torch.randn(H, dtype=torch.float64), torch.randn(H * K, dtype=torch.float64)
    return [logits.to(dtype), a_log, dt_bias]


def test_bounded_gate_adds_the_bias_before_the_scale_of_the_head() -> None:
    logits, a_log, dt_bias = gate_inputs()
    g = bounded_gate(logits, a_log, dt_bias, lower_bound=-5.0)
    for t, h, c in ((0, 0, 0), (3, 1, 2), (4, 0, 1)):
        z = math.exp(a_log[h]) * float(logits[t, h, c] + dt_bias[h * K + c])
        assert float(g[t, h, c]) == pytest.approx(-5.0 / (1 + math.exp(-z)), rel=1e-12)


def test_softplus_gate_scales_outside() -> None:
    logits, a_log, dt_bias = gate_inputs()
    g = softplus_gate(logits, a_log, dt_bias)
    for t, h, c in ((0, 0, 0), (3, 1, 2), (4, 0, 1)):
        softplus = math.log1p(math.exp(float(logits[t, h, c] + dt_bias[h * K + c])))
        assert float(g[t, h, c]) == pytest.approx(-math.exp(a_log[h]) * softplus, rel=1e-12)


def test_softplus_gate_is_linear_above_20() -> None:
    logits = torch.tensor([20.5, 90.0, 1e4]).double().expand(1, H, K)
    g = softplus_gate(logits, torch.zeros(H).double(), torch.zeros(H * K).double())
    assert torch.equal(g, -logits)


@pytest.mark.parametrize("size", [1e2, 1e5])
def test_bounded_gate_reaches_its_ends_and_never_passes_them(size: float) -> None:
    logits = size * torch.tensor([1.0, -1.0, 0.01]).expand(1, H, K)
    g = bounded_gate(logits, torch.ones(H), torch.zeros(H * K), lower_bound=-5.0)
    assert g.min() == -5.0
    assert g.max() <= 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gates_are_fp32_whatever_the_logits_are(dtype: torch.dtype) -> None:
    logits, a_log, dt_bias = gate_inputs(dtype)
    a_log, dt_bias = a_log.float(), dt_bias.float()
    for got, exact in (
        (
            bounded_gate(logits, a_log, dt_bias, lower_bound=-5.0),
            bounded_gate(logits.double(), a_log, dt_bias, lower_bound=-5.0),
        ),
        (softplus_gate(logits, a_log, dt_bias), softplus_gate(logits.double(), a_log, dt_bias)),
    ):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)


def test_gradcheck_of_both_gates_and_the_normalisation() -> None:
    inputs = [x.requires_grad_() for x in gate_inputs()]
    assert torch.autograd.gradcheck(lambda *x: bounded_gate(*x, lower_bound=-3.0), inputs)
    assert torch.autograd.gradcheck(softplus_gate, inputs)
    assert torch.autograd.gradcheck(lambda x: l2_normalize(x, scale=0.25), inputs[:1])


def test_normalisation_sums_squares_and_keeps_eps_inside_the_root() -> None:
    x = torch.tensor([[3e-3, 4e-3], [0.0, 0.0], [300.0, -400.0]])
    expected = torch.tensor([[3e-3, 4e-3], [0.0, 0.0], [0.6, -0.8]])
    expected[0] /= math.sqrt(25e-6 + 1e-6)
    torch.testing.assert_close(l2_normalize(x), expected)
    torch.testing.assert_close(l2_normalize(x, scale=0.5), 0.5 * expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_normalisation_is_the_same_with_and_without_gradients(dtype: torch.dtype) -> None:
    x = torch.randn(4, 64).to(dtype)
    with torch.no_grad():
        inferred = l2_normalize(x, scale=0.125)
    assert inferred.dtype == dtype
    torch.testing.assert_close(inferred, l2_normalize(x, scale=0.125))


def test_normalisation_keeps_the_dtype_and_computes_in_fp32() -> None:
    x = (1e3 * torch.randn(4, 64)).half()
    y = l2_normalize(x)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y, l2_normalize(x.float()).half())


@pytest.mark.parametrize(
    ("index", "change", "says"),
    [
        (0, lambda x: x[0], "decay_logits: expected"),
        (1, lambda x: x[:1], r"A_log: expected \[H\] = \[2\], got \[1\]"),
        (1, lambda x: x[None], r"A_log: expected"),
        (2, lambda x: x.view(H, K), r"dt_bias: expected \[H \* K\] = \[6\], got \[2, 3\]"),
    ],
)
def test_parameters_of_another_shape_are_refused(index: int, change: object, says: str) -> None:
    assert callable(change)
    inputs = gate_inputs()
    inputs[index] = change(inputs[index])
    with pytest.raises(ValueError, match=says):
        softplus_gate(*inputs)
    with pytest.raises(ValueError, match=says):
        bounded_gate(*inputs, lower_bound=-5.0)


@pytest.mark.parametrize("bound", [-5.01, 0.0, 2.0])
def test_a_bound_outside_its_range_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="lower_bound"):
        bounded_gate(*gate_inputs(), lower_bound=bound)
