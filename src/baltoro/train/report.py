"""`baltoro report`: what a run did, as one HTML page that needs nothing beside it."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch

from baltoro.data.document import data_url
from baltoro.data.manifest import CARD
from baltoro.optim.balancing import max_vio
from baltoro.train.folder import CONFIG_FILE, METRICS_FILE, PICTURES
from baltoro.train.metrics import duration, read_metrics
from baltoro.train.page import card, folded, grid, none, page, table
from baltoro.train.svg import Points, heat_map, line_chart

_MOST_COLUMNS = 40  # of a heat map over steps; more are thinned


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The lines of a run's log by kind, and its other texts."""

    name: str
    kinds: dict[str, list[dict[str, Any]]]
    config: dict[str, Any]
    card: str  # "" if the folder has none
    pictures: dict[str, bytes]  # PNG files by their path in the folder

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Lines of one kind, in order."""
        return self.kinds.get(kind, [])

    def last(self, kind: str) -> dict[str, Any]:
        """The last line of a kind; empty without any."""
        return self.of(kind)[-1] if self.of(kind) else {}

    def points(self, name: str) -> Points:
        """A number of the steps by step."""
        lines = [line for line in self.of("step") if name in line]
        return [(line["step"], float(line[name])) for line in lines]


def report(run: Path, *, out: Path | None = None) -> None:
    """Write what the run in RUN did as one HTML page, readable without a network.

    Args:
        run: folder of a run of `baltoro train`, finished or not.
        out: the page; absent, RUN/report.html.
    """
    page = run / "report.html" if out is None else out
    page.write_text(render(read_run(run)), encoding="utf-8")
    print(f"{page}: written")


def read_run(run: Path) -> RunRecord:
    """What the folder of a run says; raises `ValueError` if it holds none."""
    for name in (CONFIG_FILE, METRICS_FILE):
        if not (run / name).is_file():
            raise ValueError(
                f"{run}: holds no {name}, so no run; give the --out of `baltoro train`"
            )
    kinds: dict[str, list[dict[str, Any]]] = {}
    for line in read_metrics(run / METRICS_FILE):
        kinds.setdefault(line["kind"], []).append(line)
    data_card = run / CARD
    return RunRecord(
        name=run.name,
        kinds=kinds,
        config=json.loads((run / CONFIG_FILE).read_text()),
        card=data_card.read_text() if data_card.is_file() else "",
        pictures={
            str(path.relative_to(run)): path.read_bytes()
            for path in sorted((run / PICTURES).glob("*.png"))
        },
    )


def render(run: RunRecord) -> str:
    """The page."""
    config = folded("all values", json.dumps(run.config, indent=1))
    return page(
        f"Run {run.name}",
        [
            ("Summary", _summary(run)),
            ("Alarms", _alarms(run)),
            ("Loss", _loss(run)),
            ("Rate and speed", _rate(run)),
            ("Experts", _experts(run)),
            ("Attention logits", _logits(run)),
            ("KDA memory", _half_lives(run)),
            ("Attention residuals", _residuals(run)),
            ("Sizes inside", _sizes(run)),
            ("Samples", _samples(run)),
            ("Data", card(run.card) if run.card else none("no data card")),
            ("Configuration", config),
        ],
    )


def _summary(run: RunRecord) -> str:
    step, evaluation, baseline = run.last("step"), run.last("eval"), run.last("baseline")
    rows = [("recipe", str(run.config.get("name", "")))]
    if step:
        planned = run.config["schedule"]["num_steps"]
        rows += [
            ("steps", f"{step['step']:,} of {planned:,}"),
            ("tokens", f"{step['train/total_tokens']:,.0f}"),
            ("training time", duration(float(step["train/total_seconds"]))),
            ("speed", f"{float(step['train/speed_tokens_per_second']):,.0f} tokens/s"),
            ("MFU", f"{float(step['train/model_flops_utilisation']):.1%} of the measured matmul"),
            ("last loss", f"{float(step['train/loss']):.4f} nats per token"),
        ]
    shares = run.points("train/matmul_share")
    if shares:
        rows.append(("in matrix products", f"{shares[-1][1]:.0%} of a step's time"))
    if evaluation:
        rows.append(("held out", f"{float(evaluation['bits_per_byte']):.4f} bits per byte"))
    if baseline:
        text = f"{float(baseline['bits_per_byte']):.4f} bits per byte, fitted on the same tokens"
        rows.append(("interpolated bigram", text))
    return table(rows)


def _alarms(run: RunRecord) -> str:
    items = [
        f'<li class="alarm"><b>{escape(alarm["name"])}</b> at step {alarm["step"]:,}'
        f"{' in ' if alarm['where'] else ''}{escape(alarm['where'])}: "
        f"{escape(alarm['message'])}</li>"
        for alarm in run.of("alarm")
    ]
    items += [
        f'<li class="alarm"><b>rewind</b>: {escape(line["message"])}</li>'
        for line in run.of("rewind")
    ]
    return f"<ul>{''.join(items)}</ul>" if items else "<p>None was raised.</p>"


def _loss(run: RunRecord) -> str:
    held_out: dict[str, list[tuple[float, float]]] = {}
    for line in run.of("eval"):
        held_out.setdefault("all held out", []).append((line["step"], float(line["bits_per_byte"])))
        for domain, bits in line["by_domain"].items():
            held_out.setdefault(domain, []).append((line["step"], float(bits)))
    baseline = run.last("baseline")
    if baseline and held_out:
        bits = float(baseline["bits_per_byte"])
        steps = [step for step, _ in held_out["all held out"]]
        held_out["bigram"] = [(step, bits) for step in sorted({steps[0], steps[-1]})]
    losses = {"training": run.points("train/loss"), "MTP": run.points("train/mtp_loss")}
    return grid(
        line_chart(losses, label="Training loss, nats per token"),
        line_chart(held_out, label="Held-out bits per byte by domain", dashed=("bigram",)),
    )


def _rate(run: RunRecord) -> str:
    shares = {
        "MFU": run.points("train/model_flops_utilisation"),
        "time in matrix products": run.points("train/matmul_share"),
    }
    return grid(
        line_chart({"learning rate": run.points("train/lr")}, label="Learning rate"),
        line_chart(
            {"gradient norm": run.points("train/grad_norm")},
            label="Gradient norm, before clipping",
            is_log=True,
        ),
        line_chart(
            {"tokens/s": run.points("train/speed_tokens_per_second")},
            label="Speed, tokens per second",
        ),
        line_chart(
            {
                name: [(step, 100 * share) for step, share in points]
                for name, points in shares.items()
            },
            label="Use of the machine, percent",
        ),
    )


def _experts(run: RunRecord) -> str:
    inspected = [line for line in run.of("inspect") if line["loads"]]
    shares = {}
    for layer, counts in (inspected[-1]["loads"] if inspected else {}).items():
        mean = sum(counts) / len(counts) or 1.0
        shares[short(layer)] = [count / mean for count in counts]
    num_experts = max((len(row) for row in shares.values()), default=0)
    vios = [
        (
            line["step"],
            {layer: max_vio(torch.tensor(counts)) for layer, counts in line["loads"].items()},
        )
        for line in inspected
    ]
    drifts = [(line["step"], line["bias_drift"]) for line in inspected]
    return (
        heat_map(
            shares,
            label="Load of each expert in the last step inspected, in fair shares; red: no token",
            high=3.0,
            columns=[str(index) for index in range(num_experts)],
            axis="expert",
            marks_zero=True,
        )
        + _over_steps(vios, label="MaxVio by layer: (largest load - mean) / mean", high=2.0)
        + _over_steps(drifts, label="Largest change of a router bias in a step, by layer")
        + grid(
            line_chart({"MaxVio": run.points("router/max_vio")}, label="Largest MaxVio"),
            line_chart(
                {"dead": run.points("router/dead_experts")}, label="Dead experts, all layers"
            ),
            line_chart(
                {"least": run.points("router/min_grad_norm")},
                label="Least gradient norm of a router",
                is_log=True,
            ),
        )
    )


def _logits(run: RunRecord) -> str:
    limit = float(run.config["step"]["qk_clip_tau"])
    heads = [
        (
            line["step"],
            {
                f"{short(mixer)} head {head}": value
                for mixer, values in line["max_logits"].items()
                for head, value in enumerate(values)
            },
        )
        for line in run.of("inspect")
        if line["max_logits"]
    ]
    return _over_steps(
        heads, label=f"Largest attention logit of each MLA head; clipped at {limit:g}"
    ) + grid(
        line_chart({"largest": run.points("attention/max_logit")}, label="Largest attention logit"),
        line_chart(
            {"clipped": run.points("attention/clipped_heads")}, label="Heads clipped in a step"
        ),
    )


def _half_lives(run: RunRecord) -> str:
    found = run.last("probe").get("kda/half_life", {})
    rows = {
        f"{short(name)}, {quantile}": [float(head[index]) for head in heads]
        for name, heads in found.items()
        for index, quantile in enumerate(("10 %", "median", "90 %"))
    }
    longest = max((value for row in rows.values() for value in row), default=1.0)
    num_heads = max((len(row) for row in rows.values()), default=0)
    text = (
        "<p>Tokens after which a key channel has decayed to a half: quantiles over the channels of "
        "each head, at the last evaluation.</p>"
    )
    return text + heat_map(
        rows,
        label="KDA half-lives, tokens",
        high=longest,
        columns=[str(head) for head in range(num_heads)],
        axis="head",
    )


def _residuals(run: RunRecord) -> str:
    found = run.last("probe").get("attn_res/weights", {})
    rows = {short(name): [float(weight) for weight in row] for name, row in found.items()}
    num_sources = max((len(row) for row in rows.values()), default=0)
    text = (
        "<p>Weight of each source in every read, averaged over tokens at the last evaluation: "
        "finished blocks, the embedding (0) first, then the running sum of the block.</p>"
    )
    return text + heat_map(
        rows,
        label="Attention residual weights",
        high=1.0,
        columns=[str(source) for source in range(num_sources)],
        axis="source",
    )


def _sizes(run: RunRecord) -> str:
    probes = run.of("probe")
    sizes = list(run.last("probe").get("rms/partial_sum", {}).values())
    saturated = [(line["step"], line["situ/saturated"]) for line in probes]
    chart = line_chart(
        {"RMS": [(index, float(value)) for index, value in enumerate(sizes)]},
        label="RMS of the sum a layer hands on, at the last evaluation",
        axis="layer",
    )
    percent = [
        (step, {name: 100 * float(share) for name, share in shares.items()})
        for step, shares in saturated
        if shares
    ]
    return grid(chart) + _over_steps(percent, label="SiTU gates beyond the soft cap, percent")


def _samples(run: RunRecord) -> str:
    samples = run.of("sample")
    if not samples:
        return none("no samples")
    last = samples[-1]["step"]
    shown = [sample for sample in samples if sample["step"] == last]
    return f"<p>After step {last:,}; in bold what it was given.</p>" + "".join(
        _sample(sample, run.pictures.get(sample.get("picture", ""))) for sample in shown
    )


def _sample(sample: dict[str, Any], picture: bytes | None) -> str:
    """A prompt with its continuation; with its picture beside it, and what was expected."""
    words = f"<pre><b>{escape(sample['prompt'])}</b>{escape(sample['text'])}</pre>"
    if picture is None:
        return words
    expected = escape(sample.get("expected", ""))
    return (
        f'<div class="pictured"><img alt="held-out picture" src="{data_url(picture)}">'
        f'<div>{words}<p class="none">The document says: {expected}</p></div></div>'
    )


def _over_steps(
    lines: Sequence[tuple[int, Mapping[str, Any]]], *, label: str, high: float | None = None
) -> str:
    """A row for each name, a column for each line; darkest at `high`, or at the largest value."""
    stride = math.ceil(len(lines) / _MOST_COLUMNS) if lines else 1
    kept = [line for index, line in enumerate(lines) if (len(lines) - 1 - index) % stride == 0]
    rows: dict[str, list[float]] = {}
    for _, values in kept:
        for name, value in values.items():
            rows.setdefault(short(name), []).append(float(value))
    largest = max((value for row in rows.values() for value in row), default=0.0)
    return heat_map(
        rows,
        label=label,
        high=high or largest or 1.0,
        columns=[str(step) for step, _ in kept],
        axis="step",
    )


def short(name: str) -> str:
    """A module's name as a reader says it: `layers.3.self_attn` is layer 3."""
    name = re.sub(r"^mtp_layers\.", "MTP layer ", name)
    name = re.sub(r"^layers\.", "layer ", name)
    name = re.sub(r"\.(self_attn|block_sparse_moe)(?=\.|$)", "", name)
    return name.replace(".", " ")
