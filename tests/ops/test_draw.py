"""One token per row: noise of its seed, step and token alone, and a kernel that draws the same."""

import pytest
import torch
from ops.earned import randn
from ops.interpreted import assert_runs_interpreted, needs_interpreter
from torch import Tensor

from baltoro.ops.draw import Drawn, Noise, draw_tokens


def settings(num_rows: int) -> tuple[Tensor, Noise]:
    """Temperatures, and noise for two of three rows."""
    rows = torch.arange(num_rows)
    scale = 0.5 + 0.25 * (rows % 5)[:, None].float()
    return scale, Noise((rows % 3 > 0)[:, None], rows * 7_919 - 20_000, rows * rows)


def assert_drawn_alike(found: Drawn, expected: Drawn) -> None:
    sound = expected.numbers[2] == 1.0
    assert torch.equal(found.numbers[2], expected.numbers[2])
    assert torch.equal(found.ids[sound], expected.ids[sound])
    assert torch.equal(found.numbers[0], found.ids.double())
    torch.testing.assert_close(
        found.numbers[1, sound], expected.numbers[1, sound], atol=1e-5, rtol=1e-6
    )


def compared(num_rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Kernel against plain operators, with and without noise and temperature, ties and faults."""
    logits = randn(num_rows, width, seed=width).to(dtype)
    logits[0, width // 2 :] = logits[0, width // 2]
    logits[0] -= 8.0 * (torch.arange(width) < width // 2)
    if num_rows > 3:
        logits[1, -1] = float("nan")
        logits[2, 0] = float("inf")
        logits[3, width // 3] = float("-inf")
    scale, noise = settings(num_rows)
    for given in ((None, None), (scale, None), (scale, noise), (None, noise)):
        temperatures, randoms = (x.to(device) if isinstance(x, Tensor) else x for x in given)
        if randoms is not None:
            randoms = Noise(*(x.to(device) for x in randoms))
        cases = (logits.to(device), temperatures, randoms)
        assert_drawn_alike(draw_tokens(*cases, impl="triton"), draw_tokens(*cases, impl="torch"))


def test_the_likeliest_is_the_lowest_of_several() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, 3.0, 3.0]])
    found = draw_tokens(logits, None, None, impl="torch")
    assert found.ids.tolist() == [1, 0]
    torch.testing.assert_close(found.numbers[1, 1].float(), torch.tensor(1 / 3).log())
    assert found.numbers[2].tolist() == [1.0, 1.0]


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(20_000, 3)
    rows = torch.arange(20_000)
    noise = Noise(torch.ones(20_000, 1, dtype=torch.bool), rows, rows % 7)
    found = draw_tokens(logits, None, noise, impl="torch")
    shares = found.ids.bincount(minlength=3) / 20_000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.2]), atol=0.015, rtol=0.0)


def test_a_temperature_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scale: expected fp32 \[2, 1\]"):
        draw_tokens(torch.zeros(2, 3), torch.ones(2), None, impl="torch")


INTERPRETED = """
import warnings

warnings.simplefilter("ignore")
import numpy
import torch
from baltoro.ops.draw import triton
from ops.test_draw import compared

numpy.seterr(all="ignore")
triton.BLOCK = 16
for num_rows, width in ((1, 1), (5, 40), (4, 16), (6, 33)):
    for programs in (1, 264):
        triton.PROGRAMS = programs
        compared(num_rows, width, torch.float32)
"""


@pytest.mark.slow
@needs_interpreter
def test_the_kernels_draw_the_same_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    assert_runs_interpreted(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_draw_the_same(dtype: torch.dtype) -> None:
    for num_rows, width in ((1, 32_768), (7, 1_000), (256, 32_768), (33, 163_840)):
        compared(num_rows, width, dtype, "cuda")


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("is_drawn", torch.ones(4).bool()),
        ("seeds", torch.zeros(4)),
        ("steps", torch.zeros(3).long()),
    ],
)
def test_noise_of_another_shape_or_dtype_is_refused(field: str, bad: Tensor) -> None:
    noise = settings(4)[1]._replace(**{field: bad})
    with pytest.raises(ValueError, match=rf"noise\.{field}: expected"):
        draw_tokens(torch.zeros(4, 9), None, noise, impl="torch")
