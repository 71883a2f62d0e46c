"""Gated multi-head latent attention without positions (report section 2.1.2).

Keys and values are read from one latent per token. `forward` expands it (training, prefill) or,
for decode, folds the expansion into query and output and attends over the latents themselves.

K is the query-key width (nope and shared part), R the cached row.
"""

import torch
from torch import Tensor, nn

from baltoro.model.cache import Cache, LatentPages, LatentRows
from baltoro.model.config import ModelConfig
from baltoro.model.joined import Groups, Joined, projected, rejoined
from baltoro.model.norm import RmsNorm
from baltoro.ops.mla import varlen_attention
from baltoro.ops.mla.paged import paged_latent_attention
from baltoro.ops.mla.rows import sigmoid_gated


class Mla(nn.Module):
    """The MLA mixer of one layer."""

    def __init__(self, config: ModelConfig, layer_idx: int) -> None:
        super().__init__()
        mla, size = config.mla, config.hidden_size
        self.config = config
        self.layer_idx = layer_idx
        eps, impl = mla.latent_norm_eps, config.impl.rms_norm
        if mla.q_lora_rank is None:
            self.q_proj = nn.Linear(size, mla.num_heads * mla.qk_head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(size, mla.q_lora_rank, bias=False)
            self.q_a_layernorm = RmsNorm(mla.q_lora_rank, eps=eps, impl=impl)
            self.q_b_proj = nn.Linear(mla.q_lora_rank, mla.num_heads * mla.qk_head_dim, bias=False)
        self.joined: Joined | None = None
        self.kv_a_proj_with_mqa = nn.Linear(size, mla.kv_latent_dim, bias=False)
        self.kv_a_layernorm = RmsNorm(mla.kv_lora_rank, eps=eps, impl=impl)
        self.kv_b_proj = nn.Linear(
            mla.kv_lora_rank, mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), bias=False
        )
        if mla.use_output_gate:
            self.g_proj = nn.Linear(size, mla.num_heads * mla.v_head_dim, bias=False)
        self.o_proj = nn.Linear(mla.num_heads * mla.v_head_dim, size, bias=False)

    def forward(self, x_TD: Tensor, cu_seqlens: Tensor, cache: Cache | None = None) -> Tensor:
        """`[T, D]` to `[T, D]`; with a cache the new latents are appended and all are attended."""
        query_TC, latent_TR, *gates = projected(x_TD, self._groups(), self.joined)
        q_THK, rows = self._query(query_TC), self._rows(latent_TR)
        if cache is None:
            y_THV = self._expanded(q_THK, rows.normed(), cu_seqlens, cu_seqlens)
        else:
            cache.append_kv(self.layer_idx, rows, cu_seqlens)
            if cache.form == "decode":
                y_THV = self._absorbed(q_THK, cache.latent_pages(self.layer_idx))
            else:
                y_THV = cache.attended(self.layer_idx, self._expanded, q_THK, cu_seqlens)
        impl = self.config.impl.attention_decode
        y_TC = sigmoid_gated(y_THV, gates[0], impl=impl) if gates else y_THV.flatten(1)
        return self.o_proj(y_TC)

    def join(self) -> None:
        """Make one product of the input's projections where no gradient is wanted."""
        self.joined = rejoined(self._groups(), self.joined)

    def _groups(self) -> Groups:
        mla = self.config.mla
        query = self.q_proj if mla.q_lora_rank is None else self.q_a_proj
        gates = [(self.g_proj,)] if mla.use_output_gate else []
        return ((query,), (self.kv_a_proj_with_mqa,), *gates)

    def _query(self, q_TC: Tensor) -> Tensor:
        mla = self.config.mla
        if mla.q_lora_rank is not None:
            q_TC = self.q_b_proj(self.q_a_layernorm(q_TC))
        return q_TC.unflatten(-1, (mla.num_heads, mla.qk_head_dim))

    def _rows(self, kv_TR: Tensor) -> LatentRows:
        """The rows to cache: normalised latent, then the raw shared key."""
        norm, impl = self.kv_a_layernorm, self.config.impl
        return LatentRows(kv_TR, norm.weight, norm.eps, norm.impl, impl.attention_decode)

    def _expanded(
        self, q_THK: Tensor, kv_SR: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
    ) -> Tensor:
        """`[T, H, V]`: queries over keys and values made of their latents."""
        mla = self.config.mla
        latent_SR, shared_SR = kv_SR.split([mla.kv_lora_rank, mla.qk_rope_head_dim], -1)
        nope_SHK, v_SHV = (
            self.kv_b_proj(latent_SR)
            .view(-1, mla.num_heads, mla.qk_nope_head_dim + mla.v_head_dim)
            .split([mla.qk_nope_head_dim, mla.v_head_dim], -1)
        )
        k_SHK = torch.cat([nope_SHK, shared_SR[:, None].expand(-1, mla.num_heads, -1)], -1)
        return varlen_attention(
            q_THK,
            k_SHK,
            v_SHV,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            causal=True,
            scale=mla.qk_head_dim**-0.5,
            impl=self.config.impl.attention,
        )

    def _absorbed(self, q_THK: Tensor, pages: LatentPages) -> Tensor:
        mla = self.config.mla
        nope_THK, shared_THK = q_THK.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], -1)
        up_k_HKR, up_v_HVR = self.kv_b_proj.weight.view(
            mla.num_heads, mla.qk_nope_head_dim + mla.v_head_dim, mla.kv_lora_rank
        ).split([mla.qk_nope_head_dim, mla.v_head_dim], 1)
        q_THR = torch.cat(
            [torch.bmm(nope_THK.transpose(0, 1), up_k_HKR).transpose(0, 1), shared_THK], -1
        )
        out_THR = paged_latent_attention(
            q_THR,
            pages.latents,
            pages.page_table,
            pages.lengths,
            cu_seqlens=pages.cu_seqlens,
            max_tokens=pages.max_tokens,
            kv_lora_rank=mla.kv_lora_rank,
            scale=mla.qk_head_dim**-0.5,
            impl=self.config.impl.attention_decode,
        )
        return torch.bmm(out_THR.transpose(0, 1), up_v_HVR.transpose(1, 2)).transpose(0, 1)
