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
MAX_STACK_BYTES = 16  # a thread

INTERPRETED = """
import torch
from baltoro.ops.newton_schulz import loop_triton as kernels
from baltoro.ops.newton_schulz.shared import COEFFICIENTS, normed
kernels.ROWS, kernels.COLUMNS, kernels.INNER, kernels.CACHE_BYTES = 32, 16, 16, 10**5
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
def test_the_kernel_is_exact_in_the_interpreter():
    assert_runs_interpreted(INTERPRETED)


@pytest.mark.slow
@pytest.mark.parametrize(("R", "C"), [(384, 448), (768, 2048), (136, 144)])
def test_the_kernel_compiles_without_spills_or_lost_addresses(R, C):
    arguments = {
        **dict.fromkeys(("x", "even", "odd", "gram", "poly"), "*bf16"), "counters": "*i32",
        **dict.fromkeys(("num_matrices", "steps", "group"), "i32"),
        **dict.fromkeys(("a", "b", "c"), "fp32"), "R": R, "C": C, "SQUARES": 6, "TILES": 12,
        "M": kernels.ROWS, "N": kernels.COLUMNS, "B": kernels.INNER, "STAGES": kernels.NUM_STAGES,
    }  # fmt: skip
    found = resources(kernels.loop_kernel, arguments, kernels.NUM_WARPS)
    assert found.stack_bytes <= MAX_STACK_BYTES
    assert found.registers * 32 * kernels.NUM_WARPS * 2 <= 65536  # two programs at once
    code = machine_code(kernels.loop_kernel, arguments, kernels.NUM_WARPS)
    assert "HGMMA" in code and lost_memory_descriptors(code) == []
    # tiles are out before they are counted, and a count is read anew each time
    assert code.count("MEMBAR") >= 2 and code.count("LDG.E.STRONG.GPU") >= 6


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


@pytest.mark.gpu
def test_the_list_of_tiles_ends_with_more_and_with_fewer_matrices_than_the_cache_holds(monkeypatch):
    x = torch.randn(300, 384, 448, device="cuda", dtype=BF16)
    want = newton_schulz(x, compute_dtype=BF16, impl="torch")
    for cache_bytes in (1, 2**23, 2**40):
        monkeypatch.setattr(kernels, "CACHE_BYTES", cache_bytes)
        got = newton_schulz(x, compute_dtype=BF16, impl="triton")
        assert float((got - want).float().norm() / want.float().norm()) < 1e-2
