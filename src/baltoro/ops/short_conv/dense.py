"""The short convolution as a few passes over ranges of tokens that stay in cache.

A first pass ignores where sequences begin: output t is a sum over rows t - W + 1 .. t of x. The
first W - 1 outputs of each sequence are then computed again from its state; these few rows are the
"heads". The backward pass mirrors both, shifts reversed, and keeps nothing but the inputs.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..blocks import token_blocks
from ..derivatives import no_second_derivatives


def short_conv(
    x: torch.Tensor, weight: torch.Tensor, bounds: list[int], initial_state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[T, D]` and the last `W - 1` inputs of each sequence `[N, D, W - 1]`."""
    num_sequences = len(bounds) - 1
    if bounds == list(range(num_sequences + 1)):
        return _one_token_each(x, weight, initial_state)
    if x.shape[0] == 0:
        return x.clone(), initial_state.clone()
    y, final_state = _ShortConv.apply(x, weight, initial_state, bounds)
    return y, final_state


def _one_token_each(
    x: torch.Tensor, weight: torch.Tensor, initial_state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    window = torch.cat([initial_state, x[..., None]], dim=2)
    if x.dtype == weight.dtype == torch.float32:
        y = torch.linalg.vecdot(window, weight)
    else:
        dtype = torch.promote_types(x.dtype, torch.float32)
        y = torch.linalg.vecdot(window.to(dtype), weight.to(dtype))
    return F.silu(y).to(x.dtype), window[..., 1:]


class _Edges(NamedTuple):
    """Rows at the ends of sequences; X = W - 1 for each of N."""

    head: torch.Tensor  # [N, X] first tokens
    is_head: torch.Tensor  # [N, X] whether the sequence is that long
    at_head: torch.Tensor  # [T, 1] whether a token is one of them
    last: torch.Tensor  # [N, X] last inputs: their token
    last_in_state: torch.Tensor  # [N, X] or their place in the state
    from_state: torch.Tensor  # [N, X] which of the two it is


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        initial_state: torch.Tensor,
        bounds: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_kept = weight.shape[1] - 1
        taps = weight.to(torch.promote_types(x.dtype, torch.float32)).mT.contiguous()
        edges = _edges(bounds, num_kept, x.device)
        y = torch.empty_like(x)
        for block in _blocks(x):
            start = max(block.start, num_kept)
            if start < block.stop:
                y[start : block.stop] = F.silu(_windows(x, taps, start, block.stop))
        state = initial_state.mT
        heads = F.silu(_head_windows(_history(x, state, edges), taps)).to(x.dtype)
        y[edges.head[edges.is_head]] = heads[edges.is_head]
        place = edges.last_in_state[..., None].expand_as(state)
        final_state = torch.where(
            edges.from_state[..., None], state.gather(1, place), x[edges.last]
        )
        ctx.save_for_backward(x, weight, taps, initial_state)
        ctx.edges = edges
        return y, final_state.mT.contiguous()

    @staticmethod
    @no_second_derivatives("short_conv: impl='torch'")
    def backward(
        ctx: Any, saved: tuple[torch.Tensor, ...], *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        dy, dfinal_state = grads
        x, weight, taps, initial_state = saved
        edges: _Edges = ctx.edges
        num_kept = taps.shape[0] - 1
        dx = torch.empty_like(x, dtype=taps.dtype)
        dtaps = torch.zeros_like(taps)
        for block in _blocks(x):
            _backward_block(x, taps, dy, edges.at_head, block, dx, dtaps)
        history = _history(x, initial_state.mT, edges).to(taps.dtype)
        dheads = dy[edges.head] * _silu_slope(_head_windows(history, taps))
        dheads = dheads.masked_fill(~edges.is_head[..., None], 0.0)
        dhistory = torch.zeros_like(history)
        for j, tap in enumerate(taps):
            dhistory[:, j : j + num_kept] += dheads * tap
            dtaps[j] += (dheads * history[:, j : j + num_kept]).sum((0, 1))
        dstate, from_head = dhistory.split(num_kept, dim=1)
        dlast = dfinal_state.mT.to(taps.dtype)
        dx.index_put_((edges.head[edges.is_head],), from_head[edges.is_head], accumulate=True)
        dx.index_put_((edges.last[~edges.from_state],), dlast[~edges.from_state], accumulate=True)
        place = edges.last_in_state[..., None].expand_as(dlast)
        dlast = dlast.masked_fill(~edges.from_state[..., None], 0.0)
        dstate = dstate.scatter_add(1, place, dlast)
        return dx.to(x.dtype), dtaps.mT.to(weight.dtype), dstate.mT.to(x.dtype), None


def _backward_block(
    x: torch.Tensor,
    taps: torch.Tensor,
    dy: torch.Tensor,
    at_head: torch.Tensor,
    block: slice,
    dx: torch.Tensor,
    dtaps: torch.Tensor,
) -> None:
    """Writes `dx[block]` and adds to `dtaps`, all but what goes through heads."""
    num_kept = taps.shape[0] - 1
    length = block.stop - block.start
    first, stop = max(block.start, num_kept), min(block.stop + num_kept, len(x))
    # gradients of the block's windows and of the W - 1 after it, which its tokens are in as well
    dwindows = taps.new_zeros(length + num_kept, x.shape[1])
    if first < stop:
        slope = _silu_slope(_windows(x, taps, first, stop)).mul_(dy[first:stop])
        slope.masked_fill_(at_head[first:stop], 0.0)
        dwindows[first - block.start : stop - block.start] = slope
    torch.mul(dwindows[:length], taps[num_kept], out=dx[block])
    for j in range(1, num_kept + 1):
        dx[block].addcmul_(dwindows[j : j + length], taps[num_kept - j])
    if first < block.stop:
        ends = dwindows[first - block.start : length]
        for j in range(num_kept + 1):
            dtaps[j] += (ends * x[first - num_kept + j : block.stop - num_kept + j]).sum(0)


def _windows(x: torch.Tensor, taps: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Sums over the windows that end at rows `start` to `stop` of `x`; `start >= W - 1`."""
    num_kept = taps.shape[0] - 1
    total = x[start - num_kept : stop - num_kept] * taps[0]
    for j in range(1, num_kept + 1):
        total.addcmul_(x[start - num_kept + j : stop - num_kept + j], taps[j])
    return total


def _history(x: torch.Tensor, state: torch.Tensor, edges: _Edges) -> torch.Tensor:
    """State and first tokens of each sequence, `[N, 2 * (W - 1), D]`."""
    return torch.cat([state, x[edges.head]], dim=1)


def _head_windows(history: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Sums over the windows that end at the first tokens, `[N, W - 1, D]`."""
    num_kept = taps.shape[0] - 1
    total = history[:, :num_kept] * taps[0]
    for j in range(1, num_kept + 1):
        total = total.addcmul(history[:, j : j + num_kept], taps[j])
    return total


def _silu_slope(x: torch.Tensor) -> torch.Tensor:
    sigmoid = torch.sigmoid(x)
    return (1 - sigmoid).mul_(x).add_(1).mul_(sigmoid)


def _blocks(x: torch.Tensor) -> list[slice]:
    return list(token_blocks(x.shape[0], 4 * x.shape[1] * x.element_size(), x.device))


def _edges(bounds: list[int], num_kept: int, device: torch.device) -> _Edges:
    edges, kept = torch.tensor(bounds), torch.arange(num_kept)
    starts, lengths = edges[:-1, None], edges.diff()[:, None]
    head, is_head = starts + kept, kept < lengths
    at_head = torch.zeros(bounds[-1], 1, dtype=torch.bool)
    at_head[head[is_head]] = True
    place = lengths + kept
    rows = (head, is_head, at_head, starts + place - num_kept, place, place < num_kept)
    head, is_head, at_head, last, place, from_state = (x.to(device) for x in rows)
    return _Edges(
        head=head.clamp(max=bounds[-1] - 1),
        is_head=is_head,
        at_head=at_head,
        last=last.clamp(min=0),
        last_in_state=place.clamp(max=num_kept - 1),
        from_state=from_state,
    )
