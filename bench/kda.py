"""Time `chunk_kda_fused` on a GPU beside its floor and, where it is installed, fla's `chunk_kda`.

    PYTHONPATH=src python3 bench/kda.py [--quick] [--fla-seconds 90] [--out bench/results/kda.json]

Norm of q and k, decay map and sigmoid are inside both. `eager` is the median of device events
around the call, host gaps included; `graph` the replay of a CUDA graph of it. The gates are
-5 sigmoid(x): x ~ N(0, 1) forgets fast, N(-4, 1) slowly. Before any time is taken, gradients are
compared with the reference in fp64, and nothing is reported if one is further away than 1 %. fla
takes part where it can be imported, in the shapes of `FLA_SHAPES`, until its seconds are over; how
its launch shapes are found is in `fla_ops.py`. `softmax` is causal attention of the same q, k and v
by cuDNN, for one sequence.

Floor: the larger of the bytes that must move (1282 a token and head forward, 3590 with the
backward) at a measured copy rate, and 186k and 662k FLOPs at a measured bf16 matrix rate.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import fla_ops
import torch
import torch.nn.functional as F
import triton
from provenance import commit_of
from torch.nn.attention import SDPBackend, sdpa_kernel

from baltoro.ops.kda.fused import chunk_kda_fused

SHAPES = ((96, [4096]), (96, [8192]), (96, [32768]), (16, [4096]), (16, [8192]), (16, [32768]))
FLA_SHAPES = ((96, 8192), (16, 4096))
PACKINGS = ((96, [1300, 547, 2048, 963, 271, 3063]), (96, [1024] * 8))
DIM = 128
BOUND = -5.0
GATES = {"fast": 0.0, "slow": -4.0}
FORWARD_BYTES, STEP_BYTES = 1282, 3590
FORWARD_FLOPS, STEP_FLOPS = 186e3, 662e3


def draw(
    num_heads: int, lengths: list[int], shift: float, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Inputs, the output's gradient and the boundaries."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    shape = (sum(lengths), num_heads, DIM)
    return {
        "q": normal(*shape).bfloat16(),
        "k": normal(*shape).bfloat16(),
        "v": normal(*shape).bfloat16(),
        "decay_logits": (normal(*shape) + shift).bfloat16(),
        "beta_logits": normal(*shape[:2]).bfloat16(),
        "A_log": torch.zeros(num_heads, device="cuda"),
        "dt_bias": torch.zeros(num_heads * DIM, device="cuda"),
        "do": normal(*shape).bfloat16(),
        "cu_seqlens": torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32),
    }


LEAVES = ("q", "k", "v", "decay_logits", "beta_logits", "A_log", "dt_bias")


def ours(x: dict[str, torch.Tensor], impl: str = "triton") -> torch.Tensor:
    return chunk_kda_fused(
        *(x[name] for name in LEAVES), cu_seqlens=x["cu_seqlens"], gate_lower_bound=BOUND, impl=impl
    ).o


def fla(x: dict[str, torch.Tensor]) -> torch.Tensor:
    inputs = (x[name] for name in LEAVES)
    return fla_ops.kda(*inputs, cu_seqlens=x["cu_seqlens"], gate_lower_bound=BOUND).o


def warm_fla(shapes: Sequence[tuple[int, int]], budget: float) -> None:
    """Compile fla's launch shapes for heads and tokens, each of the first in a process."""
    workers = [
        subprocess.Popen([sys.executable, __file__, "--warm", str(H), str(T), str(number)])
        for H, T in shapes
        for number in range(fla_ops.TRIED)
    ]
    end = time.monotonic() + budget
    for worker in workers:
        try:
            worker.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def run_warm(num_heads: int, num_tokens: int, number: int) -> None:
    """One step with the `number`th launch shape of every kernel."""
    fla_ops.hold_autotuning(number, number + 1)
    step(fla, draw(num_heads, [num_tokens], 0.0))()
    torch.cuda.synchronize()


def forward(op: Callable, x: dict[str, torch.Tensor]) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return op(x)

    return run


def step(op: Callable, x: dict[str, torch.Tensor]) -> Callable[[], object]:
    leaves = [x[name].detach().requires_grad_() for name in LEAVES]
    inputs = {**x, **dict(zip(LEAVES, leaves, strict=True))}
    return lambda: torch.autograd.grad(op(inputs), leaves, x["do"])


def eager_ms(run: Callable[[], object], repeats: int = 11) -> float:
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


def graph_ms(run: Callable[[], object]) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return eager_ms(graph.replay)


def peak_gib(run: Callable[[], object]) -> float:
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


def refuse_wrong_results() -> None:
    for shift in GATES.values():
        x = draw(2, [200, 1, 63], shift, seed=1)
        wide = {n: t.double() if t.is_floating_point() else t for n, t in x.items()}
        exact = step(lambda x: ours(x, "reference"), wide)()
        for name, got, want in zip(LEAVES, step(ours, x)(), exact, strict=True):
            error = float((got.double() - want).norm() / want.norm())
            if not error < 1e-2:
                raise SystemExit(f"bench: gradient of {name} is off by {error:.1e}; nothing timed")


def measure(op: Callable, x: dict[str, torch.Tensor], has_graph: bool) -> dict[str, float]:
    times = {
        "forward_eager_ms": eager_ms(forward(op, x)),
        "step_eager_ms": eager_ms(step(op, x)),
        "step_peak_gib": peak_gib(step(op, x)),
    }
    if has_graph:
        times["forward_graph_ms"] = graph_ms(forward(op, x))
        times["step_graph_ms"] = graph_ms(step(op, x))
    return times


def softmax_times(x: dict[str, torch.Tensor]) -> dict[str, float]:
    """Milliseconds of causal attention over one sequence."""
    leaves = [x[name].transpose(0, 1)[None].detach().requires_grad_() for name in ("q", "k", "v")]
    d_out = x["do"].transpose(0, 1)[None]

    def attend() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*leaves, is_causal=True)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attend()

    return {
        "forward_eager_ms": eager_ms(forward),
        "step_eager_ms": eager_ms(lambda: torch.autograd.grad(attend(), leaves, d_out)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/kda.json"))
    parser.add_argument("--commit", help="instead of asking git")
    parser.add_argument("--quick", action="store_true", help="the two shapes of the targets only")
    parser.add_argument("--fla-seconds", type=float, default=90.0, help="0 leaves fla out")
    parser.add_argument("--warm", type=int, nargs=3, help="heads, tokens, launch shape; internal")
    arguments = parser.parse_args()
    if arguments.warm:
        run_warm(*arguments.warm)
        return
    has_fla = fla_ops.chunk_kda is not None and arguments.fla_seconds > 0
    fla_end = time.monotonic() + arguments.fla_seconds
    if has_fla:
        fla_ops.hold_autotuning(0, fla_ops.TRIED)
        warm_fla(FLA_SHAPES, 0.6 * arguments.fla_seconds)
    commit = commit_of(arguments.commit)
    refuse_wrong_results()
    bytes_per_s, flops_per_s = ceilings()
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
        "copy_tb_per_s": bytes_per_s / 1e12,
        "bf16_tflop_per_s": flops_per_s / 1e12,
        "fla": fla_ops.version() if has_fla else None,
        "rows": [],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    shapes = ((96, [8192]), (16, [4096])) if arguments.quick else (*SHAPES, *PACKINGS)
    for num_heads, lengths in shapes:
        token_heads = num_heads * sum(lengths)
        floors = {
            "forward_ms": 1e3 * token_heads * max(
                FORWARD_BYTES / bytes_per_s, FORWARD_FLOPS / flops_per_s),
            "step_ms": 1e3 * token_heads * max(STEP_BYTES / bytes_per_s, STEP_FLOPS / flops_per_s),
        }  # fmt: skip
        for gate, shift in GATES.items():
            x = draw(num_heads, lengths, shift)
            row = {"heads": num_heads, "lengths": lengths, "gate": gate, "floor": floors}
            is_short = sum(lengths) <= 8192
            row["ours"] = measure(ours, x, has_graph=is_short)
            if len(lengths) == 1:
                try:
                    row["softmax"] = softmax_times(x)
                except RuntimeError as error:  # where cuDNN does not serve it
                    row["softmax_left_out"] = str(error)[:200]
            if has_fla and (num_heads, sum(lengths)) in FLA_SHAPES and len(lengths) == 1:
                try:
                    with fla_ops.seconds(fla_end - time.monotonic()):
                        row["fla"] = measure(fla, x, has_graph=False)
                        row["fla"] |= measure(fla, x, has_graph=is_short)
                except (RuntimeError, fla_ops.BudgetSpentError) as error:
                    row["fla_left_out"] = str(error)[:200]
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
            del x


if __name__ == "__main__":
    main()
