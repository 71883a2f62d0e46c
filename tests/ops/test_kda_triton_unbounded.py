"""The Triton kernels of KDA for gates without a bound: the softplus map, and any g <= 0."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from ops.harness import GATES, KEYS, Packed, assert_within_budget
from ops.test_kda_triton import (
    FP32_STEPS,
    LENGTHS,
    bf16_inputs,
    fused,
    kda,
    raw_inputs,
    rounded_chunks,
    rounded_fused,
)

pytestmark = pytest.mark.gpu


def some(like: torch.Tensor, share: float) -> torch.Tensor:
    """True at a random `share` of the places."""
    return torch.rand(like.shape, generator=torch.Generator().manual_seed(3)) < share


def extreme(batch: Packed) -> Packed:
    """The batch with steps of -200 among steps of -1e-6, within a chunk and between channels."""
    tokens = dict(batch.tokens)
    if "g" in tokens:
        tokens["g"] = torch.where(some(tokens["g"], 0.1), -200.0, -1e-6).to(tokens["g"])
    else:  # softplus(-14) is 8e-7
        logits = tokens["decay_logits"]
        tokens["decay_logits"] = torch.where(some(logits, 0.1), 200.0, -14.0).to(logits)
    return replace(batch, tokens=tokens)


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("gate", [*GATES, "unbounded"])
def test_bf16_without_a_bound_is_as_exact_as_plain_code_that_rounds(gate, keys):
    batch = bf16_inputs(gate=gate, keys=keys)
    assert_within_budget(
        kda("triton", None), kda("reference", None), batch, plain=rounded_chunks, device="cuda"
    )


@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(64, 64), (64, 128), (128, 64), (16, 16), (32, 128), (64, 32)]
)
def test_other_head_dims_without_a_bound(key_dim, value_dim):
    batch = bf16_inputs(key_dim=key_dim, value_dim=value_dim, gate="unbounded", num_heads=3)
    assert_within_budget(
        kda("triton", None), kda("reference", None), batch, plain=rounded_chunks, device="cuda"
    )


@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float32), (128, torch.bfloat16)])
def test_steps_that_forget_all_stand_beside_steps_that_forget_nothing(dim, dtype):
    steps = {"rounding_steps": FP32_STEPS} if dtype == torch.float32 else {}
    for batch, form, plain in (
        (bf16_inputs(key_dim=dim, value_dim=dim, dtype=dtype), kda, rounded_chunks),
        (raw_inputs(LENGTHS, dtype, 0.0, dim), fused, rounded_fused(None)),
    ):
        assert_within_budget(
            form("triton", None),
            form("reference", None),
            extreme(batch),
            plain=plain if dtype == torch.bfloat16 else None,
            device="cuda",
            **steps,
        )


@pytest.mark.parametrize(("dim", "shift"), [(64, 0.0), (128, 0.0), (128, -4.0), (128, 6.0)])
def test_the_fused_softplus_form_is_as_exact_as_its_parts(dim, shift):
    batch = raw_inputs(LENGTHS, torch.bfloat16, shift, dim)
    assert_within_budget(
        fused("triton", None),
        fused("reference", None),
        batch,
        plain=rounded_fused(None),
        device="cuda",
    )
