import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint.cases import (
    GOLDEN,
    copy,
    edit_tensors,
    everything,
    headers,
    random_model,
    shard,
    state,
    tensors,
)
from model.tiny import tiny_k3, tiny_kimi_linear
from safetensors.torch import load_file
from torch import Tensor, nn

import baltoro
from baltoro.checkpoint import names
from baltoro.model.config import ModelConfig
from baltoro.model.model import Model
from baltoro.ops.mxfp4 import Mxfp4Tensor, decode_mxfp4, encode_mxfp4
from baltoro.text.tokenizer import train

HEADS = "language_model.model.layers.0.self_attn.A_log"


def test_a_new_k3_is_written_in_its_layout(tmp_path: Path) -> None:
    model = random_model(everything()).cast(torch.bfloat16)
    baltoro.save(model, tmp_path / "a")
    found = headers(tmp_path / "a")
    assert found["language_model.lm_head.weight"] == ("BF16", [64, 32])
    assert found[HEADS] == ("F32", [8])  # three heads, padded to the head width
    layer = "language_model.model.layers.1."
    assert found[f"{layer}self_attn.q_conv1d.weight"][0] == "F32"
    assert found[f"{layer}block_sparse_moe.experts.0.w1.weight"] == ("BF16", [32, 32])
    assert found[f"{layer}block_sparse_moe.gate.e_score_correction_bias"][0] == "F32"
    assert torch.equal(tensors(tmp_path / "a")[HEADS][3:], torch.zeros(5))


def test_a_new_kimi_linear_is_written_in_its_layout(tmp_path: Path) -> None:
    baltoro.save(Model(tiny_kimi_linear()), tmp_path / "a")
    found = headers(tmp_path / "a")
    assert "lm_head.weight" in found and "model.embed_tokens.weight" in found
    heads = tiny_kimi_linear().kda.num_heads
    assert found["model.layers.0.self_attn.A_log"] == ("F32", [1, 1, heads, 1])


def test_an_mtp_layer_is_written_with_copies_of_embedding_and_head(tmp_path: Path) -> None:
    model = random_model(everything())
    baltoro.save(model, tmp_path / "a")
    held = tensors(tmp_path / "a")
    for index in (5, 6):
        layer = f"language_model.model.layers.{index}."
        assert torch.equal(held[f"{layer}embed_tokens.weight"], model.embed_tokens.weight)
        assert torch.equal(held[f"{layer}shared_head.head.weight"], model.lm_head.weight)
        assert held[f"{layer}eh_proj.weight"].shape == (32, 64)


@pytest.mark.parametrize(("experts", "dtype"), [("bf16", "BF16"), ("fp32", "F32")])
def test_the_format_of_the_experts_is_theirs_alone(
    tmp_path: Path, experts: str, dtype: str
) -> None:
    model = random_model(everything())
    baltoro.save(model, tmp_path / "a", experts=experts)  # type: ignore[arg-type]
    for name, (found, _) in headers(tmp_path / "a").items():
        assert found == (dtype if ".experts." in name else "F32"), name


def test_packed_experts_are_what_the_encoder_makes(tmp_path: Path) -> None:
    model = random_model(everything())
    baltoro.save(model, tmp_path / "a", experts="mxfp4")
    held = tensors(tmp_path / "a")
    stem = "language_model.model.layers.1.block_sparse_moe.experts.2.w3"
    encoded = encode_mxfp4(model.layers[1].block_sparse_moe.experts.gate_up_proj[2, 32:])
    assert torch.equal(held[f"{stem}.weight_packed"], encoded.packed)
    assert torch.equal(held[f"{stem}.weight_scale"], encoded.scale)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["text_config"]["quantization_config"]["format"] == "mxfp4-pack-quantized"


def test_packed_experts_can_be_written_decoded(tmp_path: Path) -> None:
    model = baltoro.load(GOLDEN / "k3-mxfp4-mini", experts="packed")
    baltoro.save(model, tmp_path / "a", experts="fp32")
    again = baltoro.load(tmp_path / "a")
    decoded = state(baltoro.load(GOLDEN / "k3-mxfp4-mini"))
    for name, tensor in state(again).items():
        assert torch.equal(tensor, decoded[name]), name


def test_scale_bytes_survive_decoding_whatever_they_were(tmp_path: Path) -> None:
    path = copy("k3-mxfp4-mini", tmp_path / "a")

    def spoil(held: dict[str, Tensor]) -> None:
        stem = "language_model.model.layers.1.block_sparse_moe.experts.0.w2"
        held[f"{stem}.weight_packed"][0, :16] = 0x91  # codes 1 and 9: a half and minus a half
        held[f"{stem}.weight_packed"][1, :16] = 0x80  # zeros of both signs under some scale
        held[f"{stem}.weight_scale"][1, 0] = 131

    edit_tensors(path, spoil)
    model = baltoro.load(path)
    baltoro.save(model, tmp_path / "b")
    assert (tmp_path / "b" / "model.safetensors").read_bytes() == (
        path / "model.safetensors"
    ).read_bytes()
    # of the 96 matrices this one, and one of the golden checkpoint's own
    assert len(model.release.scale_hints) == 2


def test_a_trained_expert_is_encoded_afresh(tmp_path: Path) -> None:
    path = copy("k3-mxfp4-mini", tmp_path / "a")
    stem = "language_model.model.layers.1.block_sparse_moe.experts.0.w2"
    edit_tensors(path, lambda held: held[f"{stem}.weight_packed"][0, :16].fill_(0x11))
    model = baltoro.load(path)
    with torch.no_grad():
        weight = model.layers[1].block_sparse_moe.experts.down_proj
        weight.mul_(1.1)
    baltoro.save(model, tmp_path / "b")
    held = tensors(tmp_path / "b")
    packed = Mxfp4Tensor(held[f"{stem}.weight_packed"], held[f"{stem}.weight_scale"])
    assert all(torch.equal(*pair) for pair in zip(packed, encode_mxfp4(weight[0]), strict=True))
    error = (decode_mxfp4(packed, torch.float32) - weight[0]).abs().max() / weight[0].abs().max()
    assert error < 0.2


def test_the_dtype_of_the_rest_can_be_chosen(tmp_path: Path) -> None:
    model = baltoro.load(GOLDEN / "k3-mxfp4-mini")
    baltoro.save(model, tmp_path / "a", dtype=torch.bfloat16)
    found = headers(tmp_path / "a")
    assert found["language_model.lm_head.weight"][0] == "BF16"
    assert found["language_model.model.layers.0.self_attn.dt_bias"][0] == "F32"
    assert any(name.endswith("weight_packed") for name in found)


def test_a_model_loaded_in_another_dtype_is_saved_in_it(tmp_path: Path) -> None:
    baltoro.save(baltoro.load(GOLDEN / "k3-mini", dtype=torch.bfloat16), tmp_path / "a")
    found = headers(tmp_path / "a")
    fp32 = {name for name, (dtype, _) in found.items() if dtype == "F32"}
    assert fp32 == {name for name in found if names.is_fp32(name)}


def test_a_mixture_of_dtypes_is_saved_as_it_was(tmp_path: Path) -> None:
    path = copy("k3-mini", tmp_path / "a")

    def mix(held: dict[str, Tensor]) -> None:
        for name in held:
            if ".experts." in name or name.endswith("q_conv1d.weight"):
                held[name] = held[name].bfloat16()

    edit_tensors(path, mix)
    baltoro.save(baltoro.load(path), tmp_path / "b")
    assert headers(tmp_path / "b") == headers(path)
    baltoro.save(baltoro.load(path), tmp_path / "c", experts="fp32")
    found = headers(tmp_path / "c")
    assert found["language_model.model.layers.0.self_attn.q_conv1d.weight"][0] == "BF16"
    assert all(dtype == "F32" for name, (dtype, _) in found.items() if ".experts." in name)


@pytest.mark.parametrize("prefix", ["language_model.", "model.", ""])
def test_prefix_and_form_of_a_log_are_saved_as_they_were(tmp_path: Path, prefix: str) -> None:
    path = copy("k3-mini", tmp_path / "a")

    def respell(held: dict[str, Tensor]) -> None:
        for name in list(held):
            new = name.replace("language_model.model.", prefix).replace(
                "language_model.lm_head", f"{prefix}lm_head"
            )
            held[new] = held.pop(name)
        held[f"{prefix}layers.1.self_attn.A_log"] = torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0])

    edit_tensors(path, respell)
    baltoro.save(baltoro.load(path), tmp_path / "b")
    assert (tmp_path / "b" / "model.safetensors").read_bytes() == (
        path / "model.safetensors"
    ).read_bytes()


def test_shards_and_index_are_saved_as_they_were(tmp_path: Path) -> None:
    path = copy("kimi-linear-mini", tmp_path / "a")
    shard(path)
    index = path / "model.safetensors.index.json"
    before = json.loads(index.read_text())
    before["metadata"]["made_by"] = "them"
    index.write_text(json.dumps(before))
    baltoro.save(baltoro.load(path), tmp_path / "b")
    after = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    assert after["weight_map"] == before["weight_map"]
    assert after["metadata"] == {"made_by": "them", "total_size": 1_513_792}
    for file in set(after["weight_map"].values()):
        assert (tmp_path / "b" / file).read_bytes() == (path / file).read_bytes()


def test_a_large_k3_gets_a_file_per_layer_and_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "SINGLE_FILE_BYTES", 0)
    model = random_model(everything())
    baltoro.save(model, tmp_path / "a")
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == "model-00001-of-000010.safetensors" and len(files) == 10
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for file in files for tensor in load(tmp_path / "a" / file)
    )
    assert index["weight_map"]["language_model.model.layers.6.eh_proj.weight"] == files[6]
    assert index["weight_map"]["mm_projector.post_norm.weight"] == files[8]
    again = state(baltoro.load(tmp_path / "a"))
    assert all(torch.equal(tensor, again[name]) for name, tensor in state(model).items())


def load(path: Path) -> list[Tensor]:
    return list(load_file(path).values())


def test_text_files_travel_with_the_model(tmp_path: Path) -> None:
    path = copy("k3-vision-mini", tmp_path / "a")
    (path / "generation_config.json").write_text('{"temperature": 0.5}')
    (path / "encoding_k3.py").write_text("x = 1\n")
    (path / "events.log").write_text("not a companion")
    baltoro.save(baltoro.load(path), tmp_path / "b")
    assert (tmp_path / "b" / "encoding_k3.py").read_text() == "x = 1\n"
    assert (tmp_path / "b" / "generation_config.json").read_text() == '{"temperature": 0.5}'
    assert not (tmp_path / "b" / "events.log").exists()


def test_a_new_model_is_saved_with_its_tokenizer_and_preprocessor(tmp_path: Path) -> None:
    config = everything()
    assert config.vision is not None
    vision = replace(config.vision, placeholder_token_id=256 + 21)
    model = Model(replace(config, vocab_size=512, vision=vision))
    model.tokenizer = train([], 512)
    baltoro.save(model, tmp_path / "a")
    loaded = baltoro.load(tmp_path / "a")
    assert loaded.tokenizer.special_ids == model.tokenizer.special_ids
    assert loaded.processor.images.config.max_frames == 4


def test_saving_over_the_checkpoint_it_came_from_works(tmp_path: Path) -> None:
    path = copy("k3-mini", tmp_path / "a")
    before = (path / "model.safetensors").read_bytes()
    baltoro.save(baltoro.load(path), path)
    assert (path / "model.safetensors").read_bytes() == before
    assert os.listdir(tmp_path) == ["a"]


def test_a_failure_half_way_leaves_nothing(tmp_path: Path) -> None:
    model = random_model(everything())
    with torch.no_grad():
        model.layers[4].block_sparse_moe.experts.down_proj[0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        baltoro.save(model, tmp_path / "a", experts="mxfp4")
    assert os.listdir(tmp_path) == []


def widened(config: ModelConfig) -> Model:
    model = Model(config)
    model.layers[0].adapter = nn.Linear(2, 2)
    return model


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (lambda: Model(tiny_k3()), {"experts": "int4"}, "experts='int4': choose one of mxfp4"),
        (lambda: Model(tiny_k3(moe=None)), {"experts": "bf16"}, "has no routed experts"),
        (lambda: Model(tiny_k3()), {"experts": "mxfp4"}, "moe.latent_size=16"),
        (lambda: Model(tiny_k3()).double(), {}, "dtype=torch.float64: cannot be saved"),
        (lambda: Model(tiny_k3()), {"dtype": torch.int32}, "dtype=torch.int32: cannot be saved"),
        (lambda: widened(tiny_k3()), {}, "2 tensors of the model have no place.*adapter"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is(
    tmp_path: Path, model: object, options: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        baltoro.save(model(), tmp_path / "a", **options)  # type: ignore[operator, arg-type]
    assert os.listdir(tmp_path) == []
