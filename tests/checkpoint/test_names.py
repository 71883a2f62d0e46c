from dataclasses import replace
from math import prod

import pytest
from checkpoint.cases import everything
from model.tiny import tiny_k3, tiny_kimi_linear

from baltoro.checkpoint import names
from baltoro.checkpoint.names import fresh_layout, release_tensors, shard_files
from baltoro.model.config import ModelConfig
from baltoro.model.counts import meta_model
from baltoro.model.presets import PRESETS, k3, kimi_linear_48b, preset


def listed(config: ModelConfig, experts: str = "BF16") -> list[names.ReleaseTensor]:
    return list(release_tensors(config, fresh_layout(config, dtype="BF16", experts=experts)))


@pytest.fixture(scope="module")
def release_of_k3() -> list[names.ReleaseTensor]:
    return listed(k3(), "mxfp4")


def test_k3_has_the_names_and_bytes_of_its_release(
    release_of_k3: list[names.ReleaseTensor],
) -> None:
    assert len({tensor.name for tensor in release_of_k3}) == 497_220
    assert sum(tensor.num_bytes for tensor in release_of_k3) == 1_560_860_324_864
    assert sum(tensor.num_elements for tensor in release_of_k3) == 2_779_931_837_184


def test_k3_is_cut_into_the_shards_of_its_release(
    release_of_k3: list[names.ReleaseTensor],
) -> None:
    shards = shard_files(release_of_k3, wrapped=True)
    files = list(shards)
    assert len(files) == 96
    assert files[0] == "model-00001-of-000096.safetensors"
    for layer in (0, 47, 92):
        prefix = f"language_model.model.layers.{layer}."
        assert all(tensor.name.startswith(prefix) for tensor in shards[files[layer]])
    assert {tensor.name for tensor in shards[files[93]]} == {
        "language_model.model.embed_tokens.weight",
        "language_model.model.norm.weight",
        "language_model.model.output_attn_res_norm.weight",
        "language_model.model.output_attn_res_proj.weight",
        "language_model.lm_head.weight",
    }
    assert len(shards[files[94]]) == 3
    assert len(shards[files[95]]) == 165


def test_some_tensors_of_k3_are_as_its_release_lists_them(
    release_of_k3: list[names.ReleaseTensor],
) -> None:
    tensors = {tensor.name: tensor for tensor in release_of_k3}
    layer = "language_model.model.layers."
    for name, dtype, shape in (
        (f"{layer}0.self_attn.A_log", "F32", (128,)),
        (f"{layer}91.self_attn.q_b_proj.weight", "BF16", (18432, 1536)),
        (f"{layer}92.self_attn.kv_a_proj_with_mqa.weight", "BF16", (576, 7168)),
        (f"{layer}1.block_sparse_moe.experts.895.w2.weight_packed", "U8", (3584, 1536)),
        (f"{layer}1.block_sparse_moe.experts.895.w3.weight_scale", "U8", (3072, 112)),
        (f"{layer}1.block_sparse_moe.gate.e_score_correction_bias", "F32", (896,)),
        ("vision_tower.encoder.blocks.26.wqkv.weight", "BF16", (4608, 1024)),
        ("mm_projector.proj.2.weight", "BF16", (7168, 4096)),
    ):
        assert (tensors[name].dtype, tensors[name].shape) == (dtype, shape)


def test_kimi_linear_is_cut_into_files_of_at_most_5_gb() -> None:
    tensors = listed(kimi_linear_48b())
    assert sum(tensor.num_elements for tensor in tensors) == 49_122_681_728
    shards = shard_files(tensors, wrapped=False)
    sizes = [sum(tensor.num_bytes for tensor in shard) for shard in shards.values()]
    assert list(shards)[-1] == "model-00020-of-00020.safetensors"
    assert max(sizes) <= names.SINGLE_FILE_BYTES
    assert [tensor for shard in shards.values() for tensor in shard] == tensors


def test_a_small_checkpoint_is_one_file_without_number() -> None:
    assert list(shard_files(listed(tiny_k3()), wrapped=True)) == ["model.safetensors"]


@pytest.mark.parametrize("name", [*PRESETS, "everything"])
def test_every_tensor_of_the_model_has_its_place_and_shape(name: str) -> None:
    config = everything() if name == "everything" else preset(name)
    model = meta_model(config)
    held = dict([*model.named_parameters(), *model.named_buffers()])
    shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
    rows: dict[str, int] = {}
    for tensor in listed(config):
        if tensor.rows is not None:
            expert, first, end = tensor.rows
            target = f"{tensor.target}_proj"
            assert tensor.shape == (end - first, shapes[target][2])
            assert expert < shapes[target][0] and end <= shapes[target][1]
            rows[target] = rows.get(target, 0) + end - first
        elif tensor.kind == "plain":
            assert tuple(held.pop(tensor.target).shape) == tensor.shape
        elif tensor.kind == "a_log":
            assert held.pop(tensor.target).numel() <= prod(tensor.shape)
    for target, count in rows.items():
        stacked = held.pop(target)
        assert count == stacked.shape[0] * stacked.shape[1]
    assert held == {}


def test_the_packed_model_has_a_place_for_codes_and_scales() -> None:
    config = everything()
    assert config.moe is not None
    config = replace(config, moe=replace(config.moe, expert_format="mxfp4"))
    held = dict(meta_model(config).named_buffers())
    for tensor in listed(config, "mxfp4"):
        if tensor.rows is not None:
            expert, first, end = tensor.rows
            target = held[f"{tensor.target}_{tensor.kind}"]
            assert tuple(target[expert, first:end].shape) == tensor.shape


def test_kimi_linear_gets_its_own_layout_and_anything_more_gets_k3s() -> None:
    assert not fresh_layout(tiny_kimi_linear(), dtype="F32", experts="F32").wrapped
    gated = tiny_kimi_linear(activation="situ")
    assert fresh_layout(gated, dtype="F32", experts="F32").wrapped


def test_mxfp4_needs_whole_groups_of_32() -> None:
    config = everything()
    assert config.moe is not None
    config = replace(config, moe=replace(config.moe, expert_intermediate_size=48))
    with pytest.raises(ValueError, match=r"expert_intermediate_size=48: MXFP4 experts need"):
        listed(config, "mxfp4")
