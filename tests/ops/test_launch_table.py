"""The table of launch shapes: complete, refused when it is not one, written whole."""

import json
import os
from itertools import product

import pytest
import torch

from baltoro.ops import launch_table
from baltoro.ops.launch_table import (
    LaunchTableError,
    derived,
    launch,
    read,
    section_of,
    trying,
    write,
)

CPU = torch.device("cpu")
SHAPE = {"rows": 2, "num_warps": 4}


def stored(path, held: object) -> object:
    path.write_text(held if isinstance(held, str) else json.dumps(held))
    return path


def test_what_is_written_is_read(tmp_path):
    table = {
        "portable": {"norm": {"w8": SHAPE, "w16": {"rows": 1}}, "loss": {"fp32": {"block": 8}}},
        "sm_90": {"norm": {"w8": {"rows": 4, "num_warps": 1}}},
    }
    path = tmp_path / "table.json"
    write(table, path)
    assert read(path) == table
    assert os.listdir(tmp_path) == ["table.json"]


def test_a_write_that_fails_leaves_the_old_table_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    write({"portable": {"norm": {"w8": SHAPE}}}, path)
    before = path.read_text()

    def refuse(source, target):
        raise OSError("no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no"):
        write({"portable": {"norm": {"w8": {"rows": 9}}}}, path)
    assert path.read_text() == before and os.listdir(tmp_path) == ["table.json"]


@pytest.mark.parametrize(
    ("held", "why"),
    [
        ("{", "no JSON"),
        ([], "version"),
        ({"version": 2, "sections": {"portable": {}}}, "version"),
        ({"version": 1}, "portable"),
        ({"version": 1, "sections": []}, "sections must be an object"),
        ({"version": 1, "sections": {"sm_90": {"norm": {"w8": SHAPE}}}}, "portable"),
        ({"version": 1, "sections": {"portable": {"norm": {}}}}, "sections.portable.norm must"),
        ({"version": 1, "sections": {"portable": {"norm": {"w8": {}}}}}, "norm.w8 must"),
        ({"version": 1, "sections": {"portable": {"norm": {"w8": {"rows": 0}}}}}, "w8.rows is 0"),
        ({"version": 1, "sections": {"portable": {"norm": {"w8": {"rows": "2"}}}}}, "is '2'"),
        ({"version": 1, "sections": {"portable": {"norm": {"w8": {"rows": True}}}}}, "is True"),
    ],
)
def test_a_malformed_table_is_refused_with_the_place(tmp_path, held, why):
    path = stored(tmp_path / "table.json", held)
    with pytest.raises(LaunchTableError, match=why) as raised:
        read(path)
    assert "table.json" in str(raised.value)


def test_a_missing_entry_names_the_nearest_one():
    with pytest.raises(
        LaunchTableError, match=r"'bf16 w1025'.*nearest.*'rms_norm_forward bf16 w10"
    ):
        launch("rms_norm_forward", "bf16 w1025", CPU)


def test_a_device_without_an_entry_takes_the_portable_one(monkeypatch):
    held = {"portable": {"norm": {"a": {"rows": 1}, "b": {"rows": 2}}},
            "sm_90": {"norm": {"a": {"rows": 3}}}}  # fmt: skip
    monkeypatch.setattr(launch_table, "pinned", lambda: held)
    launch_table._launch.cache_clear()
    try:
        found = [launch_table._launch("norm", name, "sm_90")["rows"] for name in ("a", "b")]
        assert found == [3, 2]
        assert launch_table._launch("norm", "a", "sm_100")["rows"] == 1
    finally:
        launch_table._launch.cache_clear()


def test_a_tried_shape_holds_for_its_block_only():
    before = launch("rms_norm_forward", "bf16 w128", CPU)
    with trying("rms_norm_forward", "bf16 w128", section_of(CPU), SHAPE):
        assert launch("rms_norm_forward", "bf16 w128", CPU) == SHAPE
    assert launch("rms_norm_forward", "bf16 w128", CPU) is before


def test_a_tried_shape_of_a_class_that_had_none_is_gone_after_an_error():
    with pytest.raises(RuntimeError), trying("rms_norm_forward", "new", "portable", SHAPE):
        assert launch("rms_norm_forward", "new", CPU) == SHAPE
        raise RuntimeError
    with pytest.raises(LaunchTableError):
        launch("rms_norm_forward", "new", CPU)


@pytest.mark.parametrize(
    ("width", "name"), [(1, "w16"), (16, "w16"), (17, "w32"), (768, "w1024"), (9999, "w4096")]
)
def test_a_width_class_is_a_padded_width_within_bounds(width, name):
    assert launch_table.width_class(width, 16, 4096) == name


def test_every_class_that_a_kernel_can_ask_for_is_pinned():
    table = launch_table.pinned()["portable"]
    for dtype in ("bf16", "fp32"):
        for kernel in ("rms_norm_forward", "rms_norm_backward"):
            for width in range(4, 15):
                assert set(table[kernel][f"{dtype} w{1 << width}"]) == {"rows", "num_warps"}
        for kernel in ("short_conv_forward", "short_conv_backward"):
            for width in (1024, 2048):
                shape = table[kernel][f"{dtype} w{width}"]
                assert set(shape) == {"channels", "rows", "strip", "num_warps"}
                assert shape["strip"] % shape["rows"] == 0
        for kernel in ("cross_entropy_loss", "cross_entropy_gradient"):
            for width in (32768, 65536):
                assert set(table[kernel][f"{dtype} w{width}"]) == {"block", "num_warps"}
        for kernel in ("situ_glu_forward", "situ_glu_backward"):
            assert set(table[kernel][dtype]) == {"block", "num_warps"}
    for rows in (16, 32, 64, 128):
        for part in ("gram", "apply"):
            shape = table[f"newton_schulz_{part}"][f"r{rows}"]
            assert set(shape) == {"columns", "num_warps", "num_stages", "part"}
            assert shape["part"] % shape["columns"] == 0
        assert set(table["newton_schulz_factor"][f"r{rows}"]) == {"num_warps"}


KEYS_OF_LAYERS = {
    "attn_res_forward": ("num_warps", "ahead", "held", "held_warps"),
    "attn_res_backward": ("num_warps", "ahead", "held", "held_warps"),
    "attn_res_ring_forward": ("num_warps", "pairs", "slots", "programs"),
    "attn_res_ring_backward": ("num_warps", "pairs", "slots", "spare", "programs", "group"),
    "kda_prep": ("columns", "num_warps"),
    "kda_scan": ("columns", "num_warps"),
    "kda_fold": ("columns", "num_warps", "num_stages"),
    "kda_row_gradients": ("values", "num_warps"),
    "kda_gradients": ("columns", "values", "num_warps"),
    "kda_segments": ("programs", "chunks"),
    "moe_few": ("rows", "tokens", "inputs", "num_warps", "num_stages"),
}


def test_every_class_of_layers_is_pinned_and_no_other():
    dtypes, widths = ("bf16", "fp32"), [f"w{512 << i}" for i in range(5)]
    rings = ["w768", "w1024", "w2048", "w4096", "wider"]
    means = ["single", "t2", "t6", "t12", "t28", "t40", "t64", "more"]
    classes = dict.fromkeys(("attn_res_forward", "attn_res_backward"), widths)
    classes |= dict.fromkeys(("attn_res_ring_forward", "attn_res_ring_backward"), rings)
    classes |= dict.fromkeys(("kda_prep", "kda_row_gradients", "kda_gradients"), dtypes)
    classes |= dict.fromkeys(("kda_scan", "kda_fold"), ("fp32",))
    classes["kda_segments"] = [f"p{8 << i} c{16 << j}" for i in range(5) for j in range(5)]
    classes["moe_few"] = [f"{dtype} {mean}" for dtype in ("bf16", "mxfp4") for mean in means]
    table = launch_table.pinned()
    for kernel, keys in KEYS_OF_LAYERS.items():
        assert set(table["portable"][kernel]) == set(classes[kernel]), kernel
        for section in table.values():
            for name, shape in section.get(kernel, {}).items():
                assert name in classes[kernel] and set(shape) == set(keys), (kernel, name)
    for dtype, dim, kind in product(dtypes, (16, 32, 64, 128), ("one", "more")):
        assert "num_warps" in table["portable"]["kda_decode"][f"{dtype} d{dim} {kind}"]
    assert set(table["sm_90"]["kda_prep_sm90"]) == {"k64", "k128"}


def test_what_is_derived_follows_a_tried_shape():
    @derived
    def doubled(section: str) -> int:
        return 2 * launch_table._launch("rms_norm_forward", "bf16 w128", section)["rows"]

    before = doubled("portable")
    with trying("rms_norm_forward", "bf16 w128", "portable", {"rows": 5, "num_warps": 1}):
        assert doubled("portable") == 10
    assert doubled("portable") == before == 128
