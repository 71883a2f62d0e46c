"""QK-Clip of MLA heads: weights shrink where attention logits grew beyond a limit.

gamma_h = min(1, tau / S_h) with S_h the head's largest scaled logit of the step (K2, arXiv
2507.20534). The own parts of query and key take sqrt(gamma) each, the query's part against the
shared key takes gamma, the shared key, which belongs to all heads, nothing: the head's logits
shrink by gamma and no other head's change. KDA needs none: its keys have norm one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TAU = 100.0  # K2's limit; K3 does not restate it


@dataclass(frozen=True, kw_only=True, slots=True)
class QkWeights:
    """The two weights of a layer that QK-Clip scales, and how their rows fall into heads."""

    query: Tensor  # [H * (nope + rope), in]: q_b_proj, or q_proj without a query latent
    key_value: Tensor  # [H * (nope + v), R]: kv_b_proj
    num_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        for field, per_head in (
            ("query", self.qk_nope_head_dim + self.qk_rope_head_dim),
            ("key_value", self.qk_nope_head_dim + self.v_head_dim),
        ):
            rows = getattr(self, field).shape[0]
            if rows != self.num_heads * per_head:
                raise ValueError(
                    f"{field} has {rows} rows; {self.num_heads} heads of {per_head} were described"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class QkClip:
    """What one layer's clip did; tensors on the device of the weights, nothing read back."""

    gamma: Tensor  # [H] fp32, 1 where the head was left alone
    num_clipped: Tensor  # [] int64
    num_not_finite: Tensor  # [] int64, heads whose largest logit is NaN or +inf; left alone


@torch.no_grad()
def qk_clip_(weights: QkWeights, max_logits: Tensor, *, tau: float = TAU) -> QkClip:
    """Scale `weights` in place by the largest logits `[H]` of the step.

    The maximum runs over all tokens, ranks and micro-batches. Pass the fp32 masters, after the
    step, and publish them. A head that saw no token has -inf and is left alone. Momenta are not
    scaled.
    """
    if max_logits.shape != (weights.num_heads,):
        raise ValueError(
            f"max_logits {list(max_logits.shape)}: one per head expected, [{weights.num_heads}]"
        )
    if not tau > 0.0:
        raise ValueError(f"tau={tau}: must be positive")
    logits_H = max_logits.to(weights.query)
    is_bad_H = logits_H.isnan() | (logits_H == torch.inf)
    gamma_H = torch.where((logits_H > tau) & ~is_bad_H, tau / logits_H, 1.0)
    root_H11 = gamma_H.sqrt()[:, None, None]
    nope = weights.qk_nope_head_dim
    query_HKD = weights.query.view(weights.num_heads, -1, weights.query.shape[1])
    query_HKD[:, :nope].mul_(root_H11)
    query_HKD[:, nope:].mul_(gamma_H[:, None, None])
    key_value_HKR = weights.key_value.view(weights.num_heads, -1, weights.key_value.shape[1])
    key_value_HKR[:, :nope].mul_(root_H11)
    return QkClip(
        gamma=gamma_H.float(),
        num_clipped=(gamma_H < 1.0).sum(),
        num_not_finite=is_bad_H.sum(),
    )
