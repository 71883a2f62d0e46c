"""Time Muon's parts on a GPU beside their floors and plain PyTorch.

    PYTHONPATH=src python3 bench/muon.py [--budget 40] [--out bench/results/muon.json]

`newton_schulz`: `loop` is `impl="torch"` with bf16 products, `compile` torch.compile of it, and
`triton` `impl="triton"`: up to 128 rows the Gram form, with its three kernels one by one, beyond
the loop.
`around`: what stands before and behind the products, for bf16 gradients and parameters; `lists` is
`ops.muon` in lists of plain PyTorch, `triton` in kernels.
Times are medians of CUDA-graph replays with the cache flushed. Errors are relative norms against
fp64, on normal numbers and on matrices whose singular values fall as a power law or end after a
few; nothing is reported where ours errs more than the loop.

Floor of r x c matrices up to 128 rows: X read twice and written once at a measured copy rate,
since its square is needed before its second use and X does not fit the cache; or the 4 r^2 c
operations of its two products at a measured bf16 rate. What the steps on the short side take is no
part of it.
Beyond: five times the 3 r^2 c + r^3 operations of a step whose symmetric products are halved.
Around: 24 bytes an entry, momentum, weight, gradient, parameter and directions once each way.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from provenance import commit_of
from timing import Rates, graph_ms
from torch import Tensor

from baltoro.ops.launch_table import launch
from baltoro.ops.muon import MuonBlocks, Stack, stack_of
from baltoro.ops.newton_schulz import newton_schulz
from baltoro.ops.newton_schulz import triton as kernels
from baltoro.ops.newton_schulz.shared import COEFFICIENTS, NORM_EPS

BF16, FP32 = torch.bfloat16, torch.float32
# heads of `k3`; heads of `small` over its width, over a latent, and halves of those
SHAPES = (
    (96, 128, 7168, BF16),
    (96, 128, 7168, FP32),
    (240, 128, 768, FP32),
    (30, 128, 384, FP32),
    (60, 128, 256, FP32),
    (21, 64, 768, FP32),
    (30, 64, 384, FP32),
    (1024, 384, 448, BF16),  # experts of `small`
    (36, 768, 768, BF16),
)
EXPERTS = (16, 64, 448, 384)  # parameters, matrices of each, rows, columns


def orthogonal(x: Tensor, impl: str) -> Tensor:
    return newton_schulz(x, compute_dtype=torch.bfloat16, impl=impl)


def spectra(rows: int, columns: int) -> dict[str, Tensor]:
    """Three matrices each of normal numbers and of two spectra that gradients resemble."""
    draw = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(3, rows, columns, generator=draw, device="cuda", dtype=torch.float64)
    u = torch.linalg.qr(x[:, :, :rows]).Q
    vh = torch.linalg.qr(x.mT).Q.mT
    place = torch.arange(rows, device="cuda", dtype=torch.float64)
    return {
        "normal": x,
        "power_law": u @ ((1 / (1 + place))[:, None] * vh),
        "low_rank": u @ ((place < rows // 16).double()[:, None] * vh),
    }


def errors(rows: int, columns: int, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name, x in spectra(rows, columns).items():
        rounded = x.to(dtype)
        exact = newton_schulz(rounded.double(), compute_dtype=torch.float64, impl="torch")
        found[name] = {
            way: float((orthogonal(rounded, impl) - exact).norm() / exact.norm())
            for way, impl in (("loop", "torch"), ("triton", "triton"))
        }
        # where few values are not 0, both show how fp32 numbers round to bf16 and little else
        if not found[name]["triton"] <= 1.1 * found[name]["loop"]:
            raise SystemExit(f"bench: {name} {rows} x {columns} {dtype}: {found[name]}; no times")
    return found


def kernel_times(x: Tensor) -> dict[str, float]:
    """Milliseconds of the three kernels of the Gram form."""
    B, R, C = x.shape
    gram, factor, apply = (
        launch(f"newton_schulz_{name}", f"r{R}", x.device) for name in ("gram", "factor", "apply")
    )
    rounded, out = x.to(BF16), torch.empty_like(x)
    num_parts = -(-C // gram["part"])
    parts = torch.empty(B, num_parts, R, R, device="cuda")
    factors = torch.empty(B, 2, R, R, dtype=torch.bfloat16, device="cuda")

    def run_gram() -> object:
        return kernels.gram_kernel[(B, num_parts)](
            rounded, parts, C, gram["part"], R=R, BR=R, BC=gram["columns"],
            NUM_STAGES=gram["num_stages"], num_warps=gram["num_warps"],
        )  # fmt: skip

    def run_factor() -> object:
        return kernels.factor_kernel[(B,)](
            parts, factors, num_parts, 5, *COEFFICIENTS, NORM_EPS, BR=R, IS_NORMED=False,
            num_warps=factor["num_warps"],
        )  # fmt: skip

    def run_apply() -> object:
        return kernels.apply_kernel[(B, -(-C // apply["part"]))](
            rounded, factors, out, C, apply["part"], R=R, BR=R, BC=apply["columns"],
            NUM_STAGES=apply["num_stages"], num_warps=apply["num_warps"],
        )  # fmt: skip

    runs = {"gram": run_gram, "factor": run_factor, "apply": run_apply}
    return {f"{name}_ms": graph_ms(run) for name, run in runs.items()}


def floor_ms(rates: Rates, x: Tensor) -> float:
    B, R, C = x.shape
    if R > kernels.MAX_ROWS:
        return rates.floor_ms(0, 5 * B * (3 * R * R * C + R**3))
    return rates.floor_ms(3 * x.numel() * x.element_size(), 4 * B * R * R * C)


def around(rates: Rates) -> dict[str, object]:
    """Directions and updates of experts, without the products."""
    count, *shape = EXPERTS
    held = [
        [torch.randn(shape, device="cuda").to(dtype) for dtype in (FP32, FP32, BF16, BF16)]
        for _ in range(count)
    ]
    entries = [MuonBlocks(weight=w, momentum=m, grad=g, low=p) for w, m, g, p in held]
    row: dict[str, object] = {"op": "around", "parameters": count, "matrices": shape}
    row["floor"] = {"ms": rates.floor_ms(24 * count * held[0][0].numel())}
    for way, impl in (("lists", "torch"), ("triton", "triton")):
        stack = stack_of(entries, impl=impl)

        def run(stack: Stack = stack) -> None:
            stack.update(stack.directions(0.95), decay=0.999, rate=1e-3)

        row[way] = {"ms": graph_ms(run)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/muon.json"))
    parser.add_argument("--commit", help="instead of asking git")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds; later shapes are left")
    arguments = parser.parse_args()
    commit = commit_of(arguments.commit)
    start = time.monotonic()
    rates = Rates.measured()
    result = {**rates.head(commit), "rows": []}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    compiled = torch.compile(orthogonal)
    for index, (B, R, C, dtype) in enumerate(SHAPES):
        if time.monotonic() - start > arguments.budget:
            print(f"bench: budget spent; {len(SHAPES) - index} shapes left out", flush=True)
            break
        x = torch.randn(B, R, C, device="cuda").to(dtype)
        row = {
            "op": "newton_schulz",
            "matrices": B,
            "rows": R,
            "columns": C,
            "dtype": str(dtype).removeprefix("torch."),
            "floor": {"ms": floor_ms(rates, x)},
            "errors": errors(R, C, dtype),
            "triton": {"ms": graph_ms(lambda x=x: orthogonal(x, "triton"))},
            "loop": {"ms": graph_ms(lambda x=x: orthogonal(x, "torch"))},
        }
        if index == 0:
            row["compile"] = {"ms": graph_ms(lambda x=x: compiled(x, "torch"))}
        if C > 4 * R:
            row["triton"]["kernels"] = kernel_times(x)
        result["rows"].append(row)
        print(json.dumps(row), flush=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    result["rows"].append(around(rates))
    print(json.dumps(result["rows"][-1]), flush=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
