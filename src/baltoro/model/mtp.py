"""The multi-token-prediction layer (report section 4.1.4; names of `k3-facts` 2.8).

h' = block(eh_proj[enorm(embed(next token)); hnorm(mixture)]), read through its own norm and the
model's own head. The block is MLA and the model's channel mixer with ordinary residuals.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from baltoro.model.cache import Cache
from baltoro.model.config import ModelConfig
from baltoro.model.mla import Mla
from baltoro.model.mlp import Mlp
from baltoro.model.moe import Moe, MoeOutput
from baltoro.model.norm import backbone_norm


class MtpOutput(NamedTuple):
    """What one MTP layer returns."""

    hidden: Tensor  # [T, D], normed, for the head
    mixture: Tensor  # [T, D], before the norm, for the next MTP layer
    router_scores: Tensor | None  # [T, E] fp32; None from a dense layer


class SharedHead(nn.Module):
    """The norm in front of the model's own head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = backbone_norm(config, config.hidden_size)


class MtpLayer(nn.Module):
    """Predicts the token after next from a hidden state and the next token."""

    def __init__(self, config: ModelConfig, mtp_idx: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.enorm = backbone_norm(config, size)
        self.hnorm = backbone_norm(config, size)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = backbone_norm(config, size)
        self.layer_idx = config.num_layers + mtp_idx
        self.self_attn = Mla(config, self.layer_idx)
        self.post_attention_layernorm = backbone_norm(config, size)
        if config.moe is None:
            self.mlp = Mlp(config, config.intermediate_size)
        else:
            self.block_sparse_moe = Moe(config, config.moe)
        self.is_moe = config.moe is not None
        self.shared_head = SharedHead(config)

    def forward(
        self,
        next_TD: Tensor,
        mixture_TD: Tensor,
        cu_seqlens: Tensor,
        cache: Cache | None = None,
    ) -> MtpOutput:
        """Embeddings `[T, D]` of the next tokens and the hidden states `[T, D]` they follow."""
        empty_N = None if cache is None else cache.is_empty(self.layer_idx)
        next_TD = next_TD.masked_fill(_first_rows(next_TD, cu_seqlens, empty_N)[:, None], 0.0)
        joined_TD = torch.cat([self.enorm(next_TD), self.hnorm(mixture_TD)], -1)
        x_TD = self.eh_proj(joined_TD)
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), cu_seqlens, cache)
        normed_TD = self.post_attention_layernorm(x_TD)
        if self.is_moe:
            out: MoeOutput = self.block_sparse_moe(normed_TD)
            x_TD, scores = x_TD + out.y, out.routing.scores
        else:
            x_TD, scores = x_TD + self.mlp(normed_TD), None
        return MtpOutput(self.shared_head.norm(x_TD), x_TD, scores)


def _first_rows(x_TD: Tensor, cu_seqlens: Tensor, empty_N: Tensor | None) -> Tensor:
    """`[T]` bool: rows at position 0 of their sequence, whose embedding is zeroed."""
    T = x_TD.shape[0]
    fresh = cu_seqlens[:-1] < cu_seqlens[1:]
    if empty_N is not None:
        fresh = fresh & empty_N.to(fresh.device)
    first_T = torch.zeros(T + 1, dtype=torch.bool, device=x_TD.device)
    # the last row takes what sequences without such a row write
    first_T.index_fill_(0, torch.where(fresh, cu_seqlens[:-1], T).long(), True)
    return first_T[:T]
