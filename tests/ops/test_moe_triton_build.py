"""The kernels before the experts' products without a GPU: interpreted, and compiled for Hopper."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from ops.hopper import resources
from ops.interpreted import assert_runs_interpreted, needs_interpreter

from baltoro.ops.moe import triton as kernels
from baltoro.ops.triton import padded_width

pytestmark = pytest.mark.slow
SIZES = [(8, 2), (64, 6), (96, 8), (896, 16)]

INTERPRETED = """
import warnings

warnings.simplefilter("ignore")
from ops.harness import poisoned_memory
from ops.test_moe_triton import check_choice, check_sort

for num_tokens in (1, 7, 33):
    for sizes in ((8, 2), (64, 6), (6, 3)):
        with poisoned_memory():
            check_choice("cpu", num_tokens, *sizes)
            check_sort("cpu", num_tokens, *sizes)
check_sort("cpu", 300, 64, 6)
"""


@needs_interpreter
def test_the_kernels_are_exact_in_the_interpreter():
    assert_runs_interpreted(INTERPRETED)


@pytest.mark.parametrize("bias", ["*fp32", None])
@pytest.mark.parametrize("is_softmax", [False, True])
@pytest.mark.parametrize(("num_experts", "num_active"), SIZES)
def test_the_choice_compiles_without_lost_registers(num_experts, num_active, is_softmax, bias):
    rows, num_warps = kernels.choice_shape(num_experts)
    arguments = {
        "logits": "*fp32", "bias": bias, "scores": "*fp32", "ids": "*i64", "weights": "*fp32",
        "num_tokens": "i32", "scaling": "fp32", "E": num_experts, "A": num_active,
        "BE": padded_width(num_experts), "BA": padded_width(num_active), "R": rows,
        "IS_SOFTMAX": is_softmax, "IS_RENORMALIZED": True,
    }  # fmt: skip
    assert resources(kernels.choose_kernel, arguments, num_warps).stack_bytes == 0


@pytest.mark.parametrize("block", [16, 256, kernels.SORT_BLOCK])
def test_the_order_compiles_without_lost_registers(block):
    arguments = {
        "ids": "*i64", "token": "*i64", "pair": "*i64", "row": "*i64", "stops": "*i32",
        "num_pairs": "i32", "A": 6, "B": block,
    }  # fmt: skip
    assert resources(kernels.sort_kernel, arguments, kernels.WARPS).stack_bytes == 0
