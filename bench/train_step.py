"""Time one training step of a size on a GPU: tokens/s, MFU, and which kernels the time goes to.

    PYTHONPATH=src python3 bench/train_step.py --size small [--seq-len 4096] [--positions 65536]

The step is the real one (`train.step`) on random tokens packed into sequences of one length, and
its time the mean over steps of which every tenth measures attention logits, as in a run. `--graph`
measures it also with forward and backward as one CUDA graph (`step.use_cuda_graph`). MFU is the
model's FLOPs (`model.counts.flop_counts`: products with active weights, attention and KDA; three
times the forward) over the rate of a large bf16 product measured in the same run.

`--fla kda attn_res short_conv rms_norm` measures the same model beside it with fla's operators in
those places (`fla_ops.py`), step by step in turn; `--fla-impl OP=IMPL` says what the others run
then. Weights and optimizer states of both are there all the while, and count in the peaks.
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import fla_ops
import torch
import triton
from fla_tuning import Tuning
from kda import compile_fla
from provenance import commit_of
from torch.profiler import ProfilerActivity, profile

from baltoro.config import replace
from baltoro.data.pack import PackedBatch
from baltoro.model.counts import flop_counts
from baltoro.model.model import Model
from baltoro.recipes.pretrain import PretrainConfig, pretrain_config
from baltoro.train.forecast import matmul_rate
from baltoro.train.learner import Learner, build_learner
from baltoro.train.step import train_step


def batch_of(positions: int, seq_len: int, vocab_size: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size - 300, (positions + 1,), generator=generator)
    return PackedBatch(
        tokens=ids[:-1],
        targets=ids[1:],
        weights=torch.ones(positions),
        cu_seqlens=torch.arange(0, positions + 1, seq_len, dtype=torch.int32),
        columns={},
    )


def seconds_of(learner: Learner, batches: list[PackedBatch], count: int) -> list[float]:
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        train_step(learner, batches, lr=1e-4)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times


def kernels_of(learner: Learner, batches: list[PackedBatch], count: int) -> list[dict[str, object]]:
    learner.num_steps = 1  # a step that measures no attention logits
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        train_step(learner, batches, lr=1e-4)
        torch.cuda.synchronize()
    events = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    return [
        {"name": e.key[:90], "ms": round(e.self_device_time_total / 1e3, 2), "calls": e.count}
        for e in events[:count]
    ]


class Side(NamedTuple):
    """A learner, and which of its operators are fla's."""

    learner: Learner
    fla: list[str]


def speeds_of(
    sides: dict[str, Side], batches: list[PackedBatch], count: int, flops: int, rate: float
) -> dict[str, dict[str, float]]:
    """Times of `count` steps after a few, and what follows from their mean.

    The sides take turns, step by step: what the host gives changes while they run.
    """
    found: dict[str, dict[str, float]] = {}
    for name, (learner, fla) in sides.items():
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with fla_ops.replaced(fla):
            seconds_of(learner, batches, 3)
            first = time.perf_counter() - start
            learner.num_steps = 0
            # the second that measures logits is the one that is captured
            seconds_of(learner, batches, 1)
        learner.num_steps = 0
        peak = torch.cuda.max_memory_allocated() / 2**30
        found[name] = {"first_three_steps_s": first, "peak_gib": peak}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(count):
        for name, (learner, fla) in sides.items():
            with fla_ops.replaced(fla):
                times[name] += seconds_of(learner, batches, 1)
    for name, result in found.items():
        step = statistics.mean(times[name])
        speed = sum(len(batch.tokens) for batch in batches) / step
        result |= {
            "step_s": step,
            "median_step_s": statistics.median(times[name]),
            "tokens_per_s": speed,
            "mfu": speed * flops / rate,
        }
    return found


def with_impls(config: PretrainConfig, pairs: list[str]) -> PretrainConfig:
    """`config` with `OP=IMPL` set in its model."""
    return replace(
        config, {f"model.impl.{op}": impl for op, impl in (pair.split("=") for pair in pairs)}
    )


def learner_of(config: PretrainConfig) -> Learner:
    torch.manual_seed(0)
    model = Model(config.model).cast(torch.bfloat16).cuda()
    return build_learner(model, config.optim, config.step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="small")
    parser.add_argument("--positions", type=int, default=65536)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--kernels", type=int, default=40, help="lines of the profile")
    parser.add_argument("--impl", action="append", default=[], metavar="OP=IMPL")
    parser.add_argument("--graph", action="store_true", help="measure CUDA graphs too")
    parser.add_argument("--fla", nargs="+", choices=list(fla_ops.REPLACED), default=[])
    parser.add_argument("--fla-impl", action="append", default=[], metavar="OP=IMPL")
    parser.add_argument("--out", type=Path, default=Path("bench/results/train_step.json"))
    parser.add_argument("--commit", help="instead of asking git")
    arguments = parser.parse_args()
    commit = commit_of(arguments.commit)
    config = with_impls(pretrain_config(arguments.size, is_gpu=True), arguments.impl)
    batches = [batch_of(arguments.positions, arguments.seq_len, config.model.vocab_size)]
    rate = matmul_rate(torch.device("cuda"), torch.bfloat16)
    flops = 3 * flop_counts(config.model, arguments.seq_len).total
    result: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
        "size": arguments.size,
        "impl": dataclasses.asdict(config.model.impl),
        "positions": arguments.positions,
        "seq_len": arguments.seq_len,
        "bf16_tflop_per_s": rate / 1e12,
    }
    configs = {"ours": config}
    names: dict[str, list[str]] = {"ours": []}
    tuning = None
    if arguments.fla:
        configs["fla"] = with_impls(config, arguments.fla_impl)
        names["fla"] = arguments.fla
        tuning = Tuning()
        lengths = [arguments.seq_len] * (arguments.positions // arguments.seq_len)
        compile_fla(tuning, ((config.model.kda.num_heads, lengths),))
        result["fla"] = {"operators": arguments.fla, "impl": arguments.fla_impl}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    ways = {"eager": {}, **({"graph": {"step.use_cuda_graph": True}} if arguments.graph else {})}
    result["ours_over_fla"] = {}
    for way, changes in ways.items():
        sides = {
            name: Side(learner_of(replace(own, changes)), names[name])
            for name, own in configs.items()
        }
        try:
            speeds = speeds_of(sides, batches, arguments.steps, flops, rate)
        except RuntimeError as error:  # a side that cannot be captured; what was found is kept
            if way == "eager":
                raise
            result[f"{way}_error"] = str(error)[:300]
            continue
        for name, speed in speeds.items():
            place = result if name == "ours" else result[name]
            place |= speed if way == "eager" else {way: speed}
        if len(speeds) > 1:
            ratio = speeds["ours"]["tokens_per_s"] / speeds["fla"]["tokens_per_s"]
            result["ours_over_fla"] |= {way: ratio}
        if way == "eager":
            learner = sides["ours"].learner
            result["kernels"] = kernels_of(learner, batches, arguments.kernels)
            del learner
        del sides
        torch.cuda.empty_cache()
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    if tuning is not None:
        tuning.close()
        result["fla"]["what"] = f"{fla_ops.version()}, {tuning.what()}"
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
