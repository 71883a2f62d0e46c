"""Ranges of tokens for operators that go over memory several times.

On a CPU a range stays in a core's cache, and its buffers are small enough to be used again instead
of being mapped anew. Elsewhere launches cost more than passes, so ranges are large and only bound
the memory.
"""

from collections.abc import Iterator

import torch

_CPU_BYTES = 2**20
_DEVICE_BYTES = 2**28


def token_blocks(num_tokens: int, token_bytes: int, device: torch.device) -> Iterator[slice]:
    """Cut `num_tokens` into ranges of about a block's bytes; one empty range if there are none."""
    block_bytes = _CPU_BYTES if device.type == "cpu" else _DEVICE_BYTES
    step = max(1, block_bytes // max(1, token_bytes))
    for start in range(0, max(1, num_tokens), step):
        yield slice(start, min(start + step, num_tokens))
