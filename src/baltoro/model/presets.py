"""Complete model configurations by name: three K3-shaped ones to train, and the two releases.

Sizes are counted from the parameter shapes (`baltoro inspect NAME` prints them).
"""

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
