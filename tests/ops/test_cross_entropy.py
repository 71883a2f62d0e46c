import pytest
import torch
from ops.earned import Allocations, assert_earned, randn
from torch.autograd import gradcheck
from torch.nn import functional as F

from baltoro.ops.cross_entropy import dense, linear_cross_entropy

IMPLS = ["reference", "torch"]


def loss_of(impl, targets, hidden, weight):
    return linear_cross_entropy(hidden, weight, targets, impl=impl)


def some_targets(num_tokens, vocab_size):
    draw = torch.Generator().manual_seed(num_tokens)
    return torch.randint(vocab_size, (num_tokens,), generator=draw)


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_equal_finite_differences(impl):
    targets = torch.tensor([1, -100, 6, 0])
    leaves = [t.requires_grad_() for t in (randn(4, 3), randn(7, 3))]
    assert gradcheck(lambda *t: loss_of(impl, targets, *t), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_the_tiled_loss_earns_its_tolerance(num_tokens, dtype):
    targets = some_targets(num_tokens, 101)
    inputs = [2 * randn(num_tokens, 24), randn(101, 24)]
    assert_earned(lambda impl, *t: loss_of(impl, targets, *t), inputs, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_tiles_in_both_directions_earn_it_too(monkeypatch, dtype):
    monkeypatch.setattr(dense, "_TILE_TOKENS", 9)
    monkeypatch.setattr(dense, "_TILE_BYTES", 9 * 13 * 4)
    targets = some_targets(37, 101)
    targets[5] = -100
    inputs = [2 * randn(37, 24), randn(101, 24)]
    assert_earned(lambda impl, *t: loss_of(impl, targets, *t), inputs, dtype)


@pytest.mark.parametrize("impl", IMPLS)
def test_it_is_the_usual_cross_entropy(impl):
    hidden, weight, targets = randn(9, 8), randn(30, 8), some_targets(9, 30)
    expected = F.cross_entropy(hidden @ weight.T, targets, reduction="none")
    torch.testing.assert_close(loss_of(impl, targets, hidden, weight), expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_large_logits_stay_finite(impl):
    hidden = torch.tensor([[1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    loss = loss_of(impl, torch.tensor([1]), hidden, weight)
    loss.sum().backward()
    assert loss.item() == 2e4
    assert hidden.grad.item() == 2.0


@pytest.mark.parametrize("impl", IMPLS)
def test_ignored_tokens_cost_nothing_and_are_never_used(impl):
    hidden, weight = randn(5, 8), randn(11, 8)
    targets = torch.tensor([3, -1, 10, -1, 0])
    hidden[[1, 3]] = torch.nan
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = linear_cross_entropy(*leaves, targets, ignore_index=-1, impl=impl)
    loss.sum().backward()
    assert (loss[[1, 3]] == 0).all() and torch.isfinite(loss).all()
    assert (hidden.grad[[1, 3]] == 0).all()
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_but_ignored_tokens_gives_zeros(impl):
    leaves = [randn(3, 8).requires_grad_(), randn(11, 8).requires_grad_()]
    loss = loss_of(impl, torch.full((3,), -100), *leaves)
    loss.sum().backward()
    assert loss.tolist() == [0, 0, 0]
    assert all((leaf.grad == 0).all() for leaf in leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_comes_near_all_logits(monkeypatch, dtype):
    num_tokens, vocab_size, width = 512, 4096, 16
    tile_bytes = 64 * 1024
    monkeypatch.setattr(dense, "_TILE_BYTES", tile_bytes)
    hidden = randn(num_tokens, width).to(dtype).requires_grad_()
    weight = randn(vocab_size, width).to(dtype).requires_grad_()
    targets = some_targets(num_tokens, vocab_size)
    with Allocations() as seen:
        loss = loss_of("torch", targets, hidden, weight)
        torch.autograd.grad(loss, (hidden, weight), torch.ones_like(loss))
    assert loss.dtype == torch.float32
    assert seen.largest() <= max(tile_bytes // 4, weight.numel())
    assert seen.largest() < num_tokens * vocab_size // 16


def test_a_frozen_head_costs_no_gradient_of_its_size():
    hidden, weight, targets = randn(20, 8).requires_grad_(), randn(300, 8), some_targets(20, 300)
    with Allocations() as seen:
        loss = loss_of("torch", targets, hidden, weight)
        (d_hidden,) = torch.autograd.grad(loss.sum(), hidden)
    expected = torch.autograd.grad(loss_of("reference", targets, hidden, weight).sum(), hidden)
    torch.testing.assert_close(d_hidden, *expected)
    assert (300, 8) not in seen.shapes


def test_a_token_tile_is_bounded_too(monkeypatch):
    monkeypatch.setattr(dense, "_TILE_TOKENS", 64)
    monkeypatch.setattr(dense, "_TILE_BYTES", 64 * 8 * 4)
    vocab_ranges, token_ranges = dense._tiles(torch.empty(1000, 4), torch.empty(50, 4))
    assert max(r.stop - r.start for r in token_ranges) == 64 and token_ranges[-1].stop == 1000
    assert max(r.stop - r.start for r in vocab_ranges) == 8 and vocab_ranges[-1].stop == 50


@pytest.mark.parametrize("impl", IMPLS)
def test_wrong_inputs_name_the_field(impl):
    hidden, weight, targets = randn(3, 8), randn(11, 8), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match=r"targets holds 11; ids must be in \[0, 11\)"):
        loss_of(impl, targets + 9, hidden, weight)
    with pytest.raises(ValueError, match="targets holds -1"):
        loss_of(impl, targets - 1, hidden, weight)
    with pytest.raises(ValueError, match=r"targets is torch\.int32 \[3\]"):
        loss_of(impl, targets.int(), hidden, weight)
    with pytest.raises(ValueError, match=r"hidden \[3, 8\] and weight \[11, 7\]"):
        loss_of(impl, targets, hidden, weight[:, :7])
    with pytest.raises(ValueError, match=r"weight is torch\.float32"):
        loss_of(impl, targets, hidden, weight.float())
