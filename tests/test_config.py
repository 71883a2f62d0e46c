"""Configuration helpers: paths, replacement, plain form and digest."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baltoro.config import digest, from_dict, nearest, paths, replace, to_dict


@dataclass(frozen=True, kw_only=True, slots=True)
class Expert:
    num_experts: int
    num_active: int = 2
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.num_active > self.num_experts:
            raise ValueError(f"num_active={self.num_active}: above num_experts={self.num_experts}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    width: int
    experts: Expert
    draft: Expert | None = None
    mixers: tuple[Literal["kda", "mla"], ...] = ()
    grid: tuple[int, int] = (2, 2)
    scales: dict[str, float] | None = None
    folder: Path = Path("runs")
    seed: int | str = 0
    is_tied: bool = False


MODEL = Model(width=8, experts=Expert(num_experts=4), mixers=("kda", "mla"), scales={"a": 0.5})


def test_plain_form_is_json_and_returns_the_same_tree():
    assert from_dict(Model, json.loads(json.dumps(to_dict(MODEL)))) == MODEL


@given(
    num_experts=st.integers(2, 99),
    scale=st.floats(allow_nan=False, allow_infinity=False),
    mixers=st.lists(st.sampled_from(["kda", "mla"])),
    seed=st.one_of(st.integers(), st.text()),
)
def test_every_tree_survives_its_plain_form(num_experts, scale, mixers, seed):
    experts = Expert(num_experts=num_experts, scale=scale)
    model = Model(width=1, experts=experts, mixers=tuple(mixers), seed=seed)
    again = from_dict(Model, json.loads(json.dumps(to_dict(model))))
    assert again == model
    assert digest(again) == digest(model)


def test_replacement_reaches_into_parts_and_leaves_the_original():
    changed = replace(MODEL, {"width": 16, "experts.scale": 3})
    assert (changed.width, changed.experts.scale) == (16, 3.0)
    assert isinstance(changed.experts.scale, float)
    assert (MODEL.width, MODEL.experts.scale) == (8, 1.0)


def test_replacement_checks_a_part_once_with_all_its_changes():
    changed = replace(MODEL, {"experts.num_active": 8, "experts.num_experts": 16})
    assert changed.experts == Expert(num_experts=16, num_active=8)
    with pytest.raises(ValueError, match="num_active=8: above num_experts=4"):
        replace(MODEL, {"experts.num_active": 8})


def test_replacement_takes_a_whole_part():
    draft = Expert(num_experts=2)
    assert replace(MODEL, {"draft": draft}).draft == draft
    assert replace(MODEL, {"draft": {"num_experts": 2}}).draft == draft


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts.num_expert": 1}, r"experts\.num_expert: unknown path; .*'experts\.num_experts'"),
        ({"num_experts": 1}, r"num_experts: unknown path; did you mean 'experts\.num_experts'"),
        ({"zzz": 1}, "known: width, experts, experts.num_experts"),
        ({"width.bits": 1}, "width.bits: width is 8 and has no fields"),
        ({"draft.scale": 1}, "draft.scale: draft is None and has no fields; set it whole"),
        ({"experts.scale": 2, "experts": {"num_experts": 1}}, "experts: set both whole and by"),
        ({"experts.num_experts": "4"}, "experts.num_experts='4': must be int"),
    ],
)
def test_wrong_replacement_names_the_path_and_the_fix(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(MODEL, changes)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("widht", 1, "widht: unknown key; did you mean 'width'"),
        ("width", True, "width=True: must be int"),
        ("width", 1.5, "width=1.5: must be int"),
        ("mixers", ["kda", "rnn"], r"mixers\[1\]='rnn': one of \('kda', 'mla'\)"),
        ("mixers", "kda", "mixers='kda': must be a list"),
        ("grid", [1, 2, 3], "grid=.*: must be 2 items"),
        ("scales", {"a": "x"}, "scales.a='x': must be a number"),
        ("scales", [1], "must be a mapping"),
        ("seed", None, "seed=None: must be int or str"),
        ("folder", 3, "folder=3: must be a path"),
        ("experts", {"num_experts": 4, "scael": 1}, "experts.scael: unknown key; .*'scale'"),
        ("experts", {}, "experts.num_experts: missing; Expert requires it"),
        ("experts", 3, "experts=3: must be a mapping of Expert"),
    ],
)
def test_wrong_plain_form_names_the_path_and_the_fix(key, value, message):
    with pytest.raises(ValueError, match=message):
        from_dict(Model, to_dict(MODEL) | {key: value})


def test_digest_follows_values_and_nothing_else():
    same = Model(scales={"a": 0.5}, mixers=("kda", "mla"), experts=Expert(num_experts=4), width=8)
    assert digest(same) == digest(MODEL)
    assert digest(replace(MODEL, {"experts.scale": 1.5})) != digest(MODEL)
    assert len(digest(MODEL)) == 64


def test_digest_is_the_same_in_another_process():
    code = (
        "from baltoro.config import digest\n"
        "from baltoro.model.config import KdaConfig\n"
        "print(digest(KdaConfig(num_heads=2, head_dim=8)))"
    )
    printed = {
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
        for _ in range(2)
    }
    assert len(printed) == 1


def test_an_annotation_that_is_not_plain_is_our_own_mistake():
    @dataclass(frozen=True)
    class Odd:
        value: Expert | Model
        other: set[int]

    with pytest.raises(TypeError, match="a union may hold None and one part"):
        from_dict(Odd, {"value": {}, "other": 1})
    with pytest.raises(TypeError, match="plain values, not set"):
        to_dict(Odd(value=MODEL, other={1}))
    with pytest.raises(TypeError, match="not one that a configuration may have"):
        replace(Odd(value=MODEL, other={1}), {"other": 3})


def test_only_an_instance_has_paths():
    assert paths(MODEL)[:3] == ["width", "experts", "experts.num_experts"]
    with pytest.raises(TypeError, match="expected a dataclass instance"):
        paths(Model)


def test_nearest_prefers_the_same_last_name():
    assert "'moe.scale'" in nearest("scale", ["scales", "moe.scale"])


def test_reading_a_configuration_loads_no_torch():
    code = "import sys, baltoro.config, baltoro.model.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
