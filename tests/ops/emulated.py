"""Run the Python of a Gluon kernel with torch's tensors, on a machine without a GPU.

`Emulated(kernel)` launches like `kernel`: its programs run one after another, the groups of a
`warp_specialize` as threads. Layouts and fences mean nothing here, products and copies end at once,
and lanes do not exist; indices, masks, sums, the order of groups and every wait on a barrier are
the kernel's own. A wait that nobody ends fails, and so does memory out of bounds.
"""

import functools
import itertools
import threading
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import constexpr
from triton.runtime.jit import JITFunction

PATIENCE_S = 60.0
changed = threading.Condition()


class Shared:
    """Shared memory, NaN until it is written."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.shape, self.dtype = list(data.shape), data.dtype

    def index(self, i: Any) -> "Shared":
        return Shared(self.data[int(i)])

    def slice(self, start: Any, length: int, dim: int = 0) -> "Shared":
        return Shared(self.data.narrow(dim, int(start), length))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.data.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> "Shared":
        return Shared(self.data.view(dtype).reshape(shape))

    def load(self, layout: Any) -> Tensor:
        return self.data.clone()

    def store(self, x: Tensor) -> None:
        assert (x.shape, x.dtype) == (self.data.shape, self.dtype), (x.shape, x.dtype, self.shape)
        self.data.copy_(x)


class Barrier:
    """An mbarrier: a phase ends when all arrivals and all expected bytes are there."""

    def __init__(self) -> None:
        self.count = self.missing = self.num_bytes = self.num_ended = 0

    def start(self, count: int) -> None:
        self.count = self.missing = count

    def change(self, arrivals: int, num_bytes: int) -> None:
        with changed:
            self.missing -= arrivals
            self.num_bytes += num_bytes
            assert self.missing >= 0, "more arrivals than the barrier takes"
            if self.missing == self.num_bytes == 0:
                self.num_ended += 1
                self.missing = self.count
                changed.notify_all()

    def wait(self, parity: Any) -> None:
        wanted = int(parity)
        with changed:
            ended = changed.wait_for(lambda: (self.num_ended - 1) % 2 == wanted, _patience())
        assert ended, f"waits forever for parity {wanted} after {self.num_ended} phases"


def _patience() -> float:
    return PATIENCE_S if threading.current_thread() is not threading.main_thread() else 0.0


class Pointer:
    """Places in the memory of a tensor."""

    def __init__(self, tensor: Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, offset
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.tensor, self.offset + offset)

    def places(self, mask: Any, *others: Any) -> tuple[Tensor, ...]:
        """The memory as a line; offsets, mask and others of one shape, offsets 0 where masked."""
        start = self.tensor.storage_offset()
        size = self.tensor.untyped_storage().nbytes() // self.tensor.element_size() - start
        line = self.tensor.as_strided((size,), (1,))
        values = (self.offset, True if mask is None else mask, *others)
        offset, is_here, *rest = torch.broadcast_tensors(*map(torch.as_tensor, values))
        offset = torch.where(is_here, offset, 0)
        assert not is_here.any() or (int(offset.min()) >= 0 and int(offset.max()) < size)
        return line, offset, is_here, *rest


class Rows:
    """A tensor descriptor: what is outside of its shape reads as 0."""

    def __init__(self, descriptor: Any) -> None:
        self.data = descriptor.base.as_strided(descriptor.shape, descriptor.strides)
        self.block, self.dtype = list(descriptor.block_shape), self.data.dtype

    def copy_to(self, place: list[Any], barrier: Barrier, target: Shared) -> None:
        assert target.shape == self.block, (target.shape, self.block)
        row, column = map(int, place)
        (height, width), (num_rows, num_columns) = self.block, self.data.shape
        target.data.zero_()
        if 0 <= row < num_rows and 0 <= column < num_columns:
            there = self.data[row : row + height, column : column + width]
            target.data[: there.shape[0], : there.shape[1]] = there
        barrier.change(0, -height * width * self.data.element_size())


def _load(pointer: Pointer, mask: Any = None, other: Any = None) -> Tensor:
    line, offset, is_here = pointer.places(mask)
    return line[offset] if mask is None else torch.where(is_here, line[offset], other)


def _store(pointer: Pointer, x: Any, mask: Any = None) -> None:
    line, offset, is_here, x = pointer.places(mask, x)
    line[offset[is_here]] = x[is_here]


def _product(
    a: Any, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False
) -> Tensor:
    a = a.data if isinstance(a, Shared) else a
    product = a.float() @ b.data.float()
    return acc + product if use_acc else product


def _allocated(dtype: torch.dtype, shape: list[int], layout: Any = None) -> Any:
    if dtype == torch.int64:
        barriers = [Barrier() for _ in range(shape[0])]
        return SimpleNamespace(index=lambda i: barriers[int(i)])
    return Shared(torch.full(shape, torch.nan, dtype=dtype))


def _together(groups: list[tuple[Callable, tuple]], warps: list[int], registers: list[int]) -> None:
    failures: list[BaseException] = []

    def run(function: Callable, arguments: tuple) -> None:
        try:
            function(*arguments)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=group) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _nothing(*arguments: Any, **options: Any) -> None:
    return None


def _pair(function: Callable) -> Callable:
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


_language = SimpleNamespace(
    int32=torch.int32, int64=torch.int64, float32=torch.float32, bfloat16=torch.bfloat16,
    NVMMADistributedLayout=_nothing, NVMMASharedLayout=_nothing, BlockedLayout=_nothing,
    SliceLayout=_nothing, SwizzledSharedLayout=_nothing, constexpr=lambda x: x,
    load=_load, store=_store, allocate_shared_memory=_allocated, warp_specialize=_together,
    inline_asm_elementwise=lambda *arguments, **options: torch.tensor(0),
    arange=lambda start, end, layout=None: torch.arange(start, end),
    zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
    full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
    zeros_like=torch.zeros_like, exp2=torch.exp2, log2=torch.log2, static_range=range,
    minimum=_pair(torch.minimum), maximum=_pair(torch.maximum),
    where=lambda condition, a, b: torch.where(torch.as_tensor(condition), a, b),
    cdiv=lambda a, b: torch.as_tensor(-(-a // b)),
    max=lambda x, axis=0: x.amax(axis), min=lambda x, axis=0: x.amin(axis),
    sum=lambda x, axis=0: x.sum(axis, dtype=x.dtype),
    associative_scan=lambda x, axis, combine: x.cumsum(axis),
    convert_layout=lambda x, layout: x,
)  # fmt: skip
_hopper = {
    "fence_async_shared": _nothing,
    "barrier": _nothing,
    "mbarrier": SimpleNamespace(
        MBarrierLayout=_nothing,
        init=lambda barrier, count: barrier.start(count),
        expect=lambda barrier, num_bytes: barrier.change(1, num_bytes),
        arrive=lambda barrier, count=1: barrier.change(count, 0),
        wait=lambda barrier, parity: barrier.wait(parity),
    ),
    "tma": SimpleNamespace(
        async_copy_global_to_shared=lambda rows, place, barrier, target: rows.copy_to(
            place, barrier, target
        )
    ),
    "warpgroup_mma": _product,
    "warpgroup_mma_wait": lambda outstanding, deps: deps[0] if len(deps) == 1 else tuple(deps),
}


class Emulated:
    """Launched as the kernel is, with tensors of the CPU."""

    def __init__(self, kernel: Any) -> None:
        self.names: dict[str, Any] = {}
        self.run = self._plain(kernel)
        self.grid = (1, 1, 1)
        self.names |= _hopper
        self.names["gl"] = self.names["tl"] = SimpleNamespace(
            **vars(_language),
            num_programs=lambda axis: torch.tensor(self.grid[axis]),
            program_id=lambda axis: torch.tensor(self.place[axis]),
        )

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, (*grid, 1, 1)[:3])

    def _launch(self, grid: tuple[int, ...], *arguments: Any, num_warps: int, **more: Any) -> None:
        self.grid = grid
        for self.place in itertools.product(*map(range, grid)):
            self.run(*map(_argument, arguments), **more)

    def _plain(self, jitted: Any) -> FunctionType:
        """The Python of a jitted function, which finds torch's names where Gluon's were."""
        function = jitted.fn
        for name, value in function.__globals__.items():
            if name in self.names or name.startswith("__"):
                continue
            self.names[name] = value.value if isinstance(value, constexpr) else value
            if isinstance(value, JITFunction):
                self.names[name] = self._plain(value)
        return FunctionType(function.__code__, self.names, function.__name__, function.__defaults__)


def _argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        return Pointer(x)
    return Rows(x) if isinstance(x, TensorDescriptor) else x
