"""Complete model configurations by name: four K3-shaped ones to train, and the two releases.

Sizes are counted from the parameter shapes (`baltoro inspect NAME` prints them).
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches

from baltoro.model.config import (
    KdaConfig,
    Mixer,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    VisionConfig,
)


def hybrid(num_layers: int) -> tuple[Mixer, ...]:
    """Three KDA layers to one MLA layer, the last layer always MLA, as both releases do."""
    mixers: list[Mixer] = ["mla" if index % 4 == 3 else "kda" for index in range(num_layers)]
    mixers[-1] = "mla"
    return tuple(mixers)


def nano() -> ModelConfig:
    """2.2 M parameters with sight, for tests and a first run on a CPU; its vocabulary is bytes."""
    return _k3_shaped(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_layers=8,
        attn_res_block_size=4,
        kda_head_dim=32,
        num_heads=4,
        mla_ranks=(64, 64),
        mla_head_dims=(32, 16),
        experts=(8, 2, 64),
        latent_size=64,
        max_seq_len=8192,
        vision=VisionConfig(
            hidden_size=64,
            intermediate_size=128,
            num_layers=2,
            num_heads=2,
            qkv_hidden_size=64,
            pos_emb_height=16,
            pos_emb_width=16,
            placeholder_token_id=512 - 256 + 21,  # <|media_pad|> in the block of specials
        ),
    )


def mini() -> ModelConfig:
    """31 M parameters, 15 M active: for CPUs, and a first run on a GPU."""
    return _k3_shaped(
        vocab_size=8192,
        hidden_size=384,
        intermediate_size=1024,
        num_layers=8,
        attn_res_block_size=4,
        kda_head_dim=64,
        num_heads=6,
        mla_ranks=(192, 128),
        mla_head_dims=(64, 32),
        experts=(16, 2, 224),
        latent_size=192,
        max_seq_len=8192,
    )


def small() -> ModelConfig:
    """150 M active parameters of 700 M: the smallest that a GPU is needed for."""
    return _k3_shaped(
        vocab_size=32768,
        hidden_size=768,
        intermediate_size=2048,
        num_layers=16,
        attn_res_block_size=4,
        kda_head_dim=128,
        num_heads=6,
        mla_ranks=(384, 256),
        mla_head_dims=(128, 64),
        experts=(64, 6, 448),
        latent_size=384,
        max_seq_len=65536,
    )


def base() -> ModelConfig:
    """3.2 B parameters, 0.62 B active: the largest that one GPU of 141 GB trains."""
    return _k3_shaped(
        vocab_size=65536,
        hidden_size=1280,
        intermediate_size=3456,
        num_layers=24,
        attn_res_block_size=6,
        kda_head_dim=128,
        num_heads=10,
        mla_ranks=(640, 384),
        mla_head_dims=(128, 64),
        experts=(96, 8, 640),
        latent_size=640,
        max_seq_len=65536,
    )


def preset(name: str) -> ModelConfig:
    """The configuration called `name`; raises `ValueError` with the nearest name otherwise."""
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(PRESETS)}"
        raise ValueError(f"preset {name!r} is unknown; {hint}")
    return PRESETS[name]()


def _k3_shaped(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    attn_res_block_size: int,
    kda_head_dim: int,
    num_heads: int,
    mla_ranks: tuple[int, int],
    mla_head_dims: tuple[int, int],
    experts: tuple[int, int, int],
    latent_size: int,
    max_seq_len: int,
    vision: VisionConfig | None = None,
) -> ModelConfig:
    """K3 with other sizes: ranks of query and key-value, (nope and value, shared) head dims,
    (number, active, inner width) of experts."""
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        mixers=hybrid(num_layers),
        kda=KdaConfig(
            num_heads=num_heads,
            head_dim=kda_head_dim,
            gate_lower_bound=-5.0,
            use_full_rank_gate=True,
        ),
        mla=MlaConfig(
            num_heads=num_heads,
            q_lora_rank=mla_ranks[0],
            kv_lora_rank=mla_ranks[1],
            qk_nope_head_dim=mla_head_dims[0],
            qk_rope_head_dim=mla_head_dims[1],
            v_head_dim=mla_head_dims[0],
            use_output_gate=True,
        ),
        moe=MoeConfig(
            num_experts=experts[0],
            num_experts_per_token=experts[1],
            num_shared_experts=1,
            expert_intermediate_size=experts[2],
            latent_size=latent_size,
            use_latent_norm=True,
            first_moe_layer=1,
        ),
        vision=vision,
        activation="situ",
        attn_res_block_size=attn_res_block_size,
        max_seq_len=max_seq_len,
        pad_token_id=vocab_size - 1,
    )


def k3() -> ModelConfig:
    """Kimi K3: 2.78 T parameters, 104.2 B active (config.json of the release, report table 1)."""
    return ModelConfig(
        vocab_size=163840,
        hidden_size=7168,
        intermediate_size=33792,
        mixers=hybrid(93),
        kda=KdaConfig(num_heads=96, head_dim=128, gate_lower_bound=-5.0, use_full_rank_gate=True),
        mla=MlaConfig(
            num_heads=96,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            use_output_gate=True,
        ),
        moe=MoeConfig(
            num_experts=896,
            num_experts_per_token=16,
            num_shared_experts=2,
            expert_intermediate_size=3072,
            latent_size=3584,
            use_latent_norm=True,
            first_moe_layer=1,
        ),
        vision=VisionConfig(
            hidden_size=1024,
            intermediate_size=4096,
            num_layers=27,
            num_heads=12,
            qkv_hidden_size=1536,
            placeholder_token_id=163605,
        ),
        activation="situ",
        attn_res_block_size=12,
        pad_token_id=163839,
    )


def kimi_linear_48b() -> ModelConfig:
    """Kimi Linear 48B-A3B (config.json of its release)."""
    return ModelConfig(
        vocab_size=163840,
        hidden_size=2304,
        intermediate_size=9216,
        mixers=hybrid(27),
        kda=KdaConfig(num_heads=32, head_dim=128),
        mla=MlaConfig(
            num_heads=32,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
        moe=MoeConfig(
            num_experts=256,
            num_experts_per_token=8,
            num_shared_experts=1,
            expert_intermediate_size=1024,
            routed_scaling_factor=2.446,
            first_moe_layer=1,
        ),
        pad_token_id=163839,
    )


PRESETS: Mapping[str, Callable[[], ModelConfig]] = {
    "nano": nano,
    "mini": mini,
    "small": small,
    "base": base,
    "kimi-linear-48b": kimi_linear_48b,
    "k3": k3,
}
