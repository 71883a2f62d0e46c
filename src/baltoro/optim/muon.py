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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baltoro.ops.newton_schulz import newton_schulz
from baltoro.ops.newton_schulz.shared import MAX_GRAM_STEPS
from baltoro.optim.assignment import Assignment
from baltoro.optim.config import OptimConfig
from baltoro.optim.structure import MatrixBlocks

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_WIDE_ROWS = 128  # what the Gram form on the GPU serves
MIN_WIDE_RATIO = 2  # long over short side; faster at every one measured, 2 the least of them


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonBlocks:
    """Equal matrices of one parameter, `[N, rows, cols]`; weight and momentum are views that are
    written."""

    weight: Tensor
    momentum: Tensor
    grad: Tensor


def split(weight: Tensor, momentum: Tensor, grad: Tensor, blocks: MatrixBlocks) -> list[MuonBlocks]:
    """The matrices of a parameter, its momentum and its gradient, all of one shape."""
    return [
        MuonBlocks(weight=w, momentum=m, grad=g)
        for w, m, g in zip(
            blocks.views(weight),
            blocks.views(momentum),
            blocks.views(grad.contiguous()),
            strict=True,
        )
    ]


def muon_step(entries: Sequence[MuonBlocks], *, lr: float, config: OptimConfig) -> None:
    """Update weights and momenta of all `entries` in place."""
    for stack in _stacks(entries, config.max_stack_elements):
        short, long = sorted(stack[0].weight.shape[1:])
        orthogonal = newton_schulz(
            _directions(stack, config.momentum),
            steps=config.newton_schulz_steps,
            compute_dtype=_DTYPES[config.newton_schulz_dtype],
            impl=_impl_of(short, long, config),
        )
        scale = config.update_rms * math.sqrt(long)
        first = 0
        for group in _alike(stack):
            counts = [len(entry.weight) for entry in group]
            update = orthogonal[first : first + sum(counts)]
            first += sum(counts)
            updates = update.mT.contiguous() if _is_tall(group[0]) else update
            weights = _flat([entry.weight for entry in group])
            torch._foreach_mul_(weights, 1.0 - lr * config.weight_decay)
            torch._foreach_add_(weights, _like(weights, updates.split(counts)), alpha=-lr * scale)


def _is_tall(entry: MuonBlocks) -> bool:
    return entry.weight.shape[1] > entry.weight.shape[2]


def _alike(stack: Sequence[MuonBlocks]) -> list[list[MuonBlocks]]:
    """The entries by what lists of tensors must share to be updated in one launch."""
    groups: dict[tuple[bool, bool, bool, torch.dtype], list[MuonBlocks]] = {}
    for entry in stack:
        layout = (entry.weight.is_contiguous(), entry.grad.is_contiguous())
        groups.setdefault((_is_tall(entry), *layout, entry.grad.dtype), []).append(entry)
    return list(groups.values())


def _directions(stack: Sequence[MuonBlocks], mu: float) -> Tensor:
    """Take the gradients into the momenta; G + mu M of all matrices, `[N, short, long]`."""
    short, long = sorted(stack[0].weight.shape[1:])
    num_matrices = sum(len(entry.weight) for entry in stack)
    directions = stack[0].weight.new_empty(num_matrices, short, long)
    first = 0
    for group in _alike(stack):
        counts = [len(entry.weight) for entry in group]
        place = directions[first : first + sum(counts)]
        first += sum(counts)
        own = place.new_empty(len(place), long, short) if _is_tall(group[0]) else place
        momenta = _flat([entry.momentum for entry in group])
        parts = _like(momenta, own.split(counts))
        torch._foreach_copy_(parts, _like(parts, [entry.grad for entry in group]))
        torch._foreach_mul_(momenta, mu)
        torch._foreach_add_(momenta, parts)
        torch._foreach_add_(parts, momenta, alpha=mu)
        if own is not place:
            place.copy_(own.mT)
    return directions


def _flat(tensors: list[Tensor]) -> list[Tensor]:
    """Contiguous tensors as vectors: a list takes one launch only if all strides agree, those of
    dimensions of size one included."""
    return [tensor.view(-1) if tensor.is_contiguous() else tensor for tensor in tensors]


def _like(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """`others` in the shapes of `tensors`."""
    return [other.reshape(tensor.shape) for tensor, other in zip(tensors, others, strict=True)]


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
    if impl == "triton":  # four products of pairs a step, three bf16 products each
        return num_grams * 6 * short**2 * long + steps * 24 * short**3
    if impl == "gram":  # the first step of a Gram matrix is its polynomial alone
        return num_grams * (4 * short**2 * long - 6 * short**3) + steps * 8 * short**3
    return steps * (4 * short**2 * long + 2 * short**3)


def _impl_of(short: int, long: int, config: OptimConfig) -> str:
    """The implementation that the configuration names for matrices of these sides."""
    is_wide = short <= MAX_WIDE_ROWS and long >= MIN_WIDE_RATIO * short
    return config.newton_schulz_wide_impl if is_wide else config.newton_schulz_impl


def _stacks(entries: Sequence[MuonBlocks], max_elements: int) -> Iterator[list[MuonBlocks]]:
    """Entries of one shape up to transposition, in their order, at most `max_elements` at once."""
    by_shape: dict[tuple[int, int, torch.dtype], list[MuonBlocks]] = {}
    for entry in entries:
        short, long = sorted(entry.weight.shape[1:])
        for part in _pieces(entry, max_elements):
            by_shape.setdefault((short, long, entry.weight.dtype), []).append(part)
    for same in by_shape.values():
        stack: list[MuonBlocks] = []
        size = 0
        for entry in same:
            if stack and size + entry.weight.numel() > max_elements:
                yield stack
                stack, size = [], 0
            stack.append(entry)
            size += entry.weight.numel()
        yield stack


def _pieces(entry: MuonBlocks, max_elements: int) -> list[MuonBlocks]:
    """An entry cut along N, since the experts of one layer may alone exceed the limit."""
    count = max(1, max_elements // entry.weight[0].numel())
    tensors = (entry.weight, entry.momentum, entry.grad)
    return [
        MuonBlocks(weight=w, momentum=m, grad=g)
        for w, m, g in zip(*(tensor.split(count) for tensor in tensors), strict=True)
    ]
