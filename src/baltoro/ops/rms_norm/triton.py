"""RMS normalisation on an NVIDIA GPU: one read and one write each way, nothing kept but the input.

With r = 1/rms, n = x r and e = dy, or dy sigmoid(gate): dx = r (w e - n r sum(w e x) / D) and
dw = sum(e n) over rows. The backward pass sums x^2 again beside w e x, so no 1/rms is stored. A
program takes a range of rows and adds up its part of dw.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..derivatives import no_second_derivatives
from ..launch_table import Launch, derived, dtype_class, launch, width_class
from ..triton import (
    add_pairs,
    as_operator,
    cdiv,
    enqueue,
    padded_width,
    record,
    refuse_unserved,
    rows_of,
    unfilled_like,
)

MAX_PROGRAMS = 132 * 16  # of the backward pass, and parts of dw


@triton.jit
def load_tile(x, rows, stride, columns, is_here):
    offsets = rows[:, None] * stride + columns[None, :]
    return tl.load(x + offsets, mask=is_here, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "tiles_per_program"])
def forward_kernel(
    x, weight, gate_logits, out, num_rows, tiles_per_program, x_stride, gate_stride, eps,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """A range of rows, `BR` at a time."""
    columns = tl.arange(0, BD)
    is_column = columns < D
    w = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    first = tl.program_id(0).to(tl.int64) * tiles_per_program * BR
    for i in range(tiles_per_program):
        rows = first + i * BR + tl.arange(0, BR)
        is_here = (rows < num_rows)[:, None] & is_column[None, :]
        value = load_tile(x, rows, x_stride, columns, is_here)  # [BR, BD]
        normed = value * tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        if HAS_GATE:
            gate = tl.sigmoid(load_tile(gate_logits, rows, gate_stride, columns, is_here))
            y = normed * w * gate
        else:
            # the weight multiplies the rounded quotient
            y = normed.to(x.dtype.element_ty).to(tl.float32) * w
        offsets = rows[:, None] * D + columns[None, :]
        tl.store(out + offsets, y.to(out.dtype.element_ty), mask=is_here)


@triton.jit(do_not_specialize=["num_rows", "tiles_per_program"])
def backward_kernel(
    x, weight, gate_logits, d_out, d_x, d_gate_logits, d_weight_parts,
    num_rows, tiles_per_program, x_stride, gate_stride, d_out_stride, eps,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Gradients of a range of rows, and its part of the weight's."""
    columns = tl.arange(0, BD)
    is_column = columns < D
    w = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    d_weight = tl.zeros([BR, BD], tl.float32)
    first = tl.program_id(0).to(tl.int64) * tiles_per_program * BR
    for i in range(tiles_per_program):
        rows = first + i * BR + tl.arange(0, BR)
        is_here = (rows < num_rows)[:, None] & is_column[None, :]
        value = load_tile(x, rows, x_stride, columns, is_here)  # [BR, BD]
        d_normed = load_tile(d_out, rows, d_out_stride, columns, is_here)
        if HAS_GATE:
            gate = tl.sigmoid(load_tile(gate_logits, rows, gate_stride, columns, is_here))
            d_normed *= gate
        square, dot = tl.reduce((value * value, d_normed * value * w), 1, add_pairs)
        rstd = tl.rsqrt(square / D + eps)[:, None]
        normed = value * rstd
        product = d_normed * normed
        d_weight += product
        offsets = rows[:, None] * D + columns[None, :]
        d_value = (d_normed * w - normed * (dot[:, None] * rstd / D)) * rstd
        tl.store(d_x + offsets, d_value.to(d_x.dtype.element_ty), mask=is_here)
        if HAS_GATE:
            d_gate = product * w * (1.0 - gate)
            tl.store(
                d_gate_logits + offsets, d_gate.to(d_gate_logits.dtype.element_ty), mask=is_here
            )
    parts = d_weight_parts + tl.program_id(0) * D + columns
    tl.store(parts, tl.sum(d_weight, 0), mask=is_column)


def launch_of(kernel: str, x: Tensor) -> Launch:
    """Rows of a tile and warps. A class is a dtype and a padded width."""
    return _launch_of(kernel, x.dtype, x.shape[-1], x.device)


@derived
def _launch_of(kernel: str, dtype: torch.dtype, width: int, device: torch.device) -> Launch:
    return launch(kernel, f"{dtype_class(dtype)} {width_class(width, 16, 16384)}", device)


def _forward(x: Tensor, weight: Tensor, gate_logits: Tensor | None, eps: float) -> Tensor:
    out = unfilled_like(x)
    D = x.shape[-1]
    if x.numel() > 0:
        rows = rows_of(x)
        gate = None if gate_logits is None else rows_of(gate_logits)
        shape = launch_of("rms_norm_forward", x)
        tiles = cdiv(rows.shape[0], shape["rows"])
        tiles_per_program = min(4, cdiv(tiles, 4 * MAX_PROGRAMS))
        enqueue(
            forward_kernel, (cdiv(tiles, tiles_per_program),),
            rows, weight, gate, out, rows.shape[0], tiles_per_program,
            rows.stride(0), 0 if gate is None else gate.stride(0), eps,
            D=D, BR=shape["rows"], BD=padded_width(D), HAS_GATE=gate is not None,
            num_warps=shape["num_warps"],
        )  # fmt: skip
    return out


def _forward_outputs(x, weight, gate_logits, eps):
    return unfilled_like(x)


_forward_operator = as_operator("rms_norm_forward", _forward, _forward_outputs)


def _backward(
    x: Tensor, weight: Tensor, gate_logits: Tensor | None, d_out: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    d_x, d_weight, d_gate_logits = _gradients(x, weight, gate_logits)
    if x.numel() == 0:
        return d_x, d_weight.zero_(), d_gate_logits
    D = x.shape[-1]
    rows, d_rows = rows_of(x), rows_of(d_out)
    gate = None if gate_logits is None else rows_of(gate_logits)
    shape = launch_of("rms_norm_backward", x)
    tiles = cdiv(rows.shape[0], shape["rows"])
    tiles_per_program = cdiv(tiles, MAX_PROGRAMS // shape["num_warps"])
    num_programs = cdiv(tiles, tiles_per_program)
    parts = x.new_empty(num_programs, D, dtype=torch.float32)
    enqueue(
        backward_kernel, (num_programs,),
        rows, weight, gate, d_rows, d_x, d_gate_logits, parts, rows.shape[0], tiles_per_program,
        rows.stride(0), 0 if gate is None else gate.stride(0), d_rows.stride(0), eps,
        D=D, BR=shape["rows"], BD=padded_width(D), HAS_GATE=gate is not None,
        num_warps=shape["num_warps"],
    )  # fmt: skip
    return d_x, d_weight.copy_(parts.sum(0)), d_gate_logits


def _gradients(
    x: Tensor, weight: Tensor, gate_logits: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Unfilled gradients; the last is empty without a gate."""
    d_gate_logits = x.new_empty(0) if gate_logits is None else unfilled_like(gate_logits)
    return unfilled_like(x), torch.empty_like(weight), d_gate_logits


def _backward_outputs(x, weight, gate_logits, d_out, eps):
    return _gradients(x, weight, gate_logits)


_backward_operator = as_operator("rms_norm_backward", _backward, _backward_outputs)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, gate_logits, eps):
        ctx.save_for_backward(x, weight, gate_logits)
        ctx.op, ctx.eps = "rms_norm" if gate_logits is None else "gated_rms_norm", eps
        return _forward_operator(x, weight, gate_logits, eps)

    @staticmethod
    @no_second_derivatives(lambda ctx: f"{ctx.op}: impl='triton'")
    def backward(ctx, saved, d_out):
        x, weight, gate_logits = saved
        d_x, d_weight, d_gate = _backward_operator(x, weight, gate_logits, d_out, ctx.eps)
        return d_x, d_weight, None if gate_logits is None else d_gate, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`baltoro.ops.rms_norm.rms_norm`, whose checks have passed."""
    refuse_unserved("rms_norm", x, weight)
    weight = weight.contiguous()
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return record(_RmsNorm, x, weight, None, eps)
    return _forward_operator(x, weight, None, eps)


def gated_rms_norm(x: Tensor, weight: Tensor, gate_logits: Tensor, eps: float) -> Tensor:
    """`baltoro.ops.rms_norm.gated_rms_norm`, whose checks have passed."""
    refuse_unserved("gated_rms_norm", x, weight, gate_logits)
    weight = weight.contiguous()
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or gate_logits.requires_grad
    ):
        return record(_RmsNorm, x, weight, gate_logits, eps)
    return _forward_operator(x, weight, gate_logits, eps)
