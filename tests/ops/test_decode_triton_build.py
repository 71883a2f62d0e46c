"""KDA's decode kernel without a GPU: run by the interpreter, and compiled for Hopper."""

import re

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from ops.hopper import machine_code, resources
from ops.interpreted import assert_runs_interpreted, needs_interpreter
from ops.pinned import shapes_of

from baltoro.ops.kda.triton import decode

pytestmark = pytest.mark.slow

INTERPRETED = """
import warnings

warnings.simplefilter("ignore")
import torch
from ops.harness import poisoned_memory
from ops.test_kda_decode import assert_decode_earned, decode_batch

for bound, dims in ((None, (2, 16, 32)), (-5.0, (1, 32, 16))):
    for lengths, kept in (([1, 1, 1], [0, 1, 1]), ([2, 5, 0, 3], [2, 3, 0, 0])):
        batch = decode_batch(lengths, dims=dims, kept=kept, padding=(1,), bound=bound,
                             dtype=torch.float32, is_packed=len(lengths) > 3)
        with poisoned_memory():
            assert_decode_earned(batch, "triton", "cpu", 20.0)
"""


@needs_interpreter
def test_the_kernels_are_exact_in_the_interpreter():
    assert_runs_interpreted(INTERPRETED)


@pytest.mark.parametrize("is_one", [False, True])
@pytest.mark.parametrize("states", ["*fp32", "*bf16"])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_layer_compiles_with_its_state_in_registers(dim, states, is_one):
    tokens = dict.fromkeys(
        ("projected", "decay_logits", "beta_logits", "gate_logits", "windows", "y"), "*bf16"
    )
    weights = dict.fromkeys(("conv", "a_log", "dt_bias", "norm_weight"), "*fp32")
    sizes = dict.fromkeys(decode.GENERAL, "i32") | {"state_stride": "i32:16"}
    numbers = dict.fromkeys(("lower_bound", "norm_eps", "eps"), "fp32")
    table = None if is_one else "*i32"
    arguments = {
        **tokens, **weights, **sizes, **numbers, "states": states, "slots": "*i32",
        "cu_seqlens": table, "num_kept": table, "K": dim, "V": dim, "W": 4, "IS_ONE": is_one,
        "KEEPS_ALL": is_one, "IS_BOUNDED": True,
    }  # fmt: skip
    shape_class = f"{states.removeprefix('*')} d{dim} {'one' if is_one else 'more'}"
    for shape in shapes_of("kda_decode", shape_class):
        assert resources(decode.decode_kernel, arguments, **shape).stack_bytes <= 16
        code = machine_code(decode.decode_kernel, arguments, **shape)
        first_barrier = code.index("BAR.SYNC")
        wide = [match.start() for match in re.finditer(r"LDG\.E\.128", code)]
        assert wide and max(wide) < first_barrier, "the state is asked for before any work"
