"""Time `chunk_kda_fused` on a GPU beside its floor, fla's `chunk_kda` and softmax attention.

    PYTHONPATH=src python3 bench/kda.py [--quick] [--fla-seconds 90] [--out bench/results/kda.json]

Norm of q and k, decay map and sigmoid are inside ours and fla's. The gates are -5 sigmoid(x):
x ~ N(0, 1) forgets fast, N(-4, 1) slowly. How times are taken is in `timing.py`. Before any is,
gradients are compared with the reference in fp64, and nothing is reported if one is further away
than 1 %. fla takes part where it can be imported, until its seconds are over; its launch shapes
are those of `fla_launches.json`, or are searched for (`fla_tuning.py`). `softmax` is causal
attention of the same q, k and v by torch's flash and cuDNN backends, each sequence of a pack by
itself.

Floor: the larger of the bytes that must move (1282 a token and head forward, 3590 with the
backward) at a measured copy rate, and 186k and 662k FLOPs at a measured bf16 matrix rate.
"""

import argparse
import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import fla_ops
import torch
import torch.nn.functional as F
from fla_tuning import TABLE, Tuning
from provenance import commit_of
from timing import Rates, both_ms, peak_gib
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.errors import TritonError

from baltoro.ops.kda.fused import chunk_kda_fused

MIXED = [1300, 547, 2048, 963, 271, 3063]
QUICK = ((96, [8192]), (16, [4096]), (96, MIXED))
SHAPES = (
    *QUICK, (96, [4096]), (96, [32768]), (16, [8192]), (16, [32768]), (96, [1024] * 8), (16, MIXED),
)  # fmt: skip
DIM = 128
BOUND = -5.0
GATES = {"fast": 0.0, "slow": -4.0}
FORWARD_BYTES, STEP_BYTES = 1282, 3590
FORWARD_FLOPS, STEP_FLOPS = 186e3, 662e3
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


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


def forward(op: Callable, x: dict[str, torch.Tensor]) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return op(x)

    return run


def step(op: Callable, x: dict[str, torch.Tensor]) -> Callable[[], object]:
    leaves = [x[name].detach().requires_grad_() for name in LEAVES]
    inputs = {**x, **dict(zip(LEAVES, leaves, strict=True))}
    return lambda: torch.autograd.grad(op(inputs), leaves, x["do"])


def refuse_wrong_results() -> None:
    for shift in GATES.values():
        x = draw(2, [200, 1, 63], shift, seed=1)
        wide = {n: t.double() if t.is_floating_point() else t for n, t in x.items()}
        exact = step(lambda x: ours(x, "reference"), wide)()
        for name, got, want in zip(LEAVES, step(ours, x)(), exact, strict=True):
            error = float((got.double() - want).norm() / want.norm())
            if not error < 1e-2:
                raise SystemExit(f"bench: gradient of {name} is off by {error:.1e}; nothing timed")


def measure(op: Callable, x: dict[str, torch.Tensor]) -> dict[str, float]:
    return {
        **both_ms(forward(op, x), "forward"),
        **both_ms(step(op, x), "step"),
        "step_peak_gib": peak_gib(step(op, x)),
    }


def softmax(x: dict[str, torch.Tensor], backend: SDPBackend) -> dict[str, float]:
    """Causal attention, a sequence after the other."""
    bounds = x["cu_seqlens"].tolist()
    pieces = [
        [x[name][start:end].transpose(0, 1)[None].contiguous() for name in ("q", "k", "v", "do")]
        for start, end in pairwise(bounds)
    ]
    leaves = [[t.requires_grad_() for t in piece[:3]] for piece in pieces]

    def attend() -> list[torch.Tensor]:
        with sdpa_kernel(backend):
            return [F.scaled_dot_product_attention(*qkv, is_causal=True) for qkv in leaves]

    def forward() -> object:
        with torch.no_grad():
            return attend()

    def step() -> object:
        return torch.autograd.grad(
            attend(), [t for qkv in leaves for t in qkv], [piece[3] for piece in pieces]
        )

    return both_ms(forward, "forward") | both_ms(step, "step")


def attempt(row: dict[str, object], name: str, run: Callable[[], object], budget: float) -> None:
    """`row[name]`, or why it is left out."""
    try:
        with fla_ops.seconds(budget):
            row[name] = run()
    except (RuntimeError, TritonError, fla_ops.BudgetSpentError) as error:
        row[f"{name}_left_out"] = str(error)[:200]


def compile_fla(tuning: Tuning, shapes: tuple) -> None:
    """Compile fla's kernels for every number of heads, for a sequence and for a pack."""
    kinds = {(num_heads, len(lengths) > 1) for num_heads, lengths in shapes}
    inputs = [draw(num_heads, [64] * (1 + is_pack), 0.0) for num_heads, is_pack in sorted(kinds)]
    print(
        f"bench: fla {tuning.compile_ahead(lambda: [step(fla, x)() for x in inputs])}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/kda.json"))
    parser.add_argument("--commit", help="instead of asking git")
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK}")
    parser.add_argument("--heads", type=int, help="only these")
    parser.add_argument("--fla-seconds", type=float, default=90.0, help="0 leaves fla out")
    parser.add_argument("--fla-table", type=Path, default=TABLE, help="winners to take")
    parser.add_argument("--fla-nearest", type=int, help="of a kernel's shapes; all if not given")
    parser.add_argument("--fla-out", type=Path, help="where to keep the winners")
    arguments = parser.parse_args()
    tuning = None
    if fla_ops.chunk_kda is not None and arguments.fla_seconds > 0:
        tuning = Tuning(table=arguments.fla_table, nearest=arguments.fla_nearest)
    shapes = QUICK if arguments.quick else SHAPES
    shapes = tuple(shape for shape in shapes if arguments.heads in (None, shape[0]))
    try:
        measure_all(shapes, tuning, arguments)
    finally:
        if tuning is not None:
            tuning.close()


def measure_all(shapes: tuple, tuning: Tuning | None, arguments: argparse.Namespace) -> None:
    commit = commit_of(arguments.commit)
    start = time.monotonic()
    if tuning is not None:
        compile_fla(tuning, shapes)
    fla_left = arguments.fla_seconds - (time.monotonic() - start)
    refuse_wrong_results()
    rates = Rates.measured()
    result = {**rates.head(commit), "fla": None, "rows": []}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for num_heads, lengths in shapes:
        token_heads = num_heads * sum(lengths)
        floors = {
            "forward_ms": rates.floor_ms(FORWARD_BYTES * token_heads, FORWARD_FLOPS * token_heads),
            "step_ms": rates.floor_ms(STEP_BYTES * token_heads, STEP_FLOPS * token_heads),
        }
        attention: dict[str, object] = {}
        for gate, shift in GATES.items():
            x = draw(num_heads, lengths, shift)
            row = {"heads": num_heads, "lengths": lengths, "gate": gate, "floor": floors}
            row["ours"] = measure(ours, x)
            if tuning is not None:
                start = time.monotonic()
                attempt(row, "fla", lambda x=x: measure(fla, x), fla_left)
                fla_left -= time.monotonic() - start
                result["fla"] = f"{fla_ops.version()}, {tuning.what()}"
                if arguments.fla_out is not None:
                    tuning.save(arguments.fla_out)
            for name, backend in BACKENDS.items() if not attention else ():
                attempt(attention, f"softmax_{name}", lambda x=x, b=backend: softmax(x, b), 120.0)
            result["rows"].append(row | attention)
            print(json.dumps(result["rows"][-1]), flush=True)
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
            del x


if __name__ == "__main__":
    main()
