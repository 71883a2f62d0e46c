"""Newton-Schulz: the polynomial on singular values, by every implementation on a CPU."""

import pytest
import torch
from torch import Tensor

from baltoro.ops.impl import ImplError
from baltoro.ops.newton_schulz import newton_schulz

IMPLS = ["reference", "torch", "gram"]
SHAPES = [(4, 4), (3, 17), (17, 3), (5, 2, 9), (2, 3, 8, 5), (1, 6), (6, 1)]


def by_singular_values(x: Tensor, steps: int) -> Tensor:
    """The definition on the spectrum: U f(f(...(S / |S|))) V'."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ (s[..., None] * vh)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_matrix_keeps_its_singular_vectors_and_moves_its_values(
    shape: tuple[int, ...], impl: str
) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    got = newton_schulz(x, steps=5, compute_dtype=torch.float64, impl=impl)
    torch.testing.assert_close(got, by_singular_values(x, 5), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("impl", "dtype"),
    [("torch", torch.float32), ("torch", torch.bfloat16), ("gram", torch.float32)],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_batched_form_errs_no_more_than_twice_the_reference(
    shape: tuple[int, ...], impl: str, dtype: torch.dtype
) -> None:
    x = torch.randn(shape)
    exact = newton_schulz(x.double(), compute_dtype=torch.float64, impl="reference")
    error, usual = (
        (newton_schulz(x, compute_dtype=dtype, impl=name) - exact).abs().max()
        for name in (impl, "reference")
    )
    # the Gram form rounds squares of singular values: what is added to them grows by a^4 = 141
    assert error <= 2 * usual + (100 if impl == "gram" else 1) * torch.finfo(dtype).eps


@pytest.mark.parametrize("steps", [1, 5, 12])
@pytest.mark.parametrize("smallest", [1.0, 1e-3, 1e-6, 0.0])
def test_the_gram_form_in_fp32_beats_the_loop_in_bf16_on_any_spectrum(
    smallest: float, steps: int
) -> None:
    u, _, vh = torch.linalg.svd(torch.randn(3, 24, 160, dtype=torch.float64), full_matrices=False)
    values = torch.linspace(0, 1, 24, dtype=torch.float64)
    values = smallest**values if smallest > 0 else (values < 0.3).double()
    x = (u @ (values[:, None] * vh)).bfloat16().float()
    exact = newton_schulz(x.double(), steps=steps, compute_dtype=torch.float64, impl="reference")
    error = {
        impl: (newton_schulz(x, steps=steps, compute_dtype=dtype, impl=impl) - exact).norm()
        for impl, dtype in (("gram", torch.float32), ("torch", torch.bfloat16))
    }
    assert error["gram"] < error["torch"] / 10


def test_five_steps_bring_singular_values_near_one() -> None:
    x = torch.randn(64, 192)
    values = torch.linalg.svdvals(newton_schulz(x, impl="torch"))
    assert values.min() > 0.65 and values.max() < 1.25


@pytest.mark.parametrize("impl", IMPLS)
def test_the_size_of_a_matrix_does_not_matter(impl: str) -> None:
    x = torch.randn(2, 6, 10)
    scaled = x * torch.tensor([1e4, 1e-3])[:, None, None]
    torch.testing.assert_close(
        newton_schulz(scaled, impl=impl), newton_schulz(x, impl=impl), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_zero_stays_zero_and_rounding_noise_is_not_blown_up(impl: str) -> None:
    x = torch.stack([torch.zeros(3, 5), torch.randn(3, 5) * 1e-12])
    got = newton_schulz(x, impl=impl)
    assert torch.equal(got[0], x[0])
    assert got[1].abs().max() < 0.05


@pytest.mark.parametrize("impl", IMPLS)
def test_a_broken_matrix_does_not_touch_its_neighbours(impl: str) -> None:
    x = torch.randn(3, 4, 6)
    want = newton_schulz(x, impl=impl)
    x[1, 2, 3] = torch.nan
    got = newton_schulz(x, impl=impl)
    assert torch.equal(got[[0, 2]], want[[0, 2]])
    assert got[1].isnan().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_dtype_strides_and_empty_stacks_are_handled(impl: str) -> None:
    x = torch.randn(2, 7, 4).to(torch.bfloat16)
    got = newton_schulz(x.mT, impl=impl)
    assert got.dtype == torch.bfloat16 and got.is_contiguous()
    torch.testing.assert_close(got, newton_schulz(x, impl=impl).mT, rtol=0, atol=0.01)
    assert newton_schulz(torch.zeros(0, 3, 4), impl=impl).shape == (0, 3, 4)


def test_input_is_left_alone() -> None:
    x = torch.randn(3, 5)
    before = x.clone()
    newton_schulz(x, impl="torch")
    assert torch.equal(x, before)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"float32 \[3\]"):
        newton_schulz(torch.zeros(3), impl="torch")
    with pytest.raises(ValueError, match="int64"):
        newton_schulz(torch.zeros(3, 3, dtype=torch.int64), impl="torch")
    with pytest.raises(ValueError, match="steps=0"):
        newton_schulz(torch.zeros(3, 3), steps=0, impl="torch")
    with pytest.raises(ValueError, match=r"compute_dtype=torch\.int8"):
        newton_schulz(torch.zeros(3, 3), compute_dtype=torch.int8, impl="torch")
    with pytest.raises(ImplError, match="impl='fla' is unknown"):
        newton_schulz(torch.zeros(3, 3), impl="fla")
    with pytest.raises(ImplError, match=r"'gram' serves float32 and float64.*not torch\.bfloat16"):
        newton_schulz(torch.zeros(3, 3), compute_dtype=torch.bfloat16, impl="gram")
