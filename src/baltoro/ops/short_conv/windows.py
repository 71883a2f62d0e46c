"""What the kernels of the short convolution read of a window: its taps, inputs and state."""

import triton
import triton.language as tl


@triton.jit
def place_of(num_channels, BC: tl.constexpr):
    """This program's strip or sequence, its channels and their mask; channels vary fastest."""
    num_blocks = tl.cdiv(num_channels, BC)
    channels = tl.program_id(0) % num_blocks * BC + tl.arange(0, BC)
    return tl.program_id(0) // num_blocks, channels, channels < num_channels


@triton.jit
def load_tap(weight, channels, is_channel, W: tl.constexpr, J: tl.constexpr):
    """The tap `J` tokens back."""
    is_tap = is_channel & (J < W)
    return tl.load(weight + channels * W + (W - 1 - J), mask=is_tap, other=0.0).to(tl.float32)


@triton.jit
def load_taps(weight, channels, is_channel, W: tl.constexpr):
    """The four taps, the latest first."""
    return (
        load_tap(weight, channels, is_channel, W, 0),
        load_tap(weight, channels, is_channel, W, 1),
        load_tap(weight, channels, is_channel, W, 2),
        load_tap(weight, channels, is_channel, W, 3),
    )


@triton.jit
def load_state(
    state, sequence, slot, channels, is_read, num_channels, W: tl.constexpr, HAS_STATE: tl.constexpr
):  # fmt: skip
    """Slot of a state `[N, C, W - 1]`; 0 where it has none or is not to be read."""
    value = tl.zeros(channels.shape, tl.float32)
    if HAS_STATE:
        place = state + (sequence.to(tl.int64) * num_channels + channels) * (W - 1) + slot
        is_slot = (slot >= 0) & (slot < W - 1)
        value = tl.load(place, mask=is_read & is_slot, other=0.0).to(tl.float32)
    return value


@triton.jit
def load_before(
    x, state, t, back, position, sequence, channels, is_channel, x_stride, num_channels,
    W: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """The input `back` tokens before token t, from the pack or from the state."""
    is_inside = is_channel & (position >= back)
    value = tl.load(x + (t - back) * x_stride + channels, mask=is_inside, other=0.0).to(tl.float32)
    is_outside = is_channel & (position < back)
    slot = W - 1 + position - back
    return value + load_state(
        state, sequence, slot, channels, is_outside, num_channels, W, HAS_STATE
    )


@triton.jit
def load_window(
    x, state, t, position, sequence, channels, is_channel, x_stride, num_channels,
    W: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """The three inputs before token t, the latest first."""
    return (
        load_before(
            x, state, t, 1, position, sequence, channels, is_channel, x_stride, num_channels,
            W, HAS_STATE,
        ),
        load_before(
            x, state, t, 2, position, sequence, channels, is_channel, x_stride, num_channels,
            W, HAS_STATE,
        ),
        load_before(
            x, state, t, 3, position, sequence, channels, is_channel, x_stride, num_channels,
            W, HAS_STATE,
        ),
    )  # fmt: skip


@triton.jit
def exchange(
    x_1, x_2, x_3, begins, state, sequence, channels, is_channel, num_channels,
    W: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """The window, or where a sequence begins its state."""
    is_read = is_channel & begins
    s_1 = load_state(state, sequence, W - 2, channels, is_read, num_channels, W, HAS_STATE)
    s_2 = load_state(state, sequence, W - 3, channels, is_read, num_channels, W, HAS_STATE)
    s_3 = load_state(state, sequence, W - 4, channels, is_read, num_channels, W, HAS_STATE)
    return tl.where(begins, s_1, x_1), tl.where(begins, s_2, x_2), tl.where(begins, s_3, x_3)


@triton.jit
def silu_slope(z):
    sigmoid = tl.sigmoid(z)
    return sigmoid * (1.0 + z * (1.0 - sigmoid))
