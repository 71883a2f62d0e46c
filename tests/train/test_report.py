"""The page of a run: whole, self-contained, and true to the log."""

import json
import re
from html.parser import HTMLParser

import pytest

from baltoro import config as plain
from baltoro.recipes.pretrain import pretrain_config
from baltoro.train.metrics import MetricsLog
from baltoro.train.report import read_run, render, report, short
from baltoro.train.svg import heat_map, line_chart


def write_run(path):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(plain.to_dict(pretrain_config("nano"))))
    (path / "card.md").write_text(
        "# Data card\n<b>raw</b>\n\n| domain | documents |\n|---|--:|\n| prose | 34 |\n"
    )
    with MetricsLog(path / "metrics.jsonl") as log:
        log.write("baseline", 0, {"bits_per_byte": 3.5, "by_domain": {}})
        log.write("rewind", 0, {"from": 2, "num_batches": 2, "message": "back to step 0"})
        for step in (1, 2, 3):
            numbers = {
                "train/loss": 6.0 - step,
                "train/grad_norm": 1.0,
                "train/lr": 1e-3,
                "train/total_tokens": 10.0 * step,
                "train/total_seconds": 61.0,
                "train/speed_tokens_per_second": 1234.0,
                "train/model_flops_utilisation": 0.25,
                "train/matmul_share": 0.45,
                "router/max_vio": 0.5,
                "attention/max_logit": float("nan") if step == 2 else 3.0,
            }
            log.write("step", step, numbers)
        log.write(
            "inspect",
            3,
            {
                "loads": {"layers.1": [0, 30, 10]},
                "bias_drift": {"layers.1": 0.01},
                "max_logits": {"layers.3.self_attn": [1.0, 2.0]},
            },
        )
        log.write("eval", 3, {"bits_per_byte": 2.25, "by_domain": {"prose": 2.25}})
        log.write(
            "probe",
            3,
            {
                "kda/half_life": {"layers.0.self_attn": [[1.0, 2.0, 3.0]]},
                "attn_res/weights": {"layers.1.mlp": [0.75, 0.25]},
                "rms/partial_sum": {"layers.0": 1.0, "layers.1": 2.0},
                "situ/saturated": {"layers.0.mlp": 0.125},
            },
        )
        log.write("sample", 3, {"prompt": "The ", "text": "<script>alert(1)</script>"})
        (path / "pictures").mkdir()
        (path / "pictures" / "a.png").write_bytes(b"\x89PNG")
        seen = {"picture": "pictures/a.png", "expected": "a <red> flower"}
        log.write("sample", 3, {"prompt": "What is it?", "text": "a tree"} | seen)
        log.write("alarm", 2, {"name": "loss_spike", "where": "", "message": "loss 9 where 3"})


VOID = ("meta", "rect", "line", "img", "circle")


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.names, self.open, self.links, self.ids = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_startendtag(self, tag, attrs):
        self.names.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def test_the_page_shows_what_the_log_says_and_needs_nothing_else(tmp_path):
    write_run(tmp_path / "run")
    report(tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    anchors = [link for link in tags.links if link.startswith("#")]
    assert set(tags.links) - set(anchors) == {"data:image/png;base64,iVBORw=="}
    assert {anchor[1:] for anchor in anchors} == set(tags.ids) != set()
    assert "script" not in tags.names
    assert not re.search(r"https?:|//|@import|url\(", page)
    assert 'name="viewport"' in page
    for text in ("2.2500 bits per byte", "3.5000 bits per byte", "1 min 01 s"):
        assert text in page
    assert "<b>loss_spike</b> at step 2: loss 9 where 3" in page
    assert "&lt;script&gt;" in page and "&lt;b&gt;raw" in page
    assert "layer 1, expert 0: 0<" in page and "1,234 tokens/s" in page
    assert "layer 0 mlp, step 3: 12.5<" in page
    assert "layer 1, step 3: 1.25<" in page  # MaxVio of loads 0, 30, 10
    assert "layer 3 head 1, step 3: 2<" in page
    assert "<td>prose</td><td>34</td>" in page and "|---" not in page
    assert "45% of a step" in page
    assert "a &lt;red&gt; flower" in page and "back to step 0" in page


def test_a_run_that_only_began_has_a_page_too(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    (tmp_path / "run" / "card.md").unlink()
    page = render(read_run(tmp_path / "run"))
    assert "nothing was recorded" in page and "no data card" in page


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no config.json"):
        read_run(tmp_path)


def test_points_that_cannot_be_drawn_are_left_out():
    chart = line_chart({"a": [(1, 1.0), (2, float("nan")), (3, 2.0)]}, label="x")
    (points,) = re.findall(r'points="([^"]*)"', chart)
    assert len(points.split()) == 2
    logarithmic = line_chart({"a": [(1, 0.0), (2, 1.0), (3, 100.0)]}, label="x", is_log=True)
    (points,) = re.findall(r'points="([^"]*)"', logarithmic)
    assert len(points.split()) == 2


def test_a_long_line_is_thinned_and_keeps_its_end():
    chart = line_chart({"a": [(step, float(step)) for step in range(8001)]}, label="x")
    (points,) = re.findall(r'points="([^"]*)"', chart)
    assert len(points.split()) <= 602
    assert points.split()[-1] == "536.0,10.0"


def drawn(rows, **changes):
    options = {"label": "x", "high": 1.0, "columns": ["0"], "axis": "expert"} | changes
    return heat_map(rows, **options)


def test_an_expert_without_tokens_is_red():
    assert 'fill="#dc2626"' in drawn({"a": [0.0]}, marks_zero=True)
    assert 'fill="#dc2626"' not in drawn({"a": [0.0]})


def test_a_narrow_map_shows_its_values_and_a_wide_one_its_shades():
    assert ">0.25</text>" in drawn({"a": [0.25]})
    columns = [str(index) for index in range(100)]
    wide = drawn({"a": [0.25] * 100}, columns=columns)
    assert ">0.25</text>" not in wide and "a, expert 99: 0.25<" in wide


def marks_of(chart):
    return re.findall(r'text-anchor="end">([^<]*)</text>', chart)


def test_axes_are_marked_at_round_numbers():
    linear = line_chart({"a": [(1, 3.07), (30, 6.29)]}, label="x")
    assert marks_of(linear) == ["0", "2", "4", "6", "8", "step"]
    flat = line_chart({"a": [(1, 0.0), (2, 0.0)]}, label="x")
    assert marks_of(flat) == ["0", "0.5", "1", "step"]
    decades = line_chart({"a": [(1, 0.0002), (2, 30.0)]}, label="x", is_log=True)
    assert marks_of(decades) == ["0.001", "0.01", "0.1", "1", "10", "step"]
    narrow = line_chart({"a": [(1, 4e-4), (2, 8e-4)]}, label="x", is_log=True)
    assert len(marks_of(narrow)) >= 4


def test_a_single_point_is_seen_and_last_values_are_told():
    chart = line_chart({"a": [(5, 2.5)], "b": [(5, 1.0), (6, 7.25)]}, label="x", dashed=["b"])
    assert "<circle" in chart and "stroke-dasharray" in chart
    assert "<b>2.5</b>" in chart and "<b>7.25</b>" in chart


def test_names_are_those_of_a_reader():
    names = ["layers.3.self_attn", "mtp_layers.0", "layers.1.block_sparse_moe.shared_experts"]
    assert [short(name) for name in names] == ["layer 3", "MTP layer 0", "layer 1 shared_experts"]
    assert short("layers.1.self_attention") == "layer 1 self_attention"


def test_many_steps_are_thinned_to_what_fits(tmp_path):
    write_run(tmp_path / "run")
    with MetricsLog(tmp_path / "run" / "metrics.jsonl") as log:
        for step in range(4, 400):
            values = {"loads": {"layers.1": [1, 1]}, "bias_drift": {}, "max_logits": {}}
            log.write("inspect", step, values)
    page = render(read_run(tmp_path / "run"))
    assert 20 <= page.count("layer 1, step ") <= 40
    assert "layer 1, step 399: 0<" in page
