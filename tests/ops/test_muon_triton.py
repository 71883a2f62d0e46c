"""Muon's stack in Triton against lists of plain PyTorch, interpreted and on a GPU."""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl
from ops.harness import poisoned_memory
from ops.hopper import machine_code, resources
from ops.interpreted import assert_runs_interpreted, needs_interpreter

from baltoro.ops.impl import ImplError
from baltoro.ops.muon import MuonBlocks, Stack, stack_of
from baltoro.ops.muon import triton as kernels

BF16 = torch.bfloat16
MU = 0.95
# of stored tensors [N, rows, columns]; the last is cut out of a wider one
SHAPES = [(3, 96, 130), (2, 130, 96), (1, 96, 130), (4, 96, 130)]

INTERPRETED = """
import torch
from ops.test_muon_triton import difference
from baltoro.ops.newton_schulz import newton_schulz
for grad_dtype in (torch.float32,):
    worst = difference("cpu", grad_dtype, low_dtype=None)
    assert worst < 2e-2, worst

from baltoro.optim.assignment import assign
from baltoro.optim.config import OptimConfig
from baltoro.optim.optimizer import Optimizer
from baltoro.optim.structure import MatrixBlocks
p = torch.randn(24, 40).bfloat16().requires_grad_()
blocks = {"p": MatrixBlocks(row_parts=(24,), col_parts=(40,), why="whole")}
config = OptimConfig(muon_impl="triton", newton_schulz_dtype="bfloat16")
optimizer = Optimizer([("p", p)], assign([("p", p)], blocks), config)
for _ in range(3):
    p.grad = torch.randn(24, 40).bfloat16()
    optimizer.step(0.1)
    torch.testing.assert_close(p.float(), optimizer.masters["p"], rtol=1e-2, atol=1e-3)
    p.data = p.data.clone()  # somewhere else
"""


def entries(
    device: str, grad_dtype: torch.dtype, low_dtype: torch.dtype | None
) -> list[MuonBlocks]:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(device)

    made = []
    for index, (count, rows, columns) in enumerate(SHAPES):
        extra = 6 if index == len(SHAPES) - 1 else 0
        weight, momentum, grad = (normal(count, rows, columns + extra) for _ in range(3))
        parts = [weight, momentum, 3.0**index * grad.to(grad_dtype)]
        if low_dtype is not None:
            parts.append(weight.to(low_dtype))
        views = [part[:, :, extra:] for part in parts]
        low = views[3] if low_dtype is not None else None
        made.append(MuonBlocks(weight=views[0], momentum=views[1], grad=views[2], low=low))
    return made


def directions(stack: Stack) -> Tensor:
    """fp32, of norm one."""
    found = stack.directions(MU).float()
    return found if stack.is_normed else found / found.norm(dim=(1, 2), keepdim=True)


def difference(device: str, grad_dtype: torch.dtype, low_dtype: torch.dtype | None) -> float:
    """Largest relative error of what the kernels write, against plain code on the same numbers."""
    held = {impl: entries(device, grad_dtype, low_dtype) for impl in ("torch", "triton")}
    stacks = {impl: stack_of(held[impl], impl=impl) for impl in held}
    want, got = (directions(stacks[impl]) for impl in ("torch", "triton"))
    pairs = [(got, want)]
    for stack in stacks.values():
        stack.update(want.to(BF16), decay=0.75, rate=2.0)
    for own, other in zip(held["triton"], held["torch"], strict=True):
        pairs += [(own.weight, other.weight), (own.momentum, other.momentum)]
        if own.low is not None and other.low is not None:
            assert torch.equal(own.low, own.weight.to(low_dtype))
            pairs.append((own.low, other.low))
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


@pytest.mark.slow
@needs_interpreter
def test_the_kernels_do_what_plain_code_does_in_the_interpreter():
    assert_runs_interpreted(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.parametrize("grad_dtype", [torch.float32, BF16])
@pytest.mark.parametrize("low_dtype", [None, BF16])
def test_the_kernels_do_what_plain_code_does(grad_dtype, low_dtype):
    with poisoned_memory():
        assert difference("cuda", grad_dtype, low_dtype) < 3e-3  # directions are rounded to bf16


@pytest.mark.gpu
def test_what_lies_beside_a_matrix_is_left_alone():
    held = entries("cuda", BF16, BF16)
    whole = held[-1].weight._base
    beside = whole[:, :, :6].clone()
    stack = stack_of(held, impl="triton")
    stack.update(stack.directions(MU), decay=0.5, rate=1.0)
    assert torch.equal(whole[:, :, :6], beside)


@pytest.mark.gpu
def test_runs_repeat_to_the_bit():
    found = []
    for _ in range(2):
        held = entries("cuda", BF16, BF16)
        stack = stack_of(held, impl="triton")
        first = stack.directions(MU)
        stack.update(first, decay=0.9, rate=0.1)
        found.append([first, *(entry.weight for entry in held)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.gpu
def test_a_zero_matrix_has_zero_directions():
    zero = [torch.zeros(2, 64, 64, device="cuda") for _ in range(3)]
    stack = stack_of([MuonBlocks(weight=zero[0], momentum=zero[1], grad=zero[2])], impl="triton")
    assert torch.equal(stack.directions(MU).float(), zero[0])


@pytest.mark.gpu
def test_what_the_kernels_do_not_serve_is_refused():
    wide = torch.zeros(1, 8, 8, device="cuda")
    narrow = wide.to(BF16)
    with pytest.raises(ImplError, match=r"float32 weights and momenta, not torch\.bfloat16"):
        stack_of([MuonBlocks(weight=narrow, momentum=wide, grad=wide)], impl="triton")
    with pytest.raises(ImplError, match="one layout"):
        stack_of([MuonBlocks(weight=wide, momentum=wide, grad=wide.mT)], impl="triton")


@pytest.mark.slow
@pytest.mark.parametrize("is_tall", [False, True])
def test_the_kernels_move_sixteen_bytes_a_thread_at_once_and_spill_nothing(is_tall):
    table = {"table": "*i64", "R": 448, "C": 384, "ALIGN": 8, "SIDE": kernels.SIDE, "NUM_TILES": 42}
    tall = {**table, "IS_TALL": is_tall, "stack": "*bf16"}
    squares = {"squares": "*fp32", "mu": "fp32", "G": tl.bfloat16}
    low = {"decay": "fp32", "rate": "fp32", "HAS_LOW": True, "L": tl.bfloat16}
    tiles = {"eps": "fp32"}
    for kernel, arguments, loads in (
        (kernels.momentum_kernel, {**table, **squares}, 8 + 4),
        (kernels.direction_kernel, {**tall, **squares, **tiles}, 8 + 4),
        (kernels.update_kernel, {**tall, **low}, 8 + 4),
    ):
        assert resources(kernel, arguments, kernels.NUM_WARPS).stack_bytes == 0
        code = machine_code(kernel, arguments, kernels.NUM_WARPS)
        wide = [line for line in code.splitlines() if re.search(r"LDG\S*\.128", line)]
        assert len(wide) == loads, (kernel, len(wide))


@pytest.mark.gpu
def test_gradients_that_moved_are_read_where_they_are():
    held, other = entries("cuda", BF16, BF16), entries("cuda", BF16, BF16)
    moved = [
        replace(entry, weight=from_.weight, momentum=from_.momentum, low=from_.low)
        for entry, from_ in zip(other, held, strict=True)
    ]
    stack = stack_of(held, impl="triton")
    old = torch.tensor([entry.grad._base.data_ptr() for entry in held])
    new = torch.tensor([entry.grad._base.data_ptr() for entry in other])
    for entry in held:
        entry.grad.fill_(torch.nan)
    starts, order = old.sort()
    stack.move_gradients(starts, (new - old)[order])
    got = stack.directions(MU)
    assert got.isfinite().all()
    for entry, from_ in zip(moved, entries("cuda", BF16, BF16), strict=True):
        entry.momentum.copy_(from_.momentum)
    assert torch.equal(got, stack_of(moved, impl="triton").directions(MU))
