"""The chunked form against the token loop: accuracy in every regime, gradients, memory."""

from functools import partial

import pytest
import torch
from ops.harness import (
    GATES,
    KEYS,
    Gate,
    Keys,
    Op,
    Packed,
    assert_within_budget,
    kda_inputs,
    outcome,
    poisoned_memory,
    relative_error,
)
from torch.utils.checkpoint import checkpoint

from baltoro.ops.kda import KdaOutput, chunk_kda, chunked, recurrent_kda

LENGTHS = [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130]


def run_chunk(batch: Packed, *, bound: float | None = -5.0, chunk_size: int = 64) -> KdaOutput:
    return chunk_kda(
        **batch.tokens,
        **batch.states,
        cu_seqlens=batch.cu_seqlens,
        gate_lower_bound=bound,
        chunk_size=chunk_size,
        impl="torch",
    )


def reference(batch: Packed) -> KdaOutput:
    return recurrent_kda(
        **batch.tokens, **batch.states, cu_seqlens=batch.cu_seqlens, impl="reference"
    )


SCHEMES: dict[str, Op] = {"tiles": run_chunk, "levels": partial(run_chunk, bound=None)}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())


@every_scheme
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("keys", KEYS)
def test_fp32_is_as_accurate_as_the_token_loop(scheme: Op, gate: Gate, keys: Keys) -> None:
    batch = kda_inputs([130, 1, 64, 0, 17], gate=gate, keys=keys, dtype=torch.float32)
    assert_within_budget(scheme, reference, batch)


@pytest.mark.parametrize("keys", KEYS)
def test_gates_without_a_bound_are_as_accurate_as_the_token_loop(keys: Keys) -> None:
    batch = kda_inputs([130, 1, 64], gate="unbounded", keys=keys, dtype=torch.float32)
    assert batch.tokens["g"].min() < -40
    assert_within_budget(partial(run_chunk, bound=None), reference, batch)


@every_scheme
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_equals_the_token_loop_with_all_gradients(
    scheme: Op, gate: Gate, length: int
) -> None:
    batch = kda_inputs([length], gate=gate, keys="near_parallel")
    got, exact = outcome(scheme, batch), outcome(reference, batch)
    for name, x in got.items():
        assert relative_error(x, exact[name]) < 1e-12, name


@every_scheme
@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
def test_every_chunk_size_equals_the_token_loop(scheme: Op, chunk_size: int) -> None:
    batch = kda_inputs([100, 33, 16], keys="repeated", gate="near_zero")
    got, exact = outcome(partial(scheme, chunk_size=chunk_size), batch), outcome(reference, batch)
    for name, x in got.items():
        assert relative_error(x, exact[name]) < 1e-12, name


@every_scheme
def test_gradcheck(scheme: Op) -> None:
    batch = kda_inputs([18, 0, 1], num_heads=1, key_dim=3, value_dim=2)
    leaves = {name: x.requires_grad_() for name, x in batch.floats.items()}

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        named = dict(zip(leaves, tensors, strict=True))
        state = {"initial_state": named.pop("initial_state")}
        return tuple(
            scheme(
                Packed(tokens=named, states=state, weights={}, cu_seqlens=batch.cu_seqlens),
                chunk_size=16,
            )
        )

    assert torch.autograd.gradcheck(run, tuple(leaves.values()))


@every_scheme
@pytest.mark.parametrize("beta", [0.0, 1e-30, 1.0])
def test_gradients_hold_where_nothing_is_written_and_where_all_is(scheme: Op, beta: float) -> None:
    batch = kda_inputs([40], dtype=torch.float32)
    batch.tokens["beta"][5:30] = beta
    assert_within_budget(scheme, reference, batch)


@every_scheme
def test_blocks_of_one_step_and_of_all_steps_agree(
    scheme: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = kda_inputs([200, 64, 130, 1], dtype=torch.float64)
    results = []
    for elements in (1, 2**30):
        monkeypatch.setattr(chunked, "_CPU_BLOCK", elements)
        results.append(outcome(scheme, batch))
    for name, x in results[0].items():
        assert relative_error(x, results[1][name]) < 1e-14, name


@every_scheme
def test_a_form_in_blocks_may_be_recomputed(scheme: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "_CPU_BLOCK", 1)
    batch = kda_inputs([200, 64])

    def recomputed(batch: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        return checkpoint(scheme, batch, use_reentrant=False)

    expected = outcome(scheme, batch)
    for name, x in outcome(recomputed, batch).items():
        assert torch.equal(x, expected[name]), name


@every_scheme
def test_inference_and_training_give_the_same_bits(scheme: Op) -> None:
    batch = kda_inputs([70, 3], dtype=torch.float32)
    with torch.no_grad():
        inferred = scheme(batch)
    trained = scheme(batch.map(lambda x: x.requires_grad_()))
    assert not inferred[0].requires_grad
    assert all(torch.equal(x, y) for x, y in zip(inferred, trained, strict=True))


@every_scheme
@pytest.mark.parametrize("gate", ["bound", "mixed"])
def test_gradients_have_room_for_a_loss_scaled_by_two_to_the_sixtieth(
    scheme: Op, gate: Gate
) -> None:
    batch = kda_inputs([70], gate=gate, dtype=torch.float32)

    def run(scale: float) -> list[torch.Tensor]:
        leaves = batch.map(lambda x: x.detach().requires_grad_())
        loss = scheme(leaves)[0].square().sum() * scale
        return list(torch.autograd.grad(loss, list(leaves.floats.values())))

    for plain, scaled in zip(run(1.0), run(2.0**60), strict=True):
        assert relative_error(scaled * 2.0**-60, plain.double()) < 1e-6


@every_scheme
def test_no_fresh_memory_is_read_before_it_is_written(scheme: Op) -> None:
    batch = kda_inputs([70, 0, 3], dtype=torch.float32)
    clean = outcome(scheme, batch)
    with poisoned_memory():
        poisoned = outcome(scheme, batch)
    for name, x in clean.items():
        assert torch.equal(x, poisoned[name]), name


@every_scheme
def test_a_gradient_that_is_not_asked_for_is_not_needed(scheme: Op) -> None:
    batch = kda_inputs([20])
    batch.tokens["v"].requires_grad_()
    o, _ = scheme(batch)
    o.sum().backward()
    whole = kda_inputs([20]).map(lambda x: x.requires_grad_())
    scheme(whole)[0].sum().backward()
    torch.testing.assert_close(batch.tokens["v"].grad, whole.tokens["v"].grad)
    assert batch.tokens["q"].grad is None


@every_scheme
def test_strong_decay_leaves_no_denormal_numbers_between_tokens(scheme: Op) -> None:
    batch = kda_inputs([256], gate="bound", dtype=torch.float32)
    leaves = batch.map(lambda x: x.requires_grad_())
    o, _ = scheme(leaves)
    tiny = torch.finfo(torch.float32).tiny
    for x in o.grad_fn.saved_tensors:
        assert not ((x != 0) & (x.abs() < tiny)).any(), list(x.shape)
