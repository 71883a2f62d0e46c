"""Configuration of the model: one frozen dataclass per part, zero-based layers, absent means off.

The release's `config.json` is translated into these records by `baltoro.checkpoint.release`; the
model never sees its key names. Nothing here imports torch.
"""

from dataclasses import dataclass, replace
from typing import Literal

Mixer = Literal["kda", "mla"]
Activation = Literal["situ", "silu"]

# tensors that are fp32 on disk and in memory whatever the dtype of the rest (`k3-facts` 3.9)
FP32_SUFFIXES = (
    ".q_conv1d.weight",
    ".k_conv1d.weight",
    ".v_conv1d.weight",
    ".A_log",
    ".dt_bias",
    ".o_norm.weight",
    ".expert_bias",
)


def _require(ok: bool, field: str, value: object, rule: str) -> None:
    if not ok:
        raise ValueError(f"{field}={value!r}: {rule}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImplConfig:
    """Which implementation of each operator a run uses (`baltoro.ops.impl`)."""

    kda: str = "torch"  # many tokens of a sequence at once
    kda_decode: str = "torch"  # one after another
    short_conv: str = "torch"
    attention: str = "torch"
    attention_decode: str = "torch"  # over the latents themselves
    attn_res: str = "torch"
    situ: str = "torch"
    rms_norm: str = "torch"
    route: str = "torch"  # the choice of experts
    moe: str = "torch"
    cross_entropy: str = "torch"

    @classmethod
    def all(cls, impl: str) -> "ImplConfig":
        """Every operator on the same implementation, for example `reference`."""
        return cls(**dict.fromkeys(cls.__slots__, impl))


@dataclass(frozen=True, kw_only=True, slots=True)
class KdaConfig:
    """Kimi Delta Attention (report section 2.1.1)."""

    num_heads: int
    head_dim: int  # key and value width of a head
    conv_kernel_size: int = 4
    gate_lower_bound: float | None = None  # None: softplus decay (Kimi Linear)
    use_full_rank_gate: bool = False  # output gate: one matrix, or rank `head_dim`

    def __post_init__(self) -> None:
        _require(self.num_heads > 0, "kda.num_heads", self.num_heads, "must be positive")
        _require(self.head_dim > 0, "kda.head_dim", self.head_dim, "must be positive")
        _require(
            self.conv_kernel_size >= 2, "kda.conv_kernel_size", self.conv_kernel_size, "at least 2"
        )
        bound = self.gate_lower_bound
        _require(
            bound is None or -5.0 <= bound < 0.0,
            "kda.gate_lower_bound",
            bound,
            "must be None or in [-5, 0): 16-token tiles need the bound",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaConfig:
    """Multi-head latent attention without positions (report section 2.1.2)."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int  # never rotated; a shared content key
    v_head_dim: int
    use_output_gate: bool = False
    latent_norm_eps: float = 1e-6  # of q_a_layernorm and kv_a_layernorm, not rms_norm_eps

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_latent_dim(self) -> int:
        """Width of the cached row per token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def __post_init__(self) -> None:
        for field in ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            _require(getattr(self, field) > 0, f"mla.{field}", getattr(self, field), "positive")
        rank = self.q_lora_rank
        _require(rank is None or rank > 0, "mla.q_lora_rank", rank, "must be None or positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """Stable LatentMoE, or a plain mixture when `latent_size` is None (report section 2.3)."""

    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    expert_intermediate_size: int
    latent_size: int | None = None  # None: experts work on the full hidden width
    use_latent_norm: bool = False
    router_activation: Literal["sigmoid", "softmax"] = "sigmoid"
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_groups: int = 1
    topk_groups: int = 1
    first_moe_layer: int = 0  # earlier layers have the dense MLP
    layer_freq: int = 1  # MoE where layer_idx % layer_freq == 0
    expert_format: Literal["dense", "mxfp4"] = "dense"  # mxfp4: packed codes, inference only

    def __post_init__(self) -> None:
        k = self.num_experts_per_token
        _require(
            1 <= k <= self.num_experts,
            "moe.num_experts_per_token",
            k,
            f"must be between 1 and num_experts={self.num_experts}",
        )
        _require(
            self.router_activation in ("sigmoid", "softmax"),
            "moe.router_activation",
            self.router_activation,
            "must be 'sigmoid' or 'softmax'",
        )
        groups = self.num_expert_groups
        _require(
            groups >= 1 and self.num_experts % groups == 0,
            "moe.num_expert_groups",
            groups,
            f"must divide num_experts={self.num_experts}",
        )
        _require(
            1 <= self.topk_groups <= groups,
            "moe.topk_groups",
            self.topk_groups,
            f"must be between 1 and num_expert_groups={groups}",
        )
        kept = self.num_experts // groups * self.topk_groups
        _require(
            k <= kept,
            "moe.num_experts_per_token",
            k,
            f"only {kept} experts survive group selection",
        )
        _require(self.layer_freq >= 1, "moe.layer_freq", self.layer_freq, "must be at least 1")
        _require(
            not self.use_latent_norm or self.latent_size is not None,
            "moe.use_latent_norm",
            self.use_latent_norm,
            "needs latent_size",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """MoonViT-V2 and the projector (report section 2.4)."""

    patch_size: int = 14
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    qkv_hidden_size: int  # num_heads * head dim, not hidden_size
    pos_emb_height: int = 64
    pos_emb_width: int = 64
    pos_emb_time: int = 4  # most frames of one clip
    merge_height: int = 2
    merge_width: int = 2
    projector_eps: float = 1e-5
    placeholder_token_id: int  # tokens that image rows replace

    @property
    def head_dim(self) -> int:
        return self.qkv_hidden_size // self.num_heads

    @property
    def merged_size(self) -> int:
        """Width of one merged cell, the projector's input."""
        return self.hidden_size * self.merge_height * self.merge_width

    def __post_init__(self) -> None:
        _require(
            self.qkv_hidden_size % self.num_heads == 0 and self.head_dim % 4 == 0,
            "vision.qkv_hidden_size",
            self.qkv_hidden_size,
            f"per head (num_heads={self.num_heads}) must be a multiple of 4 for the 2D rotation",
        )
        _require(self.hidden_size % 2 == 0, "vision.hidden_size", self.hidden_size, "must be even")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A K3- or Kimi-Linear-shaped model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the dense MLP layers
    mixers: tuple[Mixer, ...]  # one per layer, zero-based
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig | None
    vision: VisionConfig | None = None
    activation: Activation = "silu"
    situ_beta: float = 4.0
    situ_linear_beta: float | None = 25.0  # None: the up branch is not capped
    attn_res_block_size: int | None = None  # layers per residual block; None: ordinary residuals
    num_mtp_layers: int = 0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_seq_len: int = 1048576
    pad_token_id: int | None = None  # its embedding row is zero and gets no gradient
    impl: ImplConfig = ImplConfig()

    @property
    def num_layers(self) -> int:
        return len(self.mixers)

    def is_moe(self, layer_idx: int) -> bool:
        """Whether the channel mixer of a layer is the mixture of experts."""
        moe = self.moe
        if moe is None:
            return False
        return layer_idx >= moe.first_moe_layer and layer_idx % moe.layer_freq == 0

    def __post_init__(self) -> None:
        for field in ("vocab_size", "hidden_size", "intermediate_size", "max_seq_len"):
            _require(getattr(self, field) > 0, field, getattr(self, field), "must be positive")
        _require(len(self.mixers) > 0, "mixers", self.mixers, "needs at least one layer")
        for mixer in self.mixers:
            _require(mixer in ("kda", "mla"), "mixers", mixer, "must be 'kda' or 'mla'")
        _require(
            self.activation in ("situ", "silu"), "activation", self.activation, "'situ' or 'silu'"
        )
        block = self.attn_res_block_size
        _require(block is None or block > 0, "attn_res_block_size", block, "None or positive")
        _require(self.num_mtp_layers >= 0, "num_mtp_layers", self.num_mtp_layers, "not negative")
        pad = self.pad_token_id
        _require(
            pad is None or 0 <= pad < self.vocab_size,
            "pad_token_id",
            pad,
            f"must be None or below vocab_size={self.vocab_size}",
        )


# what the kernels serve: `ops/kda/triton`, `ops/short_conv/triton.py`, `ops/mla`, `ops/moe`
KDA_DIMS, MAX_TAPS = (16, 32, 64, 128), 4
MAX_FLASH_DIM, MAX_LATENT_RANK, MAX_SHARED_DIM = 256, 512, 64
MAX_EXPERTS, EXPERT_WIDTH_UNIT = 1024, 8


def gpu_refusals(model: ModelConfig) -> dict[str, str]:
    """Operators that have no kernel for this model on an NVIDIA GPU, each with the reason."""
    kda, mla, moe = model.kda, model.mla, model.moe
    dim, taps, rank, shared = (
        kda.head_dim,
        kda.conv_kernel_size,
        mla.kv_lora_rank,
        mla.qk_rope_head_dim,
    )
    width = max(mla.qk_head_dim, mla.v_head_dim)
    rules = [
        ("kda", dim in KDA_DIMS, f"kda.head_dim={dim} is none of {KDA_DIMS}"),
        ("kda_decode", dim in KDA_DIMS, f"kda.head_dim={dim} is none of {KDA_DIMS}"),
        ("kda_decode", taps <= MAX_TAPS, f"kda.conv_kernel_size={taps} is above {MAX_TAPS}"),
        ("short_conv", taps <= MAX_TAPS, f"kda.conv_kernel_size={taps} is above {MAX_TAPS}"),
        ("attention", width <= MAX_FLASH_DIM, f"mla head dim {width} is above {MAX_FLASH_DIM}"),
        (
            "attention_decode",
            rank <= MAX_LATENT_RANK,
            f"mla.kv_lora_rank={rank} is above {MAX_LATENT_RANK}",
        ),
        (
            "attention_decode",
            shared <= MAX_SHARED_DIM,
            f"mla.qk_rope_head_dim={shared} is above {MAX_SHARED_DIM}",
        ),
        ("situ", model.activation == "situ", f"activation is {model.activation}"),
    ]
    if moe is not None:
        experts, groups = moe.num_experts, moe.num_expert_groups
        kept = f"moe.topk_groups={moe.topk_groups} of {groups} groups"
        rules.append(("route", moe.topk_groups == groups, kept))
        limit = f"moe.num_experts={experts} is above {MAX_EXPERTS}"
        rules.append(("route", experts <= MAX_EXPERTS, limit))
        widths = moe.latent_size or model.hidden_size, moe.expert_intermediate_size
        is_served = all(each % EXPERT_WIDTH_UNIT == 0 for each in widths)
        unit = f"moe: one of the widths {widths} is no multiple of {EXPERT_WIDTH_UNIT}"
        rules.append(("moe", is_served, unit))
    return {operator: reason for operator, is_served, reason in rules if not is_served}


def gpu_impl(model: ModelConfig) -> ImplConfig:
    """The operators of a bf16 run on an NVIDIA GPU: kernels but where `gpu_refusals` names one."""
    kernels = replace(ImplConfig.all("triton"), attention="flash")
    return replace(kernels, **dict.fromkeys(gpu_refusals(model), "torch"))
