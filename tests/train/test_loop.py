"""The loop of a run, with everything around the model real but small."""

import dataclasses
import io
import json
import math
import os
import signal
import time
from contextlib import contextmanager

import pytest
import torch
from model.tiny import tiny_k3
from rich.console import Console
from train.batch import TinySource, tiny_batch

from baltoro.config import digest
from baltoro.model.model import Model
from baltoro.optim.config import OptimConfig
from baltoro.optim.schedule import ScheduleConfig, learning_rate
from baltoro.train import loop
from baltoro.train.alarms import AlarmWatch
from baltoro.train.config import (
    ContextStage,
    DataConfig,
    PretrainConfig,
    RunConfig,
    StepConfig,
)
from baltoro.train.evaluate import HeldOutScore
from baltoro.train.folder import open_run
from baltoro.train.learner import build_learner
from baltoro.train.loop import Training, run_loop
from baltoro.train.matmul_share import ProductTime
from baltoro.train.metrics import MetricsLog, ProgressLine, read_metrics
from baltoro.train.probe import probe_model
from baltoro.train.samples import Sample
from baltoro.train.state import load_state


def config_of(num_steps=20, peak=1e-2, **run):
    run = {"eval_every": 100, "save_every": 100, "inspect_every": 5} | run
    return PretrainConfig(
        name="test",
        seed=0,
        dtype="float32",
        model=tiny_k3(mixers=("kda", "mla")),
        data=DataConfig(
            seed=0,
            tokens_per_step=32,
            num_microbatches=2,
            stages=(ContextStage(seq_len=16, fraction=1.0),),
        ),
        optim=OptimConfig(),
        schedule=ScheduleConfig(num_steps=num_steps, peak=peak),
        step=StepConfig(),
        run=RunConfig(**run),
    )


def training_of(folder, log, config, **changes):
    torch.manual_seed(config.seed)
    parts = {
        "config": config,
        "digest": digest(config.model),
        "learner": build_learner(Model(config.model), config.optim, config.step),
        "source": TinySource(lengths=(10, 6)),
        "folder": folder,
        "log": log,
        "progress": ProgressLine(Console(quiet=True), every=1),
        "watch": AlarmWatch(qk_clip_tau=100.0),
        "evaluate": lambda model: HeldOutScore(bits_per_byte=2.0, by_domain={"even": 2.0}),
        "sample": lambda model: [Sample("a", "b")],
        "probe": lambda model: probe_model(model, tiny_batch()),
        "flops_per_token": 1e6,
        "peak_flops": 1e9,
    }
    return Training(**(parts | changes))


def run(path, config, *, resumes=False, **changes):
    with open_run(path) as folder, MetricsLog(folder.metrics_file) as log:
        training = training_of(folder, log, config, **changes)
        if resumes:
            last = folder.checkpoint(folder.steps()[-1])
            record = load_state(last, training.learner, training.source, digest=training.digest)
            training.watch.restart(record.recent_losses)
            log.write("resume", training.learner.num_steps, {})
        finished = run_loop(training)
    return training, finished


def losses(path):
    return {
        entry["step"]: entry["train/loss"]
        for entry in read_metrics(path / "metrics.jsonl")
        if entry["kind"] == "step"
    }


class StopAt(TinySource):
    """Sends this process SIGTERM while a step's data is read, as a scheduler does."""

    def __init__(self, at, **settings):
        super().__init__(**settings)
        self.at = at

    def batch(self, step, part=0, num_parts=1):
        if (step, part) == (self.at, 0):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().batch(step, part, num_parts)


def test_twenty_steps_are_ten_a_stop_and_ten_more_bit_for_bit(tmp_path):
    config = config_of()
    straight, finished = run(tmp_path / "straight", config)
    assert finished
    stopped, finished = run(tmp_path / "cut", config, source=StopAt(9, lengths=(10, 6)))
    assert not finished and stopped.learner.num_steps == 10
    resumed, finished = run(tmp_path / "cut", config, resumes=True)
    assert finished
    for name, tensor in straight.learner.model.state_dict().items():
        assert torch.equal(tensor, resumed.learner.model.state_dict()[name]), name
    for name, tensor in straight.learner.optimizer.state_dict().items():
        assert torch.equal(tensor, resumed.learner.optimizer.state_dict()[name]), name
    assert losses(tmp_path / "straight") == losses(tmp_path / "cut")
    assert len(losses(tmp_path / "cut")) == 20


def test_signal_handlers_are_put_back(tmp_path):
    former = signal.getsignal(signal.SIGTERM)
    run(tmp_path, config_of(num_steps=1))
    assert signal.getsignal(signal.SIGTERM) is former


def test_a_crash_in_an_evaluation_finds_its_checkpoint_on_disk(tmp_path):
    def crash(model):
        raise MemoryError

    with pytest.raises(MemoryError):
        run(tmp_path, config_of(num_steps=4, eval_every=2), evaluate=crash)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    resumed, finished = run(tmp_path, config_of(num_steps=4, eval_every=2), resumes=True)
    assert finished and resumed.learner.num_steps == 4


def test_the_best_and_the_last_checkpoints_are_kept_and_linked(tmp_path):
    scores = iter([3.0, 1.0, 2.0, 2.5])
    training, _ = run(
        tmp_path,
        config_of(num_steps=4, eval_every=1, keep_last=1),
        evaluate=lambda model: HeldOutScore(bits_per_byte=next(scores), by_domain={}),
    )
    assert training.best == (1.0, 2)
    assert training.folder.steps() == [2, 4]
    assert "step-00000002" in str((tmp_path / "best").resolve())
    assert "step-00000004" in str((tmp_path / "latest").resolve())


def test_everything_is_written_down(tmp_path):
    run(tmp_path, config_of(num_steps=6, eval_every=3))
    entries = list(read_metrics(tmp_path / "metrics.jsonl"))
    kinds = {entry["kind"] for entry in entries}
    assert kinds >= {"step", "inspect", "eval", "probe", "sample"}
    steps = [entry for entry in entries if entry["kind"] == "step"]
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4, 5, 6]
    rates = [learning_rate(config_of(num_steps=6).schedule, step) for step in range(6)]
    assert [entry["train/lr"] for entry in steps] == rates
    assert {
        "train/loss",
        "train/grad_norm",
        "train/lr",
        "train/speed_tokens_per_second",
        "train/model_flops_utilisation",
        "router/dead_experts",
        "attention/max_logit",
    } <= steps[-1].keys()
    inspected = [entry for entry in entries if entry["kind"] == "inspect"]
    assert [entry["step"] for entry in inspected] == [1, 5, 6]
    assert sum(inspected[0]["loads"]["layers.1"]) == 2 * 32


def test_the_share_of_products_is_measured_now_and_then_and_shown(tmp_path):
    console = Console(record=True, width=300, file=io.StringIO())
    run(
        tmp_path,
        config_of(num_steps=9, profile_every=4),
        progress=ProgressLine(console, every=1),
    )
    entries = [e for e in read_metrics(tmp_path / "metrics.jsonl") if e["kind"] == "step"]
    shares = {e["step"]: e["train/matmul_share"] for e in entries if "train/matmul_share" in e}
    assert shares.keys() == {4, 5, 8}
    assert all(share > 0.0 for share in shares.values())
    lines = [line for line in console.export_text().splitlines() if "matmul" in line]
    assert "matmul ?" in lines[0] and f"matmul {shares[8]:.0%}" in lines[8]


def test_the_share_is_of_steps_that_were_not_slowed_by_measuring(tmp_path, monkeypatch):
    @contextmanager
    def measured(device):
        products = ProductTime()
        yield products
        time.sleep(0.05)
        products.seconds = 3.0

    monkeypatch.setattr(loop, "time_products", measured)
    training, _ = run(tmp_path, config_of(num_steps=4, profile_every=4))
    seconds = [elapsed for elapsed, _ in training.recent]
    assert len(seconds) == 3
    assert training.matmul_share == pytest.approx(3.0 * 3 / sum(seconds))
    training, _ = run(tmp_path / "first", config_of(num_steps=1, profile_every=1))
    assert training.matmul_share == pytest.approx(3.0 / training.recent[0][0])


def test_an_inspection_between_two_measurements_tells_the_last_logits(tmp_path):
    config = config_of(num_steps=6, inspect_every=5)
    config = dataclasses.replace(config, step=StepConfig(qk_clip_every=4))
    run(tmp_path, config)
    inspected = [e for e in read_metrics(tmp_path / "metrics.jsonl") if e["kind"] == "inspect"]
    logits = {e["step"]: e["max_logits"]["layers.1.self_attn"] for e in inspected}
    assert logits.keys() == {1, 5, 6} and logits[1] != logits[5] == logits[6]


class OneBadBatch(TinySource):
    """Step 1 has a target of infinite weight."""

    def batch(self, step, part=0, num_parts=1):
        batch = super().batch(step, part, num_parts)
        if step == 1:
            batch.weights[0] = torch.inf
        return batch


def test_what_is_due_behind_a_skipped_step_waits_for_a_good_one(tmp_path):
    config = config_of(num_steps=5, eval_every=2, keep_last=9)
    training, finished = run(tmp_path, config, source=OneBadBatch(lengths=(10, 6)))
    assert finished
    entries = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [entry["step"] for entry in entries if entry["kind"] == "eval"] == [3, 4, 5]
    assert [entry["step"] for entry in entries if entry["kind"] == "alarm"] == [2]
    assert training.folder.steps() == [3, 4, 5]


def test_a_rate_that_diverges_is_named_and_the_last_good_checkpoint_stays(tmp_path):
    with pytest.raises(ValueError, match=r"step-00000001.*lower --schedule.peak"):
        run(tmp_path, config_of(num_steps=40, peak=1e25, save_every=1, max_bad_steps=3))
    entries = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert "not_finite" in {entry.get("name") for entry in entries if entry["kind"] == "alarm"}


def test_a_line_cut_by_a_kill_is_left_out_and_steps_told_twice_count_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"kind": "step", "step": 1, "x": 1},
        {"kind": "step", "step": 2, "x": 1},
        {"kind": "resume", "step": 1},
        {"kind": "step", "step": 2, "x": 2},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "st')
    found = [(entry["step"], entry.get("x")) for entry in read_metrics(path)]
    assert found == [(1, 1), (1, None), (2, 2)]
    path.write_text('{"kind": \n{"kind": "step", "step": 1}\n')
    with pytest.raises(ValueError, match="line 1"):
        list(read_metrics(path))


def test_numbers_that_are_not_finite_stay_readable(tmp_path):
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.write("step", 1, {"a": math.nan, "b": [math.inf, 1.0]})
    assert json.loads((tmp_path / "m.jsonl").read_text())["b"] == ["inf", 1.0]
