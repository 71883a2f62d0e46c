"""The Triton kernels around the products without a GPU: interpreted, and compiled for Hopper."""

from functools import partial

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import triton
from ops.hopper import machine_code, resources
from ops.interpreted import assert_runs_interpreted, needs_interpreter
from ops.pinned import CPU, on_every_device, shapes_of

from baltoro.ops import launch_table
from baltoro.ops.attn_res import ring
from baltoro.ops.attn_res import triton as attn_res
from baltoro.ops.cross_entropy import triton as cross_entropy
from baltoro.ops.rms_norm import triton as rms_norm
from baltoro.ops.short_conv import triton as short_conv
from baltoro.ops.situ import triton as situ

pytestmark = pytest.mark.slow
MAX_STACK_BYTES = 96  # a thread; with 16 warps it has 128 registers

INTERPRETED = """
import warnings

warnings.simplefilter("ignore")
import torch
from ops.earned import assert_earned, randn
from ops.harness import assert_within_budget, poisoned_memory, short_conv_inputs
from ops.test_pointwise_triton import gated, halves, loss, mix, norm, situ, sources_of, uncapped
from ops.test_short_conv_triton import conv, reference
from baltoro.ops import launch_table
from baltoro.ops.attn_res import triton as attn_res
from baltoro.ops.cross_entropy import triton as cross_entropy

fp32, bf16 = torch.float32, torch.bfloat16
for num_sources, num_tokens, width in ((1, 3, 16), (2, 0, 16), (3, 7, 24), (5, 5, 32)):
    assert_earned(mix, sources_of(num_sources, num_tokens, width), fp32, impl="triton")
for num_tokens in (0, 1, 65):
    x, gate = 3 * randn(num_tokens, 3, 8), 2 * randn(num_tokens, 3, 8, seed=1)
    assert_earned(norm, [x, randn(8)], bf16, impl="triton")
    assert_earned(gated, [x, randn(8), gate], fp32, impl="triton")
    for scale in (1e-3, 10.0):
        for op in (situ, uncapped):
            assert_earned(op, [scale * x, scale * gate], fp32, impl="triton")
    assert_earned(halves, [4 * randn(num_tokens, 48)], fp32, impl="triton")
shape = {"block": 32, "num_warps": 4}
for kernel in ("cross_entropy_loss", "cross_entropy_gradient"):
    launch_table.pinned()["portable"][kernel]["fp32 w32768"] = shape
for numbers in (2**28, 4 * 101):
    cross_entropy.RANGE_NUMBERS = numbers
    for num_tokens in (0, 1, 9):
        assert_earned(loss, [randn(num_tokens, 24), randn(101, 24)], fp32, impl="triton")
for lengths, width in (([1], 4), ([1, 1, 1], 2), ([0, 2, 0, 5], 3), ([37, 1, 20], 4)):
    with poisoned_memory():
        batch = short_conv_inputs(lengths, width=width, dtype=fp32)
        assert_within_budget(conv, reference, batch)
"""


@needs_interpreter
def test_the_kernels_are_exact_in_the_interpreter():
    assert_runs_interpreted(INTERPRETED)


@pytest.mark.parametrize(
    ("num_sources", "width"), [(1, 768), (5, 768), (9, 2048), (9, 7168), (10, 7168)]
)
def test_the_mixture_compiles_without_lost_registers(num_sources, width):
    padded = triton.next_power_of_2(width)
    sources = ("*bf16",) * num_sources
    shared = {
        "sources": sources, "norm_weight": "*bf16", "proj_weight": "*bf16", "stats": "*fp32",
        "num_tokens": "i32", "tokens_per_program": "i32", "S": num_sources, "D": width,
        "BD": padded,
    }  # fmt: skip
    forward = {"out": "*bf16", "eps": "fp32", "IS_KEPT": True}
    backward = {"d_sources": sources, "d_out": "*bf16", "d_query_parts": "*fp32"}
    for kernel, others, shape_of in (
        (attn_res.forward_kernel, forward, attn_res.forward_shape),
        (attn_res.backward_kernel, backward, attn_res.backward_shape),
    ):
        for shape in on_every_device(partial(shape_of, num_sources, padded)):
            arguments = {**shared, **others, "AHEAD": shape.ahead, "IS_HELD": shape.is_held}
            found = resources(kernel, arguments, shape.num_warps)
            assert found.stack_bytes <= MAX_STACK_BYTES


@pytest.mark.parametrize("weight", ["*bf16", "*fp32"])
@pytest.mark.parametrize(
    ("num_sources", "width"),
    [(5, 768), (4, 1024), (9, 2048), (9, 4096), (1, 7168), (9, 7168), (10, 7168), (8, 8192)],
)
def test_the_mixture_through_a_ring_fits_its_programs_into_a_multiprocessor(
    num_sources, width, weight
):
    sources = ("*bf16",) * num_sources
    shared = {
        "sources": sources, "norm_weight": weight, "proj_weight": weight, "stats": "*fp32",
        "num_tokens": "i32", "S": num_sources, "D": width,
    }  # fmt: skip
    forward = {"out": "*bf16", "eps": "fp32", "IS_KEPT": True}
    backward = {"d_sources": sources, "d_out": "*bf16", "d_query_parts": "*fp32"}
    for kernel, others, shape_of in (
        (ring.ring_forward_kernel, forward, partial(ring.forward_shape, width)),
        (ring.ring_backward_kernel, backward, partial(ring.backward_shape, num_sources, width)),
    ):
        for shape in on_every_device(shape_of):
            arguments = {**shared, **others, "P": shape.pairs, "SLOTS": shape.slots}
            if kernel is ring.ring_backward_kernel:
                arguments["GROUP"] = shape.group
            found = resources(kernel, arguments, shape.num_warps)
            assert found.stack_bytes <= MAX_STACK_BYTES
            assert shape.programs * (found.shared_bytes + 1024) <= 228 * 1024
            registers = -(-found.registers // 8) * 8 * 32 * shape.num_warps
            assert shape.programs * registers <= 65536


def test_a_ring_is_refused_where_a_token_does_not_fit():
    assert ring.backward_shape(12, 8192, CPU) is not None
    assert ring.backward_shape(13, 8192, CPU) is None
    assert ring.forward_shape(2**16, CPU) is None


@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("width", [128, 384, 768, 2048, 7168])
def test_the_norms_compile_without_lost_registers(width, has_gate):
    shared = {
        "x": "*bf16", "weight": "*bf16", "gate_logits": "*bf16" if has_gate else None,
        "num_rows": "i32", "tiles_per_program": "i32", "x_stride": "i32:16",
        "gate_stride": "i32:16", "eps": "fp32",
        "D": width, "BD": triton.next_power_of_2(width), "HAS_GATE": has_gate,
    }  # fmt: skip
    backward = {
        **shared, "d_out": "*bf16", "d_x": "*bf16", "d_gate_logits": "*bf16",
        "d_weight_parts": "*fp32", "d_out_stride": "i32:16",
    }  # fmt: skip
    shape_class = f"bf16 {launch_table.width_class(width, 16, 16384)}"
    for name, kernel, arguments in (
        ("rms_norm_forward", rms_norm.forward_kernel, {**shared, "out": "*bf16"}),
        ("rms_norm_backward", rms_norm.backward_kernel, backward),
    ):
        for shape in shapes_of(name, shape_class):
            arguments["BR"] = shape["rows"]
            found = resources(kernel, arguments, shape["num_warps"])
            assert found.stack_bytes <= MAX_STACK_BYTES


@pytest.mark.parametrize("is_capped", [False, True])
@pytest.mark.parametrize("pointer", ["*bf16", "*fp32"])
def test_the_gated_unit_compiles_without_lost_registers(pointer, is_capped):
    shared = {
        "gate": pointer, "up": pointer, "out": pointer, "width": "i32:16", "gate_stride": "i32:16",
        "up_stride": "i32:16", "out_stride": "i32:16", "beta": "fp32", "linear_beta": "fp32",
        "IS_CAPPED": is_capped, "IS_EXACT": pointer == "*fp32", "IS_SQUARE": True,
    }  # fmt: skip
    backward = {
        **shared, "d_out": pointer, "d_gate": pointer, "d_up": pointer,
        "d_out_stride": "i32:16",
    }  # fmt: skip
    del backward["out"]
    for name, kernel, arguments, most in (
        ("situ_glu_forward", situ.situ_forward_kernel, shared, 30),
        ("situ_glu_backward", situ.situ_backward_kernel, backward, 50),
    ):
        for shape in shapes_of(name, pointer.removeprefix("*")):
            arguments["BLOCK"], num_warps = shape["block"], shape["num_warps"]
            assert resources(kernel, arguments, num_warps).stack_bytes == 0
            if pointer == "*bf16":  # else they wait for instructions and not for memory
                code = machine_code(kernel, arguments, num_warps)
                assert len(code.splitlines()) / (shape["block"] / (32 * num_warps)) < most


@pytest.mark.parametrize("has_d_final", [False, True])
@pytest.mark.parametrize("has_state", [False, True])
def test_the_convolution_compiles_without_lost_registers(has_state, has_d_final):
    shared = {
        "x": "*bf16", "weight": "*fp32", "state": "*bf16" if has_state else None,
        "positions": "*i32", "sequences": "*i32", "num_tokens": "i32", "strip": "i32:16",
        "x_stride": "i32:16", "num_channels": "i32:16", "W": 4, "HAS_STATE": has_state,
    }  # fmt: skip
    backward = {
        **shared, "cu_seqlens": "*i32", "d_y": "*bf16", "d_x": "*bf16",
        "d_final": "*bf16" if has_d_final else None, "d_weight_parts": "*fp32",
        "d_y_stride": "i32:16", "HAS_D_FINAL": has_d_final,
    }  # fmt: skip
    for name, kernel, arguments in (
        ("short_conv_forward", short_conv.forward_kernel, {**shared, "y": "*bf16"}),
        ("short_conv_backward", short_conv.backward_kernel, backward),
    ):
        for shape in shapes_of(name, "bf16 w1024", "bf16 w2048"):
            arguments |= {"BC": shape["channels"], "ROWS": shape["rows"]}
            found = resources(kernel, arguments, shape["num_warps"])
            assert found.stack_bytes <= MAX_STACK_BYTES


def test_the_loss_compiles_without_lost_registers():
    shared = {
        "logits": "*bf16", "targets": "*i64", "lse": "*fp32", "vocab_size": "i32:16",
        "ignore_index": "i32",
    }  # fmt: skip
    for name, kernel, arguments in (
        ("cross_entropy_loss", cross_entropy.loss_kernel, {"losses": "*fp32"}),
        ("cross_entropy_gradient", cross_entropy.gradient_kernel, {"d_losses": "*fp32"}),
    ):
        for shape in shapes_of(name, "bf16 w32768", "bf16 w65536"):
            found = resources(
                kernel, {**shared, **arguments, "BW": shape["block"]}, shape["num_warps"]
            )
            assert found.stack_bytes == 0
