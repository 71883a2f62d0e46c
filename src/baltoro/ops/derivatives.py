"""Backward passes that are written out and have no derivatives of their own.

Under `create_graph` torch would take what they return for constants and a second derivative would
be wrong in silence; its own `once_differentiable` leaves the gradients without a way back to the
inputs, so that `torch.autograd.grad` passes them by.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .impl import ImplError

_Gradients = tuple[Tensor | None, ...]


class _Last(torch.autograd.Function):
    """The first `num` tensors as they are; to differentiate them by any of all is refused."""

    @staticmethod
    def forward(ctx: Any, reason: str, num: int, *tensors: Tensor | None) -> _Gradients:
        ctx.reason = reason
        return tensors[:num]

    @staticmethod
    def backward(ctx: Any, *d_tensors: Tensor) -> None:
        raise ImplError(ctx.reason)


def no_second_derivatives(
    form: str | Callable[[Any], str], instead: str = "impl='reference' has them"
) -> Callable[[Callable[..., _Gradients]], Callable[..., _Gradients]]:
    """Make `backward(ctx, saved, *d_outputs)` a Function's `backward(ctx, *d_outputs)`.

    `saved` are `ctx.saved_tensors`. Under `create_graph` the gradients are right, and to
    differentiate them by an input or by `d_outputs` raises `ImplError` which names the `form`,
    given or found from `ctx`, and what has second derivatives `instead`. For that the Function must
    save each input that has a gradient, or one of its own outputs that has one. Compiled graphs
    refuse a second pass themselves.
    """

    def decorate(backward: Callable[..., _Gradients]) -> Callable[..., _Gradients]:
        @wraps(backward)
        def run(ctx: Any, *d_outputs: Tensor | None) -> _Gradients:
            saved = ctx.saved_tensors  # once: recomputed layers allow no more
            if not torch.is_grad_enabled():
                return backward(ctx, saved, *d_outputs)
            with torch.no_grad():
                gradients = backward(ctx, saved, *d_outputs)
            if torch.compiler.is_compiling():
                return gradients
            name = form if isinstance(form, str) else form(ctx)
            reason = f"{name} has no second derivatives; {instead}"
            refused: _Gradients = _Last.apply(
                reason, len(gradients), *gradients, *d_outputs, *saved
            )
            return refused

        return run

    return decorate
