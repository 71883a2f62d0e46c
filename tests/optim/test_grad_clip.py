"""Clipping by the global norm."""

import pytest
import torch

from baltoro.optim.grad_clip import clip_grad_norm_


def test_a_long_gradient_is_shortened_and_keeps_its_direction() -> None:
    grads = [torch.full((2, 2), 3.0), torch.full((4,), 4.0)]
    norm = clip_grad_norm_(grads, max_norm=5.0)
    assert float(norm) == 10.0
    torch.testing.assert_close(grads, [torch.full((2, 2), 1.5), torch.full((4,), 2.0)])


def test_a_short_gradient_is_left_bit_for_bit() -> None:
    grads = [torch.randn(5), torch.randn(2, 3).bfloat16()]
    before = [grad.clone() for grad in grads]
    clip_grad_norm_(grads, max_norm=100.0)
    assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_norm_that_is_not_finite_touches_nothing(bad: float) -> None:
    grads = [torch.tensor([1.0, 2.0]), torch.tensor([bad])]
    norm = clip_grad_norm_(grads, max_norm=1.0)
    assert not norm.isfinite()
    assert grads[0].tolist() == [1.0, 2.0]


def test_the_norm_of_bf16_gradients_is_fp32() -> None:
    norm = clip_grad_norm_([torch.full((1001,), 1.0, dtype=torch.bfloat16)], max_norm=torch.inf)
    assert norm.dtype == torch.float32
    assert abs(float(norm) - 1001**0.5) < 1e-4


def test_zero_and_absent_gradients_have_norm_zero() -> None:
    zero = torch.zeros(3)
    assert float(clip_grad_norm_([zero], max_norm=1.0)) == 0.0
    assert torch.equal(zero, torch.zeros(3))
    assert float(clip_grad_norm_([], max_norm=1.0)) == 0.0


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_a_limit_that_is_not_positive_is_refused(max_norm: float) -> None:
    with pytest.raises(ValueError, match="max_norm"):
        clip_grad_norm_([torch.ones(2)], max_norm=max_norm)


@pytest.mark.parametrize("max_norm", [0.1, 0.3, 1.0, 2.9])
def test_bf16_gradients_are_shortened_to_within_a_rounding(max_norm: float) -> None:
    grads = [torch.full((4, 4), 0.75).bfloat16(), torch.full((3,), -0.5)]
    clip_grad_norm_(grads, max_norm=max_norm)
    norm = torch.cat([grad.float().flatten() for grad in grads]).norm()
    assert 0.988 * max_norm <= norm <= 1.003 * max_norm
