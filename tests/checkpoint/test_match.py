from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.cases import CASES, copy, edit_tensors
from torch import Tensor

from baltoro.checkpoint.directory import CheckpointDirectory
from baltoro.checkpoint.match import match
from baltoro.checkpoint.names import Layout
from baltoro.checkpoint.release import read_config

LAYER = "model.layers.1."


def matched(path: Path) -> Layout:
    directory = CheckpointDirectory(path)
    return match(directory, read_config(directory.raw_config))[0]


def refuse(path: Path, *words: str) -> str:
    with pytest.raises(ValueError) as caught:
        matched(path)
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return copy("kimi-linear-mini", tmp_path / "checkpoint")


@pytest.mark.parametrize("case", CASES)
def test_golden_checkpoints_fit_their_configurations(case: str, tmp_path: Path) -> None:
    layout = matched(copy(case, tmp_path / case))
    assert layout.wrapped == case.startswith("k3")
    assert layout.experts == ("mxfp4" if "mxfp4" in case else "F32")
    assert layout.dtype == "F32" and not layout.stored


def test_missing_tensors_are_listed(path: Path) -> None:
    name = f"{LAYER}self_attn.q_proj.weight"
    edit_tensors(path, lambda held: held.pop(name))
    refuse(path, "1 tensors do not match", f"missing {name}")


def test_unused_tensors_are_listed(path: Path) -> None:
    edit_tensors(path, lambda held: held.update({"model.layers.9.x": torch.zeros(1)}))
    refuse(path, "1 tensors do not match", "unused model.layers.9.x")


def test_misshapen_tensors_are_listed_with_both_shapes(path: Path) -> None:
    name = f"{LAYER}self_attn.b_proj.weight"
    edit_tensors(path, lambda held: held.update({name: torch.zeros(64, 4)}))
    refuse(path, f"misshapen {name}: F32 [64, 4], expected F32 [4, 64]")


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.uint8])
def test_tensors_of_a_dtype_that_is_not_a_releases_are_listed(
    path: Path, dtype: torch.dtype
) -> None:
    name = f"{LAYER}self_attn.b_proj.weight"
    edit_tensors(path, lambda held: held.update({name: held[name].to(dtype)}))
    refuse(path, f"misshapen {name}", "expected F32 [4, 64]")


def test_no_more_than_twenty_are_named_and_all_are_counted(path: Path) -> None:
    def spoil(held: dict[str, Tensor]) -> None:
        for number in range(33):
            held[f"extra.{number:02d}"] = torch.zeros(1)

    edit_tensors(path, spoil)
    message = refuse(path, "33 tensors do not match", "unused extra.19", "and 13 more")
    assert "extra.20" not in message


def test_all_kinds_of_fault_are_in_one_list(path: Path) -> None:
    def spoil(held: dict[str, Tensor]) -> None:
        held["model.nrom.weight"] = held.pop("model.norm.weight")
        held["lm_head.weight"] = held["lm_head.weight"][:255].contiguous()

    edit_tensors(path, spoil)
    refuse(path, "3 tensors", "missing model.norm", "unused model.nrom", "misshapen lm_head")


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("language_model.model.", "language_model.lm_head.weight"),
        ("language_model.", "language_model.lm_head.weight"),
        ("language_model.", "lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("model.", "lm_head.weight"),
        ("", "lm_head.weight"),
    ],
)
def test_the_root_prefix_is_found(path: Path, prefix: str, head: str) -> None:
    edit_tensors(path, lambda held: respell(held, prefix, head))
    layout = matched(path)
    assert (layout.prefix, layout.head) == (prefix, head)


def respell(held: dict[str, Tensor], prefix: str, head: str) -> None:
    old = dict(held)
    held.clear()
    for name, tensor in old.items():
        held[head if name == "lm_head.weight" else prefix + name.removeprefix("model.")] = tensor


def test_tensors_of_another_family_are_refused(path: Path) -> None:
    edit_tensors(path, lambda held: held.update({"wte": held.pop("model.embed_tokens.weight")}))
    refuse(path, "no embed_tokens.weight", "K3 or Kimi Linear")


@pytest.mark.parametrize("shape", [(4,), (1, 1, 4, 1), (16,), (5,)])
def test_legal_forms_of_a_log_are_found_per_layer(path: Path, shape: tuple[int, ...]) -> None:
    name = "model.layers.1.self_attn.A_log"
    edit_tensors(path, lambda held: held.update({name: torch.zeros(shape)}))
    forms = matched(path).a_log
    assert forms["layers.1.self_attn.A_log"] == shape
    assert forms["layers.0.self_attn.A_log"] == (1, 1, 4, 1)


@pytest.mark.parametrize("shape", [(3,), (4, 1), (1, 4, 1, 1), (1, 1, 16, 1)])
def test_other_forms_of_a_log_are_misshapen(path: Path, shape: tuple[int, ...]) -> None:
    name = "model.layers.1.self_attn.A_log"
    edit_tensors(path, lambda held: held.update({name: torch.zeros(shape)}))
    refuse(path, f"misshapen {name}: F32 {list(shape)}")


def test_a_mixture_of_dtypes_is_remembered_by_name(path: Path) -> None:
    def mix(held: dict[str, Tensor]) -> None:
        for name in ("model.norm.weight", "model.layers.0.self_attn.q_conv1d.weight"):
            held[name] = held[name].bfloat16()

    edit_tensors(path, mix)
    layout = matched(path)
    assert layout.dtype == "F32"
    assert layout.stored == {
        "model.norm.weight": "BF16",
        "model.layers.0.self_attn.q_conv1d.weight": "BF16",
    }


def test_experts_packed_in_part_are_refused(tmp_path: Path) -> None:
    path = copy("k3-mxfp4-mini", tmp_path / "checkpoint")
    stem = "language_model.model.layers.1.block_sparse_moe.experts.0.w1"

    def unpack(held: dict[str, Any]) -> None:
        del held[f"{stem}.weight_packed"], held[f"{stem}.weight_scale"]
        held[f"{stem}.weight"] = torch.zeros(96, 64)

    edit_tensors(path, unpack)
    refuse(path, f"missing {stem}.weight_packed", f"unused {stem}.weight")
