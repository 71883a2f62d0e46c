"""The decode form against the token loop."""

import pytest
import torch
from ops.harness import (
    GATES,
    KEYS,
    Gate,
    Keys,
    Packed,
    assert_within_budget,
    kda_inputs,
    outcome,
    poisoned_memory,
)

from baltoro.ops.kda import KdaOutput, recurrent_kda


def run(batch: Packed, impl: str = "torch") -> KdaOutput:
    return recurrent_kda(**batch.tokens, **batch.states, cu_seqlens=batch.cu_seqlens, impl=impl)


def reference(batch: Packed) -> KdaOutput:
    return run(batch, "reference")


@pytest.mark.parametrize("gate", [*GATES, "unbounded"])
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [40, 0, 3, 1, 3]], ids=str)
def test_it_is_as_accurate_as_the_token_loop(lengths: list[int], gate: Gate, keys: Keys) -> None:
    batch = kda_inputs(lengths, gate=gate, keys=keys, dtype=torch.float32)
    assert_within_budget(run, reference, batch)


@pytest.mark.parametrize("lengths", [[1, 1], [3, 0, 2]], ids=str)
def test_gradcheck(lengths: list[int]) -> None:
    batch = kda_inputs(lengths, num_heads=1, key_dim=3, value_dim=2)
    leaves = tuple(x.requires_grad_() for x in batch.floats.values())

    def step(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, g, beta, state = tensors
        return tuple(
            recurrent_kda(
                q, k, v, g, beta, cu_seqlens=batch.cu_seqlens, initial_state=state, impl="torch"
            )
        )

    assert torch.autograd.gradcheck(step, leaves)


def test_tokens_of_many_sequences_keep_their_places() -> None:
    batch = kda_inputs([2, 5, 0, 1, 5], dtype=torch.float64)
    torch.testing.assert_close(run(batch).o, reference(batch).o)


def test_several_tokens_at_once_are_bit_equal_to_one_at_a_time() -> None:
    batch = kda_inputs([4], dtype=torch.float32)
    whole = run(batch)
    state, outputs = batch.states["initial_state"], []
    for t in range(4):
        token = {name: x[t : t + 1] for name, x in batch.tokens.items()}
        cu_seqlens = torch.tensor([0, 1], dtype=torch.int32)
        o, state = recurrent_kda(**token, cu_seqlens=cu_seqlens, initial_state=state, impl="torch")
        outputs.append(o)
    assert torch.equal(whole.o, torch.cat(outputs))
    assert torch.equal(whole.final_state, state)


def test_no_fresh_memory_is_read_before_it_is_written() -> None:
    batch = kda_inputs([3, 0, 1], dtype=torch.float32)
    clean = outcome(run, batch)
    with poisoned_memory():
        poisoned = outcome(run, batch)
    assert all(torch.equal(x, poisoned[name]) for name, x in clean.items())
