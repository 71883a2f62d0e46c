"""The kernels of paged absorbed attention without a GPU: emulated, and compiled for Hopper."""

import re

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from ops.emulated import Emulated
from ops.harness import poisoned_memory
from ops.hopper import machine_code, resources
from ops.sass import lost_memory_descriptors
from ops.test_mla_paged import assert_pages_earned, pages_of

from baltoro.ops.mla import triton as kernels

MAX_SHARED_BYTES = 227 * 1024
bf16, fp16 = torch.bfloat16, torch.float16


@pytest.fixture
def emulate(monkeypatch):
    """Kernels run by torch on the CPU, their work divided among a number of programs."""
    shape_of = kernels.shape_of

    def with_programs(num_programs: int) -> None:
        monkeypatch.setattr(
            kernels,
            "shape_of",
            lambda *sizes: shape_of(*sizes)._replace(num_programs=num_programs),
        )

    monkeypatch.setattr(kernels, "walk_sm90_kernel", Emulated(kernels.walk_sm90_kernel))
    monkeypatch.setattr(kernels, "merge_kernel", Emulated(kernels.merge_kernel))
    monkeypatch.setattr(kernels, "refuse_unserved", lambda *tensors, dtypes: None)
    return with_programs


@pytest.mark.parametrize("num_programs", [1, 3, 7, 264])
@pytest.mark.parametrize(
    ("lengths", "num_queries", "num_heads", "dims", "page_size"),
    [
        ([1, 64, 0, 65, 200], None, 6, (256, 64), 64),
        ([0, 300, 0, 0, 100, 0], None, 3, (96, 32), 16),
        ([0, 300, 0, 129, 40, 0], [1, 8, 0, 2, 4, 0], 6, (64, 16), 48),
        ([150, 1, 260], [3, 1, 8], 17, (128, 0), 8),
    ],
)
def test_the_kernels_are_exact_when_emulated(
    lengths, num_queries, num_heads, dims, page_size, num_programs, emulate
):
    emulate(num_programs)
    pages = pages_of(
        lengths, num_queries, num_heads=num_heads, dims=dims, page_size=page_size, dtype=bf16
    )
    with poisoned_memory():
        assert_pages_earned(pages, "triton")


@pytest.mark.parametrize("num_programs", [1, 4])
def test_one_page_of_any_size_is_exact_when_emulated(num_programs, emulate):
    emulate(num_programs)
    pages = pages_of(
        [150, 1, 64], num_heads=3, dims=(64, 16), page_size=151, spare_pages=0, dtype=fp16
    )
    with poisoned_memory():
        assert_pages_earned(pages, "triton")


def built(shape: kernels.Shape, dims: tuple[int, int], dtype: str, is_one: bool):
    """The walk for sm_90, and its machine code."""
    kernel, rank, width = kernels.walk_sm90_kernel, dims[0], sum(dims)
    layout = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)"
    sizes = ("num_sequences", "page_rows", "table_stride", "page_size", "num_heads", "block_rows")
    given = {
        "queries": f"tensordesc<{dtype}[{shape.rows}, {kernels.CHUNK}],{layout}>",
        "rows": f"tensordesc<{dtype}[{shape.tokens}, {kernels.CHUNK}],{layout}>",
        **dict.fromkeys(("page_table", "lengths", "cu_seqlens"), "*i32"),
        **dict.fromkeys(("parts", "sums"), "*fp32"),
        **dict.fromkeys(sizes, "i32"),
        "out": f"*{dtype}",
        "log2_scale": "fp32",
    }
    constants = {
        "R": rank, "W": width, "H": shape.rows, "BN": shape.tokens, "PARTS": shape.parts,
        "STAGES": shape.num_stages, "BOX": shape.tokens, "BS": 256, "IS_ONE": is_one,
        "NUM_WARPS": shape.num_warps, "P_IN_TAIL": shape.has_tail and shape.rows == 64,
    }  # fmt: skip
    if is_one:
        constants["cu_seqlens"] = None
    arguments = {name: given[name] for name in kernel.arg_names if name in given} | constants
    found = resources(kernel, arguments, shape.num_warps)
    code = machine_code(kernel, arguments, shape.num_warps)
    return found.shared_bytes, found.stack_bytes, code


@pytest.mark.slow
@pytest.mark.parametrize(("is_one", "dtype"), [(True, "bf16"), (False, "fp16")])
@pytest.mark.parametrize(
    ("num_rows", "dims", "max_stack_bytes"),
    [
        (6, (256, 64), 0),  # `small`
        (10, (384, 64), 0),  # `base`
        (16, (512, 64), 0),
        (16, (512, 0), 0),
        (24, (512, 64), 0),
        (96, (512, 64), 240),  # of 255 registers a thread, 128 are the output's
        (96, (128, 32), 0),
    ],
)
def test_the_walk_compiles_for_the_tensor_cores(num_rows, dims, max_stack_bytes, is_one, dtype):
    shape = kernels.shape_of(num_rows, dims[0], sum(dims))
    shared_bytes, stack_bytes, code = built(shape, dims, dtype, is_one)
    assert stack_bytes <= max_stack_bytes
    assert shared_bytes <= MAX_SHARED_BYTES
    assert len(re.findall(r"\bHGMMA\b", code)) >= 16
    assert not lost_memory_descriptors(code)
    assert re.search(r"\bUTMALDG\b", code)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [64, 512])
def test_the_merge_compiles_without_lost_registers(rank):
    sizes = ("num_sequences", "num_programs", "num_heads", "num_blocks", "block_rows")
    arguments = {
        "parts": "*fp32", "sums": "*fp32", "out": "*bf16", "lengths": "*i32", "cu_seqlens": "*i32",
        **dict.fromkeys(sizes, "i32"), "R": rank, "BR": rank, "BN": 64, "BS": 256,
        "BP": kernels.MERGED, "IS_ONE": False,
    }  # fmt: skip
    assert resources(kernels.merge_kernel, arguments, max(1, rank // 128)).stack_bytes == 0
