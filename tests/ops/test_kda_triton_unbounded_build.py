"""The portable KDA kernels without a GPU: run by the interpreter, and compiled for Hopper."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from ops.hopper import machine_code, resources
from ops.interpreted import assert_runs_interpreted, needs_interpreter
from ops.pinned import shapes_of
from ops.sass import lost_memory_descriptors

from baltoro.ops.kda.triton.gradients import gradients_kernel, row_gradients_kernel
from baltoro.ops.kda.triton.prep import prep_kernel

pytestmark = pytest.mark.slow
MAX_STACK_BYTES = {"bf16": 704, "fp32": 1440}  # of 255 registers a thread

INTERPRETED = """
import warnings

warnings.simplefilter("ignore")
import torch
from ops.harness import assert_within_budget, in_two_parts, kda_inputs, poisoned_memory
from ops.test_kda_triton import fused, kda, raw_inputs
from ops.test_kda_triton_unbounded import extreme

for gate, keys in (("unbounded", "random"), ("unbounded", "repeated"), ("near_zero", "repeated")):
    batch = kda_inputs([70, 0, 33, 1], gate=gate, keys=keys, key_dim=16, value_dim=32,
                       num_heads=3, dtype=torch.float32)
    with poisoned_memory():
        assert_within_budget(kda("triton", None), kda("reference", None), batch, rounding_steps=12)
batch = extreme(kda_inputs([100], key_dim=32, value_dim=16, dtype=torch.float32))
assert_within_budget(kda("triton", None), kda("reference", None), batch)
assert_within_budget(in_two_parts(kda("triton", None)), kda("reference", None), batch)
batch = extreme(raw_inputs([70, 1], torch.float32, 0.0, 16))
assert_within_budget(fused("triton", None), fused("reference", None), batch)
"""


@needs_interpreter
def test_they_are_exact_for_any_gate_in_the_interpreter():
    assert_runs_interpreted(INTERPRETED)


FP32 = {"a_log", "dt_bias", "gamma", "chunk_beta", "norms", "products"}
FP32 |= {"d_bias_parts", "d_rate_parts"}
SCALARS = {"scale": "fp32", "eps": "fp32", "lower_bound": "fp32", "num_heads": "i32"}


def arguments_of(kernel, dtype: str, from_logits: bool, **constants) -> dict[str, object]:
    """What `kernel` is given with tensors of `dtype`, from raw inputs or not."""
    constants |= {"FROM_LOGITS": from_logits, "NORMALIZE": from_logits, "PRECISION": "tf32x3"}
    arguments = {name: value for name, value in constants.items() if name in kernel.arg_names}
    for name in kernel.arg_names:
        if name in SCALARS:
            arguments[name] = SCALARS[name]
        elif name == "table":
            arguments[name] = "*i32"
        elif name in ("a_log", "dt_bias") and not from_logits:
            arguments[name] = None
        elif name not in constants:
            is_wide = name in FP32 or (name in ("g", "beta", "dg", "dbeta") and not from_logits)
            arguments[name] = "*fp32" if is_wide else f"*{dtype}"
    return arguments


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (128, 128), (64, 128)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_they_compile_without_lost_registers(dtype, key_dim, value_dim, from_logits):
    is_low = dtype == "bf16"
    form = {"K": key_dim, "V": value_dim, "IS_BOUNDED": False}
    form |= {"IS_TRANSPOSED": is_low, "PARTS": 2 if is_low else 3}
    for name, kernel in (
        ("kda_prep", prep_kernel),
        ("kda_row_gradients", row_gradients_kernel),
        ("kda_gradients", gradients_kernel),
    ):
        for shape in shapes_of(name, dtype):
            form |= {"BK": shape.get("columns"), "BV": shape.get("values")}
            arguments = arguments_of(kernel, dtype, from_logits, **form)
            num_warps = shape["num_warps"]
            stack = resources(kernel, arguments, num_warps).stack_bytes
            assert stack <= MAX_STACK_BYTES[dtype], f"{kernel.__name__}: {stack} bytes of stack"
            assert not lost_memory_descriptors(machine_code(kernel, arguments, num_warps))
