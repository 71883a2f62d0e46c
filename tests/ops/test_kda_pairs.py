"""Pair products and the inverse: the pieces of the chunked form that can go wrong by themselves."""

import pytest
import torch
from ops.harness import kda_inputs

from baltoro.ops.kda.inverse import unit_lower_inverse
from baltoro.ops.kda.pairs import pair_gradients, pair_products


def chunk_inputs(gate: str) -> list[torch.Tensor]:
    batch = kda_inputs([64], gate=gate, keys="near_parallel")
    return [batch.tokens[name].transpose(0, 1).contiguous() for name in ("q", "k", "g")]


def by_pairs(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Both matrices straight from the definition, `[2, B, C, C]`."""
    total = g.cumsum(1)
    decay = (total[:, :, None] - total[:, None, :]).exp()
    products = torch.stack([(x[:, :, None] * k[:, None, :] * decay).sum(-1) for x in (q, k)])
    return products.masked_fill(torch.ones(64, 64).triu().bool(), 0.0)


@pytest.mark.parametrize("is_bounded", [True, False])
@pytest.mark.parametrize("gate", ["near_zero", "mixed"])
def test_products_and_their_gradients_follow_the_definition(gate: str, is_bounded: bool) -> None:
    inputs = [x.requires_grad_() for x in chunk_inputs(gate)]
    exact = by_pairs(*inputs)
    with torch.no_grad():
        aqk, akk, row, col = pair_products(*inputs, is_bounded)
        total = inputs[2].cumsum(1)
    torch.testing.assert_close(torch.stack([aqk, akk]), exact.detach())
    torch.testing.assert_close(row, total.exp())
    torch.testing.assert_close(col, (total[:, -1:] - total).exp())
    probe = torch.randn_like(exact).tril(-1)
    expected = torch.autograd.grad((exact * probe).sum(), inputs)
    with torch.no_grad():
        got = pair_gradients(*inputs, *probe, is_bounded)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_tiles_at_the_bound_stay_in_range_of_fp32_before_the_mask() -> None:
    q, k, g = (x.float() for x in chunk_inputs("bound"))
    exact = by_pairs(*(x.double() for x in (q, k, g)))
    got = torch.stack(pair_products(q, k, g, True)[:2])
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-8)


def test_the_inverse_of_near_equal_keys_keeps_its_digits() -> None:
    _, k, g = (x.float() for x in chunk_inputs("near_zero"))
    lower = pair_products(k, k, g, True)[1]
    exact = torch.linalg.inv(torch.eye(64).double() + lower.double())
    assert exact.abs().max() <= 1.0 + 1e-6
    assert (unit_lower_inverse(lower).double() - exact).abs().max() < 2e-6


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_the_inverse_of_every_chunk_size_is_unit_lower_triangular(size: int) -> None:
    lower = torch.randn(3, size, size, dtype=torch.float64).tril(-1) / size
    inverse = unit_lower_inverse(lower)
    eye = torch.eye(size, dtype=torch.float64).expand(3, size, size)
    torch.testing.assert_close(inverse @ (eye + lower), eye)
    assert torch.equal(inverse, inverse.tril())
