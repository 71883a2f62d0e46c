"""`baltoro train` on a small data folder, from tokens to a checkpoint one can load."""

import json
import os
import random
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from data.small import small_config, write_sources
from rich.console import Console
from safetensors.torch import load_file

from baltoro import config as plain
from baltoro.checkpoint.load import load
from baltoro.cli import main, split_overrides
from baltoro.config import to_dict
from baltoro.data.build import build
from baltoro.recipes import pretrain as recipe
from baltoro.recipes.pretrain import check_memory, pretrain_config, summary
from baltoro.train import forecast, loop
from baltoro.train import pretrain as pretraining
from baltoro.train.config import RunConfig
from baltoro.train.metrics import read_metrics
from baltoro.train.pretrain import differences, stage_starts
from baltoro.train.report import report


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pretrain")
    write_sources(root / "sources")
    build(small_config(root / "sources"), root / "built", report=lambda line: None)
    return root / "built"


SMALL = {
    "model.vocab_size": 300,
    "model.pad_token_id": 299,
    "model.vision.placeholder_token_id": None,  # set by `arguments`, from the data's tokenizer
    "model.hidden_size": 32,
    "model.intermediate_size": 48,
    "model.mixers": ["kda", "mla"],
    "model.max_seq_len": 512,
    "data.tokens_per_step": 1024,
    "data.stages": [{"seq_len": 256, "fraction": 0.5}, {"seq_len": 512, "fraction": 0.5}],
    "schedule.num_steps": 4,
    "run.eval_every": 2,
    "run.num_eval_batches": 1,
    "run.num_sample_tokens": 4,
}


def arguments(data: Path, out: Path, **changes: object) -> list[str]:
    tokenizer = recipe_tokenizer(data)
    values = SMALL | {"model.vision.placeholder_token_id": tokenizer.media_pad_id}
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    args = ["train", "nano", "--data", str(data), "--out", str(out), "--device", "cpu"]
    for path, value in values.items():
        args += [f"--{path}", json.dumps(value)]
    return args


def recipe_tokenizer(data: Path):
    from baltoro.text.tokenizer import load_tokenizer

    return load_tokenizer(data / "tokenizer")


def test_a_run_goes_from_tokens_to_a_checkpoint_and_a_page(data, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(arguments(data, out)) == 0
    printed = capsys.readouterr().out
    for text in ("memory:", "time: about", "bits per byte", "schedule.num_steps: 4"):
        assert text in printed
    model = load(out / "latest")
    assert model.tokenizer is not None and model.config.vocab_size == 300
    entries = list(read_metrics(out / "metrics.jsonl"))
    kinds = [entry["kind"] for entry in entries]
    assert kinds.count("eval") == 2 and kinds.count("baseline") == 1
    seen = [entry for entry in entries if entry["kind"] == "sample" and "picture" in entry]
    assert len(seen) == 2 and (out / seen[0]["picture"]).is_file() and seen[0]["expected"]
    report(out)
    assert (out / "report.html").stat().st_size > 1000
    # a second call finds the run at its end, a third with another rate is refused
    assert main(arguments(data, out)) == 0
    assert "nothing is left to do" in capsys.readouterr().out
    assert main(arguments(data, out, schedule__peak=0.5)) == 2
    assert "schedule.peak" in capsys.readouterr().err
    assert main([*arguments(data, out), "--no-resume"]) == 2
    assert "--no-resume" in capsys.readouterr().err


def test_a_run_older_than_a_setting_goes_on_with_its_default(data, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(arguments(data, out)) == 0
    record = json.loads((out / "config.json").read_text())
    del record["optim"]["muon_impl"], record["step"]["max_logits_impl"], record["run"]["on_spike"]
    (out / "config.json").write_text(json.dumps(record))
    digest = plain.digest_of({**record, "run": plain.to_dict(RunConfig())})
    for path in out.glob("checkpoints/*/state.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "digest": digest}))
    capsys.readouterr()
    for _ in range(2):
        assert main(arguments(data, out)) == 0
        assert "nothing is left to do" in capsys.readouterr().out
    assert main(arguments(data, out, step__max_logits_impl="triton")) == 2
    assert "step.max_logits_impl" in capsys.readouterr().err


def assert_same_end(first: Path, second: Path, step: int) -> None:
    """Weights, momenta, biases, the data's cursor, every random generator, and all losses."""
    states, records, losses = [], [], []
    for out in (first, second):
        checkpoint = out / "checkpoints" / f"step-{step:08d}"
        states.append(load_file(checkpoint / "state.safetensors"))
        record = json.loads((checkpoint / "state.json").read_text())
        records.append({key: value for key, value in record.items() if key != "seconds"})
        entries = [e for e in read_metrics(out / "metrics.jsonl") if e["kind"] == "step"]
        losses.append([(entry["step"], entry["train/loss"]) for entry in entries])
    assert states[0].keys() == states[1].keys() and records[0] == records[1]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
    assert losses[0] == losses[1] and [at for at, _ in losses[0]] == [*range(1, step + 1)]


def test_two_runs_of_one_seed_end_in_the_same_state_to_the_bit(data, tmp_path):
    for name in ("one", "two"):
        random.random(), np.random.rand(), torch.rand(1)
        assert main(arguments(data, tmp_path / name, schedule__num_steps=2)) == 0
    assert_same_end(tmp_path / "one", tmp_path / "two", 2)


@pytest.mark.slow
@pytest.mark.parametrize("killed_in_step", [10, 13])
def test_twenty_steps_are_some_a_kill_and_the_rest_bit_for_bit(data, tmp_path, killed_in_step):
    settings = {"schedule__num_steps": 20, "run__save_every": 5, "run__eval_every": 10}
    straight, cut = (arguments(data, tmp_path / name, **settings) for name in ("straight", "cut"))
    assert main(straight) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process with threads
        child = os.fork()
    if child == 0:
        train_step = loop.train_step

        def step_or_die(learner, *args, **options):
            if learner.num_steps + 1 == killed_in_step:
                os.kill(os.getpid(), signal.SIGKILL)
            return train_step(learner, *args, **options)

        loop.train_step = step_or_die
        main(cut)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert main(cut) == 0
    assert_same_end(tmp_path / "straight", tmp_path / "cut", 20)


def test_a_continued_run_knows_the_losses_by_which_a_spike_is_told(data, tmp_path, monkeypatch):
    out = tmp_path / "run"
    assert main(arguments(data, out)) == 0
    seen = []
    monkeypatch.setattr(pretraining, "run_loop", lambda training: seen.append(training) or True)
    assert main(arguments(data, out)) == 0
    losses = [e["train/loss"] for e in read_metrics(out / "metrics.jsonl") if e["kind"] == "step"]
    assert list(seen[0].watch.losses) == losses and len(losses) == 4


def test_a_vocabulary_that_does_not_match_is_refused(data, tmp_path, capsys):
    args = arguments(data, tmp_path / "run", model__vocab_size=400, model__pad_token_id=1)
    assert main(args) == 2
    assert "vocab_size=400" in capsys.readouterr().err


def test_an_unknown_path_or_a_missing_value_is_refused(data, tmp_path, capsys):
    assert main([*arguments(data, tmp_path), "--schedule.peek", "1"]) == 2
    assert "schedule.peak" in capsys.readouterr().err
    assert main([*arguments(data, tmp_path), "--schedule.peak"]) == 2
    assert "needs a value" in capsys.readouterr().err


def test_options_with_a_dot_are_paths():
    rest, overrides = split_overrides(
        ["nano", "--a.b", "1e-3", "--out", "x.y", "--c.d=text", "--e.f", "true"]
    )
    assert rest == ["nano", "--out", "x.y"]
    assert overrides == {"a.b": 1e-3, "c.d": "text", "e.f": True}
    with pytest.raises(ValueError, match="twice"):
        split_overrides(["--a.b", "1", "--a.b", "2"])


def test_memory_that_will_not_do_is_refused_with_a_smaller_size(monkeypatch, capsys):
    config = pretrain_config("mini")
    needed = forecast.state_bytes(pretrain_config("nano").model, "float32")
    monkeypatch.setattr(forecast, "available_bytes", lambda device: 12 * needed)
    with pytest.raises(ValueError, match=r"mini will not fit; train nano"):
        check_memory(config, torch.device("cpu"), "mini", Console())


def test_the_configuration_is_printed_by_path():
    text = summary(pretrain_config("nano"), torch.device("cpu"))
    assert "step.mtp_loss_weight: 0.3" in text and "model.kda.num_heads: 4" in text


def test_every_configuration_survives_json():
    config = pretrain_config("small", is_gpu=True)
    assert recipe.plain.from_dict(type(config), json.loads(json.dumps(to_dict(config)))) == config


def test_differences_are_named_by_path():
    first, second = {"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 1, "c": 3}, "d": [1], "e": 0}
    assert differences(first, second) == ["a.c", "e"]


def test_stages_begin_where_their_shares_of_the_steps_say():
    config = pretrain_config("small")
    assert stage_starts(config.data, 100) == [(0, 512), (60, 4096), (80, 16384), (92, 65536)]
    assert stage_starts(config.data, 2) == [(0, 512), (1, 4096)]
