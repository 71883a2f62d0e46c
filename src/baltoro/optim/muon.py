"""Muon on matrix blocks: one Newton-Schulz per true matrix (per head for W_q, W_k, W_v).

M <- mu M + G,   O = NewtonSchulz(G + mu M),   W <- (1 - lr lambda) W - lr 0.2 sqrt(max(rows, cols))
O

The factor makes the RMS of a full-rank update 0.2, the usual size of AdamW's, so one learning rate
serves both (arXiv 2502.16982 section 2.2). It is taken from the block and not from the stored
tensor: a head's block is smaller, and without its own factor its update would be too large. Blocks
of one shape, or its transpose, from all parameters are stacked and orthogonalised together.

Heads over a wide model may take another implementation, in Gram form: with three products for one
on the short side and two for one of the two on the long side, five steps are 6 r^2 c + 120 r^3
operations, and the loop's 20 r^2 c + 10 r^3, more from c = 8 r; of its traffic they are a fifth.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from baltoro.ops.muon import MuonBlocks, Stack, stack_of
from baltoro.ops.newton_schulz import newton_schulz
from baltoro.ops.newton_schulz.shared import MAX_GRAM_STEPS, SQUARE_SIDE
from baltoro.optim.assignment import Assignment
from baltoro.optim.config import OptimConfig
from baltoro.optim.structure import MatrixBlocks

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_WIDE_ROWS = 128  # what the Gram form on the GPU serves
MIN_WIDE_RATIO = 2  # long over short side; faster at every one measured, 2 the least of them


def split(
    weight: Tensor,
    momentum: Tensor,
    grad: Tensor,
    blocks: MatrixBlocks,
    low: Tensor | None = None,
) -> list[MuonBlocks]:
    """The matrices of a parameter, its momentum and its gradient, all of one shape.

    `low` is the parameter itself where `weight` is its fp32 master.
    """
    copies = [None] * blocks.num_parts if low is None else blocks.views(low)
    return [
        MuonBlocks(weight=w, momentum=m, grad=g, low=c)
        for w, m, g, c in zip(
            blocks.views(weight),
            blocks.views(momentum),
            blocks.views(grad.contiguous()),
            copies,
            strict=True,
        )
    ]


def stacks_of(entries: Sequence[MuonBlocks], config: OptimConfig) -> list[Stack]:
    """Entries of one shape up to transposition together, at most `max_stack_elements` at once."""
    by_shape: dict[tuple[int, int, torch.dtype], list[MuonBlocks]] = {}
    for entry in entries:
        short, long = sorted(entry.weight.shape[1:])
        # the experts of one layer may alone exceed the limit
        count = max(1, config.max_stack_elements // (short * long))
        by_shape.setdefault((short, long, entry.weight.dtype), []).extend(entry.parts(count))
    return [
        stack_of(part, impl=config.muon_impl)
        for same in by_shape.values()
        for part in _within(same, config.max_stack_elements)
    ]


def muon_step(entries: Sequence[MuonBlocks], *, lr: float, config: OptimConfig) -> None:
    """Update weights and momenta of all `entries` in place."""
    step_stacks(stacks_of(entries, config), lr=lr, config=config)


def step_stacks(stacks: Sequence[Stack], *, lr: float, config: OptimConfig) -> None:
    """`muon_step` of the entries that `stacks_of` put together."""
    for stack in stacks:
        short, long = stack.sides
        orthogonal = newton_schulz(
            stack.directions(config.momentum),
            steps=config.newton_schulz_steps,
            compute_dtype=_DTYPES[config.newton_schulz_dtype],
            is_normed=stack.is_normed,
            impl=_impl_of(short, long, config),
        )
        stack.update(
            orthogonal,
            decay=1.0 - lr * config.weight_decay,
            rate=lr * config.update_rms * math.sqrt(long),
        )


def muon_flops(assignment: Assignment, config: OptimConfig) -> int:
    """Floating-point operations of the matrix products of one step, whatever the batch.

    Of what each shape's implementation does (`baltoro.ops.newton_schulz`). On small batches this
    can exceed forward and backward together.
    """
    total = 0
    for row in assignment.rows:
        if row.blocks is None:
            continue
        num_matrices = row.blocks.num_groups * math.prod(row.shape[:-2])
        for rows, cols in itertools.product(row.blocks.row_parts, row.blocks.col_parts):
            short, long = sorted((rows, cols))
            total += num_matrices * _matrix_flops(short, long, config)
    return total


def _matrix_flops(short: int, long: int, config: OptimConfig) -> int:
    steps, impl = config.newton_schulz_steps, _impl_of(short, long, config)
    num_grams = -(-steps // MAX_GRAM_STEPS)
    if impl == "triton" and short > MAX_WIDE_ROWS:  # of the symmetric products half and a diagonal
        across = -(-short // SQUARE_SIDE)
        squares = (2 * short**2 * long + 2 * short**3) * (across + 1) // (2 * across)
        return steps * (squares + 2 * short**2 * long)
    if impl == "triton":  # four products of pairs a step, three bf16 products each
        return num_grams * 6 * short**2 * long + steps * 24 * short**3
    if impl == "gram":  # the first step of a Gram matrix is its polynomial alone
        return num_grams * (4 * short**2 * long - 6 * short**3) + steps * 8 * short**3
    return steps * (4 * short**2 * long + 2 * short**3)


def _impl_of(short: int, long: int, config: OptimConfig) -> str:
    """The implementation that the configuration names for matrices of these sides."""
    is_wide = short <= MAX_WIDE_ROWS and long >= MIN_WIDE_RATIO * short
    return config.newton_schulz_wide_impl if is_wide else config.newton_schulz_impl


def _within(entries: Iterable[MuonBlocks], max_elements: int) -> Iterator[list[MuonBlocks]]:
    """The entries in their order, in lists of at most `max_elements` numbers, or of one entry."""
    held: list[MuonBlocks] = []
    size = 0
    for entry in entries:
        if held and size + entry.weight.numel() > max_elements:
            yield held
            held, size = [], 0
        held.append(entry)
        size += entry.weight.numel()
    yield held
