"""Time the operators around the products on a GPU beside their floors and plain PyTorch.

    PYTHONPATH=src python3 bench/ops_pointwise.py [--only rms_norm] [--ways triton fla] [--out FILE]

`triton` and `torch` are our implementations, `compile` is torch.compile of the formula as it reads,
`fla` its operator where it has one and can be imported. How times are taken is in `timing.py`;
`host` is on few tokens. Before any is, outputs and gradients are compared with the reference in
fp64; nothing is reported if one of ours is off by over 1 %.

Floor: the bytes that must move, each input read and each output written once, at a measured copy
rate; for the loss the products alone, one forward and two backward, at a measured bf16 matrix rate.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import fla_ops
import torch
import torch.nn.functional as F
from fla_tuning import Tuning
from provenance import commit_of
from timing import Rates, eager_ms, graph_ms, host_us
from torch import Tensor
from triton import TritonError

from baltoro.ops.attn_res import attn_res_mix
from baltoro.ops.cross_entropy import linear_cross_entropy
from baltoro.ops.rms_norm import gated_rms_norm, rms_norm
from baltoro.ops.short_conv import short_conv
from baltoro.ops.situ import situ_glu

Op = Callable[..., Tensor]
WAYS = ("triton", "fla", "torch", "compile")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operator at one size."""

    name: str
    sizes: dict[str, int]
    op: Op  # op(impl, *inputs)
    inputs: Callable[[int], list[Tensor]]  # of a number of tokens
    forward_bytes: int
    backward_bytes: int
    forward_flops: int = 0
    backward_flops: int = 0
    plain: Op | None = None  # what torch.compile takes, instead of `op` with the reference
    fla: Op | None = None


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, device="cuda")).bfloat16()


def mix(impl: str, norm_weight: Tensor, proj_weight: Tensor, *sources: Tensor) -> Tensor:
    return attn_res_mix(sources, norm_weight, proj_weight, eps=1e-5, impl=impl)


def norm(impl: str, x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, eps=1e-5, impl=impl)


def gated(impl: str, x: Tensor, weight: Tensor, gate_logits: Tensor) -> Tensor:
    return gated_rms_norm(x, weight, gate_logits, eps=1e-5, impl=impl)


def situ(impl: str, gate: Tensor, up: Tensor) -> Tensor:
    return situ_glu(gate, up, beta=4.0, linear_beta=25.0, impl=impl)


@cache
def bounds_of(num_tokens: int) -> Tensor:
    """Of one sequence; made before a graph is captured, which may not copy from the host."""
    return torch.tensor([0, num_tokens], dtype=torch.int32, device="cuda")


def conv(impl: str, x: Tensor, weight: Tensor) -> Tensor:
    return short_conv(x, weight, cu_seqlens=bounds_of(x.shape[0]), impl=impl).y


def plain_conv(impl: str, x: Tensor, weight: Tensor) -> Tensor:
    windows = F.pad(x.T.float(), (weight.shape[1] - 1, 0))[None]
    return F.silu(F.conv1d(windows, weight[:, None], groups=weight.shape[0])[0].T).bfloat16()


def fla_mix(impl: str, norm_weight: Tensor, proj_weight: Tensor, *sources: Tensor) -> Tensor:
    return fla_ops.attn_res(sources, norm_weight, proj_weight, eps=1e-5, impl=impl)


def fla_norm(impl: str, x: Tensor, weight: Tensor) -> Tensor:
    return fla_ops.norm(x, weight, eps=1e-5, impl=impl)


def fla_gated(impl: str, x: Tensor, weight: Tensor, gate_logits: Tensor) -> Tensor:
    return fla_ops.gated_norm(x, weight, gate_logits, eps=1e-5, impl=impl)


def fla_conv(impl: str, x: Tensor, weight: Tensor) -> Tensor:
    bounds = bounds_of(x.shape[0])
    return fla_ops.short_conv(x, weight.bfloat16(), cu_seqlens=bounds, impl=impl).y


def loss(impl: str, hidden: Tensor, weight: Tensor) -> Tensor:
    targets = torch.arange(hidden.shape[0], device=hidden.device) * 7 % weight.shape[0]
    return linear_cross_entropy(hidden, weight, targets, impl=impl)


def cases() -> list[Case]:
    found = []
    for name, op, shape in (("rms_norm", norm, (768,)), ("gated_rms_norm", gated, (6, 128))):
        T, is_gated = 65536, op is gated
        found.append(
            Case(
                name=name,
                sizes={"width": shape[-1], "heads": len(shape[:-1]) and shape[0], "tokens": T},
                op=op,
                fla=fla_gated if is_gated else fla_norm,
                inputs=lambda T, shape=shape, is_gated=is_gated: [
                    normal(T, *shape), normal(shape[-1]), *([normal(T, *shape)] * is_gated)
                ],
                forward_bytes=2 * T * 768 * (2 + is_gated),
                backward_bytes=2 * T * 768 * (3 + 2 * is_gated),
            )
        )  # fmt: skip
    for width in (3072, 2048):
        T = 65536
        found.append(
            Case(
                name="situ_glu",
                sizes={"width": width, "tokens": T},
                op=situ,
                inputs=lambda T, width=width: list(normal(T, 2 * width, scale=2.0).chunk(2, -1)),
                forward_bytes=2 * T * width * 3,
                backward_bytes=2 * T * width * 5,
            )
        )
    T, C = 65536, 2304
    found.append(
        Case(
            name="short_conv",
            sizes={"channels": C, "taps": 4, "tokens": T},
            op=conv,
            inputs=lambda T: [normal(T, C), normal(C, 4).float()],
            forward_bytes=2 * T * C * 2,
            backward_bytes=2 * T * C * 3,
            plain=plain_conv,
            fla=fla_conv,
        )
    )
    T, D, W = 65536, 768, 32768
    found.append(
        Case(
            name="cross_entropy",
            sizes={"width": D, "vocabulary": W, "tokens": T},
            op=loss,
            inputs=lambda T: [normal(T, D), normal(W, D, scale=D**-0.5)],
            forward_bytes=2 * (T + W) * D,
            backward_bytes=4 * (T + W) * D,
            forward_flops=2 * T * D * W,
            backward_flops=4 * T * D * W,
        )
    )
    for S, D, T in ((5, 768, 65536), (9, 7168, 8192), (9, 2048, 8192)):
        found.append(
            Case(
                name="attn_res",
                sizes={"sources": S, "width": D, "tokens": T},
                op=mix,
                fla=fla_mix,
                inputs=lambda T, S=S, D=D: [
                    normal(D), normal(D, scale=0.1), *(normal(T, D) for _ in range(S))
                ],
                forward_bytes=2 * T * D * (S + 1),
                backward_bytes=2 * T * D * (2 * S + 1),
            )
        )  # fmt: skip
    return found


def leaves_of(case: Case, num_tokens: int) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in case.inputs(num_tokens)]


def refuse_wrong_results(case: Case) -> None:
    leaves = leaves_of(case, 200)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    got, exact = case.op("triton", *leaves), case.op("reference", *wide)
    probe = torch.randn_like(exact)
    pairs = [(got, exact)]
    pairs += zip(
        torch.autograd.grad(got, leaves, probe.to(got)),
        torch.autograd.grad(exact, wide, probe),
        strict=True,
    )
    for index, (x, y) in enumerate(pairs):
        error = float((x.detach().double() - y.detach()).norm() / y.detach().norm())
        if not error < 1e-2:
            raise SystemExit(f"{case.name}: result {index} is off by {error:.1e}; no times")


def measure(op: Op, case: Case, impl: str) -> dict[str, float]:
    leaves = leaves_of(case, case.sizes["tokens"])
    out = op(impl, *leaves)
    d_out = torch.randn_like(out)

    def forward() -> object:
        with torch.no_grad():
            return op(impl, *leaves)

    def backward() -> object:
        return torch.autograd.grad(out, leaves, d_out, retain_graph=True)

    times = {"forward_ms": eager_ms(forward), "backward_ms": eager_ms(backward)}
    if impl in ("triton", "fla"):
        times["forward_graph_ms"] = graph_ms(forward)
        # leaves of their own: those of a graph that lives remember the stream of its making
        own = leaves_of(case, case.sizes["tokens"])
        times["step_graph_ms"] = graph_ms(lambda: torch.autograd.grad(op(impl, *own), own, d_out))
        few = leaves_of(case, 16)
        few_out = op(impl, *few)
        few_d_out = torch.randn_like(few_out)
        times["forward_host_us"] = host_us(lambda: op(impl, *few))
        times["backward_host_us"] = host_us(
            lambda: torch.autograd.grad(few_out, few, few_d_out, retain_graph=True)
        )
    return times


def compile_fla(tuning: Tuning, only: str | None) -> None:
    """Compile fla's kernels for every case side by side."""

    def everything() -> None:
        for case in cases():
            if case.fla is not None and only in (None, case.name):
                leaves = leaves_of(case, case.sizes["tokens"])
                out = case.fla("fla", *leaves)
                torch.autograd.grad(out, leaves, torch.ones_like(out))

    print(f"bench: fla {tuning.compile_ahead(everything)}", flush=True)


def time_case(
    case: Case, ways: list[str], rates: Rates, row: dict[str, object], keep: Callable[[], None]
) -> None:
    """Put floors and times of a case into `row`, and `keep` it after each way."""
    refuse_wrong_results(case)
    row |= {
        "op": case.name,
        **case.sizes,
        "floor": {
            "forward_ms": rates.floor_ms(case.forward_bytes, case.forward_flops),
            "backward_ms": rates.floor_ms(case.backward_bytes, case.backward_flops),
        },
    }
    row["floor"]["step_ms"] = sum(row["floor"].values())
    plain = case.plain or case.op
    for way in ways:
        if way == "compile":
            row[way] = measure(torch.compile(plain), case, "reference")
        elif way != "fla":
            row[way] = measure(case.op, case, way)
        elif case.fla is not None and fla_ops.fla is not None:
            try:
                row[way] = measure(case.fla, case, way)
            except (RuntimeError, TritonError) as error:
                row["fla_left_out"] = str(error)[:200]
        keep()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/ops_pointwise.json"))
    parser.add_argument("--commit", help="instead of asking git")
    parser.add_argument("--only", help="one operator")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--fla-out", type=Path, help="where to keep the winners of fla's search")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds; the rest is left out")
    arguments = parser.parse_args()
    start = time.monotonic()
    commit = commit_of(arguments.commit)
    tuning = Tuning() if fla_ops.fla is not None and "fla" in arguments.ways else None
    if tuning is not None:
        compile_fla(tuning, arguments.only)
    rates = Rates.measured()
    result = {**rates.head(commit), "fla": None, "rows": []}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        if tuning is not None:
            result["fla"] = f"{fla_ops.version()}, {tuning.what()}"
            if arguments.fla_out is not None:
                tuning.save(arguments.fla_out)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")

    for case in cases():
        if arguments.only not in (None, case.name):
            continue
        if time.monotonic() - start > arguments.budget:
            print(f"bench: budget spent; left out from {case.name} {case.sizes} on", flush=True)
            break
        result["rows"].append({})
        time_case(case, arguments.ways, rates, result["rows"][-1], keep)
        print(json.dumps(result["rows"][-1]), flush=True)
    if tuning is not None:
        tuning.close()


if __name__ == "__main__":
    main()
