"""The Newton-Schulz loop in Triton: interpreted, compiled for Hopper, and as exact as torch's."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from ops.harness import poisoned_memory
from ops.hopper import machine_code, resources
from ops.interpreted import assert_runs_interpreted, needs_interpreter
from ops.sass import lost_memory_descriptors
from ops.test_newton_schulz_triton import errors, with_spectrum

from baltoro.ops.newton_schulz import loop_triton as kernels
from baltoro.ops.newton_schulz import newton_schulz

BF16 = torch.bfloat16

INTERPRETED = """
import torch
from baltoro.ops.newton_schulz import loop_triton as kernels
from baltoro.ops.newton_schulz.shared import COEFFICIENTS, normed
kernels.ROWS, kernels.COLUMNS, kernels.INNER = 32, 16, 16
a, b, c = COEFFICIENTS
for shape in ((2, 70, 90), (1, 32, 32), (3, 40, 41)):
    x = normed(torch.randn(shape, generator=torch.Generator().manual_seed(0)), torch.float32)
    got, want = kernels.newton_schulz_loop(x, 2), x  # fp32 throughout
    for _ in range(2):
        gram = want @ want.mT
        want = a * want + (b * gram + c * gram @ gram) @ want
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
"""


@pytest.mark.slow
@needs_interpreter
def test_the_kernels_are_exact_in_the_interpreter():
    assert_runs_interpreted(INTERPRETED)


@pytest.mark.slow
@pytest.mark.parametrize(("R", "C"), [(384, 448), (768, 2048), (136, 144)])
def test_the_kernels_compile_without_spills_or_lost_addresses(R, C):
    sizes = {
        "M": kernels.ROWS, "B": kernels.INNER, "STAGES": kernels.NUM_STAGES, "R": R, "NUM_TILES": 6,
        "x": "*bf16", "out": "*bf16",
    }  # fmt: skip
    square = {**sizes, "scale": "fp32", "share": "fp32"}
    for kernel, arguments in (
        (kernels.square_kernel, {**square, "K": C, "HAS_SHARE": False}),
        (kernels.square_kernel, {**square, "K": R, "HAS_SHARE": True}),
        (
            kernels.step_kernel,
            {**sizes, "poly": "*bf16", "a": "fp32", "C": C, "N": kernels.COLUMNS},
        ),
    ):
        assert resources(kernel, arguments, kernels.NUM_WARPS).stack_bytes == 0
        code = machine_code(kernel, arguments, kernels.NUM_WARPS)
        assert "HGMMA" in code and lost_memory_descriptors(code) == []


@pytest.mark.gpu
@pytest.mark.parametrize("smallest", [1.0, 1e-3, 0.0])
@pytest.mark.parametrize("shape", [(5, 384, 448), (3, 448, 384), (2, 130, 131), (1, 768, 2048)])
def test_the_loop_errs_no_more_than_torchs(shape, smallest):
    with poisoned_memory():
        for steps in (1, 5, 6):
            ours, loop = errors(with_spectrum(smallest, *shape), steps)
            assert ours <= 1.02 * loop, (steps, ours, loop)


@pytest.mark.gpu
def test_one_matrix_gets_the_same_bits_in_any_stack_and_any_run():
    x = torch.randn(70, 200, 300, device="cuda", dtype=BF16)
    options = {"compute_dtype": BF16, "impl": "triton"}
    whole = newton_schulz(x, **options)
    assert torch.equal(whole, newton_schulz(x, **options))
    assert torch.equal(whole[5:7], newton_schulz(x[5:7].clone(), **options))
