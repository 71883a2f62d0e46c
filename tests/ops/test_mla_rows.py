"""Rows into pages and the output gate: plain operators, and kernels that round where they round."""

import pytest
import torch
from ops.earned import randn
from ops.interpreted import assert_runs_interpreted, needs_interpreter
from torch import Tensor

from baltoro.ops.impl import ImplError
from baltoro.ops.mla.rows import append_rows, latent_rows, next_rows, sigmoid_gated

EPS = 1e-6


def appended(
    impl: str, dtype: torch.dtype, num_tokens: int, rank: int, width: int, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Pages after new tokens were written, and the rows that should be there."""
    wide = randn(num_tokens, 2 * width + 3).to(device, dtype)
    raw, weight = wide[:, 3 : 3 + width], randn(rank, seed=1).to(device, dtype)
    memory = torch.full((4, 3, 5, width), 7.0, dtype=dtype, device=device)
    latents = memory[:, 1]  # pages any distance apart
    spots = torch.randperm(20, generator=torch.Generator().manual_seed(2))[:num_tokens].to(device)
    append_rows(raw, weight, latents, spots // 5, spots % 5, eps=EPS, impl=impl)
    assert (memory[:, [0, 2]] == 7.0).all()
    expected = torch.full((20, width), 7.0, dtype=dtype, device=device)
    expected[spots] = latent_rows(raw, weight, eps=EPS, impl="reference")
    return latents.reshape(20, width), expected


def gated(impl: str, dtype: torch.dtype, num_tokens: int, device: str = "cpu") -> Tensor:
    y = randn(3, num_tokens, 24).to(device, dtype).transpose(0, 1)
    gate = 3.0 * randn(num_tokens, 100, seed=1).to(device, dtype)[:, 9:81]
    with torch.no_grad():
        return sigmoid_gated(y, gate, impl=impl)


def assert_moved_on(impl: str, num_rows: int, device: str = "cpu") -> None:
    positions = (torch.arange(num_rows) * 7 % 30).to(device)
    steps = (torch.arange(num_rows) % 3 > 0).long().to(device)
    table = torch.arange(100, 100 + 9 * num_rows, dtype=torch.int32).view(num_rows, 9).to(device)
    before = positions.clone()
    found = next_rows(positions, steps, table[:, 1:], 4, impl=impl)
    rows = torch.arange(num_rows, device=device)
    assert torch.equal(found.pages, 101 + 9 * rows + before // 4)
    assert torch.equal(found.places, before % 4)
    assert torch.equal(positions, before + steps)
    assert torch.equal(found.lengths, positions.int())


def test_positions_move_on_and_rows_go_where_they_were() -> None:
    assert_moved_on("torch", 11)
    with pytest.raises(ValueError, match=r"steps: expected int64 \[2\]"):
        next_rows(torch.zeros(2).long(), torch.zeros(2), torch.zeros(2, 3).int(), 4, impl="torch")


@pytest.mark.parametrize("rank", [5, 8])
def test_rows_lie_where_they_should_and_nowhere_else(rank: int) -> None:
    found, expected = appended("torch", torch.float64, 7, rank, 8)
    torch.testing.assert_close(found, expected)


def test_the_gate_is_a_sigmoid_in_the_order_of_the_heads() -> None:
    y, gate = randn(2, 3, 4), randn(2, 12, seed=1)
    expected = y.reshape(2, 12) / (1.0 + (-gate).exp())
    torch.testing.assert_close(sigmoid_gated(y, gate, impl="torch"), expected)


def test_rows_of_another_width_and_places_of_another_type_are_refused() -> None:
    pages = torch.zeros(2, dtype=torch.int64)
    latents = torch.zeros(3, 4, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"raw: expected torch.float64 \[T, 8\]"):
        append_rows(randn(2, 7), randn(5), latents, pages, pages, eps=EPS, impl="torch")
    with pytest.raises(ValueError, match=r"places: expected int64 \[2\]"):
        append_rows(randn(2, 8), randn(5), latents, pages, pages[:1], eps=EPS, impl="torch")
    with pytest.raises(ValueError, match=r"expected \[T, H, V\]"):
        sigmoid_gated(randn(2, 3, 4), randn(2, 11), impl="torch")


INTERPRETED = """
import warnings

warnings.simplefilter("ignore")
import torch
from ops.test_mla_rows import appended, assert_moved_on, gated

assert_moved_on("triton", 0)
assert_moved_on("triton", 131)
for num_tokens, rank, width in ((1, 5, 8), (7, 8, 8), (9, 20, 29), (0, 5, 8)):
    found, expected = appended("triton", torch.float32, num_tokens, rank, width)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)
    ours, plain = (gated(impl, torch.float32, num_tokens) for impl in ("triton", "torch"))
    torch.testing.assert_close(ours, plain, atol=2e-6, rtol=2e-6)
"""


@pytest.mark.slow
@needs_interpreter
def test_the_kernels_are_exact_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    assert_runs_interpreted(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_round_where_plain_operators_round(dtype: torch.dtype) -> None:
    found, expected = appended("triton", dtype, 19, 256, 320, "cuda")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=8e-3)
    assert (found == expected).double().mean() > (0.99 if dtype == torch.bfloat16 else 0.3)
    assert_moved_on("triton", 300, "cuda")
    for num_tokens in (1, 300):
        ours, plain = (gated(impl, dtype, num_tokens, "cuda") for impl in ("triton", "torch"))
        torch.testing.assert_close(ours, plain)


def test_a_weight_wider_than_a_row_is_refused_and_so_is_an_unknown_gate() -> None:
    pages = torch.zeros(2, dtype=torch.int64)
    latents, raw = torch.zeros(3, 4, 8), torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"weight: \[12\]; expected \[R\]"):
        append_rows(raw, torch.ones(12), latents, pages, pages, eps=EPS, impl="torch")
    with pytest.raises(ImplError, match="impl='nonsense' is unknown"):
        sigmoid_gated(torch.zeros(2, 3, 4), torch.zeros(2, 12), impl="nonsense")
