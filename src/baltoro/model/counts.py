"""Parameters and FLOPs of a configuration, counted on its real shapes without allocating them.

Counts are of the release's layout: `A_log` of a bounded gate is stored padded to `head_dim`
entries, and the router's correction bias counts.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from baltoro.model.config import ModelConfig
from baltoro.model.model import Model

CHUNK_SIZE = 64  # of `ops.kda.chunk_kda`
PARTS = (
    ("embed_tokens", "embedding"),
    ("lm_head", "head"),
    ("vision_tower", "vision tower"),
    ("mm_projector", "projector"),
    ("mtp_layers", "mtp"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """Elements of a model."""

    parts: dict[str, int]  # by part, adding up to `total`
    total: int
    active: int  # used for one text token, without the embedding table, vision and MTP


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopCounts:
    """Forward FLOPs of one token (a multiply-add is two), averaged over a sequence of length T."""

    matmul: int  # products with weights, head included
    attention: int  # MLA scores and values over the mean causal length
    kda: int  # state and chunk products of KDA

    @property
    def total(self) -> int:
        return self.matmul + self.attention + self.kda


def meta_model(config: ModelConfig) -> Model:
    """The model on the meta device: every shape, no memory."""
    with torch.device("meta"):
        return Model(config)


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    """Total, active and by part, in elements of the release's layout."""
    parts: Counter[str] = Counter()
    active = 0
    moe = config.moe
    for name, tensor in _tensors(meta_model(config)):
        part, size = _part(config, name), _elements(config, name, tensor)
        parts[part] += size
        if part in ("embedding", "vision tower", "projector", "mtp"):
            continue
        if part == "routed experts":
            assert moe is not None
            size = size // moe.num_experts * moe.num_experts_per_token
        active += size
    return ParameterCounts(parts=dict(parts), total=sum(parts.values()), active=active)


def flop_counts(config: ModelConfig, seq_len: int) -> FlopCounts:
    """Forward FLOPs per token at sequence length `seq_len` (backward costs twice as much).

    KDA per head and token: 6 d^2 + 3 C d + C^2 (`k3-recipe` 2.2).
    """
    matmul = 0
    for name, tensor in _tensors(meta_model(config)):
        part = _part(config, name)
        if tensor.dim() < 2 or part in ("embedding", "vision tower", "projector", "mtp"):
            continue
        size = tensor.numel()
        if part == "routed experts":
            assert config.moe is not None
            size = size // config.moe.num_experts * config.moe.num_experts_per_token
        matmul += 2 * size
    mla, kda = config.mla, config.kda
    mean_len = (seq_len + 1) / 2
    per_mla = 2 * mla.num_heads * (mla.qk_head_dim + mla.v_head_dim) * mean_len
    dim, chunk = kda.head_dim, min(CHUNK_SIZE, seq_len)
    per_kda = kda.num_heads * (6 * dim * dim + 3 * chunk * dim + chunk * chunk)
    return FlopCounts(
        matmul=matmul,
        attention=round(per_mla * config.mixers.count("mla")),
        kda=per_kda * config.mixers.count("kda"),
    )


def _tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _elements(config: ModelConfig, name: str, tensor: Tensor) -> int:
    if name.endswith("A_log") and config.kda.gate_lower_bound is not None:
        return max(config.kda.num_heads, config.kda.head_dim)
    if name.endswith("_packed"):
        return 2 * tensor.numel()
    if name.endswith("_scale"):
        return 0  # of the format, not of the model
    return tensor.numel()


def _part(config: ModelConfig, name: str) -> str:
    for prefix, part in PARTS:
        if name.startswith(prefix):
            return part
    if ".experts." in name:
        return "routed experts"
    if ".shared_experts." in name:
        return "shared experts"
    if ".self_attn." in name:
        layer_idx = int(name.split(".")[1])
        return config.mixers[layer_idx]
    if ".mlp." in name:
        return "dense mlp"
    if "routed_expert_" in name:
        return "latent projections"
    if ".gate." in name:
        return "router"
    return "norms and residual reads"
