"""`ModelConfig` -> config.json of the release (`release` reads it back).

The file a model was loaded with is kept while it still describes the model; otherwise a new one is
written with the keys of the release. What the release's keys cannot say is an error, not a loss.
"""

import dataclasses
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from baltoro.checkpoint.names import MXFP4_GROUP, Layout
from baltoro.checkpoint.release import read_config
from baltoro.model.config import ImplConfig, ModelConfig, MoeConfig, VisionConfig

# What a new config.json takes over from the old one: the model's shape does not decide it.
CARRIED_KEYS = (
    "bos_token_id",
    "eos_token_id",
    "auto_map",
    "image_placeholder",
    "ignore_index",
    "transformers_version",
)
DTYPE_NAMES: Mapping[str, str] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}

# text_config.quantization_config of K3. The ignore list is the release's; it does not name every
# unquantised matrix, so readers go by the names of the tensors.
QUANTIZATION_CONFIG: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "float",
                "group_size": MXFP4_GROUP,
                "strategy": "group",
                "symmetric": True,
                "dynamic": False,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "actorder": None,
                "block_structure": None,
                "zp_dtype": None,
            },
        }
    },
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
}


def write_config(
    config: ModelConfig, layout: Layout, *, raw: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """config.json, parsed, for a model saved in `layout`.

    `raw` is the config.json the model was loaded with, if any. Raises `ValueError` naming the
    fields of `config` that the release's keys cannot say.
    """
    if raw is not None and _is_wrapped(raw) == layout.wrapped and not _differences(raw, config):
        written = deepcopy(dict(raw))
    else:
        written = _fresh(config, layout, raw or {})
        lost = _differences(written, config)
        if lost:
            raise ValueError(f"{', '.join(lost)}: the release's config.json cannot say this")
    text = written["text_config"] if layout.wrapped else written
    for values in (written, text):
        for key in ("dtype", "torch_dtype"):
            if key in values:
                values[key] = DTYPE_NAMES[layout.dtype]
    if layout.experts != "mxfp4" or config.moe is None:
        for values in (written, text):
            values.pop("quantization_config", None)
    elif "quantization_config" not in written and "quantization_config" not in text:
        text["quantization_config"] = deepcopy(dict(QUANTIZATION_CONFIG))
    return written


def write_preprocessor(vision: VisionConfig) -> dict[str, Any]:
    """preprocessor_config.json with the release's values for a tower of these patch sizes."""
    merge = [vision.merge_height, vision.merge_width]
    return {
        "media_proc_cfg": {
            "patch_size": vision.patch_size,
            "merge_kernel_size": merge[0] if merge[0] == merge[1] else merge,
            "in_patch_limit": 65536,
            "patch_limit_on_one_side": 512,
            "in_patch_limit_each_frame": 16384,
            "fixed_output_tokens": None,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "sample_fps": 8.0,
            "temporal_merge_kernel_size": vision.pos_emb_time,
            "transparent_bg_config": {
                "pattern": "chessboard",
                "chessboard_square_size": 8,
                "chessboard_square_on_top_left": True,
                "chessboard_white_value": 255,
                "chessboard_gray_value": 180,
            },
            "transparent_bg_fill_stage": "after_resize",
        }
    }


def _is_wrapped(raw: Mapping[str, Any]) -> bool:
    return raw.get("model_type") == "kimi_k3"


def _differences(raw: Mapping[str, Any], config: ModelConfig) -> list[str]:
    """Fields in which a config.json says something else than `config`."""
    read = read_config(raw)
    moe = config.moe and dataclasses.replace(config.moe, expert_format="dense")
    config = dataclasses.replace(config, moe=moe, impl=ImplConfig())
    return [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in dataclasses.fields(config)
        if getattr(read, field.name) != getattr(config, field.name)
    ]


def _fresh(config: ModelConfig, layout: Layout, raw: Mapping[str, Any]) -> dict[str, Any]:
    carried = {key: raw[key] for key in CARRIED_KEYS if key in raw}
    dtype = DTYPE_NAMES[layout.dtype]
    if not layout.wrapped:
        head = {"architectures": ["KimiLinearForCausalLM"]}
        return head | _text(config, layout) | {"dtype": dtype} | carried
    old_text = raw.get("text_config", {})
    carried_text = {key: old_text[key] for key in CARRIED_KEYS if key in old_text}
    written: dict[str, Any] = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": dtype,
        "pad_token_id": config.pad_token_id,
        "tie_word_embeddings": False,
        "text_config": {"architectures": ["KimiLinearForCausalLM"]}
        | _text(config, layout)
        | {"dtype": dtype}
        | carried_text,
    }
    if config.vision is not None:
        written["media_placeholder_token_id"] = config.vision.placeholder_token_id
        written["image_placeholder"] = "<|kimi_image_placeholder|>"
        written["ignore_index"] = -100
        written["vision_config"] = _vision(config.vision, config.hidden_size)
    return written | carried


def _text(config: ModelConfig, layout: Layout) -> dict[str, Any]:
    mla = config.mla
    text: dict[str, Any] = {
        "model_type": "kimi_linear",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": mla.num_heads,
        "num_key_value_heads": mla.num_heads,
        "hidden_act": config.activation,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "max_position_embeddings": config.max_seq_len,
        "num_nextn_predict_layers": config.num_mtp_layers,
        "pad_token_id": config.pad_token_id,
        "tie_word_embeddings": False,
        "use_cache": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": mla.use_output_gate,
        "linear_attn_config": _linear_attn(config),
    }
    if config.activation == "situ":
        text["activation_situ_beta"] = config.situ_beta
        text["activation_situ_linear_beta"] = config.situ_linear_beta
    if config.attn_res_block_size is not None:
        text["attn_res_block_size"] = config.attn_res_block_size
    if config.moe is not None:
        text |= _moe(config.moe)
    if not layout.wrapped:
        # other readers of Kimi Linear require these, though nothing rotates
        text |= {
            "head_dim": config.kda.head_dim,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "model_max_length": config.max_seq_len,
        }
    return text


def _linear_attn(config: ModelConfig) -> dict[str, Any]:
    kda = config.kda
    layers: dict[str, list[int]] = {"kda": [], "mla": []}
    for number, mixer in enumerate(config.mixers, start=1):  # counted from 1 in the release
        layers[mixer].append(number)
    linear: dict[str, Any] = {
        "kda_layers": layers["kda"],
        "full_attn_layers": layers["mla"],
        "num_heads": kda.num_heads,
        "head_dim": kda.head_dim,
        "short_conv_kernel_size": kda.conv_kernel_size,
    }
    if kda.gate_lower_bound is not None:
        linear["gate_lower_bound"] = kda.gate_lower_bound
    if kda.use_full_rank_gate:
        linear["use_full_rank_gate"] = True
    return linear


def _moe(moe: MoeConfig) -> dict[str, Any]:
    written: dict[str, Any] = {
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.num_experts_per_token,
        "num_shared_experts": moe.num_shared_experts,
        "moe_intermediate_size": moe.expert_intermediate_size,
        "moe_renormalize": moe.renormalize,
        "moe_router_activation_func": moe.router_activation,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "num_expert_group": moe.num_expert_groups,
        "topk_group": moe.topk_groups,
        "use_grouped_topk": True,
        "topk_method": "noaux_tc",
        "first_k_dense_replace": moe.first_moe_layer,
        "moe_layer_freq": moe.layer_freq,
    }
    if moe.latent_size is not None:
        written["routed_expert_hidden_size"] = moe.latent_size
        written["latent_moe_use_norm"] = moe.use_latent_norm
    return written


def _vision(vision: VisionConfig, hidden_size: int) -> dict[str, Any]:
    return {
        "patch_size": vision.patch_size,
        "init_pos_emb_height": vision.pos_emb_height,
        "init_pos_emb_width": vision.pos_emb_width,
        "init_pos_emb_time": vision.pos_emb_time,
        "pos_emb_type": "divided_fixed",
        "pos_emb_interpolation_mode": "bilinear",
        "merge_kernel_size": [vision.merge_height, vision.merge_width],
        "merge_type": "sd2_tpool",
        "activation_func": "gelu_pytorch_tanh",
        "norm_type": "rmsnorm",
        "mlp_type": "mlp2",
        "attn_bias": False,
        "linear_bias": False,
        "patch_embed_proj_bias": False,
        "vt_hidden_size": vision.hidden_size,
        "vt_intermediate_size": vision.intermediate_size,
        "vt_num_attention_heads": vision.num_heads,
        "vt_num_hidden_layers": vision.num_layers,
        "qkv_hidden_size": vision.qkv_hidden_size,
        "mm_projector_type": "patchmergerv2",
        "mm_hidden_size": vision.hidden_size,
        "projector_hidden_act": "gelu",
        "projector_ln_eps": vision.projector_eps,
        "text_hidden_size": hidden_size,
    }
