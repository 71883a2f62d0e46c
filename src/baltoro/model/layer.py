"""One decoder layer: token mixer, channel mixer, and what stands between them.

With attention residuals (report section 2.2, eq. 8-10) there is no residual stream. Each mixer
reads a softmax mixture over the finished block sums and the running sum of its own block; its
output is added to that running sum only. A block begins at every `attn_res_block_size`-th layer;
the embedding is the first finished block. Without them the layer is pre-norm.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from baltoro.model.cache import Cache
from baltoro.model.config import ModelConfig
from baltoro.model.kda import Kda
from baltoro.model.mla import Mla
from baltoro.model.mlp import Mlp
from baltoro.model.moe import Moe, MoeOutput
from baltoro.model.norm import RmsNorm, backbone_norm
from baltoro.ops.moe import Routing
from baltoro.ops.residual import Query, ResidualRead, normed_read


class LayerOutput(NamedTuple):
    """What a layer hands to the next one."""

    partial_sum: Tensor  # [T, D]; the residual stream without attention residuals
    blocks: tuple[Tensor, ...]  # finished block sums, each [T, D]
    routing: Routing | None  # None from a dense layer
    pending: Tensor | None = None  # [T, D], to be added to `partial_sum` by who reads it


def query_of(norm: RmsNorm, proj: nn.Linear, impl: str) -> Query:
    """The two vectors of one read; the release keeps them side by side, not in a module."""
    return Query(norm.weight, proj.weight.squeeze(0), norm.eps, impl)


class Layer(nn.Module):
    """Decoder layer `layer_idx`, zero-based."""

    def __init__(self, config: ModelConfig, layer_idx: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.impl = config.impl.attn_res
        block_size = config.attn_res_block_size
        self.use_attn_res = block_size is not None
        self.starts_block = block_size is not None and layer_idx % block_size == 0
        self.input_layernorm = backbone_norm(config, size)
        mixer = Kda if config.mixers[layer_idx] == "kda" else Mla
        self.self_attn = mixer(config, layer_idx)
        self.post_attention_layernorm = backbone_norm(config, size)
        if config.is_moe(layer_idx):
            assert config.moe is not None
            self.block_sparse_moe = Moe(config, config.moe)
        else:
            self.mlp = Mlp(config, config.intermediate_size)
        if self.use_attn_res:
            self.self_attention_res_norm = backbone_norm(config, size)
            self.self_attention_res_proj = nn.Linear(size, 1, bias=False)
            self.mlp_res_norm = backbone_norm(config, size)
            self.mlp_res_proj = nn.Linear(size, 1, bias=False)
        self.is_moe = config.is_moe(layer_idx)

    def forward(
        self,
        partial_sum: Tensor,
        blocks: tuple[Tensor, ...],
        cu_seqlens: Tensor,
        cache: Cache | None = None,
        replay_ids: Tensor | None = None,
        pending: Tensor | None = None,
    ) -> LayerOutput:
        """`[T, D]` and the finished blocks to the next `[T, D]` and blocks.

        An MoE layer runs the experts `replay_ids` int64 `[T, A]`, if given, in place of its own.
        Where states are kept and no gradient is wanted, the last addition is left to the next read.
        """
        attn_query, mlp_query = self._queries()
        read = self._read(blocks, partial_sum, pending, attn_query, self.input_layernorm)
        y_TD = self.self_attn(read.normed, cu_seqlens, cache)
        partial_sum, pending = read.partial_sum, y_TD
        if self.starts_block:
            # after the read, before the write: the channel mixer already sees the finished block
            blocks, partial_sum, pending = (*blocks, partial_sum), y_TD, None
        read = self._read(blocks, partial_sum, pending, mlp_query, self.post_attention_layernorm)
        y_TD, routing = self._channel_mix(read.normed, replay_ids)
        if cache is not None and not torch.is_grad_enabled():
            return LayerOutput(read.partial_sum, blocks, routing, y_TD)
        return LayerOutput(read.partial_sum + y_TD, blocks, routing)

    def join(self) -> None:
        """Make one product of the projections of an input where no gradient is wanted."""
        self.self_attn.join()
        (self.block_sparse_moe if self.is_moe else self.mlp).join()

    def _queries(self) -> tuple[Query | None, Query | None]:
        """Of the reads before the token and the channel mixer."""
        if not self.use_attn_res:
            return None, None
        return (
            query_of(self.self_attention_res_norm, self.self_attention_res_proj, self.impl),
            query_of(self.mlp_res_norm, self.mlp_res_proj, self.impl),
        )

    def _read(
        self,
        blocks: tuple[Tensor, ...],
        partial_sum: Tensor,
        pending: Tensor | None,
        query: Query | None,
        norm: RmsNorm,
    ) -> ResidualRead:
        return normed_read(
            blocks, partial_sum, pending, query, norm.weight, eps=norm.eps, impl=norm.impl
        )

    def _channel_mix(
        self, x_TD: Tensor, replay_ids: Tensor | None
    ) -> tuple[Tensor, Routing | None]:
        if not self.is_moe:
            return self.mlp(x_TD), None
        out: MoeOutput = self.block_sparse_moe(x_TD, replay_ids)
        return out.y, out.routing
