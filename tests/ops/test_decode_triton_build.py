"""The decode kernels without a GPU: run by the interpreter, and compiled for Hopper."""

import re

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from ops.hopper import machine_code, resources
from ops.interpreted import assert_runs_interpreted, needs_interpreter
from ops.sass import lost_memory_descriptors

from baltoro.ops.kda.triton import decode
from baltoro.ops.mla import triton as mla

pytestmark = pytest.mark.slow
MAX_SHARED_BYTES = 227 * 1024
MAX_STACK_BYTES = 240  # of 255 registers a thread, with 32 rows a program

INTERPRETED = """
import warnings

warnings.simplefilter("ignore")
import torch
from ops.harness import poisoned_memory
from ops.test_kda_decode import assert_decode_earned, decode_batch
from ops.test_mla_paged import assert_pages_earned, pages_of
from baltoro.ops.mla import triton as mla

for bound, dims in ((None, (2, 16, 32)), (-5.0, (1, 32, 16))):
    for lengths, kept in (([1, 1, 1], [0, 1, 1]), ([2, 5, 0, 3], [2, 3, 0, 0])):
        batch = decode_batch(lengths, dims=dims, kept=kept, padding=(1,), bound=bound,
                             dtype=torch.float32, is_packed=len(lengths) > 3)
        with poisoned_memory():
            assert_decode_earned(batch, "triton", "cpu", 20.0)
for num_heads, page_size, dims, splits in (
    (3, 16, (64, 16), 1), (17, 64, (96, 32), 2), (5, 48, (128, 0), 9)
):
    mla.num_splits_of = lambda num_programs, num_tiles, splits=splits: splits
    for lengths, queries in (([1, 0, 147], None), ([70, 64, 8], [8, 0, 1])):
        pages = pages_of(lengths, queries, num_heads=num_heads, dims=dims, page_size=page_size,
                         dtype=torch.float16)
        with poisoned_memory():
            assert_pages_earned(pages, "triton")
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
    num_warps = decode.num_warps_of(dim, dim)
    assert resources(decode.decode_kernel, arguments, num_warps).stack_bytes <= 16
    code = machine_code(decode.decode_kernel, arguments, num_warps)
    first_barrier = code.index("BAR.SYNC")
    wide = [match.start() for match in re.finditer(r"LDG\.E\.128", code)]
    assert wide and max(wide) < first_barrier, "the state is asked for before any work"


@pytest.mark.parametrize(("is_one", "is_whole"), [(True, False), (False, True)])
@pytest.mark.parametrize(
    ("dims", "page_size"), [((512, 64), 64), ((512, 64), 16), ((512, 0), 64), ((96, 32), 64)]
)
@pytest.mark.parametrize("num_rows", [16, 17])
def test_attention_over_pages_compiles_for_the_tensor_cores(
    num_rows, dims, page_size, is_whole, is_one
):
    shape = mla.shape_of(num_rows)
    R, P = dims
    pointers = dict.fromkeys(("q_latent", "latents"), "*bf16")
    sizes = dict.fromkeys(("table_stride", "page_size", "num_heads", "num_splits"), "i32")
    arguments = {
        **pointers, **sizes, "page_table": "*i32", "lengths": "*i32", "sums": "*fp32",
        "cu_seqlens": None if is_one else "*i32", "out": "*bf16" if is_whole else "*fp32",
        "page_stride": "i32:16", "log2_scale": "fp32", "R": R, "P": P,
        "BR": mla.padded_width(R), "BP": max(16, mla.padded_width(P)),
        "BH": shape.rows, "BN": shape.tokens, "STAGES": shape.num_stages,
        "IS_ONE": is_one, "IS_ALIGNED": page_size % shape.tokens == 0, "IS_WHOLE": is_whole,
    }  # fmt: skip
    found = resources(mla.split_kernel, arguments, shape.num_warps)
    code = machine_code(mla.split_kernel, arguments, shape.num_warps)
    assert found.stack_bytes <= MAX_STACK_BYTES
    assert found.shared_bytes <= MAX_SHARED_BYTES
    # 64 of them read outside of shared memory on a card
    assert 1 <= len(re.findall(r"\bHGMMA\b", code)) <= 16
    assert not lost_memory_descriptors(code)
    assert re.search(r"\bLDGSTS\b", code)  # two tiles are on their way while a third is worked on


@pytest.mark.parametrize("rank", [64, 512])
def test_the_merge_compiles_without_lost_registers(rank):
    arguments = {
        "parts": "*fp32", "sums": "*fp32", "out": "*bf16", "num_splits": "i32", "R": rank,
        "BR": rank, "BS": mla.MERGED,
    }  # fmt: skip
    assert resources(mla.merge_kernel, arguments, 4).stack_bytes == 0
