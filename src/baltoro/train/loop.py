"""The loop of a run: step, write down, save, look at held-out text; until the end or a signal.

The order at a step that is due: save, then evaluate, so that whatever goes wrong in an evaluation
finds the checkpoint of its step on disk.

A spike is a loss that `train.alarms` calls one. With `run.on_spike`

    alarm    it is named, and the step counts like any other
    skip     it is named, and the step is not applied: like one that is not finite it changes no
             weight, momentum or bias, and the data goes on. `max_bad_steps` of them in a row end
             the run, since then the weights are at fault and not the data.
    rewind   it is named, and the run goes back to its last checkpoint c, weights, schedule and
             spike statistics included. The data does not go back: the step behind c reads the batch
             behind the spike's, and all batches from c to the spike are passed over; context
             stages, which belong to batches, begin that much earlier. After
             `max_rewinds` to one checkpoint the next spike ends the run. A run begins with a
             checkpoint of step 0 then, to have one.

Both are functions of the losses, and those by which a spike is told are in the checkpoint with the
data's cursor: a run that is killed, also between going back and its next checkpoint, and resumed
does what it would have done.
"""

import errno
import math
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from safetensors import SafetensorError

from baltoro.data.pack import PackedBatch
from baltoro.model.model import Model
from baltoro.optim.schedule import learning_rate
from baltoro.train.alarms import AlarmWatch
from baltoro.train.batches import BatchSource
from baltoro.train.config import PretrainConfig
from baltoro.train.evaluate import HeldOutScore
from baltoro.train.folder import RunFolder
from baltoro.train.learner import Learner, device_of
from baltoro.train.matmul_share import time_products
from baltoro.train.metrics import MetricsLog, ProgressLine, Value, duration
from baltoro.train.samples import Sample
from baltoro.train.state import load_state, save_state
from baltoro.train.step import StepResult, train_step

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FIRST_PROFILE = 5  # the step whose share of products is measured first: caches are warm by then


@dataclass(kw_only=True, slots=True)
class Training:
    """What a run consists of; `train.pretrain` builds one."""

    config: PretrainConfig
    digest: str
    learner: Learner
    source: BatchSource
    folder: RunFolder
    log: MetricsLog
    progress: ProgressLine
    watch: AlarmWatch
    evaluate: Callable[[Model], HeldOutScore]
    sample: Callable[[Model], Sequence[Sample]]
    probe: Callable[[Model], dict[str, Value]]
    flops_per_token: float
    peak_flops: float  # per second, of this device
    seconds: float = 0.0  # of training, in all processes
    best: tuple[float, int] | None = None  # bits per byte and step
    num_bad_steps: int = 0  # skipped in a row, up to now
    num_rewinds: int = 0  # since the last checkpoint
    matmul_share: float | None = None  # of a step's time, when it was last measured
    max_logits: Mapping[str, list[float]] = field(default_factory=dict)  # last measured, by mixer
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=20))


class StopRequest:
    """Whether a signal asked the run to stop."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt  # asked twice: at once
        self.signal = signal.Signals(number).name


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """SIGTERM and SIGINT ask for a stop behind the current step; a second one interrupts it."""
    request = StopRequest()
    numbers = (signal.SIGTERM, signal.SIGINT)
    former = [signal.signal(number, request) for number in numbers]
    try:
        yield request
    finally:
        for number, handler in zip(numbers, former, strict=True):
            signal.signal(number, handler)


def run_loop(training: Training) -> bool:
    """Train to the end of the schedule; returns False if a signal ended it before, state saved.

    Raises `ValueError` when the weights or so many steps in a row are not finite, after too many
    spikes in a row, and when the folder can no longer be written, as on a full disk. The last good
    checkpoint stays.
    """
    try:
        return _run(training)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise ValueError(_unwritten(training, error)) from error


def _run(training: Training) -> bool:
    learner, schedule, run = training.learner, training.config.schedule, training.config.run
    is_eval_due = is_save_due = False
    with stop_on_signals() as request:
        if run.on_spike == "rewind" and not training.folder.steps():
            _save(training)
        while learner.num_steps < schedule.num_steps:
            result = _advance(training)
            if result.is_spike and run.on_spike == "rewind":
                _rewind(training, result)
                continue
            step = learner.num_steps
            is_last = step == schedule.num_steps
            # behind a skipped step the weights may be beyond help: what is due waits for a good one
            is_good = training.num_bad_steps == 0 or is_last
            if request.signal is not None and is_good:
                path = _save(training)
                training.progress.note(
                    f"stopped by {request.signal} after step {step}; {path} continues from here"
                )
                return False
            is_eval_due = is_eval_due or is_last or step % run.eval_every == 0
            is_save_due = is_save_due or is_eval_due or step % run.save_every == 0
            if is_good and is_save_due:
                _save(training)
                is_save_due = False
            if is_good and is_eval_due:
                _look_up(training)
                is_eval_due = False
    return True


def _advance(training: Training) -> StepResult:
    """One step, its line of metrics and its alarms."""
    learner, config = training.learner, training.config
    step = learner.num_steps
    num_parts = config.data.num_microbatches
    source = training.source
    device = device_of(learner.model)
    is_timed = step + 1 == _FIRST_PROFILE or (step + 1) % config.run.profile_every == 0
    with time_products(device) if is_timed else nullcontext(None) as products:
        start = time.perf_counter()
        batches = [source.batch(source.step, part, num_parts) for part in range(num_parts)]
        result = _step(training, batches)
        elapsed = time.perf_counter() - start
    source.step += 1
    training.seconds += elapsed
    if products is not None:
        # measuring slows a step down: the share is of the steps before, which also tell the speed
        before = [seconds for seconds, _ in training.recent] or [elapsed]
        training.matmul_share = products.seconds / statistics.fmean(before)
    if products is None or not training.recent:
        training.recent.append((elapsed, sum(len(batch.tokens) for batch in batches)))
    is_undone = result.is_spike and config.run.on_spike == "rewind"
    is_bad = result.is_skipped and not is_undone
    training.num_bad_steps = training.num_bad_steps + 1 if is_bad else 0
    _write(training, result, is_timed=is_timed)
    if training.num_bad_steps >= config.run.max_bad_steps:
        what = "spikes" if result.is_spike else "not finite"
        raise ValueError(
            _diverged(training, f"{training.num_bad_steps} steps were skipped, the last as {what}")
        )
    return result


def _step(training: Training, batches: Sequence[PackedBatch]) -> StepResult:
    """The update; raises `ValueError` if weights that are not finite make it impossible."""
    learner, config = training.learner, training.config
    step, watch = learner.num_steps, training.watch
    try:
        return train_step(
            learner,
            batches,
            lr=learning_rate(config.schedule, step),
            max_loss=math.inf if config.run.on_spike == "alarm" else watch.spike_limit(),
        )
    except ValueError as error:
        if all(bool(master.isfinite().all()) for master in learner.optimizer.masters.values()):
            raise
        _log_alarm(training, "not_finite", "", step, "the weights are not finite")
        raise ValueError(_diverged(training, "the weights are not finite")) from error


def _rewind(training: Training, result: StepResult) -> None:
    """Back to the last checkpoint, on with the data, as the module's docstring says."""
    learner, source, folder = training.learner, training.source, training.folder
    spike, cursor = learner.num_steps, source.step
    if training.num_rewinds >= training.config.run.max_rewinds:
        what = f"a spike again after {training.num_rewinds} rewinds to one checkpoint"
        raise ValueError(_diverged(training, what))
    last = folder.steps()[-1]
    record = load_state(folder.checkpoint(last), learner, source, digest=training.digest)
    num_passed = cursor - source.step
    source.step = cursor
    training.watch.restart(record.recent_losses)
    training.num_rewinds += 1
    text = (
        f"loss {result.numbers['train/loss']:.3f} at step {spike}: back to step {last}, past "
        f"{num_passed} batches"
    )
    training.log.write("rewind", last, {"from": spike, "num_batches": num_passed, "message": text})
    training.progress.note(f"rewind {training.num_rewinds}: {text}")


def _write(training: Training, result: StepResult, *, is_timed: bool) -> None:
    """Metrics, inspection, progress and alarms of the step just taken."""
    step, run = training.learner.num_steps, training.config.run
    seconds, tokens = (sum(part) for part in zip(*training.recent, strict=True))
    speed = tokens / seconds
    utilisation = speed * training.flops_per_token / training.peak_flops
    numbers = result.numbers | {
        "train/speed_tokens_per_second": speed,
        "train/model_flops_utilisation": utilisation,
        "train/total_tokens": float(training.learner.num_tokens),
        "train/total_seconds": training.seconds,
    }
    share = training.matmul_share
    if is_timed and share is not None:
        numbers["train/matmul_share"] = share
    if result.max_logits:
        training.max_logits = result.max_logits
    is_last = step == training.config.schedule.num_steps
    if step % run.log_every == 0 or is_timed or result.is_skipped or is_last:
        training.log.write("step", step, numbers)
    if (step == 1 or step % run.inspect_every == 0 or is_last) and not result.is_skipped:
        training.log.write(
            "inspect",
            step,
            {
                "loads": {name: item.loads.tolist() for name, item in result.balances.items()},
                "bias_drift": {name: item.bias_drift for name, item in result.balances.items()},
                "max_logits": dict(training.max_logits),
            },
        )
    left = (training.config.schedule.num_steps - step) * seconds / len(training.recent)
    matmul = "?" if share is None else f"{share:.0%}"
    training.progress.update(
        f"step {step}/{training.config.schedule.num_steps}  loss {numbers['train/loss']:.3f}  "
        f"{speed:,.0f} tokens/s  MFU {utilisation:.1%}  matmul {matmul}  "
        f"grad {numbers['train/grad_norm']:.2f}  "
        f"dead experts {numbers.get('router/dead_experts', 0.0):.0f}  left {duration(left)}"
    )
    for alarm in training.watch.check(step, result):
        _log_alarm(training, alarm.name, alarm.where, step, alarm.message)


def _save(training: Training) -> Path:
    try:
        path = save_state(
            training.folder,
            training.learner,
            training.source,
            digest=training.digest,
            seconds=training.seconds,
            recent_losses=tuple(training.watch.losses),
        )
        training.folder.point("latest", training.learner.num_steps)
    except (OSError, SafetensorError) as error:
        raise ValueError(_unwritten(training, error)) from error
    training.num_rewinds = 0
    return path


def _look_up(training: Training) -> None:
    """Evaluate, probe, write samples, and keep the best checkpoint and the last ones."""
    learner, step = training.learner, training.learner.num_steps
    score = training.evaluate(learner.model)
    training.log.write(
        "eval", step, {"bits_per_byte": score.bits_per_byte, "by_domain": score.by_domain}
    )
    if training.best is None or score.bits_per_byte < training.best[0]:
        training.best = (score.bits_per_byte, step)
        training.folder.point("best", step)
    training.folder.prune(keep_last=training.config.run.keep_last, best=training.best[1])
    domains = "  ".join(f"{name} {bits:.3f}" for name, bits in score.by_domain.items())
    training.progress.note(
        f"step {step}: held out {score.bits_per_byte:.4f} bits per byte  ({domains})"
    )
    training.log.write("probe", step, training.probe(learner.model))
    for sample in training.sample(learner.model):
        line: dict[str, Value] = {"prompt": sample.prompt, "text": sample.text}
        if sample.picture is not None:
            line["picture"] = training.folder.keep_picture(sample.picture)
        if sample.expected is not None:
            line["expected"] = sample.expected
        training.log.write("sample", step, line)


def _log_alarm(training: Training, name: str, where: str, step: int, message: str) -> None:
    training.log.write("alarm", step, {"name": name, "where": where, "message": message})
    text = f"alarm {name} at step {step}{f' in {where}' if where else ''}: {message}"
    training.progress.note(text)


def _diverged(training: Training, what: str) -> str:
    return (
        f"step {training.learner.num_steps}: {what}; {_kept(training)}; lower --schedule.peak "
        f"({training.config.schedule.peak:g}) in a new run"
    )


def _unwritten(training: Training, error: Exception) -> str:
    return (
        f"step {training.learner.num_steps}: {training.folder.path} could not be written "
        f"({error}); {_kept(training)}; make room on that disk and give the same command again: it "
        "continues from there"
    )


def _kept(training: Training) -> str:
    steps = training.folder.steps()
    if not steps:
        return "no checkpoint was written yet"
    return f"the last good checkpoint is {training.folder.checkpoint(steps[-1])}"
