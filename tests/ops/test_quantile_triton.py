"""Counts of Quantile Balancing in Triton: exactly those of plain code."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from ops.harness import poisoned_memory
from ops.hopper import resources
from ops.interpreted import assert_runs_interpreted, needs_interpreter

from baltoro.ops.impl import ImplError
from baltoro.ops.quantile import margin_counts
from baltoro.ops.quantile import triton as kernels

# tokens, experts, of a token, bins
SIZES = [(300, 64, 6, 1000), (1, 3, 2, 7), (0, 5, 1, 10), (77, 100, 16, 50)]

INTERPRETED = """
from ops.test_quantile_triton import SIZES, check
for sizes in SIZES:
    check("cpu", *sizes)
"""


def check(device: str, num_tokens: int, num_experts: int, top_k: int, num_bins: int) -> None:
    draw = torch.Generator().manual_seed(0)
    scores = torch.rand(num_tokens, num_experts, generator=draw)
    scores[:, ::2] = scores[:, ::2].mul(8).round().div(8)  # scores that tie
    bias = torch.randn(num_experts, generator=draw) / 4
    mask = torch.rand(num_tokens, generator=draw) < 0.7
    if num_tokens > 10:
        scores[3, 1], scores[5, 0], scores[7, 2] = torch.nan, 1.5, -0.5
    for kept in (None, mask):
        for flat in (False, True):
            x = torch.full_like(scores, 0.5) if flat else scores
            found = {}
            # plain code on the CPU: on a GPU torch divides by a number as it multiplies by its
            # inverse, and a few margins change their bin
            for impl, place in (("torch", "cpu"), ("triton", device)):
                inputs = [y if y is None else y.to(place) for y in (x, bias * (not flat), kept)]
                found[impl] = margin_counts(
                    inputs[0], inputs[1], num_experts_per_token=top_k, num_bins=num_bins,
                    mask=inputs[2], impl=impl,
                )  # fmt: skip
            for name, got, want in zip(
                found["torch"]._fields, found["triton"], found["torch"], strict=True
            ):
                assert got.dtype == torch.int32
                assert torch.equal(got.cpu(), want), (name, kept is None)


@pytest.mark.slow
@needs_interpreter
def test_the_counts_are_those_of_plain_code_in_the_interpreter():
    assert_runs_interpreted(INTERPRETED)


@pytest.mark.slow
@pytest.mark.parametrize(("num_experts", "top_k"), [(64, 6), (896, 16)])
def test_the_kernel_compiles_without_spills(num_experts, top_k):
    padded = 1 << (num_experts - 1).bit_length()
    arguments = {
        "scores": "*fp32", "bias": "*fp32", "mask": None, "histogram": "*i32", "loads": "*i32",
        "counted": "*i32", "num_tokens": "i32", "E": num_experts, "A": top_k, "BE": padded,
        "R": max(1, kernels.SCORES // padded), "NUM_BINS": 1000,
    }  # fmt: skip
    assert resources(kernels.count_kernel, arguments, kernels.NUM_WARPS).stack_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [*SIZES, (5000, 896, 16, 1000), (65536, 64, 6, 1000)])
def test_the_counts_are_those_of_plain_code(sizes):
    with poisoned_memory():
        check("cuda", *sizes)


@pytest.mark.gpu
def test_more_experts_than_a_program_holds_are_refused():
    scores = torch.zeros(2, 1025, device="cuda")
    with pytest.raises(ImplError, match="up to 1024 experts, not 1025"):
        margin_counts(scores, scores[0], num_experts_per_token=1, num_bins=4, impl="triton")
