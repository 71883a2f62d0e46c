"""Muon's stack on an NVIDIA GPU: kernels that read from a table where every matrix lies.

Three passes over a stack: momenta and the sums of squares of directions; normed bf16 directions;
weights and their rounded copies. With bf16 gradients and copies these move 10, 8 and 12 bytes an
entry, and each takes one launch for the matrices of one orientation, of whatever parameters.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baltoro.ops.impl import ImplError
from baltoro.ops.muon.shared import LINE_BYTES, MuonBlocks, alike
from baltoro.ops.newton_schulz.shared import NORM_EPS
from baltoro.ops.triton import cdiv, enqueue, refuse_unserved

SIDE = 64  # rows and columns of a tile
NUM_WARPS = 4
WEIGHT, MOMENTUM, GRAD, LOW, STRIDE, FIELDS = (tl.constexpr(i) for i in range(6))  # of a row


@triton.jit
def tile_of(R: tl.constexpr, C: tl.constexpr, SIDE: tl.constexpr, NUM_TILES: tl.constexpr):
    """Matrix, rows and columns of this program, and which of them there are."""
    across: tl.constexpr = (C + SIDE - 1) // SIDE
    tile = tl.program_id(0) % NUM_TILES
    rows = tile // across * SIDE + tl.arange(0, SIDE)
    columns = tile % across * SIDE + tl.arange(0, SIDE)
    matrix = (tl.program_id(0) // NUM_TILES).to(tl.int64)
    return matrix, rows, columns, (rows < R)[:, None] & (columns < C)[None, :]


@triton.jit
def place_of(row, FIELD: tl.constexpr, rows, columns, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """Addresses of a tile of one of a matrix's tensors."""
    stride = tl.multiple_of(tl.load(row + STRIDE), ALIGN)
    start = tl.multiple_of(tl.load(row + FIELD).to(tl.pointer_type(DTYPE)), 2 * ALIGN)
    return start + rows[:, None] * stride + columns[None, :]


@triton.jit
def stack_place(
    stack, matrix, rows, columns, R: tl.constexpr, C: tl.constexpr, IS_TALL: tl.constexpr
):  # fmt: skip
    """Addresses of the tile in `stack`, where tall matrices are transposed."""
    start = stack + matrix * (R * C)
    if IS_TALL:
        return start + columns[:, None] * R + rows[None, :]
    return start + rows[:, None] * C + columns[None, :]


@triton.jit
def momentum_kernel(
    table, squares, mu,
    R: tl.constexpr, C: tl.constexpr, G: tl.constexpr, ALIGN: tl.constexpr, SIDE: tl.constexpr,
    NUM_TILES: tl.constexpr,
):  # fmt: skip
    """The momentum of a tile, and the sum of squares of its directions."""
    matrix, rows, columns, is_here = tile_of(R, C, SIDE, NUM_TILES)
    row = table + matrix * FIELDS
    at = place_of(row, MOMENTUM, rows, columns, tl.float32, ALIGN)
    grad = tl.load(place_of(row, GRAD, rows, columns, G, ALIGN), mask=is_here, other=0.0)
    grad = grad.to(tl.float32)
    momentum = mu * tl.load(at, mask=is_here, other=0.0) + grad
    tl.store(at, momentum, mask=is_here)
    direction = grad + mu * momentum
    total = tl.sum(tl.sum(direction * direction, 1), 0)
    tl.store(squares + tl.program_id(0), total)


@triton.jit
def direction_kernel(
    table, squares, stack, mu, eps,
    R: tl.constexpr, C: tl.constexpr, IS_TALL: tl.constexpr, G: tl.constexpr,
    ALIGN: tl.constexpr, SIDE: tl.constexpr, NUM_TILES: tl.constexpr,
):  # fmt: skip
    """Directions of a tile from the new momentum, over the norm of the matrix's."""
    matrix, rows, columns, is_here = tile_of(R, C, SIDE, NUM_TILES)
    row = table + matrix * FIELDS
    norm = tl.sqrt(tl.load(squares + matrix)) + eps
    momentum = tl.load(
        place_of(row, MOMENTUM, rows, columns, tl.float32, ALIGN), mask=is_here, other=0.0
    )
    grad = tl.load(place_of(row, GRAD, rows, columns, G, ALIGN), mask=is_here, other=0.0)
    direction = ((grad.to(tl.float32) + mu * momentum) / norm).to(stack.dtype.element_ty)
    at = stack_place(stack, matrix, rows, columns, R, C, IS_TALL)
    if IS_TALL:
        is_here = (rows < R)[None, :] & (columns < C)[:, None]
        direction = tl.trans(direction)
    tl.store(at, direction, mask=is_here)


@triton.jit
def update_kernel(
    table, stack, decay, rate,
    R: tl.constexpr, C: tl.constexpr, IS_TALL: tl.constexpr, HAS_LOW: tl.constexpr, L: tl.constexpr,
    ALIGN: tl.constexpr, SIDE: tl.constexpr, NUM_TILES: tl.constexpr,
):  # fmt: skip
    """Weights of a tile, and their rounded copies if there are any."""
    matrix, rows, columns, is_here = tile_of(R, C, SIDE, NUM_TILES)
    row = table + matrix * FIELDS
    at = stack_place(stack, matrix, rows, columns, R, C, IS_TALL)
    if IS_TALL:
        is_there = (rows < R)[None, :] & (columns < C)[:, None]
        update = tl.trans(tl.load(at, mask=is_there, other=0.0))
    else:
        update = tl.load(at, mask=is_here, other=0.0)
    at = place_of(row, WEIGHT, rows, columns, tl.float32, ALIGN)
    weight = decay * tl.load(at, mask=is_here, other=0.0) - rate * update.to(tl.float32)
    tl.store(at, weight, mask=is_here)
    if HAS_LOW:
        tl.store(place_of(row, LOW, rows, columns, L, ALIGN), weight.to(L), mask=is_here)


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


class _Group(NamedTuple):
    """Matrices that one launch serves, `[first, last)` of the stack."""

    first: int
    last: int
    table: Tensor  # int64 [N, 5]: four addresses and the entries between rows; on the host
    placed: Tensor  # the same on the device
    sizes: dict[str, int]  # compile-time arguments that all kernels take
    is_tall: bool
    grad: tl.dtype
    low: tl.dtype | None  # None: no rounded copies


class PlacedStack:
    """`ops.muon.Stack` of fp32 weights; it holds addresses and no tensor of its entries."""

    is_normed = True
    is_placed = True

    def __init__(self, entries: Sequence[MuonBlocks]) -> None:
        short, long = sorted(entries[0].weight.shape[1:])
        self.sides = (short, long)
        self._groups: list[_Group] = []
        first = 0
        for group in alike(entries):
            self._groups.append(_group_of(group, first))
            first = self._groups[-1].last

    def directions(self, mu: float) -> Tensor:
        """bf16 `[N, short, long]`, normed."""
        device = self._groups[0].placed.device
        num_matrices = self._groups[-1].last
        stack = torch.empty(num_matrices, *self.sides, dtype=torch.bfloat16, device=device)
        for first, last, _, table, sizes, is_tall, grad, _ in self._groups:
            squares = torch.empty(
                last - first, sizes["NUM_TILES"], dtype=torch.float32, device=device
            )
            grid = (squares.numel(),)
            enqueue(momentum_kernel, grid, table, squares, mu, G=grad, **sizes)
            enqueue(
                direction_kernel, grid, table, squares.sum(1), stack[first:last], mu, NORM_EPS,
                IS_TALL=is_tall, G=grad, **sizes,
            )  # fmt: skip
        return stack

    def update(self, orthogonal: Tensor, *, decay: float, rate: float) -> None:
        for first, last, _, table, sizes, is_tall, _, low in self._groups:
            enqueue(
                update_kernel, ((last - first) * sizes["NUM_TILES"],), table,
                orthogonal[first:last], decay, rate, IS_TALL=is_tall, HAS_LOW=low is not None,
                L=low or tl.float32, **sizes,
            )  # fmt: skip

    def move_gradients(self, starts: Tensor, steps: Tensor) -> None:
        for index, group in enumerate(self._groups):
            at = group.table[:, GRAD.value]
            at += steps[torch.searchsorted(starts, at.contiguous(), right=True) - 1]
            self._groups[index] = group._replace(placed=_on(group.placed.device, group.table))


def _group_of(entries: Sequence[MuonBlocks], first: int) -> _Group:
    """A launch for entries that are alike; raises `ImplError` for what the kernels do not serve."""
    head = entries[0]
    rows = []
    for entry in entries:
        low = entry.weight if entry.low is None else entry.low
        tensors = (entry.weight, entry.momentum, entry.grad, low)
        refuse_unserved("muon", *tensors)
        if {entry.weight.dtype, entry.momentum.dtype} != {torch.float32}:
            raise ImplError(
                f"muon: impl='triton' serves float32 weights and momenta, not {entry.weight.dtype} "
                f"and {entry.momentum.dtype}"
            )
        strides = entry.weight.stride()
        if strides[2] != 1 or {tensor.stride() for tensor in tensors} != {strides}:
            raise ImplError(
                "muon: impl='triton' serves tensors of one layout whose rows are contiguous, not "
                f"strides {[tensor.stride() for tensor in tensors]}"
            )
        rows.append([*(tensor.data_ptr() for tensor in tensors), *strides[:2]])
    count = torch.tensor([len(entry.weight) for entry in entries])
    ends = count.cumsum(0)
    of_matrix = torch.tensor(rows).repeat_interleave(count, dim=0)
    place = torch.arange(int(ends[-1])) - (ends - count).repeat_interleave(count)
    low = head.weight if head.low is None else head.low
    sizes = [x.itemsize for x in (head.weight, head.momentum, head.grad, low)]
    addresses = of_matrix[:, :4] + (place * of_matrix[:, 4])[:, None] * torch.tensor(sizes)
    table = torch.cat([addresses, of_matrix[:, 5:]], dim=1)
    is_aligned = not bool((addresses % LINE_BYTES).any() or (table[:, 4] % 8).any())
    R, C = head.weight.shape[1:]
    return _Group(
        first=first,
        last=first + len(table),
        table=table,
        placed=_on(head.weight.device, table),
        sizes={
            "R": R,
            "C": C,
            "ALIGN": 8 if is_aligned else 1,
            "SIDE": SIDE,
            "NUM_TILES": cdiv(R, SIDE) * cdiv(C, SIDE),
            "num_warps": NUM_WARPS,
        },
        is_tall=head.is_tall,
        grad=_TYPES[head.grad.dtype],
        low=None if head.low is None else _TYPES[head.low.dtype],
    )


def _on(device: torch.device, table: Tensor) -> Tensor:
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
