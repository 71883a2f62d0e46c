"""QK-Clip: which rows shrink, and what the logits are afterwards."""

import dataclasses

import pytest
import torch
from torch import Tensor

from baltoro.optim.qk_clip import QkWeights, qk_clip_

H, NOPE, ROPE, V, R, Q = 3, 4, 2, 5, 8, 6
LATENT_Q = torch.randn(10, Q, generator=torch.Generator().manual_seed(3))
LATENT_KV = torch.randn(10, R, generator=torch.Generator().manual_seed(4))
SHARED_KEY = torch.randn(10, ROPE, generator=torch.Generator().manual_seed(5))


def weights(scale: float = 1.0) -> QkWeights:
    query = torch.randn(H * (NOPE + ROPE), Q) * scale
    key_value = torch.randn(H * (NOPE + V), R) * scale
    return QkWeights(
        query=query,
        key_value=key_value,
        num_heads=H,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=V,
    )


def logits(w: QkWeights) -> Tensor:
    """`[H, T, T]` of fixed latents and the fixed shared key."""
    query = (LATENT_Q @ w.query.T).view(-1, H, NOPE + ROPE)
    own = (LATENT_KV @ w.key_value.T).view(-1, H, NOPE + V)[..., :NOPE]
    key = torch.cat([own, SHARED_KEY[:, None].expand(-1, H, -1)], -1)
    return torch.einsum("qhk,shk->hqs", query, key) * (NOPE + ROPE) ** -0.5


def test_a_head_above_the_limit_comes_down_to_it_and_no_other_moves() -> None:
    w = weights(0.3)
    w.query[NOPE + ROPE : 2 * (NOPE + ROPE)] *= 50
    before = logits(w)
    clip = qk_clip_(w, before.amax((1, 2)), tau=20.0)
    after = logits(w)
    assert before[1].max() > 20.0
    torch.testing.assert_close(after[1], before[1] * clip.gamma[1])
    assert float(after[1].max()) == pytest.approx(20.0, rel=1e-5)
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert int(clip.num_clipped) == 1 and int(clip.num_not_finite) == 0


def test_values_and_quiet_heads_are_left_bit_for_bit() -> None:
    w = weights()
    before = dataclasses.replace(w, query=w.query.clone(), key_value=w.key_value.clone())
    qk_clip_(w, torch.tensor([400.0, 100.0, 99.0]))
    value = w.key_value.view(H, NOPE + V, R)[:, NOPE:]
    assert torch.equal(value, before.key_value.view(H, NOPE + V, R)[:, NOPE:])
    query, old = w.query.view(H, -1, Q), before.query.view(H, -1, Q)
    assert torch.equal(query[1:], old[1:])
    torch.testing.assert_close(query[0, :NOPE], old[0, :NOPE] * 0.5)
    torch.testing.assert_close(query[0, NOPE:], old[0, NOPE:] * 0.25)


@pytest.mark.parametrize("largest", [torch.nan, torch.inf, -torch.inf, 0.0, -3.0])
def test_logits_that_say_nothing_leave_a_head_alone(largest: float) -> None:
    w = weights()
    before = w.query.clone()
    clip = qk_clip_(w, torch.tensor([1.0, largest, 2.0]))
    assert torch.equal(w.query, before)
    assert int(clip.num_clipped) == 0
    assert int(clip.num_not_finite) == int(largest != largest or largest == torch.inf)


def test_a_head_that_keeps_growing_is_held_at_the_limit() -> None:
    # anchor A15 in small: weights that grow by a tenth per step, with and without the clip
    torch.manual_seed(7)
    free, held = weights(3.0), weights(3.0)
    peaks, num_clips = [], 0
    for _ in range(40):
        for w in (free, held):
            w.query.mul_(1.1)
        clip = qk_clip_(held, logits(held).amax((1, 2)))
        num_clips += int(clip.num_clipped)
        peaks.append(float(logits(held).max()))
    assert logits(free).max() > 1000
    assert max(peaks) == pytest.approx(100.0, rel=1e-4)
    assert num_clips > 0


def test_bad_input_is_named() -> None:
    w = weights()
    with pytest.raises(ValueError, match=r"max_logits \[2\]: one per head expected, \[3\]"):
        qk_clip_(w, torch.zeros(2))
    with pytest.raises(ValueError, match=r"tau=0\.0"):
        qk_clip_(w, torch.zeros(3), tau=0.0)
    with pytest.raises(ValueError, match="query has 18 rows; 3 heads of 7"):
        dataclasses.replace(w, qk_rope_head_dim=3)
    with pytest.raises(ValueError, match="key_value has 27 rows; 3 heads of 10"):
        dataclasses.replace(w, v_head_dim=6)
