"""The doors of KDA: what they refuse, and the inputs that broke other projects (K rows)."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from ops.harness import (
    Gate,
    Op,
    Packed,
    assert_within_budget,
    boundaries,
    in_two_parts,
    kda_inputs,
    one_by_one,
    outcome,
    relative_error,
)

from baltoro.ops.impl import ImplError
from baltoro.ops.kda import KdaOutput, chunk_kda, recurrent_kda


def run_chunk(
    batch: Packed, *, bound: float | None = -5.0, chunk_size: int = 64, impl: str = "torch"
) -> KdaOutput:
    return chunk_kda(
        **batch.tokens,
        **batch.states,
        cu_seqlens=batch.cu_seqlens,
        gate_lower_bound=bound,
        chunk_size=chunk_size,
        impl=impl,
    )


def run_recurrent(batch: Packed, *, impl: str = "torch") -> KdaOutput:
    return recurrent_kda(**batch.tokens, **batch.states, cu_seqlens=batch.cu_seqlens, impl=impl)


reference: Op = partial(run_recurrent, impl="reference")
FORMS: dict[str, Op] = {
    "chunk, bounded": run_chunk,
    "chunk, any gate": partial(run_chunk, bound=None),
    "recurrent": run_recurrent,
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


def with_token(batch: Packed, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Packed:
    return replace(batch, tokens={**batch.tokens, name: change(batch.tokens[name])})


@pytest.mark.parametrize("gate", ["bound", "near_zero", "mixed"])
def test_the_chunked_reference_is_the_recurrent_one(gate: str) -> None:
    batch = kda_inputs([5, 2], gate=gate)
    chunked, recurrent = run_chunk(batch, impl="reference"), reference(batch)
    assert all(torch.equal(x, y) for x, y in zip(chunked, recurrent, strict=True))


def test_the_reference_is_the_matrix_form_of_the_report() -> None:
    batch = kda_inputs([3], num_heads=1)
    q, k, v, g = (batch.tokens[name][:, 0] for name in ("q", "k", "v", "g"))
    beta = batch.tokens["beta"][:, 0]
    state = batch.states["initial_state"][0, 0]
    outputs = []
    for t in range(3):
        forget = torch.eye(16, dtype=torch.float64) - beta[t] * torch.outer(k[t], k[t])
        state = forget @ torch.diag(g[t].exp()) @ state + beta[t] * torch.outer(k[t], v[t])
        outputs.append(state.T @ q[t])
    o, final_state = reference(batch)
    torch.testing.assert_close(o[:, 0], torch.stack(outputs))
    torch.testing.assert_close(final_state[0, 0], state)


@pytest.mark.parametrize("length", [255, 256, 257])
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_k01_a_gate_at_its_bound_in_every_position_stays_finite(
    length: int, chunk_size: int
) -> None:
    batch = kda_inputs([length], gate="bound", dtype=torch.float32)
    assert_within_budget(partial(run_chunk, chunk_size=chunk_size), reference, batch)


@pytest.mark.parametrize("g", [-6.0, -5.001, float("-inf"), float("nan")])
def test_k02_a_gate_below_its_bound_is_refused(g: float) -> None:
    batch = with_token(kda_inputs([20]), "g", lambda x: x.index_fill(0, torch.tensor(7), g))
    with pytest.raises(ValueError, match=r"g=(-|nan)"):
        run_chunk(batch)


@pytest.mark.parametrize("g", [-6.0, -40.0, -700.0])
def test_k02_a_gate_without_a_bound_takes_any_decay(g: float) -> None:
    batch = kda_inputs([70], gate="near_zero", dtype=torch.float32)
    batch = with_token(batch, "g", lambda x: x.index_fill(0, torch.tensor([7, 8, 40]), g))
    assert_within_budget(partial(run_chunk, bound=None), reference, batch)


@every_form
@pytest.mark.parametrize("changed", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("first", [17, 63, 64, 100, 127])
def test_k03_changing_the_future_leaves_the_past_bit_equal(
    form: Op, changed: str, first: int
) -> None:
    batch = kda_inputs([128], dtype=torch.float32)
    other = kda_inputs([128], dtype=torch.float32, seed=1).tokens[changed]
    changed_batch = with_token(batch, changed, lambda x: torch.cat([x[:first], other[first:]]))
    before, after = form(batch)[0], form(changed_batch)[0]
    assert torch.equal(before[:first], after[:first])
    assert not torch.equal(before[first:], after[first:])


@every_form
@pytest.mark.parametrize("lengths", [[127, 1], [1, 127], [128, 1, 1], [126, 2]])
def test_k05_tails_of_one_token_work_forward_and_backward(form: Op, lengths: list[int]) -> None:
    assert_within_budget(form, reference, kda_inputs(lengths, dtype=torch.float32))


@every_form
@pytest.mark.parametrize("lengths", [[80], [129], [129, 129], [80, 80, 80]])
def test_k07_fixed_lengths_that_chunks_do_not_divide(form: Op, lengths: list[int]) -> None:
    assert_within_budget(form, reference, kda_inputs(lengths, dtype=torch.float32))


@every_form
@pytest.mark.parametrize("lengths", [[37, 1, 90], [90, 37, 1], [64, 64], [0, 5, 0, 66, 0]])
def test_k10_a_pack_equals_its_sequences_one_by_one(form: Op, lengths: list[int]) -> None:
    batch = kda_inputs(lengths)
    packed, separate = outcome(form, batch), outcome(one_by_one(form), batch)
    for name, x in packed.items():
        assert relative_error(x, separate[name]) < 1e-13, name


@pytest.mark.parametrize("tail", [1, 2, 8])
@pytest.mark.parametrize("lengths", [[66], [64, 1, 20]])
def test_k11_prefill_then_decode_equals_one_prefill(lengths: list[int], tail: int) -> None:
    decode = run_recurrent
    for _ in range(tail - 1):
        decode = in_two_parts(run_recurrent, decode, tail=1)
    cached = in_two_parts(run_chunk, decode, tail=tail)
    assert_within_budget(cached, reference, kda_inputs(lengths, dtype=torch.float32))


@every_form
@pytest.mark.parametrize("lengths", [[150], [7, 90, 1, 0]])
def test_a_sequence_cut_in_two_equals_the_whole(form: Op, lengths: list[int]) -> None:
    assert_within_budget(in_two_parts(form), reference, kda_inputs(lengths, dtype=torch.float32))


@every_form
@pytest.mark.parametrize("g", [5.0, 1e-6, float("inf"), float("nan")])
def test_k12_a_growing_gate_is_refused_at_entry(form: Op, g: float) -> None:
    batch = with_token(kda_inputs([20]), "g", lambda x: x.index_fill(0, torch.tensor(3), g))
    with pytest.raises(ValueError, match=r"g=.*must be <= 0"):
        form(batch)


@every_form
def test_a_gate_of_zero_and_of_the_bound_are_inside(form: Op) -> None:
    ends = torch.tensor([0.0, -0.0, -5.0], dtype=torch.float64).repeat(8)[:20]
    batch = with_token(kda_inputs([20]), "g", lambda x: ends[:, None, None].expand(x.shape))
    assert_within_budget(form, reference, batch)


@every_form
def test_without_an_initial_state_a_sequence_starts_from_zeros(form: Op) -> None:
    batch = kda_inputs([20, 3])
    zeros = replace(batch, states={"initial_state": torch.zeros(2, 2, 16, 24).double()})
    none = replace(batch, states={})
    for x, y in zip(form(none), form(zeros), strict=True):
        assert torch.equal(x, y)


@every_form
def test_no_tokens_give_no_output_and_the_same_state(form: Op) -> None:
    batch = kda_inputs([0, 0])
    o, final_state = form(batch)
    assert o.shape == (0, 2, 24)
    assert torch.equal(final_state, batch.states["initial_state"])


@every_form
def test_a_nan_stays_in_its_sequence_forward_and_backward(form: Op) -> None:
    batch = kda_inputs([70, 5, 64])
    clean = outcome(form, batch)
    batch.tokens["v"][70:75] = float("nan")
    spoilt = outcome(form, batch)
    others = [*range(70), *range(75, 139)]
    for name in ("outputs", "d_q", "d_k", "d_v", "d_g", "d_beta"):
        assert torch.equal(spoilt[name][others], clean[name][others]), name
    assert torch.equal(spoilt["final_state"][[0, 2]], clean["final_state"][[0, 2]])


@pytest.mark.gpu
@every_form
@pytest.mark.parametrize("gate", ["bound", "near_zero", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_as_accurate_on_a_gpu(form: Op, gate: Gate, dtype: torch.dtype) -> None:
    batch = kda_inputs([130, 1, 64, 0, 17], gate=gate, dtype=dtype)
    assert_within_budget(form, reference, batch, device="cuda")


@every_form
def test_the_initial_state_is_left_as_it_was(form: Op) -> None:
    for lengths in ([1, 1], [70, 3]):
        batch = kda_inputs(lengths, dtype=torch.float32)
        before = batch.states["initial_state"].clone()
        _, final_state = form(batch)
        assert torch.equal(batch.states["initial_state"], before)
        final_state.zero_()
        assert torch.equal(batch.states["initial_state"], before)


@every_form
def test_low_precision_inputs_give_outputs_of_their_dtype_and_an_fp32_state(form: Op) -> None:
    batch = kda_inputs([70, 1], dtype=torch.bfloat16)
    o, final_state = form(batch)
    assert (o.dtype, final_state.dtype) == (torch.bfloat16, torch.float32)
    assert_within_budget(form, reference, batch)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("q", lambda x: x[0], r"q \[2, 16\].*expected \[T, H, K\]"),
        ("k", lambda x: x[..., :4], r"k: expected .*\[6, 2, 16\].*got .*\[6, 2, 4\]"),
        ("k", lambda x: x.float(), r"k: expected torch.float64.*got torch.float32"),
        ("v", lambda x: x[:5], r"v: expected .*\[6, 2, 24\]"),
        ("g", lambda x: x[..., 0], r"g: expected .*\[6, 2, 16\].*got .*\[6, 2\]"),
        ("g", lambda x: x.bfloat16(), r"g: expected torch.float64.*got torch.bfloat16"),
        ("beta", lambda x: x[..., None], r"beta: expected .*\[6, 2\].*got .*\[6, 2, 1\]"),
        ("beta", lambda x: x.half(), r"beta: expected torch.float64.*got torch.float16"),
    ],
)
@every_form
def test_tensors_that_do_not_fit_are_named(
    form: Op, name: str, change: Callable[[torch.Tensor], torch.Tensor], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        form(with_token(kda_inputs([6]), name, change))


@every_form
def test_a_state_that_does_not_fit_is_named(form: Op) -> None:
    batch = kda_inputs([3, 3])
    transposed = batch.states["initial_state"].mT
    for state in (transposed, batch.states["initial_state"].float()):
        with pytest.raises(ValueError, match=r"initial_state: expected .*\[2, 2, 16, 24\]"):
            form(replace(batch, states={"initial_state": state}))


@every_form
def test_boundaries_that_miss_tokens_are_refused(form: Op) -> None:
    with pytest.raises(ValueError, match="cu_seqlens"):
        form(replace(kda_inputs([6]), cu_seqlens=boundaries([5])))


@pytest.mark.parametrize("bound", [-5.1, 0.0, 1.0, float("nan")])
def test_a_bound_that_tiles_cannot_hold_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match=r"gate_lower_bound=.*in \[-5, 0\)"):
        run_chunk(kda_inputs([6]), bound=bound)


@pytest.mark.parametrize("chunk_size", [0, 8, 48, 256])
def test_a_chunk_size_that_tiles_do_not_halve_into_is_refused(chunk_size: int) -> None:
    with pytest.raises(ValueError, match=f"chunk_size={chunk_size}"):
        run_chunk(kda_inputs([6]), chunk_size=chunk_size)


def test_an_unknown_implementation_is_refused_by_name() -> None:
    with pytest.raises(ImplError, match=r"chunk_kda: impl='fast'.*reference.*torch"):
        run_chunk(kda_inputs([6]), impl="fast")
    with pytest.raises(ImplError, match=r"recurrent_kda: impl='fast'"):
        run_recurrent(kda_inputs([6]), impl="fast")
