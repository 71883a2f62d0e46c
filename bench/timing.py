"""Times of calls on a GPU, and the rates of this card that floors are formed with.

`eager` is the median of device events around a call, host gaps included; `graph` the replay of a
CUDA graph of it; `host` the time a call keeps Python busy. The cache is flushed before each call.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

Call = Callable[[], object]


def keep_rows(
    work: Iterable[tuple[str, Call]], result: dict[str, Any], out: Path, *, end: float
) -> None:
    """Put the rows of named calls into `result["rows"]` and the file, one after another.

    What would begin after `end` (of `time.monotonic`) is named in `result["left_out"]`.
    """
    for name, run in work:
        if time.monotonic() > end:
            result["left_out"].append(name)
            print(f"left out: {name}", flush=True)
        else:
            row = run()
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


def eager_ms(run: Call, repeats: int = 21) -> float:
    for _ in range(3):
        run()
    flush = torch.empty(64 * 2**20, dtype=torch.float32, device="cuda")
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def graph_ms(run: Call) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return eager_ms(graph.replay)


def host_us(run: Call, repeats: int = 200) -> float:
    for _ in range(20):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / repeats * 1e6


def both_ms(run: Call, name: str = "") -> dict[str, float]:
    """Eager and graph, keys led by `name`."""
    lead = f"{name}_" if name else ""
    return {f"{lead}eager_ms": eager_ms(run), f"{lead}graph_ms": graph_ms(run)}


def peak_gib(run: Call) -> float:
    """Memory above what was held before the call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def ceilings() -> tuple[float, float]:
    """Bytes a second of a copy, read and write counted, and bf16 FLOPs a second of a product."""
    a = torch.randn(2**29, device="cuda")
    b = torch.empty_like(a)
    copy = eager_ms(lambda: b.copy_(a))
    m = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = eager_ms(lambda: m @ m)
    return 2 * a.nbytes / copy * 1e3, 2 * 8192**3 / product * 1e3


@dataclass(frozen=True)
class Rates:
    """What this card does in this run."""

    bytes_per_s: float
    flops_per_s: float

    @classmethod
    def measured(cls) -> "Rates":
        return cls(*ceilings())

    def floor_ms(self, num_bytes: float, flops: float = 0.0) -> float:
        """The longer of moving the bytes and of the operations, in milliseconds."""
        return 1e3 * max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)

    def head(self, commit: str) -> dict[str, object]:
        """What every result says about where it was measured."""
        return {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": commit,
            "copy_tb_per_s": self.bytes_per_s / 1e12,
            "bf16_tflop_per_s": self.flops_per_s / 1e12,
        }
