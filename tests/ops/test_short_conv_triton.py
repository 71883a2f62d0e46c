"""The Triton kernels of the short convolution on a GPU, held to the harness of the plain form."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from ops.harness import (
    Packed,
    assert_within_budget,
    boundaries,
    in_two_parts,
    one_by_one,
    outcome,
    poisoned_memory,
    short_conv_inputs,
)

from baltoro.ops.impl import ImplError
from baltoro.ops.short_conv import ShortConvOutput, short_conv

gpu = pytest.mark.gpu
LENGTHS = [37, 1, 90, 0, 2]


def conv(batch: Packed, impl: str = "triton") -> ShortConvOutput:
    return short_conv(
        batch.tokens["x"],
        batch.weights["weight"],
        cu_seqlens=batch.cu_seqlens,
        initial_state=batch.states.get("initial_state"),
        impl=impl,
    )


# held to the token loop by its own tests, and as exact in fp64
reference = partial(conv, impl="torch")


def bf16_inputs(lengths: list[int], num_channels: int = 300, width: int = 4) -> Packed:
    return short_conv_inputs(lengths, num_channels=num_channels, width=width, dtype=torch.bfloat16)


@gpu
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize(
    "lengths",
    [[1], [63], [65], [127], [1000], [1, 1, 1], [0, 2, 0, 5], [300, 0, 1, 700, 3, 0]],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_as_accurate_as_the_token_loop(dtype, lengths, width):
    batch = short_conv_inputs(lengths, num_channels=7, width=width, dtype=dtype)
    assert_within_budget(conv, reference, batch, device="cuda")


@gpu
@pytest.mark.parametrize("num_channels", [1, 128, 2304])
def test_any_number_of_channels(num_channels):
    batch = bf16_inputs(LENGTHS, num_channels)
    assert_within_budget(conv, reference, batch, device="cuda")


@gpu
def test_packing_does_not_change_a_bit_of_a_sequence():
    batch = bf16_inputs(LENGTHS).to("cuda")
    packed, single = outcome(conv, batch), outcome(one_by_one(conv), batch)
    for name in ("outputs", "final_state", "d_x", "d_initial_state"):
        assert torch.equal(packed[name], single[name]), name


@gpu
@pytest.mark.parametrize("tail", [None, 1])
def test_a_sequence_cut_in_two_goes_on_from_its_state(tail):
    batch = bf16_inputs([20, 1, 2, 7, 0])
    assert_within_budget(in_two_parts(conv, tail=tail), reference, batch, device="cuda")


@gpu
def test_a_nan_stays_in_its_sequence_forward_and_backward():
    batch = bf16_inputs([6, 5, 4]).to("cuda")
    clean = outcome(conv, batch)
    batch.tokens["x"][6:11] = float("nan")
    spoilt = outcome(conv, batch)
    others = [*range(6), *range(11, 15)]
    for name in ("outputs", "d_x"):
        assert torch.equal(spoilt[name][others], clean[name][others]), name
    assert torch.equal(spoilt["d_initial_state"][[0, 2]], clean["d_initial_state"][[0, 2]])


@gpu
def test_runs_repeat_to_the_bit_and_read_no_fresh_memory():
    batch = bf16_inputs(LENGTHS).to("cuda")
    first = outcome(conv, batch)
    with poisoned_memory():
        second = outcome(conv, batch)
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


@gpu
def test_no_state_is_a_state_of_zeros():
    batch = bf16_inputs(LENGTHS).to("cuda")
    x, weight = batch.tokens["x"].requires_grad_(), batch.weights["weight"].requires_grad_()
    zeros = torch.zeros_like(batch.states["initial_state"])
    results = []
    for state in (None, zeros):
        y, final_state = short_conv(
            x, weight, cu_seqlens=batch.cu_seqlens, initial_state=state, impl="triton"
        )
        results.append((y, final_state, *torch.autograd.grad(y.sum(), (x, weight))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@gpu
def test_no_tokens_give_no_output_and_the_same_state():
    batch = bf16_inputs([0, 0]).to("cuda")
    y, final_state = conv(batch)
    assert y.shape == (0, 300)
    assert torch.equal(final_state, batch.states["initial_state"])


@gpu
def test_a_part_of_wider_rows_is_served():
    batch = bf16_inputs(LENGTHS).to("cuda")
    x = batch.tokens["x"]
    wide = torch.cat([x, x], dim=1)[:, : x.shape[1]]
    a = conv(batch)
    b = short_conv(
        wide,
        batch.weights["weight"],
        cu_seqlens=batch.cu_seqlens,
        initial_state=batch.states["initial_state"],
        impl="triton",
    )
    assert torch.equal(a.y, b.y) and torch.equal(a.final_state, b.final_state)


@gpu
def test_a_cuda_graph_replays_on_another_packing():
    batch = bf16_inputs([100, 28]).to("cuda")
    other = boundaries([3, 125]).to("cuda")
    changed = Packed(
        tokens=batch.tokens, states=batch.states, weights=batch.weights, cu_seqlens=other
    )
    expected = conv(changed)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        conv(batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, final_state = conv(batch)
    batch.cu_seqlens.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected.y) and torch.equal(final_state, expected.final_state)


@gpu
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch 2.11
def test_it_compiles_into_one_graph_with_its_backward():
    batch = bf16_inputs(LENGTHS).to("cuda")
    leaves = [x.requires_grad_() for x in batch.floats.values()]

    def total(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = short_conv(x, weight, cu_seqlens=batch.cu_seqlens, initial_state=state, impl="triton")
        return out.y.float().square().sum() + out.final_state.float().square().sum()

    eager = torch.autograd.grad(total(*leaves), leaves)
    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
    for a, b in zip(eager, torch.autograd.grad(compiled(*leaves), leaves), strict=True):
        assert torch.equal(a, b)


def test_what_no_kernel_serves_is_refused_with_the_reason():
    with pytest.raises(ImplError, match="needs tensors on a CUDA device, not on cpu"):
        conv(bf16_inputs([3]))
    with pytest.raises(ImplError, match="serves bfloat16 and float32, not float64"):
        conv(short_conv_inputs([3]))


@gpu
def test_more_than_four_taps_are_refused():
    with pytest.raises(ImplError, match="serves up to 4 taps, not W=5"):
        conv(bf16_inputs([3], width=5).to("cuda"))
