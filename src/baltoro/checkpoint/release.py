"""config.json of the release -> `ModelConfig` (`config_json` writes the way back).

K3 (`model_type` kimi_k3) holds a text_config and a vision_config; Kimi Linear (kimi_linear) is
flat, with the keys of a text_config. Both are read by the same rules: absent means off, layers in
the lists are counted from 1, and a value that cannot be honoured is an error. Meanings and defaults
are those of the configuration classes shipped with the releases.
"""

from collections.abc import Mapping
from typing import Any, Literal

from baltoro.checkpoint.names import MXFP4_GROUP
from baltoro.checkpoint.section import PRETRAINED_CONFIG_KEYS, Section
from baltoro.model.config import (
    Activation,
    KdaConfig,
    Mixer,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    VisionConfig,
)

# Nothing is rotated (NoPE); head_dim is a class default that nothing reads (74 for K3).
UNUSED_TEXT_KEYS = frozenset(
    ("head_dim", "qk_head_dim", "rope_theta", "rope_scaling", "rope_parameters", "rope_interleave")
)
TOP_LEVEL_KEYS = frozenset(["ignore_index", "image_placeholder"])


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """`ModelConfig` of a parsed config.json, K3's or Kimi Linear's.

    Experts are taken as dense: whether they are packed is said by the tensors, not by
    quantization_config. Raises `ValueError` naming the key, its value and what is supported.
    """
    top = Section(raw, "config.json")
    model_type = top.value("model_type")
    if model_type == "kimi_linear":
        return _read_text(top, pad_token_id=None, vision=None)
    if model_type != "kimi_k3":
        raise top.error("model_type", "only 'kimi_k3' and 'kimi_linear' can be loaded")
    text = top.section("text_config")
    if text is None:
        raise ValueError("config.json.text_config is missing")
    text.where = "text_config"
    text.expect("model_type", "kimi_linear", why="the text model of K3")
    vision = None
    values = top.section("vision_config")
    placeholder = top.size("media_placeholder_token_id", 163605, minimum=0)
    if values is not None:
        values.where = "vision_config"
        vision = _read_vision(values, text.size("hidden_size"), placeholder)
    top.expect("tie_word_embeddings", False, why="the head has its own matrix")
    _check_quantization(top)
    pad_token_id = top.optional_size("pad_token_id", minimum=0)
    top.ignore(PRETRAINED_CONFIG_KEYS | TOP_LEVEL_KEYS)
    top.finish()
    return _read_text(text, pad_token_id=pad_token_id, vision=vision)


def _read_text(
    text: Section, *, pad_token_id: int | None, vision: VisionConfig | None
) -> ModelConfig:
    heads = text.size("num_attention_heads")
    text.expect("num_key_value_heads", heads, why="latent attention has one key head per head")
    text.expect("mla_use_nope", True, why="no rotary positions here", required=True)
    text.expect("tie_word_embeddings", False, why="the head has its own matrix")
    text.expect("attention_bias", False, why="the releases have no bias")
    text.expect("attention_dropout", 0, 0.0, why="the releases use none")
    text.expect("logit_scale", 1, 1.0, why="logits are not scaled")
    _check_quantization(text)
    activation: Activation = text.choice("hidden_act", "silu", "situ")
    situ = _read_situ(text) if activation == "situ" else {}
    if activation == "silu":
        text.ignore(("activation_situ_beta", "activation_situ_linear_beta"))
    own_pad = text.optional_size("pad_token_id", minimum=0)
    if None not in (own_pad, pad_token_id) and own_pad != pad_token_id:
        raise text.error("pad_token_id", f"differs from config.json.pad_token_id={pad_token_id}")
    mixers = _read_mixers(text)
    context = text.optional_size("model_max_length")  # Kimi Linear's name for it
    config = ModelConfig(
        vocab_size=text.size("vocab_size"),
        hidden_size=text.size("hidden_size"),
        intermediate_size=text.size("intermediate_size"),
        mixers=mixers,
        kda=_read_kda(text),
        mla=MlaConfig(
            num_heads=heads,
            q_lora_rank=text.optional_size("q_lora_rank"),
            kv_lora_rank=text.size("kv_lora_rank"),
            qk_nope_head_dim=text.size("qk_nope_head_dim"),
            qk_rope_head_dim=text.size("qk_rope_head_dim", minimum=0),
            v_head_dim=text.size("v_head_dim"),
            use_output_gate=text.flag("mla_use_output_gate", False),
        ),
        moe=_read_moe(text),
        vision=vision,
        activation=activation,
        attn_res_block_size=text.optional_size("attn_res_block_size"),
        num_mtp_layers=text.size("num_nextn_predict_layers", 0, minimum=0),
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        initializer_range=text.number("initializer_range", 0.02),
        max_seq_len=text.size("max_position_embeddings", context or 4096),
        pad_token_id=pad_token_id if own_pad is None else own_pad,
        **situ,
    )
    _check_derived(text, config)
    text.ignore(PRETRAINED_CONFIG_KEYS | UNUSED_TEXT_KEYS)
    text.finish()
    if vision is not None and vision.placeholder_token_id >= config.vocab_size:
        raise ValueError(
            f"config.json.media_placeholder_token_id={vision.placeholder_token_id}: "
            f"must be below vocab_size={config.vocab_size}"
        )
    return config


def _read_situ(text: Section) -> dict[str, Any]:
    beta = text.number("activation_situ_beta", 0.0) or 1.0  # the release's code: "beta or 1.0"
    linear_beta = text.optional_number("activation_situ_linear_beta")
    for key, cap in (("activation_situ_beta", beta), ("activation_situ_linear_beta", linear_beta)):
        if cap is not None and cap <= 0.0:
            raise text.error(key, "must be positive")
    return {"situ_beta": beta, "situ_linear_beta": linear_beta}


def _linear_attn(text: Section) -> Section:
    linear = text.section("linear_attn_config")
    if linear is None:
        raise ValueError(f"{text.where}.linear_attn_config is missing")
    linear.where = "linear_attn_config"
    return linear


def _read_mixers(text: Section) -> tuple[Mixer, ...]:
    """The two lists of layers, counted from 1, must cover every layer once."""
    linear = _linear_attn(text)
    num_layers = text.size("num_hidden_layers")
    mixers: dict[int, Mixer] = {}
    lists: tuple[tuple[str, Mixer], ...] = (("kda_layers", "kda"), ("full_attn_layers", "mla"))
    for key, mixer in lists:
        layers = linear.value(key)
        if not isinstance(layers, list):
            raise linear.error(key, "must be a list of layers, counted from 1")
        for layer in layers:
            if isinstance(layer, bool) or not isinstance(layer, int):
                raise linear.error(key, f"{layer!r} is not a layer number")
            if not 1 <= layer <= num_layers:
                raise linear.error(key, f"layer {layer} is outside 1..{num_layers}")
            if layer in mixers:
                raise linear.error(key, f"layer {layer} is listed twice")
            mixers[layer] = mixer
    missing = [layer for layer in range(1, num_layers + 1) if layer not in mixers]
    if missing:
        raise ValueError(
            f"linear_attn_config: layers {missing} of 1..{num_layers} are in neither kda_layers "
            "nor full_attn_layers"
        )
    return tuple(mixers[layer] for layer in range(1, num_layers + 1))


def _read_kda(text: Section) -> KdaConfig:
    linear = _linear_attn(text)
    kda = KdaConfig(
        num_heads=linear.size("num_heads"),
        head_dim=linear.size("head_dim"),
        conv_kernel_size=linear.size("short_conv_kernel_size", 4),
        gate_lower_bound=linear.optional_number("gate_lower_bound"),
        use_full_rank_gate=linear.flag("use_full_rank_gate", False),
    )
    linear.ignore(("kda_layers", "full_attn_layers"))
    linear.finish()
    return kda


def _read_moe(text: Section) -> MoeConfig | None:
    text.expect("topk_method", "noaux_tc", why="selection bias without auxiliary loss")
    num_experts = text.optional_size("num_experts")
    if num_experts is None:
        text.ignore(_MOE_KEYS)
        return None
    groups = text.size("num_expert_group", 1)
    if groups > 1:
        text.expect("use_grouped_topk", True, why=f"num_expert_group is {groups}")
    text.ignore(("use_grouped_topk",))
    router: Literal["sigmoid", "softmax"] = text.choice(
        "moe_router_activation_func", "sigmoid", "softmax"
    )
    latent = text.optional_size("routed_expert_hidden_size")
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=text.size("num_experts_per_token"),
        num_shared_experts=text.size("num_shared_experts", 0, minimum=0),
        expert_intermediate_size=text.size("moe_intermediate_size"),
        latent_size=latent,
        # without a latent there is nothing to normalise
        use_latent_norm=text.flag("latent_moe_use_norm", False) and latent is not None,
        router_activation=router,
        renormalize=text.flag("moe_renormalize", True),
        routed_scaling_factor=text.number("routed_scaling_factor", 1.0),
        num_expert_groups=groups,
        topk_groups=text.size("topk_group", 1),
        first_moe_layer=text.size("first_k_dense_replace", 0, minimum=0),
        layer_freq=text.size("moe_layer_freq", 1),
    )


_MOE = """
    num_expert_group use_grouped_topk moe_router_activation_func routed_expert_hidden_size
    num_experts_per_token num_shared_experts moe_intermediate_size latent_moe_use_norm
    moe_renormalize routed_scaling_factor topk_group first_k_dense_replace moe_layer_freq
"""
_MOE_KEYS = frozenset(_MOE.split())


def _check_derived(text: Section, config: ModelConfig) -> None:
    """Keys in which transformers repeats what the lists and linear_attn_config say."""
    names = {"kda": "linear_attention", "mla": "full_attention"}
    why = "it must agree with linear_attn_config and first_k_dense_replace"
    text.expect("layer_types", [names[mixer] for mixer in config.mixers], why=why)
    sparse = ["sparse" if config.is_moe(i) else "dense" for i in range(config.num_layers)]
    text.expect("mlp_layer_types", sparse, why=why)
    text.expect("linear_head_dim", config.kda.head_dim, why=why)
    text.expect("linear_num_heads", config.kda.num_heads, why=why)
    text.expect("linear_conv_kernel_dim", config.kda.conv_kernel_size, why=why)


def _check_quantization(section: Section) -> None:
    """Refuses any quantisation but the release's; the tensors' names say what is packed."""
    quantization = section.section("quantization_config")
    if quantization is None:
        return
    quantization.where = f"{section.where}.quantization_config"
    quantization.expect(
        "quant_method", "compressed-tensors", why="the release's method", required=True
    )
    quantization.expect("format", "mxfp4-pack-quantized", why="the release's format", required=True)
    groups = quantization.value("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = Section(group, f"{quantization.where}.{name}").section("weights")
        if weights is not None:
            weights.expect("num_bits", 4, why="MXFP4 has four-bit codes")
            weights.expect("group_size", MXFP4_GROUP, why="MXFP4 has groups of 32")
            weights.expect("type", "float", why="MXFP4 codes are E2M1 floats")


def _read_vision(vision: Section, text_size: int, placeholder: int) -> VisionConfig:
    only = "what the release's tower computes"
    for key, allowed in _TOWER.items():
        vision.expect(key, allowed, why=only)
    size = vision.size("vt_hidden_size", 1024)
    vision.expect("mm_hidden_size", size, why="the projector reads the tower's width")
    vision.expect("text_hidden_size", text_size, why="it must equal text_config.hidden_size")
    merge = vision.value("merge_kernel_size")
    merge = [2, 2] if merge is None else merge
    merge = [merge, merge] if isinstance(merge, int) else merge
    if not (isinstance(merge, list) and len(merge) == 2 and all(type(m) is int for m in merge)):
        raise vision.error("merge_kernel_size", "must be two whole numbers")
    config = VisionConfig(
        patch_size=vision.size("patch_size", 14),
        hidden_size=size,
        intermediate_size=vision.size("vt_intermediate_size", 4096),
        num_layers=vision.size("vt_num_hidden_layers", 27),
        num_heads=vision.size("vt_num_attention_heads", 12),
        qkv_hidden_size=vision.size("qkv_hidden_size", 1536),
        pos_emb_height=vision.size("init_pos_emb_height", 64),
        pos_emb_width=vision.size("init_pos_emb_width", 64),
        pos_emb_time=vision.size("init_pos_emb_time", 4),
        merge_height=merge[0],
        merge_width=merge[1],
        projector_eps=vision.number("projector_ln_eps", 1e-5),
        placeholder_token_id=placeholder,
    )
    vision.ignore(PRETRAINED_CONFIG_KEYS)
    vision.finish()
    return config


_TOWER: Mapping[str, Any] = {
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "merge_type": "sd2_tpool",
    "norm_type": "rmsnorm",
    "mlp_type": "mlp2",
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "video_attn_type": "spatial_temporal",
    "mm_projector_type": "patchmergerv2",
    "projector_hidden_act": "gelu",
}
