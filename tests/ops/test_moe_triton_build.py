"""The kernels before the experts' products without a GPU: interpreted, and compiled for Hopper."""

from functools import partial

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from ops.hopper import machine_code, resources
from ops.interpreted import assert_runs_interpreted, needs_interpreter
from ops.pinned import on_every_device
from ops.sass import lost_memory_descriptors

from baltoro.ops.moe import few, pairs
from baltoro.ops.triton import padded_width

pytestmark = pytest.mark.slow
MAX_STACK = 16  # of a product's thread: a few registers lost once, outside its loop
SIZES = [(8, 2), (64, 6), (96, 8), (896, 16)]

INTERPRETED = """
import warnings

warnings.simplefilter("ignore")
from baltoro.ops.moe import pairs
from ops.harness import poisoned_memory
from ops.test_moe_pairs import check_choice, check_choice_gradients, check_sort
from ops.test_moe_pieces import check_gated_unit

pairs.MAX_SORTED = 300
for num_tokens in (1, 7, 33):
    for sizes in ((8, 2), (64, 6), (6, 3)):
        with poisoned_memory():
            check_choice("cpu", num_tokens, *sizes)
            check_sort("cpu", num_tokens, *sizes)
            check_choice_gradients("cpu", num_tokens, *sizes)
    check_gated_unit("cpu", num_tokens, 3, 48)
check_sort("cpu", 300, 64, 6)
check_sort("cpu", 300, 600, 16)
"""

INTERPRETED_FEW = """
import warnings

warnings.simplefilter("ignore")
import torch
from baltoro.ops.moe.shared import Glu
from ops.test_moe_few import GLU, check, check_decoding

for num_tokens, kind in ((1, "spread"), (5, "odd"), (19, "one"), (40, "spread")):
    check("cpu", torch.float32, num_tokens, (6, 2, 96, 64), kind, GLU)
check("cpu", torch.float32, 3, (64, 2, 96, 64), "spread", GLU)
check("cpu", torch.float32, 3, (4, 1, 160, 224), "spread", Glu("silu", 4.0, 25.0))
# its conversion to bf16 loses subnormal numbers: scales of 0 and 1 are left to the card
check_decoding("cpu", torch.tensor([2, 100, 127, 200, 255]))
"""


@needs_interpreter
def test_the_kernels_are_exact_in_the_interpreter():
    assert_runs_interpreted(INTERPRETED)


@needs_interpreter
def test_the_experts_of_few_tokens_are_exact_in_the_interpreter():
    assert_runs_interpreted(INTERPRETED_FEW)


@pytest.mark.parametrize("bias", ["*fp32", None])
@pytest.mark.parametrize("is_softmax", [False, True])
@pytest.mark.parametrize(("num_experts", "num_active"), SIZES)
def test_the_choice_compiles_without_lost_registers(num_experts, num_active, is_softmax, bias):
    rows, num_warps = pairs.choice_shape(num_experts)
    arguments = {
        "logits": "*fp32", "bias": bias, "scores": "*fp32", "ids": "*i64", "weights": "*fp32",
        "num_tokens": "i32", "scaling": "fp32", "E": num_experts, "A": num_active,
        "BE": padded_width(num_experts), "BA": padded_width(num_active), "R": rows,
        "IS_SOFTMAX": is_softmax, "IS_RENORMALIZED": True,
    }  # fmt: skip
    assert resources(pairs.choose_kernel, arguments, num_warps).stack_bytes == 0


@pytest.mark.parametrize("is_softmax", [False, True])
@pytest.mark.parametrize(("num_experts", "num_active"), SIZES)
def test_the_gradient_of_the_choice_compiles_without_lost_registers(
    num_experts, num_active, is_softmax
):
    rows, num_warps = pairs.choice_shape(num_experts)
    arguments = {
        "scores": "*fp32", "ids": "*i64", "d_scores": "*fp32", "d_weights": "*fp32",
        "d_logits": "*fp32", "num_tokens": "i32", "scaling": "fp32", "E": num_experts,
        "A": num_active, "BE": padded_width(num_experts), "BA": padded_width(num_active),
        "R": rows, "IS_SOFTMAX": is_softmax, "IS_RENORMALIZED": True,
    }  # fmt: skip
    assert resources(pairs.choose_backward_kernel, arguments, num_warps).stack_bytes == 0


@pytest.mark.parametrize(("num_experts", "num_active"), SIZES)
def test_the_order_of_many_compiles_without_lost_registers(num_experts, num_active):
    padded = max(32, padded_width(num_experts))
    counting = {
        "ids": "*i64", "counts": "*i32", "num_pairs": "i32", "E": num_experts, "BE": padded,
        "B": pairs.counted(num_experts),
    }  # fmt: skip
    first = {
        "counts": "*i32", "firsts": "*i32", "stops": "*i32", "num_blocks": "i32",
        "E": num_experts, "BE": padded, "R": max(1, 8192 // padded),
    }  # fmt: skip
    placing = {
        "ids": "*i64", "firsts": "*i32", "token": "*i64", "pair": "*i64", "row": "*i64",
        "num_pairs": "i32", "E": num_experts, "A": num_active, "B": pairs.counted(num_experts),
        "C": pairs.COMPARED,
    }  # fmt: skip
    assert resources(pairs.count_kernel, counting, pairs.WARPS).stack_bytes == 0
    assert resources(pairs.first_kernel, first, 2 * pairs.WARPS).stack_bytes == 0
    assert resources(pairs.place_kernel, placing, pairs.counted(num_experts) // 64).stack_bytes == 0


@pytest.mark.parametrize("num_pairs", [16, 256, 1000, 8000])
def test_the_order_compiles_without_lost_registers(num_pairs):
    shape = pairs.sort_shape(num_pairs)
    arguments = {
        "ids": "*i64", "token": None, "pair": "*i64", "row": None, "stops": None,
        "slots": "*i32", "num_pairs": "i32", "A": 6, "B": shape["B"], "N": 16,
    }  # fmt: skip
    assert resources(pairs.sort_kernel, arguments, shape["num_warps"]).stack_bytes == 0


@pytest.mark.parametrize("num_pairs", [1, 100, 300, 600, 1500, 6000])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(("latent", "inner"), [(384, 448), (3584, 3072)])
def test_the_experts_of_few_tokens_compile_without_lost_registers(
    latent, inner, is_packed, num_pairs
):
    is_single = num_pairs == 1
    common = {
        "weight": "*u8" if is_packed else "*bf16", "scale": "*u8" if is_packed else None,
        "ids": "*i64", "pair": None if is_single else "*i64",
        "slots": None if is_single else "*i32",
        "act": "*bf16", "Z": latent, "F": inner, "IS_PACKED": is_packed, "IS_SINGLE": is_single,
        "IS_PLAIN": False,
    }  # fmt: skip
    gate_up = {
        "x": "*bf16", "x_stride": "i32:16", "beta": "fp32", "linear_beta": "fp32", "A": 6,
        "IS_SITU": True, "IS_CAPPED": True, "IS_SQUARE": True, "IS_EXACT": False,
    }  # fmt: skip
    for tile in on_every_device(partial(few.tile_of, num_pairs, 64, is_packed, is_single)):
        sizes = few._sizes(tile)
        num_warps = sizes.pop("num_warps")
        for kernel, own in ((few.gate_up_kernel, gate_up), (few.down_kernel, {"y": "*bf16"})):
            arguments = {**common, **own, **sizes}
            assert resources(kernel, arguments, num_warps).stack_bytes <= MAX_STACK
            assert not lost_memory_descriptors(machine_code(kernel, arguments, num_warps))
