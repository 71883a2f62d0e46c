"""The portable KDA kernels without a GPU: run by the interpreter, and compiled for Hopper."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from ops.hopper import Resources, resources
from ops.interpreted import assert_runs_interpreted, needs_interpreter

from baltoro.ops.kda.triton.gradients import gradients_kernel, row_gradients_kernel
from baltoro.ops.kda.triton.prep import prep_kernel

pytestmark = pytest.mark.slow
MAX_STACK_BYTES = 512  # of 255 registers a thread
MAX_SHARED_BYTES = 72 * 1024  # three programs a multiprocessor
KEY_COLUMNS = {"bf16": 32, "fp32": 16}

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


def taken(kernel, dtype: str, from_logits: bool, **constants) -> Resources:
    """What `kernel` takes with tensors of `dtype`, from raw inputs or not."""
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
    return resources(kernel, arguments, 4)


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (128, 128), (64, 128)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_they_compile_without_lost_registers(dtype, key_dim, value_dim, from_logits):
    is_low = dtype == "bf16"
    shape = {"K": key_dim, "V": value_dim, "BV": 64, "IS_BOUNDED": False}
    for kernel, constants in (
        (prep_kernel, {"BK": 32}),
        (row_gradients_kernel, {}),
        (
            gradients_kernel,
            {"BK": KEY_COLUMNS[dtype], "IS_TRANSPOSED": is_low, "PARTS": 2 if is_low else 3},
        ),
    ):
        found = taken(kernel, dtype, from_logits, **shape, **constants)
        name = kernel.__name__
        assert found.stack_bytes <= MAX_STACK_BYTES, f"{name}: {found.stack_bytes} bytes of stack"
        assert found.shared_bytes <= MAX_SHARED_BYTES, f"{name}: {found.shared_bytes} shared bytes"
