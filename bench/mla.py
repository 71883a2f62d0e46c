"""Time latent attention on a GPU: training in packs, and decoding over a paged cache.

    PYTHONPATH=src python3 bench/mla.py [--quick] [--budget 60] [--out bench/results/mla.json]

`train` is causal attention with queries and keys of 192 and values of 128. `ours` is
`varlen_attention(impl="flash")`, in a graph with bounds that lie on the device; `cudnn` is torch's
cuDNN backend and `padded` its flash backend on values padded to 192, both a sequence after the
other, or all in one call where they are equally long. The floor is the operations at a measured
bf16 matrix rate: 2 (K + V) for every pair that may attend, 6 K + 4 V more with the backward. `off`
is each way's furthest result from the reference in fp64 on a small pack; nothing is reported if
ours is off by over 1 %. `finite` says whether its gradients at this size are.

`paged` is the absorbed form over a cache in pages, 16K tokens a sequence, beside the copy rate;
see `decode.py`. What the budget leaves out is named.
"""

import argparse
import time
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import decode
import torch
from kda import MIXED
from provenance import commit_of
from timing import Rates, eager_ms, graph_ms, keep_rows
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from baltoro.ops.mla import varlen_attention

Row = dict[str, object]
KEY, VALUE = 192, 128
SCALE = KEY**-0.5
QUICK = ((96, [8192]), (16, [8192]), (96, MIXED), (16, [1024] * 8))
TRAINING = (*QUICK, (16, [4096]), (96, [4096]), (16, [32768]), (16, MIXED), (96, [1024] * 8))
# heads, sequences, context, tokens a sequence
PAGED = ((96, 128, 16384, 1), (16, 128, 16384, 1), (96, 32, 16384, 1), (16, 32, 16384, 1),
         (96, 1, 16384, 1), (16, 1, 16384, 1), (16, 32, 16384, 4))  # fmt: skip


def draw(num_heads: int, lengths: list[int]) -> list[Tensor]:
    """Queries, keys, values and the output's gradient."""
    shape = (sum(lengths), num_heads)
    return [
        torch.randn(*shape, width, device="cuda").bfloat16()
        for width in (KEY, KEY, VALUE, VALUE)
    ]  # fmt: skip


@cache
def bounds_of(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def ours(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], impl: str = "flash", device: str = "cpu"
) -> Tensor:
    bounds = bounds_of(tuple(lengths), device)
    return varlen_attention(
        q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, causal=True, scale=SCALE, impl=impl
    )


def by_backend(backend: SDPBackend, is_padded: bool) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
        width = v.shape[-1]
        if is_padded:
            v = F.pad(v, (0, q.shape[-1] - width))
        if len(set(lengths)) == 1:
            parts = [tuple(t.view(len(lengths), lengths[0], *t.shape[1:]) for t in (q, k, v))]
        else:
            bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
            parts = [tuple(t[None, a:b] for t in (q, k, v)) for a, b in pairwise(bounds)]
        with sdpa_kernel(backend):
            out = [
                F.scaled_dot_product_attention(
                    *(t.transpose(1, 2) for t in part), is_causal=True, scale=SCALE
                ).transpose(1, 2).flatten(0, 1)
                for part in parts
            ]  # fmt: skip
        return torch.cat(out)[..., :width] if len(out) > 1 else out[0][..., :width]

    return run


WAYS = {
    "ours": ours,
    "cudnn": by_backend(SDPBackend.CUDNN_ATTENTION, is_padded=False),
    "padded": by_backend(SDPBackend.FLASH_ATTENTION, is_padded=True),
}


def results(op: Callable[..., Tensor], given: list[Tensor], lengths: list[int]) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in given[:3]]
    out = op(*leaves, lengths)
    return [out.detach(), *torch.autograd.grad(out, leaves, given[3].to(out))]


def furthest() -> dict[str, float]:
    """The largest relative error of every way, over output and gradients."""
    lengths = [130, 69, 2112, 300]
    given = draw(4, lengths)
    exact = results(lambda *x: ours(*x, "reference"), [t.double() for t in given], lengths)
    found = {}
    for name, op in WAYS.items():
        try:
            got = results(op, given, lengths)
        except RuntimeError as error:
            print(f"bench: {name} does not serve {lengths}: {str(error)[:200]}", flush=True)
            continue
        errors = [
            float((a.double() - b).norm() / b.norm()) for a, b in zip(got, exact, strict=True)
        ]
        found[name] = max(errors) if all(error == error for error in errors) else float("inf")
    if not found["ours"] < 1e-2:
        raise SystemExit(f"bench: ours is off by {found['ours']:.1e}; no times")
    return found


def measure(name: str, given: list[Tensor], lengths: list[int]) -> Row:
    op = WAYS[name]
    # a graph has the bounds on the device
    in_graph = partial(ours, device="cuda") if name == "ours" else op
    leaves = [t.detach().requires_grad_() for t in given[:3]]

    def forward(attend: Callable[..., Tensor]) -> object:
        with torch.no_grad():
            return attend(*leaves, lengths)

    def step(attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*leaves, lengths), leaves, given[3])

    row: Row = {"finite": all(bool(t.isfinite().all()) for t in step(op))}
    for what, run in (("forward", forward), ("step", step)):
        row[f"{what}_eager_ms"] = eager_ms(lambda run=run: run(op))
        row[f"{what}_graph_ms"] = graph_ms(lambda run=run: run(in_graph))
    return row


def time_training(rates: Rates, off: dict[str, float], num_heads: int, lengths: list[int]) -> Row:
    pairs = num_heads * sum(n * n for n in lengths) / 2
    row: Row = {
        "op": "train", "heads": num_heads, "lengths": lengths,
        "floor": {"forward_ms": rates.floor_ms(0, 2 * (KEY + VALUE) * pairs),
                  "step_ms": rates.floor_ms(0, (8 * KEY + 6 * VALUE) * pairs)},
    }  # fmt: skip
    given = draw(num_heads, lengths)
    for name in WAYS:
        try:
            row[name] = {"off": off.get(name), **measure(name, given, lengths)}
        except RuntimeError as error:
            row[f"{name}_left_out"] = str(error)[:200]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/mla.json"))
    parser.add_argument("--commit", help="instead of asking git")
    parser.add_argument("--quick", action="store_true", help="four shapes of training")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds to begin work in")
    arguments = parser.parse_args()
    start = time.monotonic()
    commit = commit_of(arguments.commit)
    off = furthest()
    rates = Rates.measured()
    result = {**rates.head(commit), "rows": [], "left_out": []}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    work = [(f"paged {sizes}", partial(decode.time_attention, rates, *sizes)) for sizes in PAGED]
    work += [
        (f"train {sizes}", partial(time_training, rates, off, *sizes))
        for sizes in (QUICK if arguments.quick else TRAINING)
    ]
    keep_rows(work, result, arguments.out, end=start + arguments.budget)


if __name__ == "__main__":
    main()
