"""`baltoro report`: what a run did, as one HTML page that needs nothing beside it."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from baltoro.data.manifest import CARD
from baltoro.train.folder import CONFIG_FILE, METRICS_FILE, PICTURES
from baltoro.train.metrics import duration, read_metrics
from baltoro.train.svg import Points, heat_map, line_chart

_STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2em auto; padding: 0 1em; }
svg text { font: 11px system-ui, sans-serif; fill: #374151; }
svg { max-width: 100%; height: auto; }
h2 { margin-top: 2em; border-bottom: 1px solid #e5e7eb; }
table { border-collapse: collapse; } td, th { padding: .2em .8em .2em 0; text-align: left; }
pre { background: #f3f4f6; padding: .8em; white-space: pre-wrap; overflow-wrap: anywhere; }
.label { font-weight: 600; margin: 1.2em 0 .2em; }
.pictured { display: flex; flex-wrap: wrap; gap: 1em; align-items: flex-start; }
.pictured > div { flex: 1 1 18em; min-width: 0; } .pictured pre { margin-top: 0; }
img { width: 12em; max-width: 100%; height: auto; background: #fff; border: 1px solid #e5e7eb; }
.alarm { color: #b91c1c; } .none, .legend { color: #4b5563; font-size: 13px; }
"""


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
    card = run / CARD
    return RunRecord(
        name=run.name,
        kinds=kinds,
        config=json.loads((run / CONFIG_FILE).read_text()),
        card=card.read_text() if card.is_file() else "",
        pictures={
            str(path.relative_to(run)): path.read_bytes()
            for path in sorted((run / PICTURES).glob("*.png"))
        },
    )


def render(run: RunRecord) -> str:
    """The page."""
    sections = [
        ("Summary", _summary(run)),
        ("Alarms", _alarms(run)),
        ("Loss", _loss(run)),
        ("Learning rate and gradient", _rate(run)),
        ("Experts", _experts(run)),
        ("Attention logits", _logits(run)),
        ("KDA memory", _half_lives(run)),
        ("Attention residuals", _residuals(run)),
        ("Sizes inside", _sizes(run)),
        ("Samples", _samples(run)),
        ("Data", f"<pre>{escape(run.card)}</pre>" if run.card else _none("no data card")),
        ("Configuration", f"<pre>{escape(json.dumps(run.config, indent=1))}</pre>"),
    ]
    body = "\n".join(f"<h2>{title}</h2>\n{content}" for title, content in sections)
    title = f"Run {escape(run.name)}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>\n{_STYLE}</style></head>\n<body><h1>{title}</h1>\n{body}\n</body></html>\n"
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
    if evaluation:
        rows.append(("held out", f"{float(evaluation['bits_per_byte']):.4f} bits per byte"))
    if baseline:
        text = f"{float(baseline['bits_per_byte']):.4f} bits per byte, fitted on the same tokens"
        rows.append(("interpolated bigram", text))
    return _table(rows)


def _alarms(run: RunRecord) -> str:
    alarms = run.of("alarm")
    rewinds = [
        f'<li class="alarm"><b>rewind</b>: {escape(line["message"])}</li>'
        for line in run.of("rewind")
    ]
    if not alarms and not rewinds:
        return "<p>None was raised.</p>"
    items = [
        f'<li class="alarm"><b>{escape(alarm["name"])}</b> at step {alarm["step"]:,} '
        f"{escape(alarm['where'])}: {escape(alarm['message'])}</li>"
        for alarm in alarms
    ]
    return f"<ul>{''.join(items + rewinds)}</ul>"


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
        held_out["bigram"] = [(step, bits) for step in {steps[0], steps[-1]}]
    losses = {"training": run.points("train/loss"), "MTP": run.points("train/mtp_loss")}
    return line_chart(losses, label="Training loss, nats per token") + line_chart(
        held_out, label="Held-out bits per byte by domain"
    )


def _rate(run: RunRecord) -> str:
    return line_chart({"learning rate": run.points("train/lr")}, label="Learning rate") + (
        line_chart(
            {"gradient norm": run.points("train/grad_norm")}, label="Gradient norm", is_log=True
        )
    )


def _experts(run: RunRecord) -> str:
    loads = run.last("inspect").get("loads", {})
    shares = {}
    for layer, counts in loads.items():
        mean = sum(counts) / len(counts) or 1.0
        shares[layer] = [count / mean for count in counts]
    drift: dict[str, list[tuple[float, float]]] = {}
    for line in run.of("inspect"):
        for layer, value in line["bias_drift"].items():
            drift.setdefault(layer, []).append((line["step"], float(value)))
    return "".join(
        [
            "<p>Load of each expert in the last step inspected, in fair shares; red: no token.</p>",
            heat_map(shares, label="Expert load by layer", high=3.0, marks_zero=True),
            line_chart({"MaxVio": run.points("router/max_vio")}, label="Largest MaxVio"),
            line_chart({"dead": run.points("router/dead_experts")}, label="Dead experts"),
            line_chart(drift, label="Bias drift by layer", is_log=True),
            line_chart(
                {"least": run.points("router/min_grad_norm")},
                label="Least router gradient norm",
                is_log=True,
            ),
        ]
    )


def _logits(run: RunRecord) -> str:
    measured = [line for line in run.of("inspect") if line["max_logits"]]
    heads = measured[-1]["max_logits"] if measured else {}
    values = {name: [float(value) for value in row] for name, row in heads.items()}
    limit = float(run.config["step"]["qk_clip_tau"])
    return "".join(
        [
            f"<p>Largest logit of each MLA head, shaded up to the clip limit of {limit:g}.</p>",
            heat_map(values, label="Largest attention logit by head", high=limit),
            line_chart(
                {"largest": run.points("attention/max_logit")}, label="Largest attention logit"
            ),
            line_chart({"clipped": run.points("attention/clipped_heads")}, label="Heads clipped"),
        ]
    )


def _half_lives(run: RunRecord) -> str:
    found = run.last("probe").get("kda/half_life", {})
    rows = {
        f"{name.removesuffix('.self_attn')} {quantile}": [float(head[index]) for head in heads]
        for name, heads in found.items()
        for index, quantile in enumerate(("10 %", "median", "90 %"))
    }
    longest = max((value for row in rows.values() for value in row), default=1.0)
    text = (
        "<p>Tokens after which a key channel has decayed to a half, by head: quantiles over the "
        f"head's channels; darkest is {longest:.3g}.</p>"
    )
    return text + heat_map(rows, label="KDA half-lives", high=longest)


def _residuals(run: RunRecord) -> str:
    found = run.last("probe").get("attn_res/weights", {})
    rows = {name: [float(weight) for weight in weights] for name, weights in found.items()}
    text = (
        "<p>Weight of each source in every read: finished blocks, the embedding first, then the "
        "running sum of the block.</p>"
    )
    return text + heat_map(rows, label="Attention residual weights", high=1.0)


def _sizes(run: RunRecord) -> str:
    probe = run.last("probe")
    sizes = list(probe.get("rms/partial_sum", {}).values())
    saturated = probe.get("situ/saturated", {})
    rows = [(name, f"{float(share):.3%}") for name, share in saturated.items()]
    chart = line_chart(
        {"RMS": [(index, float(value)) for index, value in enumerate(sizes)]},
        label="RMS of the sum a layer hands on, by layer",
        axis="layer",
    )
    table = _table([("gated MLP", "gates beyond the soft cap"), *rows]) if rows else ""
    return chart + table


def _samples(run: RunRecord) -> str:
    samples = run.of("sample")
    if not samples:
        return _none("no samples")
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
    encoded = base64.b64encode(picture).decode()
    expected = escape(sample.get("expected", ""))
    return (
        f'<div class="pictured"><img alt="held-out picture" src="data:image/png;base64,{encoded}">'
        f'<div>{words}<p class="none">The document says: {expected}</p></div></div>'
    )


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = [f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows]
    return f"<table>{''.join(cells)}</table>"


def _none(what: str) -> str:
    return f'<p class="none">{what}.</p>'
