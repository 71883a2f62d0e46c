"""baltoro: the open K3 stack.

`baltoro.load`, `baltoro.save` and `baltoro.logits` are imported on first use, so that the rooms
without torch stay without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baltoro.checkpoint.load import load
    from baltoro.checkpoint.logits import logits
    from baltoro.checkpoint.save import save

__all__ = ["load", "logits", "save"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"baltoro.checkpoint.{name}"), name)
    raise AttributeError(f"module 'baltoro' has no attribute {name!r}")
