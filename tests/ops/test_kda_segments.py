"""Scans cut into segments: as exact as whole ones, on any packing, with few heads only."""

import itertools
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from ops.harness import (
    GATES,
    KEYS,
    Packed,
    assert_within_budget,
    boundaries,
    kda_inputs,
    one_by_one,
    outcome,
    poisoned_memory,
    relative_error,
)
from ops.hopper import resources
from ops.interpreted import assert_runs_interpreted, needs_interpreter
from ops.pinned import CPU, on_every_device, shapes_of
from ops.test_kda_triton import fused, kda, raw_inputs, rounded_chunks

from baltoro.ops.kda.triton import launch
from baltoro.ops.kda.triton.segments import fold_kernel, segment_ends_kernel

LENGTHS = [400, 0, 33, 129, 1, 64]
gpu = pytest.mark.gpu

INTERPRETED = """
import warnings

warnings.simplefilter("ignore")
import torch
from ops.harness import assert_within_budget, kda_inputs, outcome, poisoned_memory, relative_error
from ops.test_kda_triton import fused, kda, raw_inputs

from baltoro.ops.kda.triton import launch

for length, gate, keys in ((1, "near_zero", "random"), (3, "near_zero", "repeated"),
                           (2, "mixed", "near_parallel")):
    batch = kda_inputs([460, 0, 33, 64, 1], gate=gate, keys=keys, num_heads=1, key_dim=16,
                       value_dim=32, dtype=torch.float32)
    launch.segment_length = lambda *shape: 0
    whole = outcome(kda("triton"), batch)
    launch.segment_length = lambda *shape: length
    with poisoned_memory():
        assert_within_budget(kda("triton"), kda("reference"), batch, rounding_steps=60)
        cut = outcome(kda("triton"), batch)
    for name, x in cut.items():
        assert relative_error(x, whole[name].double()) < 2e-6, name
"""

SLOTS = """
import random

import torch
import triton
import triton.language as tl
from baltoro.ops.kda.triton.launch import num_chunks, segment_slots
from baltoro.ops.kda.triton.segments import SEQUENCES, segment_at


@triton.jit
def kernel(found, offsets, num_sequences, length):
    slot = tl.program_id(0)
    sequence, place, segments = segment_at(
        slot, tl.arange(0, SEQUENCES), offsets, num_sequences, length
    )
    tl.store(found + slot * 3, sequence)
    tl.store(found + slot * 3 + 1, place)
    tl.store(found + slot * 3 + 2, segments)


draw = random.Random(0)
for _ in range(20):
    lengths = [draw.choice((0, 1, 64, 65, draw.randrange(2000))) for _ in range(draw.randint(1, 5))]
    length = draw.randint(1, 7)
    chunks = [-(-tokens // 64) for tokens in lengths]
    offsets = torch.tensor([0, *chunks]).cumsum(0).to(torch.int32)
    found = torch.full((segment_slots(sum(lengths), len(lengths), length), 3), -1)
    kernel[(len(found),)](found, offsets, len(lengths), length)
    segments = [max(-(-count // length), 1) for count in chunks]
    expected = [(n, i, count) for n, count in enumerate(segments) for i in range(count)]
    assert [tuple(row) for row in found.tolist() if row[0] >= 0] == expected
"""


@pytest.fixture
def cut(monkeypatch):
    """Sets the chunks of a segment, whatever the shapes."""

    def set_length(length: int) -> None:
        monkeypatch.setattr(launch, "segment_length", lambda *shape: length)

    return set_length


def bf16_inputs(**kwargs) -> Packed:
    return kda_inputs(
        LENGTHS, **{"key_dim": 128, "value_dim": 128, "dtype": torch.bfloat16, **kwargs}
    )


def test_only_few_heads_with_long_sequences_are_cut():
    def length(*shape: int) -> int:
        return launch.segment_length(*shape, CPU)

    assert length(4096, 1, 32) == 16  # 16 heads: four segments of 32 programs
    assert length(32768, 1, 8) == 32
    assert length(8192, 1, 192) == 0
    assert length(8192, 1, 64) == 0  # two segments do not pay
    assert length(1024, 1, 32) == 0
    assert length(8192, 16, 8) == 0  # 128 programs as it is
    assert length(2**20, 65, 1) == 0  # more sequences than a segment looks at


def test_every_call_has_a_class_of_segments_on_every_device():
    for programs, sequences in itertools.product((0, 1, 8, 9, 44, 64, 129, 10**4), (0, 1, 64, 70)):
        for tokens in (0, 1, 63, 2047, 2048, 16384, 2**20):
            shape = (tokens, sequences, programs)
            for length in on_every_device(partial(launch.segment_length, *shape)):
                steps = launch.segment_slots(tokens, sequences, length) - sequences
                assert length == 0 or steps <= length + 2  # of a fold, against a segment's chunks


def test_a_call_without_sequences_or_tokens_is_not_cut():
    assert launch.segment_length(0, 0, 32, CPU) == launch.segment_length(0, 3, 32, CPU) == 0


@pytest.mark.slow
def test_portable_kernels_of_segments_compile_without_spills():
    pointers = dict.fromkeys(segment_ends_kernel.arg_names, "*fp32")
    pointers |= dict.fromkeys(("offsets", "cu_seqlens"), "*i32")
    numbers = dict.fromkeys(("num_heads", "num_sequences", "length"), "i32")
    dims = {"K": 64, "V": 64, "PRECISION": "tf32x3"}
    arguments = {**pointers, **numbers, **dims, "HAS_INITIAL": True}
    for shape in shapes_of("kda_scan", "fp32"):
        arguments["BV"] = shape["columns"]
        assert resources(segment_ends_kernel, arguments, shape["num_warps"]).stack_bytes == 0
    for shape, is_reverse in itertools.product(shapes_of("kda_fold", "fp32"), (False, True)):
        found = {name: arguments.get(name) for name in fold_kernel.arg_names}
        found |= {"K": 128, "V": 128, "BV": shape["columns"], "IS_REVERSE": is_reverse}
        assert resources(fold_kernel, found, shape["num_warps"]).stack_bytes == 0


@pytest.mark.slow
@needs_interpreter
def test_portable_segments_are_exact_in_the_interpreter():
    assert_runs_interpreted(INTERPRETED)


@pytest.mark.slow
@needs_interpreter
def test_every_segment_has_one_slot():
    assert_runs_interpreted(SLOTS)


@gpu
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize(("gate", "keys"), list(itertools.product(GATES, KEYS)))
def test_bf16_segments_are_as_exact_as_plain_code_that_rounds(cut, gate, keys, length):
    cut(length)
    batch = bf16_inputs(gate=gate, keys=keys)
    assert_within_budget(
        kda("triton"), kda("reference"), batch, plain=rounded_chunks, device="cuda"
    )


@gpu
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (64, 128), (128, 64)])
def test_other_head_dims(cut, key_dim, value_dim):
    cut(2)
    batch = bf16_inputs(key_dim=key_dim, value_dim=value_dim, gate="near_zero")
    assert_within_budget(
        kda("triton"), kda("reference"), batch, plain=rounded_chunks, device="cuda"
    )


@gpu
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.bfloat16, 128), (torch.float32, 64), (torch.float32, 128)]
)
def test_many_segments_err_no_more_than_twice_a_whole_scan(cut, dtype, dim, gate):
    batch = kda_inputs([2500, 300], gate=gate, num_heads=1, key_dim=dim, value_dim=dim, dtype=dtype)
    exact = outcome(kda("torch"), batch.map(lambda x: x.double()))
    cut(0)
    whole = outcome(kda("triton"), batch.to("cuda"))
    cut(1)
    for name, x in outcome(kda("triton"), batch.to("cuda")).items():
        band = 6 * torch.finfo(x.dtype).eps / 2
        allowed = 2 * relative_error(whole[name], exact[name]) + band
        assert relative_error(x, exact[name]) <= allowed, name


@gpu
def test_packing_does_not_change_a_bit(cut):
    cut(2)
    batch = bf16_inputs().to("cuda")
    packed, single = outcome(kda("triton"), batch), outcome(one_by_one(kda("triton")), batch)
    for name, x in packed.items():
        assert torch.equal(x, single[name]), name


@gpu
def test_runs_repeat_to_the_bit_and_read_no_fresh_memory(cut):
    cut(2)
    batch = raw_inputs(LENGTHS, torch.bfloat16, -4.0).to("cuda")
    first = outcome(fused("triton"), batch)
    with poisoned_memory():
        second = outcome(fused("triton"), batch)
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


@gpu
def test_a_cuda_graph_replays_on_another_packing(cut):
    cut(2)
    batch = raw_inputs([500, 28], torch.bfloat16, -4.0).to("cuda")
    other = boundaries([3, 525]).to("cuda")
    expected, _ = fused("triton")(
        Packed(tokens=batch.tokens, states=batch.states, weights=batch.weights, cu_seqlens=other)
    )
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fused("triton")(batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = fused("triton")(batch)
    batch.cu_seqlens.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(o, expected)
