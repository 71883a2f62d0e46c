"""How much of a step goes to matrix products: the rest is what a faster kernel could save.

    share = seconds in operators that are products / seconds of a step

Counted are the dense products (`mm`, `addmm`, `bmm`, `baddbmm`, grouped and scaled ones) and fused
attention, forward and backward; whatever a Triton kernel multiplies is not, since it also does
other things. On a CPU an operator returns when it is done, so it is timed as it is called; on a GPU
the profiler says how long the kernels ran that an operator launched. Measuring changes no number of
the step but makes it slower (`nano` on a CPU: 34,000 operators through Python, 1.5 s of processor
time for 1.05), so a run does it now and then, and divides by the time of steps not measured.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "_grouped_mm", "_scaled_mm"}
    | {"_scaled_grouped_mm", "linear"}
)


class ProductTime:
    """Seconds in matrix products inside a `time_products` block, known when it has ended."""

    seconds: float = 0.0


@contextmanager
def time_products(device: torch.device) -> Iterator[ProductTime]:
    """Measure what runs inside on `device`; the work must have ended when the block does."""
    found = ProductTime()
    if device.type == "cuda":
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            yield found
        found.seconds = 1e-6 * sum(
            event.self_device_time_total
            for event in profiler.key_averages()
            if is_product(event.key)
        )
    else:
        with _Stopwatch(found):
            yield found


def is_product(operator: str) -> bool:
    """Whether an operator, for example `aten::mm`, is one of those that count."""
    name = operator.rpartition("::")[2]
    return "::" in operator and (name in _PRODUCTS or "attention" in name)


class _Stopwatch(TorchDispatchMode):
    """Runs every operator as it is, and times the products."""

    def __init__(self, found: ProductTime) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if not is_product(func._schema.name):
            return func(*args, **options)
        start = time.perf_counter()
        result = func(*args, **options)
        self.found.seconds += time.perf_counter() - start
        return result
