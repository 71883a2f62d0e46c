"""Newton-Schulz in Triton: interpreted, compiled for Hopper, and on a GPU nearer to fp64 than the
loop in bf16."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from ops.harness import poisoned_memory
from ops.hopper import machine_code, resources
from ops.interpreted import assert_runs_interpreted, needs_interpreter
from ops.pinned import shapes_of
from ops.sass import lost_memory_descriptors

from baltoro.ops.impl import ImplError
from baltoro.ops.newton_schulz import newton_schulz
from baltoro.ops.newton_schulz import triton as kernels

BF16 = torch.bfloat16
MAX_STACK_BYTES = 48  # a thread
MAX_SHARED_BYTES = 227 * 1024  # a program

INTERPRETED = """
import warnings

warnings.simplefilter("ignore")
import numpy
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from baltoro.ops import launch_table
from ops.test_newton_schulz_triton import errors, with_spectrum

def widened(x):  # the interpreter holds bf16 as bits, multiplies the bits, and cuts off to round
    if x.dtype.scalar == tl.bfloat16:
        return (x.data.astype(numpy.uint32) << 16).view(numpy.float32)
    return x.data

InterpreterBuilder.create_dot = lambda self, a, b, d, *_: TensorHandle(
    widened(a) @ widened(b) + d.data, d.dtype.scalar
)
for name in ("newton_schulz_gram", "newton_schulz_apply"):
    for shape in launch_table.pinned()["portable"][name].values():
        shape["part"] = 64  # several parts of a hundred columns
for shape, steps in (((2, 16, 64), 5), ((3, 17), 1), ((70, 5), 5), ((20, 100), 7), ((1, 6), 5)):
    for smallest in (1.0, 1e-3, 0.0):
        x = with_spectrum(smallest, *shape, device="cpu")
        ours, loop = errors(x, steps)
        assert ours < loop / 2, (shape, steps, smallest, ours, loop)
"""


def with_spectrum(smallest: float, *shape: int, device: str = "cuda") -> Tensor:
    """Numbers of bf16 in fp32; singular values fall to `smallest`, or for 0 are few and equal."""
    *stack, rows, columns = shape
    short = min(rows, columns)
    draw = torch.Generator().manual_seed(sum(shape))
    u, v = (
        torch.linalg.qr(torch.randn(*stack, side, short, generator=draw).double().to(device)).Q
        for side in (rows, columns)
    )
    place = torch.linspace(0, 1, short, dtype=torch.float64, device=device)
    values = smallest**place if smallest > 0 else (place < 0.3).double()
    return ((u * values) @ v.mT).to(BF16).float()


def errors(x: Tensor, steps: int) -> tuple[float, float]:
    """Relative errors against fp64 of the kernels and of the loop, products in bf16."""
    exact = newton_schulz(x.double(), steps=steps, compute_dtype=torch.float64, impl="gram")
    found = []
    for impl in ("triton", "torch"):
        got = newton_schulz(x, steps=steps, compute_dtype=BF16, impl=impl)
        assert got.shape == x.shape and got.dtype == x.dtype and got.is_contiguous()
        found.append(float((got - exact).norm() / exact.norm()))
    return found[0], found[1]


@pytest.mark.slow
@needs_interpreter
def test_the_kernels_are_exact_in_the_interpreter():
    assert_runs_interpreted(INTERPRETED)


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["i32:16", "i32"])
@pytest.mark.parametrize("rows", [5, 64, 100, 128])
def test_the_kernels_compile_without_lost_registers_or_addresses(rows, columns):
    padded = max(kernels.MIN_TILE, 1 << (rows - 1).bit_length())
    shared = {
        "x": "*bf16", "num_columns": columns, "columns_per_part": "i32:16", "R": rows, "BR": padded,
    }  # fmt: skip
    gram = {**shared, "parts": "*fp32"}
    apply = {**shared, "factors": "*bf16"}
    for name, kernel, arguments in (
        ("gram", kernels.gram_kernel, gram),
        ("apply", kernels.apply_kernel, {**apply, "out": "*bf16"}),
        ("apply", kernels.apply_kernel, {**apply, "out": "*fp32"}),
    ):
        for shape in shapes_of(f"newton_schulz_{name}", f"r{padded}"):
            arguments |= {"BC": shape["columns"], "NUM_STAGES": shape["num_stages"]}
            found = resources(kernel, arguments, shape["num_warps"])
            assert found.stack_bytes <= MAX_STACK_BYTES
            assert found.shared_bytes <= MAX_SHARED_BYTES
            code = machine_code(kernel, arguments, shape["num_warps"])
            assert lost_memory_descriptors(code) == []


@pytest.mark.slow
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("padded", [16, 64, 128])
def test_all_steps_of_a_matrix_fit_on_chip_and_no_load_runs_ahead_of_a_store(padded, is_normed):
    arguments = {
        "parts": "*fp32", "factors": "*bf16", "num_parts": "i32", "steps": "i32", "a": "fp32",
        "b": "fp32", "c": "fp32", "eps": "fp32", "BR": padded, "IS_NORMED": is_normed,
    }  # fmt: skip
    for shape in shapes_of("newton_schulz_factor", f"r{padded}"):
        num_warps = shape["num_warps"]
        assert resources(kernels.factor_kernel, arguments, num_warps).stack_bytes == 0
        code = machine_code(kernels.factor_kernel, arguments, num_warps)
        assert "LDGSTS" not in code and lost_memory_descriptors(code) == []


@pytest.mark.gpu
@pytest.mark.parametrize("smallest", [1.0, 1e-3, 1e-6, 0.0])
@pytest.mark.parametrize(
    "shape", [(3, 128, 1024), (1, 128, 7168), (150, 128, 256), (2, 64, 768), (7, 100, 300), (9, 40)]
)
def test_the_kernels_beat_the_loop_on_any_spectrum(shape, smallest):
    for steps in (1, 5, 12):
        ours, loop = errors(with_spectrum(smallest, *shape), steps)
        assert ours <= loop, (steps, ours, loop)
    ours, loop = errors(with_spectrum(smallest, *shape[:-2], shape[-1], shape[-2]), 5)
    assert ours <= loop, ("tall", ours, loop)


@pytest.mark.gpu
def test_bf16_matrices_come_back_in_bf16_as_near_as_the_loop():
    x = torch.randn(5, 128, 1000, device="cuda").to(BF16)
    exact = newton_schulz(x.double(), compute_dtype=torch.float64, impl="torch")
    error = {
        impl: (newton_schulz(x, compute_dtype=BF16, impl=impl) - exact).norm()
        for impl in ("triton", "torch")
    }
    assert error["triton"] <= error["torch"] / 3


@pytest.mark.gpu
def test_zero_stays_zero_and_a_broken_matrix_does_not_touch_its_neighbours():
    x = torch.randn(4, 64, 256, device="cuda")
    x[3] = 0
    with poisoned_memory():
        want = newton_schulz(x, compute_dtype=BF16, impl="triton")
    assert torch.equal(want[3], x[3])
    x[1, 2, 3] = torch.nan
    got = newton_schulz(x, compute_dtype=BF16, impl="triton")
    assert torch.equal(got[[0, 2, 3]], want[[0, 2, 3]])
    assert got[1].isnan().all()


@pytest.mark.gpu
def test_runs_repeat_to_the_bit():
    x = torch.randn(300, 128, 512, device="cuda")
    first = newton_schulz(x, compute_dtype=BF16, impl="triton")
    assert torch.equal(first, newton_schulz(x, compute_dtype=BF16, impl="triton"))
    assert torch.equal(first[:7], newton_schulz(x[:7], compute_dtype=BF16, impl="triton"))


def test_what_the_kernels_do_not_serve_is_refused_with_the_reason(monkeypatch):
    x = torch.zeros(2, 129, 200)
    with pytest.raises(ImplError, match="needs tensors on a CUDA device, not on cpu"):
        newton_schulz(x, compute_dtype=BF16, impl="triton")
    monkeypatch.setattr(kernels, "refuse_unserved", lambda *_: None)
    with pytest.raises(ImplError, match=r"serves bfloat16, not torch\.float32"):
        newton_schulz(x, impl="triton")
