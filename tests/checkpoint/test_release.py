import json
from copy import deepcopy
from typing import Any

import pytest
from checkpoint.cases import CASES, GOLDEN

from baltoro.checkpoint.release import read_config
from baltoro.model.presets import k3


def golden(case: str) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((GOLDEN / case / "config.json").read_text())
    return raw


@pytest.fixture
def raw() -> dict[str, Any]:
    return deepcopy(golden("k3-vision-mini"))


def refuse(raw: dict[str, Any], *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_config(raw)
    for word in words:
        assert word in str(caught.value)


def test_a_k3_configuration_is_read_whole() -> None:
    config = read_config(golden("k3-vision-mini"))
    assert config.mixers == ("kda", "kda", "kda", "mla")
    assert (config.hidden_size, config.attn_res_block_size, config.activation) == (64, 4, "situ")
    assert (config.situ_beta, config.situ_linear_beta) == (4.0, 25.0)
    assert config.kda.gate_lower_bound == -5.0 and config.kda.use_full_rank_gate
    assert config.mla.use_output_gate and config.mla.q_lora_rank == 48
    assert config.moe is not None and config.vision is not None
    assert (config.moe.latent_size, config.moe.use_latent_norm) == (32, True)
    assert (config.moe.routed_scaling_factor, config.moe.first_moe_layer) == (2.5, 1)
    assert (config.vision.hidden_size, config.vision.placeholder_token_id) == (40, 253)
    assert config.pad_token_id == 0


def test_what_kimi_linear_leaves_out_is_off() -> None:
    config = read_config(golden("kimi-linear-mini"))
    assert config.activation == "silu"
    assert config.attn_res_block_size is None and config.vision is None
    assert config.kda.gate_lower_bound is None and not config.kda.use_full_rank_gate
    assert config.mla.q_lora_rank is None and not config.mla.use_output_gate
    assert config.moe is not None and config.moe.latent_size is None


@pytest.mark.parametrize("case", CASES)
def test_every_golden_configuration_is_accepted(case: str) -> None:
    read_config(golden(case))


def test_the_class_defaults_hold_for_absent_numbers() -> None:
    raw = golden("kimi-linear-mini")
    for key in ("rms_norm_eps", "max_position_embeddings", "model_max_length"):
        del raw[key]
    config = read_config(raw)
    assert (config.rms_norm_eps, config.max_seq_len, config.initializer_range) == (1e-6, 4096, 0.02)


def test_kimi_linears_name_for_the_context_counts_where_it_stands_alone() -> None:
    raw = golden("kimi-linear-mini")
    del raw["max_position_embeddings"]
    raw["model_max_length"] = 777
    assert read_config(raw).max_seq_len == 777


def test_the_noise_of_pretrained_config_has_no_effect() -> None:
    plain = read_config(golden("k3-mini"))
    raw = golden("k3-mini")
    noise = {"top_k": 50, "max_length": 20, "return_dict": True, "head_dim": 74, "use_cache": True}
    raw["text_config"] |= noise | {"rope_scaling": None, "torch_dtype": "bfloat16"}
    assert read_config(raw) == plain


def test_a_quantisation_that_was_hoisted_to_the_top_is_known() -> None:
    raw = golden("k3-mxfp4-mini")
    raw["quantization_config"] = raw["text_config"].pop("quantization_config")
    assert read_config(raw) == read_config(golden("k3-mxfp4-mini"))


def test_a_beta_of_zero_or_null_means_one() -> None:
    for beta in (0, None):
        raw = golden("k3-mini")
        raw["text_config"]["activation_situ_beta"] = beta
        raw["text_config"]["activation_situ_linear_beta"] = None
        config = read_config(raw)
        assert (config.situ_beta, config.situ_linear_beta) == (1.0, None)


def test_a_square_merge_kernel_may_be_one_number(raw: dict[str, Any]) -> None:
    raw["vision_config"]["merge_kernel_size"] = 2
    assert read_config(raw) == read_config(golden("k3-vision-mini"))


def test_unknown_keys_are_named_with_the_nearest_known_one(raw: dict[str, Any]) -> None:
    raw["text_config"]["num_experts_per_tok"] = 3
    refuse(raw, "text_config", "'num_experts_per_tok'", "did you mean 'num_experts_per_token'?")


@pytest.mark.parametrize(
    "path", ["", "text_config", "vision_config", "text_config.linear_attn_config"]
)
def test_no_part_of_the_file_is_exempt_from_the_search_for_unknown_keys(
    raw: dict[str, Any], path: str
) -> None:
    part = raw
    for name in path.split(".") if path else ():
        part = part[name]
    part["frobnicate"] = 1
    refuse(raw, "unknown key 'frobnicate'", path.rpartition(".")[2] or "config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mla_use_nope", False),
        ("tie_word_embeddings", True),
        ("hidden_act", "gelu"),
        ("num_key_value_heads", 2),
        ("moe_router_activation_func", "tanh"),
        ("topk_method", "greedy"),
        ("activation_situ_linear_beta", -1.0),
        ("hidden_size", "64"),
        ("hidden_size", True),
        ("hidden_size", 0),
        ("num_nextn_predict_layers", -1),
        ("logit_scale", 0.5),
        ("model_type", "deepseek_v3"),
        ("linear_attn_config", [1]),
        ("layer_types", ["linear_attention"] * 4),
        ("quantization_config", {"quant_method": "gptq"}),
    ],
)
def test_text_settings_that_cannot_be_honoured_are_refused_by_name(
    raw: dict[str, Any], key: str, value: object
) -> None:
    raw["text_config"][key] = value
    refuse(raw, key)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("norm_type", "layernorm"),
        ("video_attn_type", "factorised"),
        ("attn_bias", True),
        ("projector_hidden_act", "gelu_pytorch_tanh"),
        ("text_hidden_size", 32),
        ("mm_hidden_size", 41),
        ("merge_kernel_size", [2, 2, 1]),
        ("vt_num_attention_heads", 3),
    ],
)
def test_vision_settings_that_cannot_be_honoured_are_refused_by_name(
    raw: dict[str, Any], key: str, value: object
) -> None:
    raw["vision_config"][key] = value
    name = {"vt_num_attention_heads": "qkv_hidden_size"}.get(key, key)
    refuse(raw, name)


@pytest.mark.parametrize("key", ["hidden_size", "kv_lora_rank", "linear_attn_config"])
def test_a_missing_setting_without_a_default_is_named(raw: dict[str, Any], key: str) -> None:
    del raw["text_config"][key]
    refuse(raw, f"text_config.{key} is missing")


@pytest.mark.parametrize(
    ("kda_layers", "full_attn_layers", "words"),
    [
        ([0, 1, 2], [3], "layer 0 is outside 1..4"),  # counted from 0
        ([1, 2, 3], [3, 4], "layer 3 is listed twice"),
        ([1, 2, 3, 3], [4], "layer 3 is listed twice"),
        ([1, 2], [4], "layers [3] of 1..4 are in neither"),
        ([1, 2, 3], [4, 5], "layer 5 is outside 1..4"),
        ([1, 2, "3"], [4], "'3' is not a layer number"),
        (None, [4], "must be a list of layers"),
    ],
)
def test_the_layer_lists_must_cover_every_layer_once(
    raw: dict[str, Any], kda_layers: object, full_attn_layers: object, words: str
) -> None:
    linear = raw["text_config"]["linear_attn_config"]
    linear["kda_layers"], linear["full_attn_layers"] = kda_layers, full_attn_layers
    refuse(raw, words)


def test_two_different_pad_tokens_are_refused(raw: dict[str, Any]) -> None:
    raw["text_config"]["pad_token_id"] = 7
    refuse(raw, "pad_token_id=7", "config.json.pad_token_id=0")


def test_a_placeholder_outside_the_vocabulary_is_refused(raw: dict[str, Any]) -> None:
    del raw["media_placeholder_token_id"]  # the release's 163605
    refuse(raw, "media_placeholder_token_id=163605", "vocab_size=256")


def test_another_family_is_refused() -> None:
    refuse({"model_type": "kimi_k25"}, "model_type='kimi_k25'", "'kimi_k3' and 'kimi_linear'")


def test_the_presets_of_the_releases_have_every_layer_of_them() -> None:
    mla = [layer for layer, mixer in enumerate(k3().mixers) if mixer == "mla"]
    assert mla == [*range(3, 92, 4), 92]
