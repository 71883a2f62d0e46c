"""The golden checkpoints: logits and features of the released code; the same files when saved."""

import filecmp
from pathlib import Path

import pytest
import torch
from checkpoint.cases import CASES, GOLDEN
from safetensors.torch import load_file
from torch import Tensor

import baltoro
from baltoro.model.cache import DenseCache

BAND = 1e-4  # golden/README.md


def golden(case: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / case / "golden.safetensors")


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_released_code(case: str, impl: str) -> None:
    held = golden(case)
    model = baltoro.load(GOLDEN / case, impl=impl)
    with torch.no_grad():
        found = baltoro.logits(
            model, held["input_ids"], held.get("pixel_values"), held.get("grid_thws")
        )
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, held["logits"], atol=BAND, rtol=0.0)


@pytest.mark.parametrize("case", CASES)
def test_decoding_token_by_token_gives_the_same_logits(case: str) -> None:
    held = golden(case)
    # fp64, as `logits`: in fp32 the order of summation alone moves k3-mini by more than the band
    model = baltoro.load(GOLDEN / case).double()
    ids_BT = held["input_ids"]
    cache = DenseCache(model.config, ids_BT.shape[0], dtype=torch.float64)
    cache.form = "decode"
    bounds = torch.arange(ids_BT.shape[0] + 1, dtype=torch.int32)
    steps = []
    with torch.no_grad():
        features = None
        if "features" in held:
            features = model.encode_images(held["pixel_values"], held["grid_thws"])
        for ids_B in ids_BT.unbind(1):
            rows = None
            if features is not None:
                assert model.config.vision is not None
                count = int((ids_B == model.config.vision.placeholder_token_id).sum())
                rows, features = features[:count], features[count:]
            steps.append(model.lm_head(model(ids_B, bounds, cache, rows).hidden))
    found = torch.stack(steps, 1).float()
    torch.testing.assert_close(found, held["logits"], atol=BAND, rtol=0.0)


def test_features_are_those_of_the_released_tower() -> None:
    held = golden("k3-vision-mini")
    model = baltoro.load(GOLDEN / "k3-vision-mini")
    with torch.no_grad():
        found = model.encode_images(held["pixel_values"], held["grid_thws"])
    torch.testing.assert_close(found, held["features"], atol=BAND, rtol=0.0)


def test_experts_that_stay_packed_give_the_same_logits() -> None:
    held = golden("k3-mxfp4-mini")
    model = baltoro.load(GOLDEN / "k3-mxfp4-mini", experts="packed")
    with torch.no_grad():
        found = baltoro.logits(model, held["input_ids"])
    torch.testing.assert_close(found, held["logits"], atol=BAND, rtol=0.0)


@pytest.mark.parametrize("case", CASES)
def test_loading_and_saving_gives_the_same_files(case: str, tmp_path: Path) -> None:
    baltoro.save(baltoro.load(GOLDEN / case), tmp_path / case)
    names = sorted(path.name for path in (tmp_path / case).iterdir())
    expected = sorted(path.name for path in (GOLDEN / case).iterdir())
    assert names == [name for name in expected if not name.startswith(("golden.", "codes."))]
    for name in names:
        assert filecmp.cmp(tmp_path / case / name, GOLDEN / case / name, shallow=False), name


def test_packed_experts_are_saved_as_they_were_loaded(tmp_path: Path) -> None:
    case = GOLDEN / "k3-mxfp4-mini"
    baltoro.save(baltoro.load(case, experts="packed"), tmp_path / "saved")
    assert filecmp.cmp(tmp_path / "saved" / "model.safetensors", case / "model.safetensors", False)
