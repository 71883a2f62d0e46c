"""Experts in one process, and divided over ranks: what `test_experts` compares."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from model.tiny import tiny_k3
from torch import Tensor

from baltoro.model.model import Model
from baltoro.ops.moe import moe_experts
from baltoro.parallel.experts import divide_experts, divided_experts

NUM_RANKS, NUM_EXPERTS, ACTIVE, LATENT, INNER = 4, 8, 2, 6, 5
COUNTS = (18, 24, 30, 12)  # tokens by rank
# also one rank without tokens, and ranks whose experts nobody wants
CASES = ((COUNTS, NUM_EXPERTS), ((18, 0, 30, 12), NUM_EXPERTS), ((18, 0, 30, 12), 2))
GLU = {"activation": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0, "impl": "torch"}


def inputs(counts: Sequence[int], num_wanted: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """`x`, weights of routing and both weights of experts; ids; the gradient of the result."""
    generator = torch.Generator().manual_seed(3)
    num_tokens, shape = sum(counts), {"dtype": torch.float64, "generator": generator}
    ids = torch.rand(num_tokens, num_wanted, generator=generator).topk(ACTIVE).indices
    leaves = [
        torch.randn(num_tokens, LATENT, **shape),
        torch.rand(num_tokens, ACTIVE, **shape),
        torch.randn(NUM_EXPERTS, 2 * INNER, LATENT, **shape),
        torch.randn(NUM_EXPERTS, LATENT, INNER, **shape),
    ]
    return leaves, ids, torch.randn(num_tokens, LATENT, **shape)


def whole(counts: Sequence[int], num_wanted: int) -> list[Tensor]:
    """The result and the gradients of all leaves, in one process."""
    leaves, ids, d_out = inputs(counts, num_wanted)
    x, weights, gate_up, down = (leaf.requires_grad_() for leaf in leaves)
    out = moe_experts(x, ids, weights, gate_up, down, **GLU)
    out.backward(d_out)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def cut(values: Sequence[Tensor], counts: Sequence[int], rank: int) -> list[Tensor]:
    """What of a result, or of leaves, is a rank's: its tokens, its experts."""
    start, part = sum(counts[:rank]), NUM_EXPERTS // NUM_RANKS
    tokens, experts = slice(start, start + counts[rank]), slice(rank * part, (rank + 1) * part)
    return [
        value[tokens if len(value) == sum(counts) else experts].detach().clone() for value in values
    ]


def at_rank(rank: int, counts: Sequence[int], num_wanted: int) -> list[Tensor]:
    """As `whole`, of one rank."""
    leaves, ids, d_out = inputs(counts, num_wanted)
    x, weights, gate_up, down, ids, d_out = cut([*leaves, ids, d_out], counts, rank)
    leaves = [leaf.requires_grad_() for leaf in (x, weights, gate_up, down)]
    out = divided_experts(x, ids, weights, gate_up, down, group=dist.group.WORLD, **GLU)
    out.backward(d_out)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def of_penalty(out: Tensor, leaves: Sequence[Tensor], d_out: Tensor) -> list[Tensor]:
    """Gradients by all leaves of the squared gradient by the first."""
    (d_x,) = torch.autograd.grad(out, leaves[0], d_out, create_graph=True)
    return list(torch.autograd.grad(d_x.square().sum(), leaves))


def whole_penalty(counts: Sequence[int], num_wanted: int) -> list[Tensor]:
    """As `whole`, of experts that have second derivatives."""
    leaves, ids, d_out = inputs(counts, num_wanted)
    x, weights, gate_up, down = (leaf.requires_grad_() for leaf in leaves)
    out = moe_experts(x, ids, weights, gate_up, down, **{**GLU, "impl": "reference"})
    return of_penalty(out, leaves, d_out)


def penalty_at_rank(rank: int, counts: Sequence[int], num_wanted: int) -> list[Tensor]:
    """As `whole_penalty`, of one rank."""
    leaves, ids, d_out = inputs(counts, num_wanted)
    *leaves, ids, d_out = cut([*leaves, ids, d_out], counts, rank)
    x, weights, gate_up, down = (leaf.requires_grad_() for leaf in leaves)
    glu = {**GLU, "impl": "reference"}
    out = divided_experts(x, ids, weights, gate_up, down, group=dist.group.WORLD, **glu)
    return of_penalty(out, leaves, d_out)


def model_of_experts() -> Model:
    torch.manual_seed(0)
    moe = replace(tiny_k3().moe, num_experts=NUM_EXPERTS)
    return Model(tiny_k3(moe=moe)).double()


def run_model(model: Model, counts: Sequence[int]) -> dict[str, Tensor]:
    """Hidden states of sequences of these lengths, and gradients of all experts by name."""
    tokens = torch.cat([torch.arange(count) * 7 % 60 for count in counts])
    bounds = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
    hidden = model(tokens, bounds).hidden
    hidden.square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if ".experts." in name}
    return {"hidden": hidden.detach(), **found}


def work(rank: int) -> tuple[list[list[Tensor]], dict[str, Tensor], list[list[Tensor]]]:
    """The operator in every case, a model whose experts are divided, and second derivatives."""
    cases = [at_rank(rank, counts, num_wanted) for counts, num_wanted in CASES]
    model = model_of_experts()
    divide_experts(model, dist.group.WORLD)
    penalties = [penalty_at_rank(rank, counts, num_wanted) for counts, num_wanted in CASES]
    return cases, run_model(model, COUNTS[rank : rank + 1]), penalties
