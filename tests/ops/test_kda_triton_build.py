"""The Triton kernels of KDA without a GPU: run by the interpreter, and compiled for Hopper."""

import itertools
import re

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from ops.interpreted import assert_runs_interpreted, needs_interpreter
from ops.pinned import shapes_of
from ops.sass import lost_memory_descriptors, resources, sass_of

from baltoro.ops.launch_table import Launch

pytestmark = pytest.mark.slow
MAX_STACK_BYTES = 288  # of 255 registers a thread; what spills is read back once

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


@pytest.mark.parametrize(("name", "constants", "options"), variants())
def test_hopper_kernels_compile_without_lost_registers(name, constants, options):
    sass, usage = sass_of(name, constants, **options)
    stack = resources(usage)
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
