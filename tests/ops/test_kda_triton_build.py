"""The Triton kernels of KDA without a GPU: run by the interpreter, and compiled for Hopper."""

import itertools
import re

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from ops.hopper import machine_code, resources
from ops.interpreted import assert_runs_interpreted, needs_interpreter
from ops.pinned import shapes_of
from ops.sass import lost_memory_descriptors

from baltoro.ops.kda.triton.gradients_sm90 import gradients_sm90_kernel
from baltoro.ops.kda.triton.prep_sm90 import prep_sm90_kernel
from baltoro.ops.kda.triton.scan_sm90 import forward_scan_sm90_kernel, reverse_scan_sm90_kernel
from baltoro.ops.kda.triton.segments_sm90 import segment_ends_sm90_kernel
from baltoro.ops.launch_table import Launch

pytestmark = pytest.mark.slow
MAX_STACK_BYTES = 288  # of 255 registers a thread; what spills is read back once

KERNELS = {
    "prep": prep_sm90_kernel,
    "gradients": gradients_sm90_kernel,
    "forward_scan": forward_scan_sm90_kernel,
    "reverse_scan": reverse_scan_sm90_kernel,
    "segment_ends": segment_ends_sm90_kernel,
}
FP32 = {
    "a_log", "dt_bias", "gamma", "chunk_beta", "norms", "initial_state", "final_state",
    "d_initial_state", "d_final_state", "d_bias_parts", "d_rate_parts", "ends",
    "transitions",
}  # fmt: skip
LOGITS = {"g", "beta", "dg", "dbeta"}  # bf16 as logits, else fp32
INT32 = {"table", "offsets", "cu_seqlens"}
SCALARS = {
    "scale": "fp32", "eps": "fp32", "lower_bound": "fp32", "num_heads": "i32:16",
    "num_sequences": "i32", "length": "i32",
}  # fmt: skip

INTERPRETED = """
import warnings

warnings.simplefilter("ignore")
import torch
from ops.harness import assert_within_budget, kda_inputs, poisoned_memory
from ops.test_kda_triton import fused, kda, raw_inputs

for gate, keys in (("bound", "random"), ("mixed", "near_parallel"), ("near_zero", "repeated")):
    batch = kda_inputs([70, 0, 33, 1], gate=gate, keys=keys, key_dim=16, value_dim=32,
                       dtype=torch.float32)
    with poisoned_memory():
        assert_within_budget(kda("triton"), kda("reference"), batch, rounding_steps=12)
for bound in (-5.0, None):
    batch = raw_inputs([70, 0, 33, 1], torch.float32, 0.0, 16)
    assert_within_budget(fused("triton", bound), fused("reference", bound), batch,
                         rounding_steps=12)
"""


@needs_interpreter
def test_the_portable_kernels_are_exact_in_the_interpreter():
    assert_runs_interpreted(INTERPRETED)


def variants() -> list[tuple[str, dict[str, object], Launch]]:
    """The Hopper kernels with the compile-time arguments and options that a call can ask for."""
    found: list[tuple[str, dict[str, object]]] = []
    for from_logits in (False, True):
        logits = {"FROM_LOGITS": from_logits, "NORMALIZE": from_logits}
        for key_dim in (64, 128):
            for value_dim in (64, 128):
                found.append(("gradients", {"K": key_dim, "V": value_dim, **logits}))
    prep = [
        ("prep", {"K": dim, "FROM_LOGITS": flag, "NORMALIZE": flag}, shape)
        for dim, flag in itertools.product((64, 128), (False, True))
        for shape in shapes_of("kda_prep_sm90", f"k{dim}")
    ]
    for dims in ({"K": 64, "V": 64}, {"K": 128, "V": 128}):
        for flag in (False, True):
            found += [("reverse_scan", {**dims, "HAS_FINAL": flag, "PASS": i}) for i in range(3)]
            found.append(("segment_ends", {**dims, "HAS_INITIAL": flag}))
            for is_kept, is_cut in itertools.product((False, True), repeat=2):
                form = {"HAS_INITIAL": flag, "IS_KEPT": is_kept, "IS_CUT": is_cut}
                found.append(("forward_scan", {**dims, **form}))
    return [*prep, *((name, constants, {}) for name, constants in found)]


def absent(constants: dict[str, object]) -> set[str]:
    """Pointers that are None under these compile-time arguments."""
    names = set()
    if not constants.get("FROM_LOGITS", True):
        names |= {"a_log", "dt_bias"}
    if not constants.get("HAS_INITIAL", True):
        names |= {"initial_state"}
    if not constants.get("HAS_FINAL", True):
        names |= {"d_final_state"}
    return names


def arguments_of(name: str, constants: dict[str, object]) -> dict[str, object]:
    """What kernel `name` is given under these compile-time arguments."""
    arguments: dict[str, object] = {**SCALARS, **dict.fromkeys(absent(constants)), **constants}
    for argument in KERNELS[name].arg_names:
        if argument in INT32:
            arguments[argument] = "*i32"
        elif argument not in arguments:
            is_fp32 = argument in FP32 or (
                argument in LOGITS and not constants.get("FROM_LOGITS", True)
            )
            arguments[argument] = "*fp32" if is_fp32 else "*bf16"
    return {argument: arguments[argument] for argument in KERNELS[name].arg_names}


@pytest.mark.parametrize(("name", "constants", "options"), variants())
def test_hopper_kernels_compile_without_lost_registers(name, constants, options):
    kernel, arguments = KERNELS[name], arguments_of(name, constants)
    stack = resources(kernel, arguments, 4, **options).stack_bytes
    sass = machine_code(kernel, arguments, 4, **options)
    assert stack <= MAX_STACK_BYTES, f"{stack} bytes of stack a thread"
    assert not lost_memory_descriptors(sass)
    assert re.search(r"\bHGMMA\b", sass)


def test_a_lost_memory_descriptor_is_seen():
    good = "ULDC.64 UR4, c[0x0][0x208] ;\nLDG.E R0, desc[UR4][R2.64] ;\n"
    assert not lost_memory_descriptors(good)
    overwritten = good + "UMOV UR4, UR9 ;\nLDG.E R0, desc[UR4][R2.64] ;\n"
    from_registers = good + "HGMMA.64x64x16.F32.BF16 R88, R136, gdesc[UR4], R88 ;\n"
    assert not lost_memory_descriptors(from_registers)  # the right operand's is in UR6 and UR7
    read_as_address = good + "UIADD3 UR22, UP0, UR4, 0x2, URZ ;\n"
    assert len(lost_memory_descriptors(overwritten)) == 1
    assert len(lost_memory_descriptors(read_as_address)) == 1
    assert len(lost_memory_descriptors(from_registers.replace("gdesc[UR4]", "gdesc[UR2]"))) == 1
