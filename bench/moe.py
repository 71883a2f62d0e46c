"""Time routed experts on a GPU: training beside dense products, MXFP4 decoding beside its bytes.

    PYTHONPATH=src python3 bench/moe.py [--quick] [--budget 60] [--out bench/results/moe.json]

`experts` is `moe_experts`: sort, gather, grouped products, SiTU and the weighted sum, forward and
backward, with routing `balanced` (every expert the same number of rows) or `random`. `grouped` has
PyTorch between the products, `triton` our kernels. `products` is `torch._grouped_mm` alone over
rows that are sorted already. The floor is what dense products of as many rows take in this run; a
second one is their FLOPs at the rate of a large square product.

`mxfp4` is `moe_experts_mxfp4`, a decode step of some tokens with packed weights; its floor is the
bytes of the experts that were chosen at the copy rate. `bf16` is `moe_experts` on weights of that
dtype in that place. Before any time is taken outputs and gradients are compared with the reference
in fp64, and nothing is reported if one is off by over 1 %. What the budget leaves out is named.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from provenance import commit_of
from timing import Rates, both_ms, keep_rows
from torch import Tensor
from torch.nn import functional as F

from baltoro.ops.impl import ImplError
from baltoro.ops.moe import moe_experts, moe_experts_mxfp4
from baltoro.ops.mxfp4 import Mxfp4Tensor

Row = dict[str, object]
Experts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # x, ids, weights, gate_up, down
LATENT, INNER = 3584, 3072
SITU = {"activation": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0}
# tokens, active, experts, latent width, inner width, routing
TRAINING = (
    (8192, 16, 64, LATENT, INNER, "balanced"),
    (8192, 16, 64, LATENT, INNER, "random"),
    (8192, 6, 64, 384, 448, "random"),
    (65536, 6, 64, 384, 448, "random"),
    (8192, 16, 448, LATENT, INNER, "random"),
)
# tokens, active, experts
DECODING = ((1, 16, 896), (32, 16, 896), (128, 16, 896), (32, 16, 224), (128, 16, 224))
MOST_IN_BF16 = 224  # experts of these widths


def ids_of(tokens: int, active: int, experts: int, routing: str) -> Tensor:
    if routing == "balanced":
        return (torch.arange(tokens * active, device="cuda") % experts).view(tokens, active)
    return torch.rand(tokens, experts, device="cuda").topk(active, -1).indices


def draw(tokens: int, active: int, experts: int, latent: int, inner: int, routing: str) -> Experts:
    def weight(rows: int, columns: int) -> Tensor:
        out = torch.empty(experts, rows, columns, device="cuda", dtype=torch.bfloat16)
        return out.normal_(std=columns**-0.5)

    return (
        torch.randn(tokens, latent, device="cuda").bfloat16(),
        ids_of(tokens, active, experts, routing),
        torch.rand(tokens, active, device="cuda") / active,
        weight(2 * inner, latent),
        weight(latent, inner),
    )


def passes(given: Experts, impl: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """A forward without gradients, and a forward with the backward."""
    x, ids, *weights = given
    leaves = [t.detach().requires_grad_() for t in (x, *weights)]
    d_out = torch.randn_like(x)

    def run() -> Tensor:
        return moe_experts(leaves[0], ids, *leaves[1:], **SITU, impl=impl)

    def forward() -> object:
        with torch.no_grad():
            return run()

    return forward, lambda: torch.autograd.grad(run(), leaves, d_out)


def refuse_wrong_results() -> None:
    given = draw(96, 4, 16, 128, 64, "random")
    x, ids, *weights = given
    wide = [t.detach().double().requires_grad_() for t in (x, *weights)]
    d_out = torch.randn_like(x)

    def gradients(impl: str, leaves: list[Tensor]) -> list[Tensor]:
        out = moe_experts(leaves[0], ids, *leaves[1:], **SITU, impl=impl)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out))]

    exact = gradients("reference", wide)
    for impl in ("triton", "grouped"):
        got = gradients(impl, [t.detach().requires_grad_() for t in (x, *weights)])
        for index, (a, b) in enumerate(zip(got, exact, strict=True)):
            error = float((a.double() - b).norm() / b.norm())
            if not error < 1e-2:
                raise SystemExit(f"bench: {impl}, result {index} is off by {error:.1e}; no times")


def dense_products(pairs: int, given: Experts) -> tuple[Callable[[], object], ...]:
    """The forward's two products over all rows with the weights of one expert, and all six."""
    *_, gate_up, down = (t[0] if t.dim() == 3 else t for t in given)
    x = torch.randn(pairs, gate_up.shape[1], device="cuda").bfloat16()
    act = torch.randn(pairs, down.shape[1], device="cuda").bfloat16()
    inner = torch.randn(pairs, gate_up.shape[0], device="cuda").bfloat16()

    def forward() -> object:
        return x @ gate_up.mT, act @ down.mT

    def step() -> object:
        return forward(), x @ down, x.mT @ act, inner @ gate_up, inner.mT @ x

    return forward, step


def grouped_products(given: Experts) -> Callable[[], object]:
    _, ids, _, gate_up, down = given
    pairs = ids.numel()
    counts = torch.bincount(ids.flatten(), minlength=gate_up.shape[0])
    stops = counts.cumsum(0).int()
    x = torch.randn(pairs, gate_up.shape[2], device="cuda").bfloat16()
    act = torch.randn(pairs, down.shape[2], device="cuda").bfloat16()
    return lambda: (
        F.grouped_mm(x, gate_up.mT, offs=stops),
        F.grouped_mm(act, down.mT, offs=stops),
    )


def time_training(rates: Rates, *sizes: int | str) -> Row:
    given = draw(*sizes)
    tokens, active, experts, latent, inner, routing = sizes
    pairs = tokens * active
    flops = 6 * pairs * latent * inner
    dense = zip(("forward", "step"), dense_products(pairs, given), strict=True)
    row: Row = {
        "op": "experts", "tokens": tokens, "active": active, "experts": experts,
        "widths": [latent, inner], "routing": routing,
        "flops": {"forward_ms": 1e3 * flops / rates.flops_per_s,
                  "step_ms": 3e3 * flops / rates.flops_per_s},
        "floor": {f"{name}_ms": both_ms(run)["graph_ms"] for name, run in dense},
        "products": both_ms(grouped_products(given), "forward"),
    }  # fmt: skip
    for impl in ("triton", "grouped"):
        forward, step = passes(given, impl)
        row[impl] = both_ms(forward, "forward") | both_ms(step, "step")
    return row


def packed(experts: int, rows: int, columns: int) -> Mxfp4Tensor:
    """Random codes, all of a scale that leaves products of one magnitude."""
    codes = torch.randint(
        0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device="cuda"
    )  # fmt: skip
    scale = torch.full(
        (experts, rows, columns // 32), 120, dtype=torch.uint8, device="cuda"
    )  # fmt: skip
    return Mxfp4Tensor(codes, scale)


def time_decoding(rates: Rates, tokens: int, active: int, experts: int) -> Row:
    x = torch.randn(tokens, LATENT, device="cuda").bfloat16()
    ids = ids_of(tokens, active, experts, "random")
    weights = torch.rand(tokens, active, device="cuda") / active
    gate_up, down = packed(experts, 2 * INNER, LATENT), packed(experts, LATENT, INNER)
    used = len(ids.unique())
    num_bytes = used * sum(t[0].nbytes for t in (*gate_up, *down))
    row: Row = {
        "op": "mxfp4", "tokens": tokens, "active": active, "experts": experts, "used": used,
        "floor": {"ms": rates.floor_ms(num_bytes)},
    }  # fmt: skip
    with torch.no_grad():
        try:
            run = partial(moe_experts_mxfp4, x, ids, weights, gate_up, down, **SITU, impl="triton")
            row["triton"] = both_ms(run)
            row["share_of_copy"] = row["floor"]["ms"] / row["triton"]["graph_ms"]
            off = run() - moe_experts_mxfp4(x, ids, weights, gate_up, down, **SITU, impl="torch")
            row["off"] = float(off.norm() / run().norm())
        except (ImplError, RuntimeError) as error:
            row["left_out"] = str(error)[:200]
        if experts <= MOST_IN_BF16:
            wide = draw(1, active, experts, LATENT, INNER, "random")[3:]
            row["bf16"] = both_ms(
                lambda: moe_experts(x, ids, weights, *wide, **SITU, impl="triton")
            )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/moe.json"))
    parser.add_argument("--commit", help="instead of asking git")
    parser.add_argument("--quick", action="store_true", help="without 448 experts in training")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds to begin work in")
    arguments = parser.parse_args()
    start = time.monotonic()
    commit = commit_of(arguments.commit)
    refuse_wrong_results()
    rates = Rates.measured()
    result = {**rates.head(commit), "rows": [], "left_out": []}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    work = [
        (f"experts {sizes}", partial(time_training, rates, *sizes))
        for sizes in TRAINING
        if not arguments.quick or sizes[2] <= 64
    ]
    work += [(f"mxfp4 {sizes}", partial(time_decoding, rates, *sizes)) for sizes in DECODING]
    keep_rows(work, result, arguments.out, end=start + arguments.budget)


if __name__ == "__main__":
    main()
