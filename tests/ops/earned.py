"""The harness's budget for operators without sequences or state, and a record of allocations."""

from collections.abc import Callable, Sequence

import torch
from ops.harness import poisoned_memory, relative_error
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Op = Callable[..., Tensor]  # op(impl, *tensors)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """fp64 normal numbers that depend on the shape and the seed alone."""
    draw = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def assert_earned(
    op: Op,
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    rounding_steps: float = 6.0,
    device: torch.device | str = "cpu",
    impl: str = "torch",
) -> None:
    """Hold the output and every gradient of `impl` to the budget of `harness`, in poisoned memory.

    The exact values are the reference's in fp64 on the same rounded inputs; the budget is twice the
    error of the reference in `dtype` plus a rounding band. Only `impl` runs on `device`.
    """
    rounded = [tensor.to(dtype) for tensor in tensors]
    exact = _outcome(op, "reference", [tensor.double() for tensor in rounded])
    plain = _outcome(op, "reference", rounded)
    with poisoned_memory():
        got = _outcome(op, impl, [tensor.to(device) for tensor in rounded])
    for index, x in enumerate(got):
        what = "output" if index == 0 else f"gradient of tensor {index - 1}"
        assert (x.dtype, x.shape) == (plain[index].dtype, plain[index].shape), what
        error = relative_error(x, exact[index])
        usual = relative_error(plain[index], exact[index])
        allowed = 2 * usual + rounding_steps * torch.finfo(x.dtype).eps / 2
        assert error <= allowed, f"{what}: error {error:.3g}, earned {allowed:.3g}"


def _outcome(op: Op, impl: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = op(impl, *leaves)
    probe = randn(*out.shape, seed=99).to(tensors[0].dtype).to(out)
    return [value.detach().cpu() for value in (out, *torch.autograd.grad(out, leaves, probe))]


class Allocations(TorchDispatchMode):
    """Records the shapes of what operators return in its `with` block, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            values = result if isinstance(result, (tuple, list)) else (result,)
            self.shapes += [tuple(value.shape) for value in values if isinstance(value, Tensor)]
        return result

    def largest(self) -> int:
        """Elements of the largest tensor."""
        return max(torch.Size(shape).numel() for shape in self.shapes)
