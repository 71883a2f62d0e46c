"""Small configurations that hold every kind of layer."""

from dataclasses import replace
from typing import Any

from baltoro.model.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig, VisionConfig

VISION = VisionConfig(
    hidden_size=24,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    qkv_hidden_size=32,
    pos_emb_height=6,
    pos_emb_width=6,
    placeholder_token_id=60,
)


def tiny_k3(**changes: Any) -> ModelConfig:
    """K3-shaped: bounded gate, residual reads over blocks of 2, latent experts, SiTU."""
    config = ModelConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        mixers=("kda", "kda", "mla", "kda", "mla"),
        kda=KdaConfig(num_heads=3, head_dim=8, gate_lower_bound=-5.0, use_full_rank_gate=True),
        mla=MlaConfig(
            num_heads=2,
            q_lora_rank=20,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=12,
            use_output_gate=True,
        ),
        moe=MoeConfig(
            num_experts=6,
            num_experts_per_token=2,
            num_shared_experts=2,
            expert_intermediate_size=16,
            latent_size=16,
            use_latent_norm=True,
            first_moe_layer=1,
        ),
        activation="situ",
        attn_res_block_size=2,
        pad_token_id=63,
    )
    return replace(config, **changes)


def tiny_kimi_linear(**changes: Any) -> ModelConfig:
    """Kimi-Linear-shaped: softplus gate, ordinary residuals, plain experts, SwiGLU."""
    config = tiny_k3(
        kda=KdaConfig(num_heads=3, head_dim=8),
        mla=replace(tiny_k3().mla, q_lora_rank=None, use_output_gate=False),
        moe=MoeConfig(
            num_experts=6,
            num_experts_per_token=3,
            num_shared_experts=1,
            expert_intermediate_size=16,
            routed_scaling_factor=2.446,
            first_moe_layer=1,
        ),
        activation="silu",
        attn_res_block_size=None,
    )
    return replace(config, **changes)
