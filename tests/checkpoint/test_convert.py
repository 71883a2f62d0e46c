import os
from pathlib import Path

import pytest
import torch
from checkpoint.cases import (
    CASES,
    GOLDEN,
    copy,
    edit_tensors,
    everything,
    headers,
    random_model,
    shard,
    state,
)
from model.tiny import tiny_k3

import baltoro
from baltoro.checkpoint.convert import convert


@pytest.mark.parametrize("case", CASES)
def test_without_a_change_the_bytes_are_the_same(case: str, tmp_path: Path) -> None:
    convert(str(GOLDEN / case), str(tmp_path / "a"))
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (GOLDEN / case / name).read_bytes()


@pytest.mark.parametrize("experts", ["mxfp4", "bf16", "fp32"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_it_writes_what_loading_and_saving_would(
    tmp_path: Path, experts: str, is_packed: bool
) -> None:
    source = tmp_path / "source"
    packed = {"experts": "mxfp4"} if is_packed else {}
    baltoro.save(random_model(everything()), source, **packed)  # type: ignore[arg-type]
    convert(str(source), str(tmp_path / "a"), experts=experts)  # type: ignore[arg-type]
    baltoro.save(baltoro.load(source), tmp_path / "b", experts=experts)  # type: ignore[arg-type]
    assert sorted(os.listdir(tmp_path / "a")) == sorted(os.listdir(tmp_path / "b"))
    for name in os.listdir(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_unpacking_and_packing_loses_nothing(tmp_path: Path) -> None:
    convert(str(GOLDEN / "k3-mxfp4-mini"), str(tmp_path / "a"), experts="bf16")
    assert "quantization_config" not in (tmp_path / "a" / "config.json").read_text()
    convert(str(tmp_path / "a"), str(tmp_path / "b"), experts="mxfp4")
    assert headers(tmp_path / "b") == headers(GOLDEN / "k3-mxfp4-mini")
    expected = state(baltoro.load(GOLDEN / "k3-mxfp4-mini"))
    for name, tensor in state(baltoro.load(tmp_path / "b")).items():
        assert torch.equal(tensor, expected[name]), name


def test_the_dtype_of_the_rest_can_be_changed(tmp_path: Path) -> None:
    convert(str(GOLDEN / "k3-vision-mini"), str(tmp_path / "a"), experts="fp32", dtype="bf16")
    found = headers(tmp_path / "a")
    assert found["mm_projector.proj.0.weight"][0] == "BF16"
    assert found["language_model.model.layers.0.self_attn.A_log"] == ("F32", [1, 1, 4, 1])
    assert found["language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight"][0] == "F32"
    loaded = state(baltoro.load(tmp_path / "a", dtype=torch.float32))
    whole = state(baltoro.load(GOLDEN / "k3-vision-mini"))
    name = "layers.3.self_attn.kv_b_proj.weight"
    assert torch.equal(loaded[name], whole[name].bfloat16().float())


def test_shards_are_read_and_a_changed_list_of_names_is_cut_anew(tmp_path: Path) -> None:
    path = copy("k3-mxfp4-mini", tmp_path / "a")
    shard(path)
    convert(str(path), str(tmp_path / "b"), experts="fp32")
    assert not (tmp_path / "b" / "model.safetensors.index.json").exists()
    decoded = state(baltoro.load(GOLDEN / "k3-mxfp4-mini"))
    for name, tensor in state(baltoro.load(tmp_path / "b")).items():
        assert torch.equal(tensor, decoded[name]), name


def test_companions_are_carried_along(tmp_path: Path) -> None:
    convert(str(GOLDEN / "k3-vision-mini"), str(tmp_path / "a"))
    assert (tmp_path / "a" / "preprocessor_config.json").exists()
    assert not (tmp_path / "a" / "golden.safetensors").exists()


def test_a_bad_tail_of_a_log_is_not_carried_along(tmp_path: Path) -> None:
    path = copy("k3-mini", tmp_path / "a")
    name = "language_model.model.layers.0.self_attn.A_log"
    edit_tensors(path, lambda held: held.update({name: torch.full((16,), 0.1)}))
    with pytest.raises(ValueError, match="tail is not zero"):
        convert(str(path), str(tmp_path / "b"))
    assert os.listdir(tmp_path) == ["a"]


def test_an_mtp_head_of_its_own_is_not_dropped_on_the_way(tmp_path: Path) -> None:
    baltoro.save(random_model(everything()), tmp_path / "a")
    name = "language_model.model.layers.5.embed_tokens.weight"
    edit_tensors(tmp_path / "a", lambda held: held[name].view(-1)[:1].add_(1.0))
    with pytest.raises(ValueError, match=f"{name}: differs"):
        convert(str(tmp_path / "a"), str(tmp_path / "b"))
    assert os.listdir(tmp_path) == ["a"]


def test_a_checkpoint_can_be_converted_in_place(tmp_path: Path) -> None:
    path = copy("k3-mxfp4-mini", tmp_path / "a")
    convert(str(path), str(path), experts="bf16")
    assert os.listdir(tmp_path) == ["a"]
    assert baltoro.load(path).release.layout.experts == "BF16"


def test_experts_that_are_not_there_cannot_be_converted(tmp_path: Path) -> None:
    baltoro.save(random_model(tiny_k3(moe=None)), tmp_path / "a")
    with pytest.raises(ValueError, match="has no routed experts"):
        convert(str(tmp_path / "a"), str(tmp_path / "b"), experts="bf16")
