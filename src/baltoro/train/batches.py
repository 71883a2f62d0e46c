"""What the loop needs of its data: the batches of any step, and a cursor."""

from collections.abc import Mapping
from typing import Any, Protocol

from baltoro.data.pack import PackedBatch


class BatchSource(Protocol):
    """Batches as a pure function of the step; `data.loader.Loader` is one."""

    step: int  # of the next batch

    def batch(self, step: int, part: int = 0, num_parts: int = 1) -> PackedBatch:
        """The batch of a step, or one of its equal parts: a microbatch.

        Its column `domain` (int64) is the place of each target's domain in a list of names.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """The cursor, as plain JSON types."""

    def load_state_dict(self, state: Any) -> None:
        """Continue from a cursor; raises `ValueError` if it belongs to other data or settings."""
