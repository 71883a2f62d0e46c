"""A disk that fills, a log cut short, data and folders that are not right: nothing is lost.

A limit on the size of files stands for the full disk: the kernel refuses the byte behind it to
every writer, those that are not Python's among them.
"""

import dataclasses
import errno
import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from data.small import small_config, write_sources
from rich.console import Console
from safetensors import SafetensorError
from train.batch import TinySource
from train.test_loop import config_of, losses, run
from train.test_state import advance, everything, learner_of, saved

from baltoro.data.build import build
from baltoro.recipes.pretrain import pretrain_config
from baltoro.train.folder import MODEL, open_run
from baltoro.train.metrics import MetricsLog, read_metrics
from baltoro.train.pretrain import pretrain
from baltoro.train.state import load_state


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


def test_a_disk_that_fills_at_any_byte_of_a_save_leaves_the_earlier_checkpoint(tmp_path):
    """Limits just below and above the size of every file: each writer meets the full disk."""
    learner, source = learner_of(mixers=("kda", "mla")), TinySource()
    with open_run(tmp_path) as folder:
        first = saved(folder, learner, source)
        sizes = {path.stat().st_size for path in first.rglob("*") if path.is_file()}
        before = {name: tensor.clone() for name, tensor in everything(learner).items()}
        advance(learner, source, 1)
        num_failures = 0
        for limit in sorted({max(1, size + shift) for size in sizes for shift in (-1, 0, 1)}):
            with files_of_at_most(limit):
                try:
                    saved(folder, learner, source)
                except (OSError, SafetensorError) as error:
                    num_failures += 1
                    assert "File too large" in str(error)
            if folder.steps() != [0]:
                break
            assert [path.name for path in folder.checkpoints.iterdir()] == [first.name]
        assert num_failures > 2 * (len(sizes) - 1)
        again = learner_of(seed=8, mixers=("kda", "mla"))
        load_state(first, again, TinySource(), digest="d")
        for name, tensor in everything(again).items():
            assert torch.equal(tensor, before[name]), name
        assert (first / MODEL / "config.json").is_file()
        saved(folder, learner, source)
        load_state(folder.checkpoint(1), again, TinySource(), digest="d")
        for name, tensor in everything(again).items():
            assert torch.equal(tensor, everything(learner)[name]), name


class Filling(TinySource):
    """The disk is full from the data of a step on: no file may grow beyond `num_bytes`."""

    def __init__(self, at: int, num_bytes: int) -> None:
        super().__init__(lengths=(10, 6))
        self.at, self.num_bytes = at, num_bytes

    def batch(self, step: int, part: int = 0, num_parts: int = 1):
        if step == self.at:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.num_bytes, hard))
        return super().batch(step, part, num_parts)


@pytest.mark.parametrize("num_bytes", [60_000, 1])
def test_a_run_on_a_full_disk_says_what_to_do_and_then_goes_on_as_if_it_had_not(
    tmp_path, num_bytes
):
    """In a save, and in a line of the log."""
    config = config_of(num_steps=12, save_every=5)
    straight, _ = run(tmp_path / "straight", config)
    with (
        files_of_at_most(resource.getrlimit(resource.RLIMIT_FSIZE)[0]),
        pytest.raises(ValueError, match=r"could not be written.*step-00000005.*same command"),
    ):
        run(tmp_path / "cut", config, source=Filling(7, num_bytes))
    assert len(list(read_metrics(tmp_path / "cut" / "metrics.jsonl"))) > 5
    resumed, finished = run(tmp_path / "cut", config, resumes=True)
    assert finished
    for name, tensor in straight.learner.model.state_dict().items():
        assert torch.equal(tensor, resumed.learner.model.state_dict()[name]), name
    assert losses(tmp_path / "straight") == losses(tmp_path / "cut")


def test_an_error_that_is_no_full_disk_stays_what_it_is(tmp_path):
    class Unplugged(TinySource):
        def batch(self, step, part=0, num_parts=1):
            raise OSError(errno.EIO, "Input/output error", "shard-0.tokens")

    with pytest.raises(OSError, match=r"shard-0\.tokens"):
        run(tmp_path, config_of(num_steps=1), source=Unplugged())


def test_a_line_that_does_not_fit_leaves_nothing_of_itself(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log, files_of_at_most(100):
        log.write("step", 1, {"x": 1})
        size = path.stat().st_size
        with pytest.raises(OSError, match="File too large"):
            log.write("step", 2, {"x": "long" * 50})
        assert path.stat().st_size == size
        log.write("step", 2, {"x": 2})
    assert [entry["x"] for entry in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("whole", ["", '{"kind": "step", "step": 1}\n'])
def test_a_log_cut_in_mid_line_by_a_kill_can_be_continued(tmp_path, whole):
    path = tmp_path / "metrics.jsonl"
    path.write_text(whole + '{"kind": "step", "st')
    with MetricsLog(path) as log:
        log.write("resume", 1, {})
        log.write("step", 2, {})
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()][-2:] == [
        "resume",
        "step",
    ]
    assert [entry["step"] for entry in read_metrics(path)][-2:] == [1, 2]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("disk")
    write_sources(root / "sources")
    build(small_config(root / "sources"), root / "built", report=lambda line: None)
    return root / "built"


def pretrained(data: Path, out: Path, vocab_size: int = 300) -> bool:
    config = pretrain_config("nano")
    model = dataclasses.replace(config.model, vocab_size=vocab_size, pad_token_id=1, vision=None)
    return pretrain(
        dataclasses.replace(config, model=model),
        data=data,
        out=out,
        device=torch.device("cpu"),
        resume=True,
        sampler=lambda model, pictures: [],
        console=Console(quiet=True),
    )


def test_a_shard_cut_short_is_named_before_a_run_begins(data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    shard = next((tmp_path / "data" / "train").glob("*.tokens.npy"))
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(ValueError, match=shard.name):
        pretrained(tmp_path / "data", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_vocabulary_is_named_before_a_run_begins(data, tmp_path):
    with pytest.raises(ValueError, match="vocab_size=301"):
        pretrained(data, tmp_path / "run", vocab_size=301)
    assert not (tmp_path / "run").exists()


def test_a_second_run_in_a_folder_touches_nothing_of_the_first(data, tmp_path):
    with open_run(tmp_path / "run") as folder:
        folder.config_file.write_text("{}")
        with pytest.raises(ValueError, match="is training in it"):
            pretrained(data, tmp_path / "run")
        names = {path.name for path in folder.path.iterdir()}
        assert names == {"lock", "config.json"} and folder.config_file.read_text() == "{}"
