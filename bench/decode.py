"""Time the decode kernels on a GPU beside the bytes they must move and, where it is there, fla's.

    PYTHONPATH=src python3 bench/decode.py [--budget 50] [--out bench/results/decode.json]

`kda` is a layer between its projections, `decode_kda(impl="triton")`: convolution, norms, gates,
update, read and gated norm of one token of each of B sequences, heads of 128, states in slots.
`fla` is `fused_recurrent_kda`, which leaves out the convolution and the gated norm and writes its
states elsewhere. `mla` is `paged_latent_attention(impl="triton")` over B contexts of one length,
rows of 512 + 64 in bf16, in scattered pages of 512 tokens. With `tokens` above 1 a sequence brings
drafts, of which its state takes in one. `eager` is the median of device events around the call,
`graph` the replay of a CUDA graph of it, the cache flushed before each.

`bytes_ms` is what must be read and written once, weights included, at the copy rate of this run;
`flops_ms` the operations of attention at its bf16 rate. The floor is the larger. Before any time is
taken, results are compared with the reference in fp64, and nothing is reported if one is off by
over 1 %. What the budget of seconds leaves out is named.
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

from baltoro.ops.kda.decode import DecodeInputs, DecodeWeights, StatePool, decode_kda
from baltoro.ops.mla.paged import paged_latent_attention

try:
    from fla.ops.kda import fused_recurrent_kda
except ModuleNotFoundError:
    fused_recurrent_kda = None

DIM, TAPS, BOUND = 128, 4, -5.0
RANK, SHARED, PAGE_SIZE = 512, 64, 512
STATES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BATCHES = (128, 256, 32, 1)
Row = dict[str, object]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda").normal_()


def layer(num_heads: int, batch: int, state: str, tokens: int) -> dict[str, object]:
    """Arguments of `decode_kda`."""
    T, C = batch * tokens, 3 * num_heads * DIM
    fp32 = torch.float32
    has_drafts = tokens > 1
    return {
        "inputs": DecodeInputs(
            normal(T, C), normal(T, num_heads, DIM), normal(T, num_heads),
            normal(T, num_heads, DIM),
        ),
        "weights": DecodeWeights(
            normal(C, TAPS, dtype=fp32), normal(num_heads, dtype=fp32) / 2,
            normal(num_heads * DIM, dtype=fp32) - 4, normal(DIM, dtype=fp32),
        ),
        "pool": StatePool(
            normal(batch + 1, C, TAPS - 1),
            normal(batch + 1, num_heads, DIM, DIM, dtype=STATES[state]),
        ),
        "slots": (1 + torch.randperm(batch, device="cuda")).to(torch.int32),
        "cu_seqlens": tokens * torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        if has_drafts else None,
        "num_kept": torch.ones(batch, dtype=torch.int32, device="cuda") if has_drafts else None,
        "gate_lower_bound": BOUND,
        "norm_eps": 1e-5,
    }  # fmt: skip


def layer_bytes(arguments: dict[str, object]) -> int:
    """Every input read once, states, windows and outputs written once."""
    inputs, pool = arguments["inputs"], arguments["pool"]
    moved = sum(x.nbytes for x in (*inputs, *arguments["weights"])) + inputs.gate_logits.nbytes
    return moved + sum(2 * x[1:].nbytes for x in pool)


def fla_layer(arguments: dict[str, object]) -> Callable[[], object]:
    inputs, pool = arguments["inputs"], arguments["pool"]
    T, H = inputs.beta_logits.shape
    q, k, v = inputs.projected.view(T, 1, 3, H, DIM).unbind(2)
    q, k, v = (x.contiguous() for x in (q, k, v))
    g, beta = inputs.decay_logits[:, None], inputs.beta_logits[:, None]
    states = pool.states[1:]
    weights = arguments["weights"]

    def run() -> object:
        return fused_recurrent_kda(
            q, k, v, g, beta, A_log=weights.A_log, dt_bias=weights.dt_bias, initial_state=states,
            output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, lower_bound=BOUND,
        )  # fmt: skip

    return run


def attention(num_heads: int, batch: int, context: int, tokens: int) -> dict[str, object]:
    """Arguments of `paged_latent_attention`."""
    pages = batch * context // PAGE_SIZE
    table = torch.randperm(pages, device="cuda").to(torch.int32).view(batch, -1)
    return {
        "q_latent": normal(batch * tokens, num_heads, RANK + SHARED),
        "latents": normal(pages, PAGE_SIZE, RANK + SHARED),
        "page_table": table,
        "lengths": torch.full((batch,), context, dtype=torch.int32, device="cuda"),
        "cu_seqlens": tokens * torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        if tokens > 1 else None,
        "max_tokens": tokens,
        "kv_lora_rank": RANK,
        "scale": (DIM + SHARED) ** -0.5,
    }  # fmt: skip


def refuse_wrong_results() -> None:
    """End the run where a result is off by over 1 %."""

    def wide(x: object) -> object:
        if isinstance(x, tuple):
            return type(x)(*(wide(y) for y in x))
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    def check(name: str, got: Tensor, exact: Tensor) -> None:
        error = float((got.double() - exact).norm() / exact.norm())
        if not error < 1e-2:
            raise SystemExit(f"bench: {name} is off by {error:.1e}; nothing timed")

    for state in STATES:
        for tokens in (1, 4):
            arguments = layer(16, 3, state, tokens)
            exact = {name: wide(x) for name, x in arguments.items()}
            y = decode_kda(**exact, impl="reference")
            check(f"kda {state} {tokens}", decode_kda(**arguments, impl="triton"), y)
            got, want = (x["pool"].states[1:] for x in (arguments, exact))
            check(f"state {state} {tokens}", got, want)
    for num_heads in (16, 96):
        arguments = attention(num_heads, 3, 1024, 1)
        exact = {name: wide(x) for name, x in arguments.items()}
        out = paged_latent_attention(**exact, impl="reference")
        check(f"mla {num_heads}", paged_latent_attention(**arguments, impl="triton"), out)


def times(run: Callable[[], object]) -> dict[str, float]:
    with torch.no_grad():
        return both_ms(run)


def floors_of(rates: Rates, num_bytes: int, flops: int = 0) -> dict[str, float]:
    bytes_ms, flops_ms = rates.floor_ms(num_bytes), rates.floor_ms(0, flops)
    return {"bytes_ms": bytes_ms, "flops_ms": flops_ms, "floor_ms": max(bytes_ms, flops_ms)}


def time_layer(rates: Rates, num_heads: int, batch: int, state: str, tokens: int) -> Row:
    arguments = layer(num_heads, batch, state, tokens)
    floors = floors_of(rates, layer_bytes(arguments))
    ours = times(lambda: decode_kda(**arguments, impl="triton"))
    row: Row = {
        "op": "kda", "heads": num_heads, "batch": batch, "state": state, "tokens": tokens,
        **floors, "ours": ours, "share_of_copy": floors["bytes_ms"] / ours["graph_ms"],
    }  # fmt: skip
    if fused_recurrent_kda is not None and state == "fp32" and tokens == 1:
        row["fla"] = times(fla_layer(arguments))
    return row


def time_attention(rates: Rates, num_heads: int, batch: int, context: int, tokens: int) -> Row:
    arguments = attention(num_heads, batch, context, tokens)
    q, latents = arguments["q_latent"], arguments["latents"]
    num_bytes = latents.nbytes + q.nbytes + q[..., :RANK].numel() * q.itemsize
    flops = 2 * q.shape[0] * num_heads * context * (2 * RANK + SHARED)
    floors = floors_of(rates, num_bytes, flops)
    ours = times(lambda: paged_latent_attention(**arguments, impl="triton"))
    return {
        "op": "mla", "heads": num_heads, "batch": batch, "context": context, "tokens": tokens,
        **floors, "ours": ours, "share_of_copy": floors["bytes_ms"] / ours["graph_ms"],
    }  # fmt: skip


def work(rates: Rates) -> list[tuple[str, Callable[[], Row]]]:
    """What to time, most wanted first."""
    found: list[tuple[str, Callable[[], Row]]] = []

    def kda(*sizes: object) -> None:
        found.append((f"kda {sizes}", partial(time_layer, rates, *sizes)))

    def mla(*sizes: int) -> None:
        found.append((f"mla {sizes}", partial(time_attention, rates, *sizes)))

    for batch in BATCHES:
        for num_heads in (96, 16):
            for state in STATES:
                kda(num_heads, batch, state, 1)
            for context in (16384, 1024):
                mla(num_heads, batch, context, 1)
    kda(96, 32, "fp32", 4)
    mla(16, 32, 16384, 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/decode.json"))
    parser.add_argument("--commit", help="instead of asking git")
    parser.add_argument("--only", choices=("kda", "mla"), help="one operator")
    parser.add_argument("--budget", type=float, default=50.0, help="seconds to begin work in")
    arguments = parser.parse_args()
    start = time.monotonic()
    commit = commit_of(arguments.commit)
    refuse_wrong_results()
    rates = Rates.measured()
    result = {**rates.head(commit), "rows": [], "left_out": []}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    chosen = [
        (name, run)
        for name, run in work(rates)
        if arguments.only is None or name.startswith(arguments.only)
    ]
    keep_rows(chosen, result, arguments.out, end=start + arguments.budget)


if __name__ == "__main__":
    main()
