from pathlib import Path

import pytest
from checkpoint.cases import GOLDEN, everything

import baltoro
from baltoro.checkpoint.inspect import alike, counts, inspect
from baltoro.checkpoint.names import fresh_layout, release_tensors
from baltoro.model.counts import parameter_counts
from baltoro.model.model import Model
from baltoro.model.presets import PRESETS, preset


@pytest.mark.parametrize("name", [*PRESETS, "everything"])
def test_the_counts_are_those_of_the_model(name: str) -> None:
    config = everything() if name == "everything" else preset(name)
    layout = fresh_layout(config, dtype="BF16", experts="BF16")
    parts, active = counts(config, list(release_tensors(config, layout)))
    expected = parameter_counts(config)
    assert parts == expected.parts
    assert active == expected.active


def test_packing_does_not_change_the_counts() -> None:
    config = preset("mini")
    both = [
        counts(config, list(release_tensors(config, fresh_layout(config, dtype="BF16", experts=e))))
        for e in ("BF16", "mxfp4")
    ]
    assert both[0] == both[1]


def test_experts_are_folded_and_nothing_else_is_lost() -> None:
    config = preset("nano")
    layout = fresh_layout(config, dtype="BF16", experts="mxfp4")
    tensors = list(release_tensors(config, layout))
    groups = alike(tensors)
    assert sum(groups.values()) == len(tensors)
    assert sum(t.num_bytes * number for t, number in groups.items()) == sum(
        tensor.num_bytes for tensor in tensors
    )


def test_k3_is_reported_with_its_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    inspect("k3")
    text = capsys.readouterr().out
    for words in (
        "497,220 tensors, 1,560,860,324,864 bytes, 96 files",
        "2,779,931,837,184 parameters; 104,189,614,848 active",
        "105,364,019,968 with the embedding table",
        "27,648 bytes per token, 449,372,160 bytes per sequence",
        "84-92   kda kda kda mla kda kda kda mla mla",
        "language_model.model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight_packed",
        "[3072,1792]     82,432",
        "vision_tower.encoder.blocks.{b}.wqkv.weight",
        "mla.kv_lora_rank              512",
    ):
        assert words in text


def test_a_directory_is_reported_as_it_lies_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    inspect(str(GOLDEN / "k3-mxfp4-mini"))
    text = capsys.readouterr().out
    assert "K3 layout, F32, experts mxfp4; 320 tensors" in text
    assert "attn_res_block_size           4" in text


def test_every_tensor_can_be_listed_with_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    inspect(str(GOLDEN / "kimi-linear-mini"), tensors=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 197
    assert "model.safetensors model.layers.0.self_attn.A_log F32 [1,1,4,1]" in lines


def test_mtp_layers_count_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baltoro.save(Model(everything()), tmp_path / "a")
    inspect(str(tmp_path / "a"))
    assert "mtp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "hint"), [("nanno", "did you mean 'nano'"), ("xyzzy", "presets are nano, mini")]
)
def test_what_is_neither_directory_nor_preset_is_refused(target: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"{target}: is neither a directory nor a preset.*{hint}"):
        inspect(target)


def test_an_unknown_preset_is_named_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="preset 'smal' is unknown; did you mean 'small'"):
        preset("smal")


def test_the_sizes_of_the_presets_are_what_their_names_say() -> None:
    sizes = {name: parameter_counts(PRESETS[name]()) for name in ("nano", "mini", "small")}
    assert sizes["nano"].total == 2_199_992
    assert sizes["mini"].total == 30_866_096
    assert sizes["small"].active == 149_636_416
