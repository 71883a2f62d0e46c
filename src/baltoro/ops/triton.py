"""What the Triton kernels of several operators share: refusals, registration, sums over rows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

from .impl import ImplError


def refuse_unserved(
    op: str, *tensors: Tensor, dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32)
) -> None:
    """Raise `ImplError` unless all tensors are of one of `dtypes` and on one CUDA device.

    In Triton's interpreter any device will do.
    """
    device = tensors[0].device
    for x in tensors:
        if x.dtype not in dtypes:
            *names, name = (str(dtype).removeprefix("torch.") for dtype in (*dtypes, x.dtype))
            raise ImplError(f"{op}: impl='triton' serves {' and '.join(names)}, not {name}")
        if x.device != device:
            raise ImplError(f"{op}: impl='triton' needs one device, not {device} and {x.device}")
    if device.type != "cuda" and not knobs.runtime.interpret:
        raise ImplError(f"{op}: impl='triton' needs tensors on a CUDA device, not on {device}")


def as_operator(
    name: str, run: Callable[..., Any], outputs: Callable[..., Any]
) -> Callable[..., Any]:
    """`run` as torch's operator `baltoro::name`, which `torch.compile` does not look into.

    `outputs` takes the same arguments and returns tensors of the same shapes, unfilled. `run`
    mutates no argument. A call costs Python a third of what `torch.library.custom_op` does.
    """
    qualified = f"baltoro::{name}"
    torch.library.define(qualified, torch.library.infer_schema(run, mutates_args=()))
    torch.library.impl(qualified, ("cuda", "cpu"), run)
    torch.library.register_fake(qualified, outputs)
    operator: Callable[..., Any] = getattr(torch.ops.baltoro, name).default
    return operator


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; Triton's own costs microseconds on the host."""
    return -(-a // b)


def padded_width(width: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << (width - 1).bit_length()


def rows_of(x: Tensor) -> Tensor:
    """`x` as `[rows, D]` whose rows are contiguous, without a copy where strides allow it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@triton.jit
def add_pairs(a_0, b_0, a_1, b_1):
    """Combines two sums at once: `tl.reduce((a, b), axis, add_pairs)`."""
    return a_0 + a_1, b_0 + b_1
