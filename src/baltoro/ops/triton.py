"""What the Triton kernels of several operators share: refusals, registration, launches, memory."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from triton import knobs
from triton.runtime.jit import JITFunction

from .impl import ImplError


def refuse_unserved(
    op: str, *tensors: Tensor, dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32)
) -> None:
    """Raise `ImplError` unless all tensors are of one of `dtypes` and on one CUDA device.

    In Triton's interpreter any device will do.
    """
    first = tensors[0]
    index = first.get_device()
    for x in tensors:
        if x.dtype not in dtypes:
            *names, name = (str(dtype).removeprefix("torch.") for dtype in (*dtypes, x.dtype))
            raise ImplError(f"{op}: impl='triton' serves {' and '.join(names)}, not {name}")
        if x.get_device() != index:
            raise ImplError(
                f"{op}: impl='triton' needs one device, not {first.device} and {x.device}"
            )
    if not first.is_cuda and not knobs.runtime.interpret:
        raise ImplError(
            f"{op}: impl='triton' needs tensors on a CUDA device, not on {first.device}"
        )


def as_operator(
    name: str, run: Callable[..., Any], outputs: Callable[..., Any]
) -> Callable[..., Any]:
    """`run` as torch's operator `baltoro::name`, which `torch.compile` does not look into.

    `outputs` takes the same arguments and returns tensors of the same shapes, unfilled. `run`
    mutates no argument. Where nobody traces or watches operators, `run` is called directly: torch's
    dispatcher costs Python as much as all the rest of a call.
    """
    qualified = f"baltoro::{name}"
    torch.library.define(qualified, torch.library.infer_schema(run, mutates_args=()))
    torch.library.impl(qualified, ("cuda", "cpu"), run)
    torch.library.register_fake(qualified, outputs)
    operator: Callable[..., Any] = getattr(torch.ops.baltoro, name).default

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
            return operator(*arguments)
        return run(*arguments)

    return call


def record(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply(*arguments)` without the look that torch's Python takes at every argument.

    The look is for `torch.func`; under its transforms, and under `torch.compile`, it is taken.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


_compiled: dict[tuple[object, ...], tuple[Any, Any, Any, tuple[object, ...]]] = {}


def enqueue(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """`kernel[grid](*arguments, **constants)`, but what Triton found for such arguments is kept.

    Triton's own look at every argument takes the host as long as a small kernel runs. `arguments`
    are tensors, tuples of tensors of one dtype, numbers or None, in the kernel's order, all that
    are not compile-time arguments; the latter come by name, with the launch's options.
    """
    if not enqueue_aligned(kernel, grid, arguments, constants):
        kernel[grid](*arguments, **constants)


def enqueue_aligned(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
) -> bool:
    """`enqueue`, or False and no launch where an address is not a multiple of 16 bytes, or is not
    of the current device."""
    if not isinstance(kernel, JITFunction):  # interpreted
        kernel[grid](*arguments, **constants)
        return True
    device = torch._C._cuda_getDevice()
    # a kernel's own hash is slow
    key: list[object] = [kernel.fn, device, *constants, *constants.values()]
    values: list[object] = []
    bits = 0
    for x in arguments:
        kind = type(x)
        if kind is int:
            values.append(x)
            # as Triton tells integers apart: one, multiples of 16, those of 64 bits
            key.append(1 if x == 1 else (x & 15 == 0, x >> 31))
        elif kind is tuple:
            pointers = []
            for tensor in x:
                if tensor.get_device() != device:
                    return False  # for Triton to refuse or to serve
                pointer = tensor.data_ptr()
                bits |= pointer
                pointers.append(pointer)
            values.append(tuple(pointers))
            key.append((x[0].dtype, len(x)))
        elif kind is float or x is None:
            values.append(x)
            key.append(kind)
        else:
            if x.get_device() != device:
                return False
            pointer = x.data_ptr()
            bits |= pointer
            values.append(pointer)
            key.append(x.dtype)
    if bits & 15:
        return False
    kind_of_call = tuple(key)
    found = _compiled.get(kind_of_call)
    if found is None or knobs.runtime.launch_enter_hook.calls:  # a profiler listens to Triton
        compiled = kernel[grid](*arguments, **constants)
        fixed = tuple([constants[name] for name in kernel.arg_names[len(arguments) :]])
        kept = compiled.run, compiled.function, compiled.packed_metadata, fixed
        _compiled[kind_of_call] = kept
        return True
    run, function, metadata, fixed = found
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    run(x, y, z, stream, function, metadata, None, None, None, *values, *fixed)
    return True


_quick_memory = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]


def allocator(like: Tensor) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """What gives unfilled memory of a shape, strides and a dtype on the device of `like`.

    It is what Inductor's programs call, past torch's dispatcher, which takes the host microseconds;
    where that would not do what torch's own functions do, it is one of those.
    """
    if (
        type(like) is Tensor  # neither a fake one nor another subclass
        and like.is_cuda
        and like.get_device() == torch._C._cuda_getDevice()
        and not torch.are_deterministic_algorithms_enabled()  # these fill fresh memory
    ):
        return _quick_memory
    return partial(_empty_strided, like)


def _empty_strided(
    like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    return like.new_empty_strided(shape, strides, dtype=dtype)


def unfilled_like(x: Tensor) -> Tensor:
    """A contiguous tensor of the shape, dtype and device of `x`, unfilled."""
    if x.dim() != 2:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    T, D = x.shape
    return allocator(x)((T, D), (D, 1), x.dtype)


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; Triton's own costs microseconds on the host."""
    return -(-a // b)


def padded_width(width: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << (width - 1).bit_length()


def rows_of(x: Tensor) -> Tensor:
    """`x` as `[rows, D]` whose rows are contiguous, without a copy where strides allow it."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@triton.jit
def add_pairs(a_0, b_0, a_1, b_1):
    """Combines two sums at once: `tl.reduce((a, b), axis, add_pairs)`."""
    return a_0 + a_1, b_0 + b_1
