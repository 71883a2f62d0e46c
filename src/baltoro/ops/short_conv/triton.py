"""The short convolution on an NVIDIA GPU: a program walks down a strip of tokens.

It holds the last three inputs of some channels, and in the backward pass the unfinished gradients
of the last three inputs, so that every row is read once and written once. Where a sequence begins,
both are exchanged for its state. With z the sum before SiLU and dz = dy silu'(z):

    dx_t = sum_j w_j dz_(t + j)    dw_j = sum_t dz_t x_(t - j)        j tokens back, in the sequence

Each strip has its part of dw; torch sums them in a fixed order. Kernels of fewer than four taps
have zeros in front.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..derivatives import no_second_derivatives
from ..impl import ImplError
from ..launch_table import Launch, derived, dtype_class, launch, width_class
from ..triton import (
    as_operator,
    cdiv,
    enqueue,
    padded_width,
    record,
    refuse_unserved,
    rows_of,
    unfilled_like,
)
from .windows import (
    exchange,
    load_before,
    load_state,
    load_tap,
    load_taps,
    load_window,
    place_of,
    silu_slope,
)

MAX_WIDTH = 4
STATE_CHANNELS = 128  # of a program of one warp that reads or writes states


@triton.jit(do_not_specialize=["num_tokens", "num_sequences"])
def table_kernel(
    cu_seqlens, positions, sequences, num_tokens, num_sequences,
    BT: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Of each token its place in its sequence and which that is, by bisection."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    n = tl.zeros([BT], tl.int32)
    for level in tl.static_range(LEVELS):
        later = n + (1 << (LEVELS - 1 - level))
        is_one = later <= num_sequences
        start = tl.load(cu_seqlens + later, mask=is_one, other=0)
        n = tl.where(is_one & (start <= t), later, n)
    is_token = t < num_tokens
    tl.store(positions + t, t - tl.load(cu_seqlens + n), mask=is_token)
    tl.store(sequences + t, n, mask=is_token)


@triton.jit(do_not_specialize=["num_tokens"])
def forward_kernel(
    x, weight, state, positions, sequences, y, num_tokens, strip, x_stride, num_channels,
    W: tl.constexpr, BC: tl.constexpr, ROWS: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    s, channels, is_channel = place_of(num_channels, BC)
    w_0, w_1, w_2, w_3 = load_taps(weight, channels, is_channel, W)
    first = s.to(tl.int64) * strip
    length = tl.minimum(strip, num_tokens - first)
    place = tl.load(positions + first)
    n = tl.load(sequences + first)
    x_1, x_2, x_3 = load_window(
        x, state, first, place, n, channels, is_channel, x_stride, num_channels, W, HAS_STATE
    )
    for i in range(0, length, ROWS):
        rows: tl.tuple = ()
        places: tl.tuple = ()
        for r in tl.static_range(ROWS):
            t = first + i + r
            is_row = is_channel & (i + r < length)
            rows += (tl.load(x + t * x_stride + channels, mask=is_row, other=0.0),)
            places += (tl.load(positions + t, mask=i + r < length, other=1),)
        for r in tl.static_range(ROWS):
            t = first + i + r
            is_row = is_channel & (i + r < length)
            begins = places[r] == 0
            if HAS_STATE:
                n = tl.load(sequences + t, mask=i + r < length, other=0)
            x_1, x_2, x_3 = exchange(
                x_1, x_2, x_3, begins, state, n, channels, is_row, num_channels, W, HAS_STATE
            )
            x_0 = rows[r].to(tl.float32)
            z = w_0 * x_0 + w_1 * x_1 + w_2 * x_2 + w_3 * x_3
            out = z * tl.sigmoid(z)
            tl.store(y + t * num_channels + channels, out.to(y.dtype.element_ty), mask=is_row)
            x_3 = x_2
            x_2 = x_1
            x_1 = x_0


@triton.jit(do_not_specialize=["num_tokens"])
def backward_kernel(
    x, weight, state, positions, sequences, cu_seqlens, d_y, d_final, d_x, d_weight_parts,
    num_tokens, strip, x_stride, d_y_stride, num_channels,
    W: tl.constexpr, BC: tl.constexpr, ROWS: tl.constexpr, HAS_STATE: tl.constexpr,
    HAS_D_FINAL: tl.constexpr,
):  # fmt: skip
    """A strip, and the three tokens after it that its last inputs are still in the windows of."""
    s, channels, is_channel = place_of(num_channels, BC)
    w_0, w_1, w_2, w_3 = load_taps(weight, channels, is_channel, W)
    first = s.to(tl.int64) * strip
    length = tl.minimum(strip, num_tokens - first)
    place = tl.load(positions + first)
    n = tl.load(sequences + first)
    x_1, x_2, x_3 = load_window(
        x, state, first, place, n, channels, is_channel, x_stride, num_channels, W, HAS_STATE
    )
    zero = tl.zeros([BC], tl.float32)
    d_1, d_2, d_3 = zero, zero, zero
    dw_0, dw_1, dw_2, dw_3 = zero, zero, zero, zero
    for i in range(0, length + 3, ROWS):
        rows: tl.tuple = ()
        d_rows: tl.tuple = ()
        places: tl.tuple = ()
        for r in tl.static_range(ROWS):
            t = first + i + r
            is_token = (t < num_tokens) & (i + r < length + 3)
            is_row = is_channel & is_token
            rows += (tl.load(x + t * x_stride + channels, mask=is_row, other=0.0),)
            d_rows += (tl.load(d_y + t * d_y_stride + channels, mask=is_row, other=0.0),)
            places += (tl.load(positions + t, mask=is_token, other=0),)
        for r in tl.static_range(ROWS):
            t = first + i + r
            is_token = (t < num_tokens) & (i + r < length + 3)
            place = places[r]
            begins = place == 0
            if HAS_STATE or HAS_D_FINAL:
                n = tl.load(sequences + t, mask=is_token, other=0)
            is_here = is_channel & is_token
            x_1, x_2, x_3 = exchange(
                x_1, x_2, x_3, begins, state, n, channels, is_here, num_channels, W, HAS_STATE
            )
            x_0 = rows[r].to(tl.float32)
            z = w_0 * x_0 + w_1 * x_1 + w_2 * x_2 + w_3 * x_3
            d_z = d_rows[r].to(tl.float32) * silu_slope(z)
            d_3 += tl.where(place >= 3, w_3 * d_z, 0.0)
            d_2 += tl.where(place >= 2, w_2 * d_z, 0.0)
            d_1 += tl.where(place >= 1, w_1 * d_z, 0.0)
            d_0 = w_0 * d_z
            if HAS_D_FINAL:
                left = tl.load(cu_seqlens + n + 1, mask=is_token, other=0) - 1 - t
                d_0 += load_state(
                    d_final, n, W - 2 - left, channels, is_here, num_channels, W, True
                )
            d_own = tl.where(i + r < length, d_z, 0.0)
            dw_0 += d_own * x_0
            dw_1 += d_own * x_1
            dw_2 += d_own * x_2
            dw_3 += d_own * x_3
            is_done = is_channel & (i + r >= 3) & (i + r < length + 3)
            tl.store(
                d_x + (t - 3) * num_channels + channels, d_3.to(d_x.dtype.element_ty), mask=is_done
            )
            d_3 = d_2
            d_2 = d_1
            d_1 = d_0
            x_3 = x_2
            x_2 = x_1
            x_1 = x_0
    parts = d_weight_parts + s.to(tl.int64) * W * num_channels + channels
    tl.store(parts + (W - 1) * num_channels, dw_0, mask=is_channel)
    tl.store(parts + (W - 2) * num_channels, dw_1, mask=is_channel)
    tl.store(parts + (W - 3) * num_channels, dw_2, mask=is_channel & (W > 2))
    tl.store(parts + (W - 4) * num_channels, dw_3, mask=is_channel & (W > 3))


@triton.jit
def final_state_kernel(
    x, state, cu_seqlens, final_state, x_stride, num_channels,
    W: tl.constexpr, BC: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """The last inputs of one sequence."""
    n, channels, is_channel = place_of(num_channels, BC)
    end = tl.load(cu_seqlens + n + 1).to(tl.int64)
    length = end - tl.load(cu_seqlens + n)
    place = (n.to(tl.int64) * num_channels + channels) * (W - 1)
    for slot in tl.static_range(W - 1):
        back = W - 1 - slot
        value = load_before(
            x, state, end, back, length, n, channels, is_channel, x_stride, num_channels, W,
            HAS_STATE,
        )  # fmt: skip
        tl.store(final_state + place + slot, value.to(x.dtype.element_ty), mask=is_channel)


@triton.jit
def state_gradient_kernel(
    x, weight, state, cu_seqlens, d_y, d_final, d_state, x_stride, d_y_stride, num_channels,
    W: tl.constexpr, BC: tl.constexpr, HAS_D_FINAL: tl.constexpr,
):  # fmt: skip
    """Gradient of the state that one sequence began with: through its first W - 1 tokens."""
    n, channels, is_channel = place_of(num_channels, BC)
    start = tl.load(cu_seqlens + n).to(tl.int64)
    length = tl.load(cu_seqlens + n + 1) - start
    place = (n.to(tl.int64) * num_channels + channels) * (W - 1)
    slopes: tl.tuple = ()
    for p in tl.static_range(W - 1):
        is_token = is_channel & (p < length)
        z = tl.zeros([BC], tl.float32)
        for j in tl.static_range(W):
            value = load_before(
                x, state, start + p, j, p, n, channels, is_token, x_stride, num_channels, W, True
            )
            z += load_tap(weight, channels, is_channel, W, j) * value
        row = tl.load(d_y + (start + p) * d_y_stride + channels, mask=is_token, other=0.0)
        slopes += (row.to(tl.float32) * silu_slope(z),)
    for slot in tl.static_range(W - 1):
        total = tl.zeros([BC], tl.float32)
        for p in tl.static_range(slot + 1):
            total += load_tap(weight, channels, is_channel, W, W - 1 - slot + p) * slopes[p]
        if HAS_D_FINAL:
            total += load_state(
                d_final, n, slot - length, channels, is_channel, num_channels, W, True
            )
        tl.store(d_state + place + slot, total.to(d_state.dtype.element_ty), mask=is_channel)


def launch_of(kernel: str, x: Tensor) -> Launch:
    """Channels of a program, rows on their way at once, tokens of a strip at most, warps.

    A class is a dtype and a width to 1,024 channels or above.
    """
    return _launch_of(kernel, x.dtype, x.shape[1], x.device)


@derived
def _launch_of(kernel: str, dtype: torch.dtype, width: int, device: torch.device) -> Launch:
    return launch(kernel, f"{dtype_class(dtype)} {width_class(width, 1024, 2048)}", device)


def strip_of(num_tokens: int, longest: int) -> int:
    """Tokens of a strip: some hundred strips, of at least 16 tokens."""
    return min(longest, max(16, num_tokens // 512 // 16 * 16))


def _blocks(num_channels: int, most: int) -> tuple[int, int]:
    """Channels of a program, and programs."""
    BC = min(most, padded_width(num_channels))
    return BC, cdiv(num_channels, BC)


def _forward(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    y, final_state, table = _outputs(x, weight, cu_seqlens)
    positions, sequences = table.unbind(0)
    (T, C), W, N = x.shape, weight.shape[1], cu_seqlens.shape[0] - 1
    rows = rows_of(x)
    constants = {"W": W, "HAS_STATE": initial_state is not None}
    if T > 0:
        enqueue(
            table_kernel, (cdiv(T, 256),),
            cu_seqlens, positions, sequences, T, N, BT=256, LEVELS=(N.bit_length() + 3) // 4 * 4,
            num_warps=4,
        )  # fmt: skip
        shape = launch_of("short_conv_forward", x)
        strip = strip_of(T, shape["strip"])
        BC, num_blocks = _blocks(C, shape["channels"])
        enqueue(
            forward_kernel, (num_blocks * cdiv(T, strip),),
            rows, weight, initial_state, positions, sequences, y, T, strip, rows.stride(0), C,
            BC=BC, ROWS=shape["rows"], num_warps=shape["num_warps"], **constants,
        )  # fmt: skip
    BC, num_blocks = _blocks(C, STATE_CHANNELS)
    enqueue(
        final_state_kernel, (num_blocks * N,),
        rows, initial_state, cu_seqlens, final_state, rows.stride(0), C,
        BC=BC, num_warps=1, **constants,
    )  # fmt: skip
    return y, final_state, table


def _outputs(x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unfilled y, final state, and place and sequence of each token `[2, >= T]`, both aligned."""
    (T, C), N = x.shape, cu_seqlens.shape[0] - 1
    final_state = x.new_empty(N, C, weight.shape[1] - 1)
    return unfilled_like(x), final_state, cu_seqlens.new_empty(2, cdiv(T, 4) * 4)


def _forward_outputs(x, weight, cu_seqlens, initial_state):
    return _outputs(x, weight, cu_seqlens)


_forward_operator = as_operator("short_conv_forward", _forward, _forward_outputs)


def _backward(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    table: Tensor,
    d_y: Tensor,
    d_final_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    d_x, d_weight, d_state = _gradients(x, weight, initial_state)
    (T, C), W, N = x.shape, weight.shape[1], cu_seqlens.shape[0] - 1
    rows, d_rows = rows_of(x), rows_of(d_y)
    positions, sequences = table.unbind(0)
    constants = {"W": W, "HAS_D_FINAL": d_final_state is not None}
    shape = launch_of("short_conv_backward", x)
    strip = strip_of(T, shape["strip"])
    num_strips = cdiv(T, strip)
    parts = x.new_empty(num_strips, W, C, dtype=torch.float32)
    if T > 0:
        BC, num_blocks = _blocks(C, shape["channels"])
        enqueue(
            backward_kernel, (num_blocks * num_strips,),
            rows, weight, initial_state, positions, sequences, cu_seqlens, d_rows, d_final_state,
            d_x, parts, T, strip, rows.stride(0), d_rows.stride(0), C, BC=BC, ROWS=shape["rows"],
            HAS_STATE=initial_state is not None, num_warps=shape["num_warps"], **constants,
        )  # fmt: skip
    if initial_state is not None:
        BC, num_blocks = _blocks(C, STATE_CHANNELS)
        enqueue(
            state_gradient_kernel, (num_blocks * N,),
            rows, weight, initial_state, cu_seqlens, d_rows, d_final_state, d_state,
            rows.stride(0), d_rows.stride(0), C, BC=BC, num_warps=1, **constants,
        )  # fmt: skip
    return d_x, d_weight.copy_(parts.sum(0).mT), d_state


def _gradients(
    x: Tensor, weight: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Unfilled gradients; the last is empty without a state."""
    d_state = x.new_empty(0) if initial_state is None else torch.empty_like(initial_state)
    return unfilled_like(x), torch.empty_like(weight), d_state


def _backward_outputs(x, weight, cu_seqlens, initial_state, table, d_y, d_final_state):
    return _gradients(x, weight, initial_state)


_backward_operator = as_operator("short_conv_backward", _backward, _backward_outputs)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, cu_seqlens, initial_state):
        y, final_state, table = _forward_operator(x, weight, cu_seqlens, initial_state)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, cu_seqlens, initial_state, table)
        return y, final_state

    @staticmethod
    @no_second_derivatives("short_conv: impl='triton'")
    def backward(ctx, saved, d_y, d_final_state):
        x, weight, cu_seqlens, initial_state, table = saved
        if d_y is None:
            d_y = torch.zeros_like(x)
        if d_final_state is not None:
            d_final_state = d_final_state.contiguous()
        d_x, d_weight, d_state = _backward_operator(
            x, weight, cu_seqlens, initial_state, table, d_y, d_final_state
        )
        return d_x, d_weight, None, None if initial_state is None else d_state


def short_conv(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`baltoro.ops.short_conv.short_conv`, whose checks have passed."""
    states = () if initial_state is None else (initial_state,)
    refuse_unserved("short_conv", x, weight, *states)
    if weight.shape[1] > MAX_WIDTH:
        raise ImplError(
            f"short_conv: impl='triton' serves up to {MAX_WIDTH} taps, not W={weight.shape[1]}"
        )
    weight, cu_seqlens = weight.contiguous(), cu_seqlens.contiguous()
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    inputs = (x, weight, *states)
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        return record(_ShortConv, x, weight, cu_seqlens, initial_state)
    return _forward_operator(x, weight, cu_seqlens, initial_state)[:2]
