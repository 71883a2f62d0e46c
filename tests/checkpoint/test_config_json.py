import json
from dataclasses import replace

import pytest
from checkpoint.cases import CASES, GOLDEN, everything
from model.tiny import tiny_k3, tiny_kimi_linear

from baltoro.checkpoint.config_json import QUANTIZATION_CONFIG, write_config, write_preprocessor
from baltoro.checkpoint.names import fresh_layout
from baltoro.checkpoint.release import read_config
from baltoro.model.config import ImplConfig, ModelConfig
from baltoro.model.presets import PRESETS, k3
from baltoro.text.images import ImageConfig

CONFIGS = {
    **PRESETS,
    "everything": everything,
    "dense": lambda: tiny_k3(moe=None),
    "flat dense": lambda: tiny_kimi_linear(moe=None),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_is_read_back(name: str) -> None:
    config: ModelConfig = CONFIGS[name]()
    layout = fresh_layout(config, dtype="BF16", experts="mxfp4")
    written = json.loads(json.dumps(write_config(config, layout)))
    assert read_config(written) == config


@pytest.mark.parametrize("case", CASES)
def test_a_configuration_that_still_fits_is_kept(case: str) -> None:
    raw = json.loads((GOLDEN / case / "config.json").read_text())
    experts = "mxfp4" if "mxfp4" in case else "F32"
    layout = fresh_layout(read_config(raw), dtype="F32", experts=experts)
    assert write_config(read_config(raw), layout, raw=raw) == raw


def test_a_changed_model_gets_a_new_configuration_with_the_old_token_ids() -> None:
    raw = json.loads((GOLDEN / "kimi-linear-mini" / "config.json").read_text())
    config = replace(read_config(raw), rms_norm_eps=1e-4)
    written = write_config(config, fresh_layout(config, dtype="F32", experts="F32"), raw=raw)
    assert read_config(written) == config
    assert (written["bos_token_id"], written["eos_token_id"]) == (1, 2)


def test_the_operators_chosen_for_a_run_do_not_change_the_file() -> None:
    raw = json.loads((GOLDEN / "k3-mini" / "config.json").read_text())
    config = replace(read_config(raw), impl=ImplConfig.all("reference"))
    assert write_config(config, fresh_layout(config, dtype="F32", experts="F32"), raw=raw) == raw


def test_the_quantisation_is_said_inside_text_config_as_the_release_does() -> None:
    config = tiny_k3()
    written = write_config(config, fresh_layout(config, dtype="BF16", experts="mxfp4"))
    assert "quantization_config" not in written
    assert written["text_config"]["quantization_config"] == QUANTIZATION_CONFIG
    golden = json.loads((GOLDEN / "k3-mxfp4-mini" / "config.json").read_text())
    theirs = golden["text_config"]["quantization_config"]
    assert {**theirs, "global_compression_ratio": None} == {**QUANTIZATION_CONFIG}


def test_the_quantisation_goes_when_the_experts_are_unpacked() -> None:
    raw = json.loads((GOLDEN / "k3-mxfp4-mini" / "config.json").read_text())
    config = read_config(raw)
    written = write_config(config, fresh_layout(config, dtype="F32", experts="F32"), raw=raw)
    assert "quantization_config" not in written["text_config"]
    assert "quantization_config" in raw["text_config"]  # the caller's own is untouched


def test_the_dtype_follows_the_tensors() -> None:
    raw = json.loads((GOLDEN / "k3-mini" / "config.json").read_text())
    raw["dtype"] = raw["text_config"]["torch_dtype"] = "float32"
    config = read_config(raw)
    written = write_config(config, fresh_layout(config, dtype="BF16", experts="BF16"), raw=raw)
    assert written["dtype"] == written["text_config"]["torch_dtype"] == "bfloat16"


def test_k3_writes_the_values_of_its_release() -> None:
    written = write_config(k3(), fresh_layout(k3(), dtype="BF16", experts="mxfp4"))
    text, vision = written["text_config"], written["vision_config"]
    assert written["architectures"] == ["KimiK3ForConditionalGeneration"]
    assert (written["media_placeholder_token_id"], written["pad_token_id"]) == (163605, 163839)
    assert text["linear_attn_config"]["full_attn_layers"] == [*range(4, 93, 4), 93]
    assert (text["num_experts"], text["routed_expert_hidden_size"]) == (896, 3584)
    assert (vision["qkv_hidden_size"], vision["text_hidden_size"]) == (1536, 7168)


def test_what_the_release_cannot_say_is_refused() -> None:
    config = tiny_k3()
    config = replace(config, mla=replace(config.mla, latent_norm_eps=1e-5))
    with pytest.raises(ValueError, match=r"latent_norm_eps=1e-05.*cannot say this"):
        write_config(config, fresh_layout(config, dtype="F32", experts="F32"))


def test_the_preprocessor_has_the_released_values() -> None:
    vision = k3().vision
    assert vision is not None
    assert ImageConfig.read(write_preprocessor(vision)["media_proc_cfg"]) == ImageConfig()
