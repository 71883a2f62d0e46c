"""Checkpoints that resume: bit for bit, whole or not at all."""

import errno
import os
import random
import shutil
import sys
import warnings

import numpy as np
import pytest
import torch
from model.tiny import tiny_k3
from train.batch import TinySource

from baltoro.checkpoint.load import load
from baltoro.model.model import Model
from baltoro.optim.config import OptimConfig
from baltoro.train.config import StepConfig
from baltoro.train.folder import MODEL, open_run
from baltoro.train.learner import build_learner
from baltoro.train.state import load_state, save_state
from baltoro.train.step import train_step


def learner_of(seed=0, dtype=torch.float32, **changes):
    torch.manual_seed(seed)
    model = Model(tiny_k3(num_mtp_layers=1, **changes)).cast(dtype)
    return build_learner(model, OptimConfig(), StepConfig())


def advance(learner, source, num_steps):
    for _ in range(num_steps):
        step = learner.num_steps
        parts = [source.batch(step, part, 2) for part in range(2)]
        train_step(learner, parts, lr=1e-3 * (1 + step))
        source.step += 1


def saved(folder, learner, source, **changes):
    settings = {"digest": "d", "seconds": 1.5, "recent_losses": (2.5, 0.1)} | changes
    return save_state(folder, learner, source, **settings)


def everything(learner):
    return (
        learner.model.state_dict() | learner.optimizer.state_dict() | learner.balancer.state_dict()
    )


def assert_same(first, second):
    first, second = everything(first), everything(second)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_learner_goes_on_bit_for_bit(tmp_path, dtype):
    straight, source = learner_of(dtype=dtype), TinySource()
    advance(straight, source, 4)
    first, source = learner_of(dtype=dtype), TinySource()
    advance(first, source, 2)
    with open_run(tmp_path) as folder:
        path = saved(folder, first, source)
    second, fresh = learner_of(seed=5, dtype=dtype), TinySource()
    load_state(path, second, fresh, digest="d")
    assert (second.num_steps, fresh.step) == (2, 2)
    advance(second, fresh, 2)
    assert_same(straight, second)
    assert straight.num_tokens == second.num_tokens > 0


def test_random_generators_continue(tmp_path):
    learner, source = learner_of(), TinySource()
    np.random.randn(), random.gauss(0, 1)  # leaves half a pair in each
    with open_run(tmp_path) as folder:
        path = saved(folder, learner, source)
    draw = lambda: (torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1))  # noqa: E731
    expected = draw()
    load_state(path, learner, source, digest="d")
    assert draw() == expected


def test_the_record_comes_back(tmp_path):
    learner, source = learner_of(), TinySource()
    with open_run(tmp_path) as folder:
        path = saved(folder, learner, source)
        again = saved(folder, learner, source, seconds=9.0)
    record = load_state(again, learner, source, digest="d")
    assert again == path and record.seconds == 1.5
    assert record.recent_losses == (2.5, 0.1)


def test_the_weights_beside_it_are_an_official_checkpoint(tmp_path):
    learner, source = learner_of(), TinySource()
    advance(learner, source, 2)
    with open_run(tmp_path) as folder:
        path = saved(folder, learner, source)
        folder.point("latest", 2)
    model = load(tmp_path / "latest")
    assert (tmp_path / "latest").resolve() == (path / MODEL).resolve()
    for name, tensor in learner.model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_router_biases_stay_fp32_to_the_bit_in_a_bf16_run_and_its_export(tmp_path):
    # case Q08
    learner, source = learner_of(dtype=torch.bfloat16), TinySource()
    advance(learner, source, 2)
    with open_run(tmp_path) as folder:
        path = saved(folder, learner, source)
    again = learner_of(seed=5, dtype=torch.bfloat16)
    load_state(path, again, TinySource(), digest="d")
    exported = load(path / MODEL).state_dict()
    for layer, bias in learner.balancer.biases.items():
        assert bias.dtype == torch.float32 and bias.count_nonzero() > 0
        assert not torch.equal(bias, bias.bfloat16().float())
        assert torch.equal(bias, again.balancer.biases[layer])
        name = f"{layer}.block_sparse_moe.gate.expert_bias"
        assert exported[name].dtype == torch.float32 and torch.equal(bias, exported[name])


def test_another_configuration_data_or_version_is_refused(tmp_path):
    learner, source = learner_of(), TinySource()
    with open_run(tmp_path) as folder:
        path = saved(folder, learner, source)
    with pytest.raises(ValueError, match="another configuration"):
        load_state(path, learner, source, digest="other")
    with pytest.raises(ValueError, match="seed=0"):
        load_state(path, learner, TinySource(seed=1), digest="d")
    record = path / "state.json"
    record.write_text(record.read_text().replace('"version": 2', '"version": 7'))
    with pytest.raises(ValueError, match="version=7"):
        load_state(path, learner, source, digest="d")


def test_a_disk_that_fills_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    learner, source = learner_of(), TinySource()
    with open_run(tmp_path) as folder:
        saved(folder, learner, source)
        advance(learner, source, 1)

        def full(descriptor):
            raise OSError(errno.ENOSPC, "No space left on device", "state.safetensors")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space"):
                saved(folder, learner, source)
        assert folder.steps() == [0]
        assert [path.name for path in folder.checkpoints.iterdir()] == ["step-00000000"]
        saved(folder, learner, source)
        assert folder.steps() == [0, 1]


FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink"}


def killed_at(event_number, work):
    """Run `work` in a child that dies, as by SIGKILL, at its n-th file operation or sync."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process with threads
        child = os.fork()
    if child == 0:
        count = 0

        def step():
            nonlocal count
            count += 1
            if count == event_number:
                os._exit(9)

        sync = os.fsync
        os.fsync = lambda descriptor: (step(), sync(descriptor))
        sys.addaudithook(lambda event, args: step() if event in FILE_EVENTS else None)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_a_kill_at_any_write_leaves_a_whole_checkpoint(tmp_path):
    """Save, link, prune; whatever moment the process dies, every checkpoint listed is whole."""
    learner, source = learner_of(mixers=("kda", "mla")), TinySource()
    with open_run(tmp_path / "pristine") as folder:
        saved(folder, learner, source)
        folder.point("latest", 0)
    before = {name: tensor.clone() for name, tensor in everything(learner).items()}
    advance(learner, source, 1)
    again = learner_of(seed=8, mixers=("kda", "mla"))
    run = tmp_path / "run"

    def work():
        with open_run(run) as folder:
            saved(folder, learner, source)
            folder.point("latest", 1)
            folder.prune(keep_last=1, best=None)

    event_number, was_killed, outcomes = 0, True, set()
    while was_killed:
        event_number += 1
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(tmp_path / "pristine", run, symlinks=True)
        was_killed = killed_at(event_number, work)
        with open_run(run) as folder:
            steps = folder.steps()
            outcomes.add(tuple(steps))
            for step in steps:
                record = load_state(folder.checkpoint(step), again, TinySource(), digest="d")
                assert record.num_steps == step
                expected = before if step == 0 else everything(learner)
                for name, tensor in everything(again).items():
                    assert torch.equal(tensor, expected[name]), name
                assert (folder.checkpoint(step) / MODEL / "config.json").is_file()
            assert (run / "latest" / "model.safetensors").is_file()
            assert not [path for path in folder.checkpoints.iterdir() if path.name[0] == "."]
    assert outcomes == {(0,), (0, 1), (1,)}
    assert event_number > 20


def test_two_runs_do_not_share_a_folder(tmp_path):
    match = f"process {os.getpid()} is training"
    with (
        open_run(tmp_path / "run"),
        pytest.raises(ValueError, match=match),
        open_run(tmp_path / "run"),
    ):
        pass
    with open_run(tmp_path / "run"):
        pass


def test_a_folder_with_other_things_is_not_taken(tmp_path):
    (tmp_path / "thesis.txt").write_text("words")
    with pytest.raises(ValueError, match=r"thesis.txt"), open_run(tmp_path):
        pass
    with pytest.raises(ValueError, match="is a file"), open_run(tmp_path / "thesis.txt"):
        pass


def test_the_last_and_the_best_checkpoints_are_kept(tmp_path):
    learner, source = learner_of(), TinySource()
    with open_run(tmp_path) as folder:
        for _ in range(4):
            saved(folder, learner, source)
            learner.num_steps += 1
        folder.prune(keep_last=2, best=0)
        assert folder.steps() == [0, 2, 3]
