import pytest
import torch
from ops.earned import Allocations, assert_earned, randn
from ops.harness import poisoned_memory
from torch.autograd import gradcheck

from baltoro.ops.impl import ImplError
from baltoro.ops.moe import dense, moe_experts

NUM_EXPERTS = 6
IMPLS = ["reference", "torch"]


def experts(impl, ids, x, weights, gate_up, down, activation="situ"):
    return moe_experts(
        x,
        ids,
        weights.to(torch.promote_types(x.dtype, torch.float32)),
        gate_up,
        down,
        activation=activation,
        situ_beta=4.0,
        situ_linear_beta=25.0,
        impl=impl,
    )


def inputs(num_tokens, num_active=2, latent=16, inner=12, num_experts=NUM_EXPERTS):
    return [
        randn(num_tokens, latent),
        randn(num_tokens, num_active, seed=1),
        randn(num_experts, 2 * inner, latent, seed=2) / latent**0.5,
        randn(num_experts, latent, inner, seed=3) / inner**0.5,
    ]


def distinct_ids(num_tokens, num_active=2, num_experts=NUM_EXPERTS):
    scores = randn(num_tokens, num_experts, seed=4)
    return scores.argsort(-1)[:, :num_active]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("activation", ["situ", "silu"])
def test_gradients_equal_finite_differences(impl, activation):
    ids = torch.tensor([[0, 2], [2, 4], [4, 0]])
    leaves = [t.requires_grad_() for t in inputs(3, latent=4, inner=3)]
    assert gradcheck(lambda *t: experts(impl, ids, *t, activation=activation), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["situ", "silu"])
@pytest.mark.parametrize("num_tokens", [0, 1, 8, 333])
def test_the_dense_form_earns_its_tolerance(num_tokens, activation, dtype):
    ids = distinct_ids(num_tokens)

    def op(impl, *tensors):
        return experts(impl, ids, *tensors, activation=activation)

    assert_earned(op, inputs(num_tokens), dtype)


@pytest.mark.parametrize("activation", ["situ", "silu"])
@pytest.mark.parametrize("num_tokens", [1, 8, 333])
def test_the_grouped_form_earns_its_tolerance(num_tokens, activation):
    ids = distinct_ids(num_tokens)

    def op(impl, *tensors):
        return experts(impl, ids, *tensors, activation=activation)

    assert_earned(op, inputs(num_tokens, inner=16), torch.bfloat16, impl="grouped")


def test_the_grouped_form_leaves_a_zero_gradient_to_an_expert_without_tokens():
    ids = torch.tensor([[0, 2], [2, 4], [4, 0]])
    leaves = [t.bfloat16().requires_grad_() for t in inputs(3, inner=16)]
    with poisoned_memory():
        experts("grouped", ids, *leaves).sum().backward()
    for weight in leaves[2:]:
        assert weight.grad[[1, 3, 5]].count_nonzero() == 0


@pytest.mark.parametrize(("dtype", "inner"), [(torch.float32, 16), (torch.bfloat16, 12)])
def test_the_grouped_form_refuses_what_it_cannot_serve(dtype, inner):
    tensors = [t.to(dtype) for t in inputs(3, inner=inner)]
    with pytest.raises(ImplError, match="grouped"):
        experts("grouped", distinct_ids(3), *tensors)


def test_many_active_experts_earn_the_tolerance_too():
    ids = distinct_ids(45, 5, 32)
    tensors = inputs(45, num_active=5, num_experts=32)
    assert_earned(lambda impl, *t: experts(impl, ids, *t), tensors, torch.float32)


@pytest.mark.parametrize("num_tokens", [0, 1, 8, 333])
def test_inference_agrees_with_training(num_tokens):
    tensors, ids = inputs(num_tokens), distinct_ids(num_tokens)
    with torch.no_grad():
        inferred = experts("torch", ids, *tensors)
    torch.testing.assert_close(inferred, experts("torch", ids, *tensors))


@pytest.mark.parametrize("impl", IMPLS)
def test_each_token_gets_the_weighted_sum_of_its_experts(impl):
    x, weights, gate_up, down = inputs(4)
    ids = distinct_ids(4)
    out = experts(impl, ids, x, weights, gate_up, down)
    for t in range(4):
        expected = torch.zeros(16, dtype=torch.float64)
        for a in range(2):
            gate, up = (gate_up[ids[t, a]] @ x[t]).chunk(2)
            act = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
            expected += weights[t, a] * (down[ids[t, a]] @ act)
        torch.testing.assert_close(out[t], expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_token_may_name_one_expert_twice(impl):
    x, weights, gate_up, down = inputs(3)
    twice = experts(impl, torch.full((3, 2), 5), x, weights, gate_up, down)
    once = experts(impl, torch.full((3, 1), 5), x, weights.sum(1, keepdim=True), gate_up, down)
    torch.testing.assert_close(twice, once)


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_unused_experts_are_not_read_and_get_a_zero_gradient(num_tokens):
    tensors = inputs(num_tokens)
    ids = 1 + 2 * distinct_ids(num_tokens, num_experts=3)  # the odd experts
    for projection in tensors[2:]:
        projection[::2] = torch.nan
    leaves = [t.requires_grad_() for t in tensors]
    out = experts("torch", ids, *leaves)
    out.sum().backward()
    assert torch.isfinite(out).all()
    for leaf in leaves:
        assert torch.isfinite(leaf.grad).all()
    assert (leaves[2].grad[::2] == 0).all() and (leaves[3].grad[::2] == 0).all()
    with torch.no_grad():
        assert torch.isfinite(experts("torch", ids, *leaves)).all()


def test_the_gradient_of_all_experts_is_allocated_once():
    leaves = [t.requires_grad_() for t in inputs(20)]
    with Allocations() as seen:
        out = experts("torch", distinct_ids(20), *leaves)
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert seen.shapes.count(tuple(leaves[2].shape)) == 1
    assert seen.shapes.count(tuple(leaves[3].shape)) == 1


def test_a_frozen_input_gets_no_gradient():
    tensors = inputs(7)
    leaves = [t.requires_grad_(index != 2) for index, t in enumerate(tensors)]
    experts("torch", distinct_ids(7), *leaves).sum().backward()
    assert leaves[2].grad is None
    assert leaves[3].grad is not None


def test_batches_hold_every_row_once(monkeypatch):
    monkeypatch.setattr(dense, "_BATCH_ROWS", 10)
    batches = dense._batches([3, 0, 9, 25, 0, 1, 4])
    rows = [own for _, segments in batches for _, own in segments]
    assert [expert for _, segments in batches for expert, _ in segments] == [0, 2, 3, 5, 6]
    assert [(own.start, own.stop) for own in rows] == [
        (0, 3),
        (3, 12),
        (12, 37),
        (37, 38),
        (38, 42),
    ]
    assert [(whole.start, whole.stop) for whole, _ in batches] == [(0, 12), (12, 37), (37, 42)]


@pytest.mark.parametrize("impl", IMPLS)
def test_wrong_inputs_name_the_field(impl):
    x, weights, gate_up, down = inputs(3)
    ids = distinct_ids(3)
    with pytest.raises(ValueError, match="expert_ids holds 6"):
        experts(impl, ids.clamp(min=6), x, weights, gate_up, down)
    with pytest.raises(ValueError, match="expert_ids holds -1"):
        experts(impl, ids * 0 - 1, x, weights, gate_up, down)
    with pytest.raises(ValueError, match=r"expert_ids is torch\.int32"):
        experts(impl, ids.int(), x, weights, gate_up, down)
    with pytest.raises(ValueError, match=r"expert_ids has shape \[2, 2\]"):
        experts(impl, ids[:2], x, weights, gate_up, down)
    with pytest.raises(ValueError, match=r"weights is torch\.float64 \[3, 1\]"):
        experts(impl, ids, x, weights[:, :1], gate_up, down)
    with pytest.raises(ValueError, match=r"gate_up_proj is torch\.float32"):
        experts(impl, ids, x, weights, gate_up.float(), down)
    with pytest.raises(ValueError, match=r"expected \[E, 2F, 16\]"):
        experts(impl, ids, x, weights, gate_up[:, :, :-1], down)
    with pytest.raises(ValueError, match=r"down weight has shape \[6, 16, 11\]"):
        experts(impl, ids, x, weights, gate_up, down[:, :, :-1])
    with pytest.raises(ValueError, match="activation='gelu'"):
        experts(impl, ids, x, weights, gate_up, down, activation="gelu")
