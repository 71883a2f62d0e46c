"""Time one training step of a size on a GPU: tokens/s, MFU, and which kernels the time goes to.

    PYTHONPATH=src python3 bench/train_step.py --size small [--seq-len 4096] [--positions 65536]

The step is the real one (`train.step`) on random tokens packed into sequences of one length. MFU
is the model's FLOPs (`model.counts.flop_counts`: products with active weights, attention and KDA;
three times the forward) over the rate of a large bf16 product measured in the same run.
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

import torch
import triton
from provenance import commit_of
from torch.profiler import ProfilerActivity, profile

from baltoro.config import replace
from baltoro.data.pack import PackedBatch
from baltoro.model.counts import flop_counts
from baltoro.model.model import Model
from baltoro.recipes.pretrain import pretrain_config
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
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        train_step(learner, batches, lr=1e-4)
        torch.cuda.synchronize()
    events = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    return [
        {"name": e.key[:90], "ms": round(e.self_device_time_total / 1e3, 2), "calls": e.count}
        for e in events[:count]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="small")
    parser.add_argument("--positions", type=int, default=65536)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--kernels", type=int, default=40, help="lines of the profile")
    parser.add_argument("--impl", action="append", default=[], metavar="OP=IMPL")
    parser.add_argument("--out", type=Path, default=Path("bench/results/train_step.json"))
    parser.add_argument("--commit", help="instead of asking git")
    arguments = parser.parse_args()
    config = pretrain_config(arguments.size, is_gpu=True)
    config = replace(
        config, {f"model.impl.{op}": impl for op, impl in (s.split("=") for s in arguments.impl)}
    )
    torch.manual_seed(0)
    model = Model(config.model).cast(torch.bfloat16).cuda()
    learner = build_learner(model, config.optim, config.step)
    batches = [batch_of(arguments.positions, arguments.seq_len, config.model.vocab_size)]
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    seconds_of(learner, batches, 2)
    first = time.perf_counter() - start
    step = statistics.median(seconds_of(learner, batches, arguments.steps))
    rate = matmul_rate(torch.device("cuda"), torch.bfloat16)
    flops = 3 * flop_counts(config.model, arguments.seq_len).total
    speed = arguments.positions / step
    commit = commit_of(arguments.commit)
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
        "size": arguments.size,
        "impl": dataclasses.asdict(config.model.impl),
        "positions": arguments.positions,
        "seq_len": arguments.seq_len,
        "first_two_steps_s": first,
        "step_s": step,
        "tokens_per_s": speed,
        "bf16_tflop_per_s": rate / 1e12,
        "mfu": speed * flops / rate,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "kernels": kernels_of(learner, batches, arguments.kernels),
    }
    print(json.dumps(result, indent=1))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
