"""Time the operators around the products on a GPU beside their floors and plain PyTorch.

    PYTHONPATH=src python3 bench/ops_pointwise.py [--only rms_norm] [--ways triton] [--out FILE]

`triton` and `torch` are our implementations, `compile` is torch.compile of the formula as it reads.
`eager` is the median of device events around the call, `graph` the replay of a CUDA graph of it,
`host` the time a call keeps Python busy, on few tokens. Before any time is taken, outputs and
gradients are compared with the reference in fp64; nothing is reported if one is off by over 1 %.
With `--tune` the operators that have a list of launch shapes are timed in each of them, and nothing
else; a shape that errs or does not run is said to and left out.

Floor: the bytes that must move, each input read and each output written once, at a measured copy
rate; for the loss the products alone, one forward and two backward, at a measured bf16 matrix rate.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
import triton
from provenance import commit_of
from timing import ceilings, eager_ms, graph_ms
from torch import Tensor
from triton.runtime.errors import TritonError

from baltoro.ops.attn_res import attn_res_mix
from baltoro.ops.attn_res import triton as attn_res_kernels
from baltoro.ops.attn_res.packed import PackedShape
from baltoro.ops.cross_entropy import linear_cross_entropy
from baltoro.ops.rms_norm import gated_rms_norm, rms_norm
from baltoro.ops.short_conv import short_conv
from baltoro.ops.situ import situ_glu
from baltoro.ops.situ import triton as situ_kernels

Op = Callable[..., Tensor]
WAYS = ("triton", "torch", "compile")


class WrongResultError(Exception):
    """A result is further from the reference than a kernel may be."""


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


def conv(impl: str, x: Tensor, weight: Tensor) -> Tensor:
    bounds = torch.tensor([0, x.shape[0]], dtype=torch.int32, device=x.device)
    return short_conv(x, weight, cu_seqlens=bounds, impl=impl).y


def plain_conv(impl: str, x: Tensor, weight: Tensor) -> Tensor:
    windows = F.pad(x.T.float(), (weight.shape[1] - 1, 0))[None]
    return F.silu(F.conv1d(windows, weight[:, None], groups=weight.shape[0])[0].T).bfloat16()


def loss(impl: str, hidden: Tensor, weight: Tensor) -> Tensor:
    targets = torch.arange(hidden.shape[0], device=hidden.device) * 7 % weight.shape[0]
    return linear_cross_entropy(hidden, weight, targets, impl=impl)


def cases() -> list[Case]:
    found = []
    for S, D, T in ((5, 768, 65536), (9, 7168, 8192), (9, 2048, 8192)):
        found.append(
            Case(
                name="attn_res",
                sizes={"sources": S, "width": D, "tokens": T},
                op=mix,
                inputs=lambda T, S=S, D=D: [
                    normal(D), normal(D, scale=0.1), *(normal(T, D) for _ in range(S))
                ],
                forward_bytes=2 * T * D * (S + 1),
                backward_bytes=2 * T * D * (2 * S + 1),
            )
        )  # fmt: skip
    for name, op, shape in (("rms_norm", norm, (768,)), ("gated_rms_norm", gated, (6, 128))):
        T, is_gated = 65536, op is gated
        found.append(
            Case(
                name=name,
                sizes={"width": shape[-1], "heads": len(shape[:-1]) and shape[0], "tokens": T},
                op=op,
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
    return found


def shapes_of(case: Case) -> list[tuple[ModuleType, dict[str, object]]]:
    """The launch shapes to try: what to set in a module of kernels, the present one first."""
    if case.name == "attn_res" and case.sizes["width"] > attn_res_kernels.MIN_PACKED_WIDTH:
        pairs = [(None, None)]
        for num_programs in (132, 264, 1024):
            forward = [PackedShape(ahead, num_programs) for ahead in (4, 6, 8)]
            backward = [
                PackedShape(3, num_programs, group=3),
                PackedShape(3, num_programs),
                PackedShape(4, num_programs, group=3, is_query_held=False),
            ]
            pairs += zip(forward, backward, strict=True)
        return [
            (attn_res_kernels, {"PACKED_FORWARD": forward, "PACKED_BACKWARD": backward})
            for forward, backward in pairs
        ]
    if case.name == "situ_glu":
        blocks = ((1024, 2), (2048, 4), (4096, 8), (2048, 2), (1024, 4), (512, 1))
        return [(situ_kernels, {"BLOCK": block, "NUM_WARPS": warps}) for block, warps in blocks]
    return []


def tuned(case: Case) -> list[dict[str, object]]:
    """Times of every launch shape of a case, each compared with the reference before."""
    rows = []
    for module, settings in shapes_of(case):
        before = {name: getattr(module, name) for name in settings}
        row: dict[str, object] = {name: str(value) for name, value in settings.items()}
        for name, value in settings.items():
            setattr(module, name, value)
        try:
            refuse_wrong_results(case)
            row |= passes_ms(case.op, case, "triton")
        except (RuntimeError, TritonError, WrongResultError) as error:
            row["refused"] = str(error)[:200]
        finally:
            for name, value in before.items():
                setattr(module, name, value)
        rows.append(row)
        print(json.dumps({"op": case.name, **case.sizes, **row}), flush=True)
    for way in ("forward_ms", "backward_ms"):
        best = min((row for row in rows if way in row), key=lambda row: row[way], default=None)
        print(f"bench: best {way} of {case.name} {case.sizes}: {best}", flush=True)
    return rows


def host_us(run: Callable[[], object], repeats: int = 200) -> float:
    for _ in range(20):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / repeats * 1e6


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
        error = float((x.double() - y).norm() / y.norm())
        if not error < 1e-2:
            raise WrongResultError(f"{case.name}: result {index} is off by {error:.1e}; no times")


def passes_ms(op: Op, case: Case, impl: str) -> dict[str, float]:
    leaves = leaves_of(case, case.sizes["tokens"])
    out = op(impl, *leaves)
    d_out = torch.randn_like(out)

    def forward() -> object:
        with torch.no_grad():
            return op(impl, *leaves)

    def backward() -> object:
        return torch.autograd.grad(out, leaves, d_out, retain_graph=True)

    return {"forward_ms": eager_ms(forward), "backward_ms": eager_ms(backward)}


def measure(op: Op, case: Case, impl: str) -> dict[str, float]:
    times = passes_ms(op, case, impl)
    if impl == "triton":
        leaves = leaves_of(case, case.sizes["tokens"])
        d_out = torch.randn_like(op(impl, *leaves))

        def forward() -> object:
            with torch.no_grad():
                return op(impl, *leaves)

        times["forward_graph_ms"] = graph_ms(forward)
        times["step_graph_ms"] = graph_ms(
            lambda: torch.autograd.grad(op(impl, *leaves), leaves, d_out)
        )
        few = leaves_of(case, 16)
        few_out = op(impl, *few)
        few_d_out = torch.randn_like(few_out)
        times["forward_host_us"] = host_us(lambda: op(impl, *few))
        times["backward_host_us"] = host_us(
            lambda: torch.autograd.grad(few_out, few, few_d_out, retain_graph=True)
        )
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/ops_pointwise.json"))
    parser.add_argument("--commit", help="instead of asking git")
    parser.add_argument("--only", help="one operator")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--tune", action="store_true", help="time launch shapes instead")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds; the rest is left out")
    arguments = parser.parse_args()
    start = time.monotonic()
    commit = commit_of(arguments.commit)
    bytes_per_s, flops_per_s = ceilings()
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
        "copy_tb_per_s": bytes_per_s / 1e12,
        "bf16_tflop_per_s": flops_per_s / 1e12,
        "rows": [],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for case in cases():
        if arguments.only not in (None, case.name) or (arguments.tune and not shapes_of(case)):
            continue
        if time.monotonic() - start > arguments.budget:
            print(f"bench: budget spent; left out from {case.name} {case.sizes} on", flush=True)
            break
        row = {
            "op": case.name,
            **case.sizes,
            "floor": {
                "forward_ms": 1e3
                * max(case.forward_bytes / bytes_per_s, case.forward_flops / flops_per_s),
                "backward_ms": 1e3
                * max(case.backward_bytes / bytes_per_s, case.backward_flops / flops_per_s),
            },
        }
        if arguments.tune:
            row["shapes"] = tuned(case)
        else:
            refuse_wrong_results(case)
            plain = case.plain or case.op
            for way in arguments.ways:
                if way == "compile":
                    row[way] = measure(torch.compile(plain), case, "reference")
                else:
                    row[way] = measure(case.op, case, way)
        result["rows"].append(row)
        print(json.dumps(row), flush=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
