"""Work that may run beside other work of the same layer, where who runs the model has a place.

A layer hands work to its fork and asks for the result later. The default does it at once, which is
the order that the layer is written in.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Fork(Protocol):
    """Begins work; the call that it returns gives the result."""

    def __call__(self, run: Callable[[], T], /) -> Callable[[], T]: ...


def at_once(run: Callable[[], T]) -> Callable[[], T]:
    """Do the work now."""
    result = run()
    return lambda: result
