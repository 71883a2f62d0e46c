"""Pretraining by size: the configuration, and the verbs `train` and `recipes`."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from baltoro import config as plain
from baltoro.config import replace
from baltoro.model.config import gpu_impl
from baltoro.model.counts import parameter_counts
from baltoro.model.model import Model
from baltoro.model.presets import preset
from baltoro.optim.config import OptimConfig
from baltoro.optim.schedule import ScheduleConfig
from baltoro.recipes import ladder
from baltoro.serve.generate import checked_device, generate_tokens, image_features
from baltoro.serve.sampler import Sampling
from baltoro.text.markers import CLOSE
from baltoro.text.processor import Prompt
from baltoro.train.config import DataConfig, PretrainConfig, RunConfig, StepConfig
from baltoro.train.forecast import memory_forecast
from baltoro.train.pretrain import pretrain
from baltoro.train.samples import PicturePrompt, Sample

Schedule = Literal["cosine", "wsd"]
PROMPTS = ("The ", "Once upon a time", "def ")


def pretrain_config(
    size: str,
    *,
    num_tokens: int | None = None,
    schedule: Schedule = "cosine",
    is_gpu: bool = False,
) -> PretrainConfig:
    """The recipe of a size: bf16 on a GPU, fp32 on a CPU.

    `num_tokens` is another horizon than the size's own; batch and learning rate follow it. Cosine
    falls to a tenth of the peak behind 1 % of warm-up; see `optim.schedule` for WSD.
    """
    rung = ladder.rung(size)
    horizon = rung.num_tokens if num_tokens is None else num_tokens
    model = dataclasses.replace(preset(rung.preset), num_mtp_layers=rung.num_mtp_layers)
    if is_gpu:
        model = dataclasses.replace(model, impl=gpu_impl(model))
    num_active = parameter_counts(model).active
    batch = ladder.tokens_per_step(num_active, horizon, rung.seq_len)
    peak = ladder.peak_learning_rate(num_active, horizon, rung.rate_factor)
    num_steps = max(1, round(horizon / batch))
    look_up = max(1, num_steps // 6)
    return PretrainConfig(
        name=f"pretrain-{size}",
        seed=0,
        dtype="bfloat16" if is_gpu else "float32",
        model=model,
        data=DataConfig(
            seed=0,
            tokens_per_step=batch,
            num_microbatches=max(1, batch // rung.max_microbatch),
            stages=ladder.context_stages(rung.seq_len),
        ),
        optim=OptimConfig(
            newton_schulz_dtype="bfloat16" if is_gpu else "float32",
            newton_schulz_impl="triton" if is_gpu else "torch",
            newton_schulz_wide_impl="triton" if is_gpu else "torch",
            muon_impl="triton" if is_gpu else "torch",
        ),
        schedule=ScheduleConfig(
            kind=schedule, num_steps=num_steps, peak=peak, floor=peak / 10, warmup_fraction=0.01
        ),
        step=StepConfig(
            qk_clip_every=10 if is_gpu else 5,
            max_logits_impl="triton" if is_gpu else "torch",
            recompute=rung.recompute,
        ),
        run=RunConfig(eval_every=look_up, save_every=look_up),
    )


def train(
    size: str,
    *,
    data: Path,
    out: Path,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    tokens: int | None = None,
    schedule: Schedule = "cosine",
    resume: bool = True,
    overrides: Mapping[str, object],
) -> None:
    """Pretrain SIZE (nano, mini, small, base) on a data folder; continue a run that was begun.

    A path of the configuration is an option too: --schedule.peak 1e-3, --run.eval_every 50. They
    are for a try; RUN/config.json records them. `baltoro recipes` prints what a size fixes.

    Args:
        data: folder that `baltoro data build` made.
        out: folder of the run: checkpoints, metrics, samples.
        device: auto takes CUDA if it is there, and says so.
        tokens: length of the run; absent, the size's own. Batch and learning rate follow.
        schedule: of the learning rate.
        resume: continue the run in OUT.
    """
    if tokens is not None and tokens < 1:
        raise ValueError(f"tokens={tokens}: must be positive")
    chosen = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    where = checked_device(chosen)
    is_gpu = where.type == "cuda"
    config = pretrain_config(size, num_tokens=tokens, schedule=schedule, is_gpu=is_gpu)
    config = replace(config, overrides)
    console = Console(highlight=False)
    console.print(summary(config, where))
    check_memory(config, where, size, console)
    pretrain(
        config,
        data=data,
        out=out,
        device=where,
        resume=resume,
        sampler=lambda model, pictures: draw_samples(
            model, PROMPTS, pictures, config.run.num_sample_tokens
        ),
        console=console,
    )


def recipes() -> None:
    """What each size fixes: shape, horizon, batch, learning rate, context; on a CPU and a GPU."""
    for size, rung in ladder.LADDER.items():
        config = pretrain_config(size)
        counts = parameter_counts(config.model)
        stages = " > ".join(str(stage.seq_len) for stage in config.data.stages)
        print(f"{size}: {rung.why}")
        print(
            f"  {counts.total:,} parameters, {counts.active:,} active; "
            f"{config.model.num_layers} layers of {config.model.hidden_size}, vocabulary "
            f"{config.model.vocab_size:,}"
        )
        print(
            f"  {config.num_tokens:,} tokens in {config.schedule.num_steps:,} steps of "
            f"{config.data.tokens_per_step:,}; peak rate {config.schedule.peak:g}, context {stages}"
        )


def summary(config: PretrainConfig, device: torch.device) -> str:
    """The configuration as lines of paths and values, and the device."""
    lines = [f"device: {device}"]
    for path in plain.paths(config):
        value: object = config
        for part in path.split("."):
            value = getattr(value, part)
        if not dataclasses.is_dataclass(value):
            lines.append(f"{path}: {value}")
    return "\n".join(lines)


def check_memory(config: PretrainConfig, device: torch.device, size: str, console: Console) -> None:
    """Print the forecast; say which smaller size fits if this one may not.

    Raises `ValueError` if weights and optimiser alone exceed the memory that is free.
    """
    forecast = memory_forecast(config, device)
    console.print(forecast.describe())
    if forecast.total <= forecast.available:
        return
    advice = _smaller_size(device, size)
    if forecast.state > forecast.available:
        raise ValueError(f"{forecast.describe()}: {size} will not fit; {advice}")
    console.print(
        f"warning: activations may not fit; --step.recompute true or more "
        f"--data.num_microbatches lower them, or {advice}"
    )


def _smaller_size(device: torch.device, size: str) -> str:
    sizes = list(ladder.LADDER)
    for smaller in reversed(sizes[: sizes.index(size)]):
        forecast = memory_forecast(pretrain_config(smaller, is_gpu=device.type == "cuda"), device)
        if forecast.total <= forecast.available:
            return f"train {smaller}, which needs {forecast.total / 1e9:.2f} GB"
    return "no smaller size fits either"


def draw_samples(
    model: Model,
    prompts: Sequence[str],
    pictures: Sequence[PicturePrompt],
    max_new_tokens: int,
) -> list[Sample]:
    """How `model` continues each prompt and each picture, drawn with the same seed every time."""
    tokenizer = model.tokenizer
    asked = [(Prompt(tokenizer.encode(prompt)), Sample(prompt, "")) for prompt in prompts]
    asked += [
        (each.prompt, Sample(each.question, "", each.picture, each.expected)) for each in pictures
    ]
    was_training = model.training
    model.eval()
    samples = []
    for prompt, sample in asked:
        generator = torch.Generator(model.lm_head.weight.device).manual_seed(0)
        tokens = generate_tokens(
            model,
            prompt.ids,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature=0.8),
            stop_ids={*tokenizer.stop_ids, tokenizer.special_ids[CLOSE]},
            generator=generator,
            image_features=image_features(model, prompt),
        )
        text = tokenizer.decode([token.id for token in tokens], skip_special=True)
        samples.append(sample._replace(text=text))
    model.train(was_training)
    return samples
