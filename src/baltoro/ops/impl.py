"""Choice of an operator's implementation: it is said by the caller, never guessed.

Every public operator takes a required keyword `impl`. `"reference"` is the definition (eager, fp32
or fp64, loops over time); `"torch"` is the fast path in plain PyTorch. An implementation that
cannot serve a call raises `ImplError` with the reason; nothing falls back.
"""

from collections.abc import Mapping
from typing import TypeVar

F = TypeVar("F")


class ImplError(ValueError):
    """The named implementation does not exist or cannot serve this call."""


def choose(op: str, impl: str, table: Mapping[str, F]) -> F:
    """The function that `impl` names in `table`.

    Raises `ImplError` naming the operator, the value and the known implementations.
    """
    if impl not in table:
        raise ImplError(f"{op}: impl={impl!r} is unknown; choose one of {', '.join(sorted(table))}")
    return table[impl]
