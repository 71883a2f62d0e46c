"""Pretraining from a data folder: build everything once, say what it will need, run the loop."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from baltoro import config as plain
from baltoro.checkpoint.directory import write_file
from baltoro.data.dataset import Dataset
from baltoro.data.loader import Loader, LoaderConfig, StageConfig, epoch
from baltoro.data.manifest import CARD
from baltoro.data.mixture import natural
from baltoro.data.pack import PackedBatch
from baltoro.model.config import ModelConfig
from baltoro.model.model import Model
from baltoro.optim.muon import muon_flops
from baltoro.text.files import read_json
from baltoro.text.images import ImageConfig, ImageProcessor
from baltoro.text.processor import Processor
from baltoro.train.alarms import AlarmWatch
from baltoro.train.bigram import Bigram
from baltoro.train.config import DataConfig, PretrainConfig, RunConfig
from baltoro.train.evaluate import HeldOutScore, evaluate
from baltoro.train.folder import RunFolder, open_run
from baltoro.train.forecast import flops_per_token, matmul_rate
from baltoro.train.learner import Learner, assignment_of, build_learner, device_of
from baltoro.train.loop import Training, run_loop
from baltoro.train.metrics import MetricsLog, ProgressLine, duration, read_metrics
from baltoro.train.probe import probe_model
from baltoro.train.samples import PicturePrompt, Sample, picture_prompts
from baltoro.train.state import load_state, seed_generators
from baltoro.train.step import run_model, token_losses

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Sampler = Callable[[Model, Sequence[PicturePrompt]], Sequence[Sample]]


def pretrain(
    config: PretrainConfig,
    *,
    data: Path,
    out: Path,
    device: torch.device,
    resume: bool,
    sampler: Sampler,
    console: Console,
) -> bool:
    """Run `config` on the data folder `data`, keeping everything in the folder `out`.

    Continues from the last checkpoint in `out` if there is one and `resume` is on. `sampler` writes
    samples at evaluations, of held-out pictures too if the model sees. Returns False if a signal
    ended the run before its schedule did.

    Raises `ValueError` for data that does not fit the model, a run of another configuration in
    `out`, a folder in use, and a run that diverged.
    """
    train_set = Dataset(data, "train", vocab_size=config.model.vocab_size)
    held_out = Dataset(data, "held_out", vocab_size=config.model.vocab_size)
    images = image_processor(config.model)
    source = Loader(train_set, loader_config(config, train_set), images)
    batches = held_out_batches(config, held_out, images)
    pictures = _pictures(config, held_out, images)
    bytes_per_token = torch.from_numpy(held_out.bytes_per_token())
    with open_run(out) as folder:
        digest = _claim(folder, config, resume=resume)
        (folder.path / CARD).write_bytes((data / CARD).read_bytes())
        console.print(f"run {folder.path}: {config.name}, data {data}", highlight=False)
        model = _build_model(config, device, train_set, images)
        learner = build_learner(model, config.optim, config.step)
        watch = AlarmWatch(qk_clip_tau=config.step.qk_clip_tau)
        steps = folder.steps()
        seconds = 0.0
        if steps:
            record = load_state(folder.checkpoint(steps[-1]), learner, source, digest=digest)
            seconds = record.seconds
            watch.restart(record.recent_losses)
            console.print(f"resumed after step {learner.num_steps}", highlight=False)
        tensorboard = folder.path / "tensorboard"
        with (
            MetricsLog(folder.metrics_file, tensorboard=tensorboard) as log,
            ProgressLine(console, every=20) as progress,
        ):
            log.write("resume" if steps else "start", learner.num_steps, {"device": str(device)})

            def score(model: Model) -> HeldOutScore:
                return evaluate(
                    model, batches, bytes_per_token=bytes_per_token, domains=held_out.domains
                )

            training = Training(
                config=config,
                digest=digest,
                learner=learner,
                source=source,
                folder=folder,
                log=log,
                progress=progress,
                watch=watch,
                evaluate=score,
                sample=lambda model: sampler(model, pictures),
                probe=lambda model: probe_model(model, batches[0]),
                flops_per_token=flops_per_token(config),
                peak_flops=matmul_rate(device, DTYPES[config.dtype]),
                seconds=seconds,
                best=_best(folder),
            )
            if not steps:
                bigram = _fit_bigram(config, source, batches, bytes_per_token, held_out.domains)
                _note_baseline(bigram, log, progress)
            _announce_time(training, progress)
            return run_loop(training)


def image_processor(model: ModelConfig) -> ImageProcessor:
    """Pictures to the patches of this model, as its preprocessor configuration will say."""
    vision = model.vision
    if vision is None:
        return ImageProcessor()
    return ImageProcessor(
        ImageConfig(
            patch_size=vision.patch_size,
            merge_height=vision.merge_height,
            merge_width=vision.merge_width,
        )
    )


def loader_config(config: PretrainConfig, dataset: Dataset) -> LoaderConfig:
    """The loader's settings: stages by step, domains by their tokens.

    A model without sight leaves out domains that have pictures.
    """
    mixture = natural(dataset, config.data.mixture_exponent)
    if config.model.vision is None:
        seen = {dataset.domains[index] for index in dataset.domain[dataset.num_pictures > 0]}
        mixture = {name: share for name, share in mixture.items() if name not in seen}
    return LoaderConfig(
        seed=config.data.seed,
        tokens_per_step=config.data.tokens_per_step,
        stages=tuple(
            StageConfig(first_step=first, seq_len=seq_len, mixture=mixture)
            for first, seq_len in stage_starts(config.data, config.schedule.num_steps)
        ),
    )


def stage_starts(data: DataConfig, num_steps: int) -> list[tuple[int, int]]:
    """First step and context length of each stage; one too short for a step is left out."""
    starts: list[tuple[int, int]] = []
    done = 0.0
    for stage in data.stages:
        first = round(done * num_steps)
        done += stage.fraction
        if round(done * num_steps) > first:
            starts.append((first, stage.seq_len))
    return starts


def held_out_batches(
    config: PretrainConfig, dataset: Dataset, images: ImageProcessor
) -> list[PackedBatch]:
    """Held-out microbatches, the same at every evaluation: all there is, or a fair part of it."""
    size = config.data.tokens_per_step // config.data.num_microbatches
    seq_len = max(stage.seq_len for stage in config.data.stages)
    num_batches = config.run.num_eval_batches
    settings = loader_config(config, dataset)
    is_small = int(dataset.num_tokens.sum()) <= num_batches * size
    if is_small and len(settings.stages[0].mixture) == len(natural(dataset)):
        return list(epoch(dataset, seq_len, size, images))
    stage = StageConfig(first_step=0, seq_len=seq_len, mixture=settings.stages[0].mixture)
    loader = Loader(dataset, LoaderConfig(seed=0, tokens_per_step=size, stages=(stage,)), images)
    return [loader.batch(step) for step in range(num_batches)]


def _pictures(
    config: PretrainConfig, dataset: Dataset, images: ImageProcessor
) -> list[PicturePrompt]:
    """Held-out pictures to ask about; none for a model without sight."""
    if config.model.vision is None:
        return []
    longest = config.model.max_seq_len - config.run.num_sample_tokens
    return picture_prompts(dataset, images, count=config.run.num_pictures, max_tokens=longest)


def _build_model(
    config: PretrainConfig, device: torch.device, dataset: Dataset, images: ImageProcessor
) -> Model:
    seed_generators(config.seed)
    model = Model(config.model).cast(DTYPES[config.dtype]).to(device)
    model.tokenizer = dataset.tokenizer
    model.processor = Processor(dataset.tokenizer, images if config.model.vision else None)
    return model


def _claim(folder: RunFolder, config: PretrainConfig, *, resume: bool) -> str:
    """Write the configuration into a new folder, or check it against the one that is there.

    Returns the digest of what a resumed run must share: all but how often it looks up. A run that
    is older than a setting goes on with the setting's default, and its record without it.
    """
    content = plain.to_dict(config)
    steps = folder.steps()
    if steps and not resume:
        raise ValueError(
            f"{folder.path}: holds a run at step {steps[-1]}; leave out --no-resume to continue "
            "it, or give another --out"
        )
    if steps:
        kept = read_json(folder.config_file)
        former = plain.to_dict(plain.from_dict(PretrainConfig, kept))
        changed = [path for path in differences(former, content) if not path.startswith("run.")]
        if changed:
            raise ValueError(
                f"{folder.path}: its run has other values of {', '.join(changed)}; continue with "
                "the same ones, or give another --out"
            )
        content = {**kept, "run": content["run"]}
    fresh = folder.config_file.with_suffix(".new")
    write_file(fresh, (json.dumps(content, indent=1) + "\n").encode())
    fresh.replace(folder.config_file)
    return plain.digest_of({**content, "run": plain.to_dict(RunConfig())})


def differences(first: Any, second: Any, path: str = "") -> list[str]:
    """Dotted paths at which two trees of plain values differ."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        found = []
        for key in [*first, *(key for key in second if key not in first)]:
            where = f"{path}.{key}" if path else str(key)
            found += differences(first.get(key), second.get(key), where)
        return found
    return [] if first == second else [path]


def _best(folder: RunFolder) -> tuple[float, int] | None:
    """The best evaluation of the run so far whose checkpoint is still there."""
    if not folder.metrics_file.exists():
        return None
    kept = set(folder.steps())
    scores = [
        (float(entry["bits_per_byte"]), int(entry["step"]))
        for entry in read_metrics(folder.metrics_file)
        if entry["kind"] == "eval" and entry["step"] in kept
    ]
    return min(scores, default=None)


def _fit_bigram(
    config: PretrainConfig,
    source: Loader,
    batches: Sequence[PackedBatch],
    bytes_per_token: Tensor,
    domains: Sequence[str],
) -> HeldOutScore:
    """Of the very tokens the run will train on, once per epoch that it reads."""
    bigram = Bigram(config.model.vocab_size)
    for step in range(config.schedule.num_steps):
        bigram.add(source.batch(step))
    return bigram.score(batches, bytes_per_token=bytes_per_token, domains=domains)


def _note_baseline(bigram: HeldOutScore, log: MetricsLog, progress: ProgressLine) -> None:
    log.write("baseline", 0, {"bits_per_byte": bigram.bits_per_byte, "by_domain": bigram.by_domain})
    progress.note(
        f"an interpolated bigram fitted on the same tokens: {bigram.bits_per_byte:.4f} bits per "
        "byte held out"
    )


def _announce_time(training: Training, progress: ProgressLine) -> None:
    """Time one microbatch, forward and backward, and say how long the run will take."""
    learner, config = training.learner, training.config
    num_left = config.schedule.num_steps - learner.num_steps
    if not num_left:
        progress.note("nothing is left to do: the run is at the end of its schedule")
        return
    batch = training.source.batch(training.source.step, 0, config.data.num_microbatches)
    seconds = _seconds_of(learner, batch) * config.data.num_microbatches
    assignment = assignment_of(learner.model)
    seconds += muon_flops(assignment, config.optim) / training.peak_flops
    progress.note(
        f"time: about {seconds:.2f} s a step, {duration(seconds * num_left)} for {num_left} steps "
        f"of {config.data.tokens_per_step:,} tokens ({config.num_tokens:,} in all)"
    )


def _seconds_of(learner: Learner, batch: PackedBatch) -> float:
    """Of forward and backward; nothing of the learner is changed."""
    device = device_of(learner.model)
    elapsed = 0.0
    for _ in range(2):  # the first one warms up
        start = time.perf_counter()
        output = run_model(learner.model, batch, recompute=learner.config.recompute)
        targets_T = torch.where(batch.weights > 0, batch.targets, -100).to(device)
        token_losses(learner.model, output, targets_T).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elapsed = time.perf_counter() - start
        learner.optimizer.zero_grad()
    return elapsed
