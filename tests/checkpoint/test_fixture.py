from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import baltoro
from baltoro.checkpoint.fixture import fixture


@pytest.mark.parametrize("experts", ["fp32", "bf16", "mxfp4"])
def test_the_golden_logits_are_those_of_the_files(tmp_path: Path, experts: str) -> None:
    fixture(str(tmp_path / "a"), experts=experts, tokens=20)  # type: ignore[arg-type]
    golden = load_file(tmp_path / "a" / "golden.safetensors")
    model = baltoro.load(tmp_path / "a")
    arguments = (golden["input_ids"], golden["pixel_values"], golden["grid_thws"])
    with torch.no_grad():
        found = baltoro.logits(model, *arguments)
        features = model.encode_images(*arguments[1:])
    torch.testing.assert_close(found, golden["logits"], atol=1e-5, rtol=0.0)
    torch.testing.assert_close(features, golden["features"], atol=1e-5, rtol=0.0)
    assert golden["logits"].shape == (2, 20, 512) and golden["logits"].std() > 0.5


def test_every_tensor_matters_to_the_logits(tmp_path: Path) -> None:
    fixture(str(tmp_path / "a"), tokens=12)
    golden = load_file(tmp_path / "a" / "golden.safetensors")
    model = baltoro.load(tmp_path / "a")
    arguments = (golden["input_ids"], golden["pixel_values"], golden["grid_thws"])
    baltoro.logits(model, *arguments).square().sum().backward()
    still = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or parameter.grad.abs().max() == 0
    ]
    # layer 0 has nothing to mix before its attention; the release keeps the two vectors
    assert still == [
        "layers.0.self_attention_res_norm.weight",
        "layers.0.self_attention_res_proj.weight",
    ]


def test_the_same_seed_gives_the_same_files_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        fixture(str(tmp_path / name), seed=seed, tokens=4)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]


def test_a_reader_finds_tokenizer_preprocessor_and_explanation(tmp_path: Path) -> None:
    fixture(str(tmp_path / "a"), tokens=8)
    readme = (tmp_path / "a" / "README.md").read_text()
    assert "`logits` [2, 8, 512]" in readme
    assert "baltoro fixture a --preset nano --experts fp32 --seed 0 --tokens 8" in readme
    model = baltoro.load(tmp_path / "a")
    assert model.tokenizer.decode(model.tokenizer.encode("Grüße")) == "Grüße"
    assert model.processor.images is not None
    assert model.tokenizer.media_pad_id == model.config.vision.placeholder_token_id


def test_a_fixture_is_small(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"preset='small': has 623,805,760 parameters"):
        fixture(str(tmp_path / "a"), preset="small")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tokens", [0, 8193])
def test_a_length_outside_the_context_is_refused(tmp_path: Path, tokens: int) -> None:
    with pytest.raises(ValueError, match=f"tokens={tokens}: must be between 1 and 8192"):
        fixture(str(tmp_path / "a"), tokens=tokens)
