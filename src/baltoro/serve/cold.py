"""Recurrent states as int8 in CPU memory: a quarter of their bytes, and not their exact values.

A row of a state, the values of one head and key channel, has a scale of its own:

    scale = max |s| / 127,    q = round(s / scale),    s' = q scale,    |s' - s| <= scale / 2

A state is rounded when it leaves the pool and widened when it comes back; the recurrence goes on in
fp32. To put away again what came back changes next to nothing, since a row's largest code is 127;
what was computed from it is rounded anew. Convolution windows stay as they are. All KDA layers of a
sequence lie one behind the other, so that they take fewer pages than in the pool.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from baltoro.ops.kda.decode import StatePool
from baltoro.serve.layout import PoolLayout

LEVELS = 127


class ColdStates:
    """The packed form of a pool's states: `layers` has each KDA layer's group and its states."""

    def __init__(self, layout: PoolLayout, layers: Sequence[tuple[int, StatePool]]) -> None:
        self._layers = layers
        self._shape = (layout.num_cold_pages, layout.layers_per_page, layout.layer_bytes)

    def packed(self, pages: Sequence[int]) -> Tensor:
        """The state in these pages, one of each group, as uint8 `[cold pages, layers, bytes]`."""
        windows = torch.stack([pool.windows[pages[group]] for group, pool in self._layers])
        states = torch.stack([pool.states[pages[group]] for group, pool in self._layers])
        scales = states.abs().amax(-1, keepdim=True).float() / LEVELS
        codes = (states / scales.where(scales > 0.0, 1.0)).round().to(torch.int8)
        parts = [x.contiguous().view(torch.uint8).flatten() for x in (windows, scales, codes)]
        num_bytes = sum(len(part) for part in parts)
        out = parts[0].new_zeros(self._shape)
        assert num_bytes <= out.numel()
        out.view(-1)[:num_bytes] = torch.cat(parts)
        return out

    def unpack(self, packed: Tensor, pages: Sequence[int]) -> None:
        """Write a packed state into these pages, one of each group."""
        window, state = (x[0] for x in self._layers[0][1])
        count, flat = len(self._layers), packed.reshape(-1)
        rows = state.shape[:-1].numel()
        sizes = [window.numel() * window.element_size(), 4 * rows, state.numel()]
        windows, scales, codes = flat[: count * sum(sizes)].split([count * n for n in sizes])
        windows = windows.view(window.dtype).view(count, *window.shape)
        widened = codes.view(torch.int8).view(count, *state.shape).to(state.dtype)
        widened *= scales.view(torch.float32).view(count, *state.shape[:-1], 1)
        for number, (group, pool) in enumerate(self._layers):
            pool.windows[pages[group]] = windows[number]
            pool.states[pages[group]] = widened[number]
