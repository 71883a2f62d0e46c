"""The short convolution: definition, state, boundaries."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from ops.harness import (
    Op,
    Packed,
    assert_within_budget,
    boundaries,
    in_two_parts,
    one_by_one,
    outcome,
    poisoned_memory,
    relative_error,
    short_conv_inputs,
)

from baltoro.ops.impl import ImplError
from baltoro.ops.short_conv import ShortConvOutput, short_conv


def run(batch: Packed, impl: str = "torch") -> ShortConvOutput:
    return short_conv(
        batch.tokens["x"],
        batch.weights["weight"],
        cu_seqlens=batch.cu_seqlens,
        initial_state=batch.states.get("initial_state"),
        impl=impl,
    )


reference: Op = partial(run, impl="reference")
every_impl = pytest.mark.parametrize("impl", ["reference", "torch"])


@every_impl
def test_the_last_tap_is_on_the_current_token_and_silu_follows(impl: str) -> None:
    x = torch.tensor([[2.0], [3.0], [5.0]])
    weight = torch.tensor([[10.0, -1.0]])
    state = torch.tensor([[[7.0]]])
    y, final_state = short_conv(
        x, weight, cu_seqlens=boundaries([3]), initial_state=state, impl=impl
    )
    torch.testing.assert_close(y, F.silu(torch.tensor([[68.0], [17.0], [25.0]])))
    assert torch.equal(final_state, torch.tensor([[[5.0]]]))


@every_impl
def test_it_is_torch_conv1d_with_zeros_in_front(impl: str) -> None:
    batch = short_conv_inputs([9])
    x, weight = batch.tokens["x"], batch.weights["weight"]
    padded = F.pad(x.T[None], (3, 0))
    expected = F.silu(F.conv1d(padded, weight[:, None], groups=5))[0].T
    y, _ = short_conv(x, weight, cu_seqlens=batch.cu_seqlens, impl=impl)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("width", [2, 4, 5])
@pytest.mark.parametrize("lengths", [[1], [40], [1, 1, 1], [37, 1, 90], [0, 2, 0, 5]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_as_accurate_as_the_token_loop(
    lengths: list[int], width: int, dtype: torch.dtype
) -> None:
    assert_within_budget(run, reference, short_conv_inputs(lengths, width=width, dtype=dtype))


@every_impl
@pytest.mark.parametrize("lengths", [[1], [2], [3], [4], [1, 1], [2, 0, 3]], ids=str)
def test_k08_few_tokens_and_a_state_have_the_gradient_of_finite_differences(
    impl: str, lengths: list[int]
) -> None:
    batch = short_conv_inputs(lengths, num_channels=2)
    leaves = tuple(x.requires_grad_() for x in batch.floats.values())

    def conv(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor) -> tuple:
        return tuple(
            short_conv(x, weight, cu_seqlens=batch.cu_seqlens, initial_state=state, impl=impl)
        )

    assert torch.autograd.gradcheck(conv, leaves)


@pytest.mark.parametrize("lengths", [[1], [2], [3]], ids=str)
def test_k08_a_short_sequence_keeps_the_newer_part_of_its_state(lengths: list[int]) -> None:
    batch = short_conv_inputs(lengths)
    history = torch.cat([batch.states["initial_state"][0], batch.tokens["x"].T], dim=1)
    assert torch.equal(run(batch).final_state[0], history[:, -3:])


def test_k10_a_pack_equals_its_sequences_one_by_one() -> None:
    batch = short_conv_inputs([37, 1, 90, 0, 2])
    packed, separate = outcome(run, batch), outcome(one_by_one(run), batch)
    for name, x in packed.items():
        assert relative_error(x, separate[name]) < 1e-14, name


@pytest.mark.parametrize("lengths", [[20], [1, 2, 7, 0]], ids=str)
@pytest.mark.parametrize("tail", [None, 1])
def test_k11_a_sequence_continued_from_its_state_equals_the_whole(
    lengths: list[int], tail: int | None
) -> None:
    batch = short_conv_inputs(lengths)
    whole, parts = outcome(run, batch), outcome(in_two_parts(run, tail=tail), batch)
    for name, x in whole.items():
        assert relative_error(x, parts[name]) < 1e-14, name


@pytest.mark.parametrize("first", [1, 8, 19])
def test_changing_the_future_leaves_the_past_bit_equal(first: int) -> None:
    batch = short_conv_inputs([20], dtype=torch.float32)
    changed = batch.map(torch.clone)
    changed.tokens["x"][first:] += 1
    assert torch.equal(run(batch).y[:first], run(changed).y[:first])


def test_no_gradient_crosses_from_one_sequence_into_the_one_before() -> None:
    batch = short_conv_inputs([5, 4])
    x = batch.tokens["x"].requires_grad_()
    run(batch).y[5:].sum().backward()
    assert torch.equal(x.grad[:5], torch.zeros(5, 5, dtype=torch.float64))


def test_a_nan_stays_in_its_sequence_forward_and_backward() -> None:
    batch = short_conv_inputs([6, 5, 4])
    clean = outcome(run, batch)
    batch.tokens["x"][6:11] = float("nan")
    spoilt = outcome(run, batch)
    others = [*range(6), *range(11, 15)]
    for name in ("outputs", "d_x"):
        assert torch.equal(spoilt[name][others], clean[name][others]), name
    assert torch.equal(spoilt["d_initial_state"][[0, 2]], clean["d_initial_state"][[0, 2]])


@pytest.mark.parametrize("num_rows", [1, 2, 7])
@pytest.mark.parametrize("lengths", [[20], [9, 1, 2, 8]], ids=str)
def test_small_ranges_of_tokens_give_the_same_as_one(
    lengths: list[int], num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = short_conv_inputs(lengths)
    whole = outcome(run, batch)
    monkeypatch.setattr("baltoro.ops.blocks._CPU_BYTES", num_rows * 4 * 5 * 8)
    for name, x in outcome(run, batch).items():
        assert relative_error(x, whole[name]) < 1e-14, name


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[1, 1], [37, 1, 90]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_as_accurate_on_a_gpu(lengths: list[int], dtype: torch.dtype) -> None:
    batch = short_conv_inputs(lengths, dtype=dtype)
    assert_within_budget(run, reference, batch, device="cuda")


@every_impl
def test_no_tokens_give_no_output_and_the_same_state(impl: str) -> None:
    batch = short_conv_inputs([0])
    y, final_state = run(batch, impl)
    assert y.shape == (0, 5)
    assert torch.equal(final_state, batch.states["initial_state"])


@pytest.mark.parametrize("lengths", [[1, 1], [9, 2]], ids=str)
def test_the_state_in_is_left_as_it_was_and_shares_nothing_with_the_state_out(
    lengths: list[int],
) -> None:
    batch = short_conv_inputs(lengths)
    before = batch.states["initial_state"].clone()
    run(batch).final_state.zero_()
    assert torch.equal(batch.states["initial_state"], before)


def test_no_fresh_memory_is_read_before_it_is_written() -> None:
    batch = short_conv_inputs([9, 0, 2], dtype=torch.float32)
    clean = outcome(run, batch)
    with poisoned_memory():
        poisoned = outcome(run, batch)
    assert all(torch.equal(x, poisoned[name]) for name, x in clean.items())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: replace(b, tokens={"x": b.tokens["x"][None]}), r"x \[1, 6, 5\].*\[T, D\]"),
        (lambda b: replace(b, weights={"weight": torch.ones(4, 4)}), r"weight \[4, 4\]"),
        (lambda b: replace(b, weights={"weight": torch.ones(5, 1)}), "W >= 2"),
        (lambda b: replace(b, cu_seqlens=boundaries([7])), "cu_seqlens"),
        (
            lambda b: replace(b, states={"initial_state": torch.ones(1, 5, 4).double()}),
            r"initial_state: expected .*\[1, 5, 3\].*got .*\[1, 5, 4\]",
        ),
        (
            lambda b: replace(b, states={"initial_state": torch.ones(1, 5, 3)}),
            r"initial_state: expected torch.float64.*got torch.float32",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: Callable[[Packed], Packed], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run(change(short_conv_inputs([6])))


def test_an_unknown_implementation_is_refused_by_name() -> None:
    with pytest.raises(ImplError, match=r"short_conv: impl='fast'.*reference.*torch"):
        run(short_conv_inputs([6]), "fast")
