"""What a run does about a loss spike: name it, pass over it, or go back before it."""

import pytest
import torch
from safetensors.torch import load_file
from train.batch import tiny_batch
from train.test_loop import StopAt, config_of, losses, run

from baltoro.train import alarms
from baltoro.train.alarms import AlarmWatch
from baltoro.train.metrics import read_metrics
from baltoro.train.state import TENSORS_FILE


@pytest.fixture(autouse=True)
def short_history(monkeypatch):
    monkeypatch.setattr(alarms, "_MIN_HISTORY", 4)


class Spikes(StopAt):
    """One batch over and over, quickly learned, but for those `at` which the tokens are shuffled.

    `passes` leaves out batches: from its key on the source reads on at its value.
    """

    def __init__(self, spikes=(), *, stops=-1, crashes=-1, passes=None):
        super().__init__(stops, lengths=(10, 6))
        self.spikes, self.crashes, self.passes = spikes, crashes, passes or {}

    def batch(self, step, part=0, num_parts=1):
        for first, jump in self.passes.items():
            step += jump if step >= first else 0
        super().batch(step, part, num_parts)
        if step == self.crashes:
            raise KeyError("the power is gone")
        batch = tiny_batch(part, self.lengths)
        if step in self.spikes:
            batch.targets.copy_(batch.targets[torch.randperm(16, generator=generator_of(step))])
        return batch


def generator_of(seed):
    return torch.Generator().manual_seed(seed)


def spiky(path, *, num_steps=16, resumes=False, source, **settings):
    settings = {"save_every": 5, "eval_every": 100} | settings
    return run(
        path,
        config_of(num_steps=num_steps, **settings),
        resumes=resumes,
        source=source,
        watch=AlarmWatch(qk_clip_tau=100.0, history=4),
    )


def entries(path, kind):
    return [entry for entry in read_metrics(path / "metrics.jsonl") if entry["kind"] == kind]


def assert_same(first, second):
    for name, tensor in first.learner.model.state_dict().items():
        assert torch.equal(tensor, second.learner.model.state_dict()[name]), name
    for name, tensor in first.learner.optimizer.state_dict().items():
        assert torch.equal(tensor, second.learner.optimizer.state_dict()[name]), name


def test_an_alarm_names_the_spike_and_the_step_counts(tmp_path):
    training, finished = spiky(tmp_path, source=Spikes([14]), save_every=1, keep_last=9)
    assert finished
    (alarm,) = entries(tmp_path, "alarm")
    assert (alarm["name"], alarm["step"]) == ("loss_spike", 15)
    before = load_file(training.folder.checkpoint(14) / TENSORS_FILE)
    after = load_file(training.folder.checkpoint(15) / TENSORS_FILE)
    assert not torch.equal(before["model/lm_head.weight"], after["model/lm_head.weight"])


def test_a_skipped_spike_changes_nothing_and_the_data_goes_on(tmp_path):
    source = Spikes([14])
    training, finished = spiky(tmp_path, source=source, num_steps=15, save_every=7, on_spike="skip")
    assert finished and source.step == 15
    assert [alarm["name"] for alarm in entries(tmp_path, "alarm")] == ["loss_spike"]
    before = load_file(training.folder.checkpoint(14) / TENSORS_FILE)
    after = load_file(training.folder.checkpoint(15) / TENSORS_FILE)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def test_too_many_spikes_in_a_row_end_a_run_that_skips(tmp_path):
    with pytest.raises(ValueError, match=r"2 steps were skipped, the last as spikes.*00000010"):
        spiky(tmp_path, source=Spikes(range(12, 99)), on_spike="skip", max_bad_steps=2)


def test_a_rewind_is_a_run_that_never_saw_the_batches_between(tmp_path):
    source = Spikes([12])
    rewound, finished = spiky(tmp_path / "rewound", source=source, on_spike="rewind")
    assert finished and source.step == 19
    spared, _ = spiky(tmp_path / "spared", source=Spikes(passes={10: 3}), on_spike="rewind")
    assert_same(rewound, spared)
    (event,) = entries(tmp_path / "rewound", "rewind")
    assert (event["step"], event["from"], event["num_batches"]) == (10, 13, 3)
    assert losses(tmp_path / "rewound") == losses(tmp_path / "spared")
    assert [entry["step"] for entry in entries(tmp_path / "rewound", "step")] == [*range(1, 17)]


def test_a_rewound_run_that_is_stopped_goes_on_bit_for_bit(tmp_path):
    straight, _ = spiky(tmp_path / "straight", source=Spikes([12]), on_spike="rewind")
    spiky(tmp_path / "cut", source=Spikes([12], stops=14), on_spike="rewind")
    resumed, finished = spiky(
        tmp_path / "cut", resumes=True, source=Spikes([12]), on_spike="rewind"
    )
    assert finished
    assert_same(straight, resumed)
    assert losses(tmp_path / "straight") == losses(tmp_path / "cut")
    assert len(entries(tmp_path / "cut", "rewind")) == 1


def test_a_crash_between_a_rewind_and_the_next_checkpoint_rewinds_again(tmp_path):
    straight, _ = spiky(tmp_path / "straight", source=Spikes([12]), on_spike="rewind")
    with pytest.raises(KeyError, match="power"):
        spiky(tmp_path / "cut", source=Spikes([12], crashes=13), on_spike="rewind")
    resumed, _ = spiky(tmp_path / "cut", resumes=True, source=Spikes([12]), on_spike="rewind")
    assert_same(straight, resumed)
    assert len(entries(tmp_path / "cut", "rewind")) == 1
    assert losses(tmp_path / "straight") == losses(tmp_path / "cut")


def test_a_skip_is_decided_alike_after_a_stop_just_before_the_spike(tmp_path):
    """The losses by which a spike is told come with the checkpoint."""
    straight, _ = spiky(tmp_path / "straight", source=Spikes([12]), on_spike="skip")
    spiky(tmp_path / "cut", source=Spikes([12], stops=11), on_spike="skip")
    resumed, _ = spiky(tmp_path / "cut", resumes=True, source=Spikes([12]), on_spike="skip")
    assert_same(straight, resumed)
    assert straight.learner.num_tokens == resumed.learner.num_tokens == 15 * 32


def test_rewinds_to_one_checkpoint_are_bounded_and_it_stays(tmp_path):
    source = Spikes(range(12, 99))
    with pytest.raises(ValueError, match=r"a spike again after 2 rewinds.*step-00000010"):
        spiky(tmp_path, source=source, on_spike="rewind", max_rewinds=2)
    assert len(entries(tmp_path, "rewind")) == 2


def test_a_new_checkpoint_gives_all_rewinds_again(tmp_path):
    _, finished = spiky(tmp_path, source=Spikes([12, 18]), on_spike="rewind", max_rewinds=1)
    assert finished
    assert [event["step"] for event in entries(tmp_path, "rewind")] == [10, 15]


def test_a_run_that_may_rewind_begins_with_a_checkpoint(tmp_path):
    source = Spikes([12])
    _, finished = spiky(tmp_path, source=source, save_every=50, on_spike="rewind", max_bad_steps=1)
    assert finished and source.step == 29
    assert [event["step"] for event in entries(tmp_path, "rewind")] == [0]


def test_an_unknown_way_is_refused():
    with pytest.raises(ValueError, match=r"run\.on_spike='panic'.*one of"):
        config_of(on_spike="panic")
