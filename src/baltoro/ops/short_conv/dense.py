"""The short convolution as a few passes over all tokens.

Each sequence gets its state as extra rows in front of its tokens. Over these rows the convolution
is a sum of `W` shifted products that needs no boundaries; windows across two sequences compute
something nobody reads. The backward pass is the same sum with the shifts reversed.
"""

from typing import Any

import torch
import torch.nn.functional as F


def short_conv(
    x: torch.Tensor, weight: torch.Tensor, bounds: list[int], initial_state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[T, D]` and the last `W - 1` inputs of each sequence `[N, D, W - 1]`."""
    num_sequences = len(bounds) - 1
    if bounds == list(range(num_sequences + 1)):
        return _one_token_each(x, weight, initial_state)
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


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        initial_state: torch.Tensor,
        bounds: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        width, num_tokens = weight.shape[1], x.shape[0]
        before, token, last = _rows(bounds, width, x.device)
        rows = x.new_empty(num_tokens + before.numel(), x.shape[1])
        rows[token] = x
        rows[before] = initial_state.mT
        final_state = rows[last].mT.contiguous()
        taps = weight.to(dtype).mT.contiguous()
        pre = _shifted_sum(rows.to(dtype), taps)[token - (width - 1)]
        ctx.save_for_backward(rows, taps, pre, before, token, last)
        ctx.weight_dtype = weight.dtype
        return F.silu(pre).to(x.dtype), final_state

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dy, dfinal_state = grads
        rows, taps, pre, before, token, last = ctx.saved_tensors
        width, dtype = taps.shape[0], taps.dtype
        rows = rows.to(dtype)
        sigmoid = torch.sigmoid(pre)
        dpre = dy.to(dtype) * (sigmoid * (1 + pre * (1 - sigmoid)))
        # rows of a window's end, with W - 1 zero rows on either side of all windows
        padded = dpre.new_zeros(rows.shape[0] + width - 1, dpre.shape[1])
        padded[token] = dpre
        drows = _shifted_sum(padded, taps.flip(0))
        drows.index_put_((last,), dfinal_state.mT.to(dtype), accumulate=True)
        num_windows = rows.shape[0] - (width - 1)
        windows_end = padded[width - 1 : rows.shape[0]]
        dtaps = torch.stack(
            [(windows_end * rows[j : j + num_windows]).sum(0) for j in range(width)], dim=1
        )
        in_dtype = dy.dtype
        return (
            drows[token].to(in_dtype),
            dtaps.to(ctx.weight_dtype),
            drows[before].mT.to(in_dtype),
            None,
        )


def _shifted_sum(rows: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Row i of the result is the sum of `taps[j] * rows[i + j]`; `W - 1` rows fewer than `rows`."""
    width = taps.shape[0]
    num_windows = rows.shape[0] - (width - 1)
    total = rows[:num_windows] * taps[0]
    for j in range(1, width):
        total.addcmul_(rows[j : j + num_windows], taps[j])
    return total


def _rows(
    bounds: list[int], width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of the states `[N, W - 1]`, of the tokens `[T]` and of the last inputs `[N, W - 1]`."""
    edges = torch.tensor(bounds)
    kept = torch.arange(width - 1)
    num_sequences = len(bounds) - 1
    shift = torch.arange(1, num_sequences + 1) * (width - 1)
    token = torch.arange(bounds[-1]) + shift.repeat_interleave(edges.diff())
    before = (edges[:-1] + shift - (width - 1))[:, None] + kept
    last = (edges[1:] + shift - (width - 1))[:, None] + kept
    return before.to(device), token.to(device), last.to(device)
