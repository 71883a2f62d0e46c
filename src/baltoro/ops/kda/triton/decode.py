"""One KDA layer's decode step: a program takes one head of one sequence through its new tokens.

It holds the head's whole state, so that 64 KiB in a row are read once and written once, and so that
no other program reads the windows that it replaces. With S the decayed state, both products with it
are one pass, and what is written enters the output by a scalar product:

    u = beta (v - S' k)        o = S' q + (k . q) u        S <- S + k u'

A token's inputs are on their way before the state is waited for, those of the next token before
this one is computed. All is fp32 between loads and stores.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...impl import ImplError
from ...launch_table import Launch, dtype_class, launch
from ...short_conv.triton import MAX_WIDTH, load_tap
from ...triton import add_pairs, refuse_unserved, rows_of
from ..decode import DecodeInputs, DecodeWeights, StatePool
from .tiles import LOG2E, bounded_log2_gate, softplus

DIMS = (16, 32, 64, 128)


@triton.jit
def add_triples(a_0, b_0, c_0, a_1, b_1, c_1):
    return a_0 + a_1, b_0 + b_1, c_0 + c_1


@triton.jit
def load_taps(weight, channels, W: tl.constexpr):
    """Taps on the current token and on those 1, 2 and 3 back."""
    is_channel = channels >= 0
    w_0 = load_tap(weight, channels, is_channel, W, 0)
    w_1 = load_tap(weight, channels, is_channel, W, 1)
    w_2 = load_tap(weight, channels, is_channel, W, 2)
    w_3 = load_tap(weight, channels, is_channel, W, 3)
    return w_0, w_1, w_2, w_3


@triton.jit
def load_window(window, channels, is_live, W: tl.constexpr):
    """The inputs 1, 2 and 3 tokens back; 0 where there is none."""
    is_here = (channels >= 0) & is_live
    place = window + channels * (W - 1) + (W - 1)
    x_1 = tl.load(place - 1, mask=is_here, other=0.0).to(tl.float32)
    x_2 = tl.load(place - 2, mask=is_here & (W > 2), other=0.0).to(tl.float32)
    x_3 = tl.load(place - 3, mask=is_here & (W > 3), other=0.0).to(tl.float32)
    return x_1, x_2, x_3


@triton.jit
def store_window(window, channels, is_kept, x_1, x_2, x_3, W: tl.constexpr):
    is_here = (channels >= 0) & is_kept
    place = window + channels * (W - 1) + (W - 1)
    dtype = window.dtype.element_ty
    tl.store(place - 1, x_1.to(dtype), mask=is_here)
    tl.store(place - 2, x_2.to(dtype), mask=is_here & (W > 2))
    tl.store(place - 3, x_3.to(dtype), mask=is_here & (W > 3))


@triton.jit
def load_token(
    projected, decay_logits, beta_logits, gate_logits, t, is_token, keys, values,
    projected_stride, decay_stride, beta_stride, gate_stride, h, num_heads,
    K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """What token t brings to head h: q, k, v before the convolution, and three logits; fp32."""
    is_key = (keys >= 0) & is_token
    is_value = (values >= 0) & is_token
    row = projected + t * projected_stride
    q = tl.load(row + h * K + keys, mask=is_key, other=0.0).to(tl.float32)
    k = tl.load(row + (num_heads + h) * K + keys, mask=is_key, other=0.0).to(tl.float32)
    v = tl.load(row + 2 * num_heads * K + h * V + values, mask=is_value, other=0.0).to(tl.float32)
    row = decay_logits + t * decay_stride
    decay = tl.load(row + h * K + keys, mask=is_key, other=0.0).to(tl.float32)
    row = gate_logits + t * gate_stride
    gate = tl.load(row + h * V + values, mask=is_value, other=0.0).to(tl.float32)
    beta = tl.load(beta_logits + t * beta_stride + h, mask=is_token, other=0.0).to(tl.float32)
    return q, k, v, decay, gate, beta


@triton.jit
def convolved(x_0, x_1, x_2, x_3, w_0, w_1, w_2, w_3):
    z = w_0 * x_0 + w_1 * x_1 + w_2 * x_2 + w_3 * x_3
    return z * tl.sigmoid(z)


@triton.jit
def decay_of(logits, bias, rate, lower_bound, IS_BOUNDED: tl.constexpr):
    if IS_BOUNDED:
        log2_gate = bounded_log2_gate(logits, bias, rate, lower_bound)
    else:
        log2_gate = -rate * LOG2E * softplus(logits + bias)
    return tl.exp2(log2_gate)


@triton.jit
def step(S, q, k, v, decay, beta, gate, norm, eps, norm_eps, K: tl.constexpr, V: tl.constexpr):
    """One token: the state behind it [K, V], and its output [V]."""
    squares_q, squares_k, product = tl.reduce((q * q, k * k, q * k), 0, add_triples)
    inverse_q = tl.rsqrt(squares_q + eps) * (K**-0.5)
    inverse_k = tl.rsqrt(squares_k + eps)
    q *= inverse_q
    k *= inverse_k
    S = S.to(tl.float32) * decay[:, None]
    predicted, seen = tl.reduce((S * k[:, None], S * q[:, None]), 0, add_pairs)  # [V]
    u = beta * (v - predicted)
    o = seen + product * inverse_q * inverse_k * u
    S += k[:, None] * u[None, :]
    o *= tl.rsqrt(tl.sum(o * o, 0) / V + norm_eps)
    return S, o * norm * tl.sigmoid(gate)


# sizes whose divisibility makes no load wider
GENERAL = [
    "projected_stride", "decay_stride", "beta_stride", "gate_stride", "window_stride", "num_heads",
]  # fmt: skip


@triton.jit(do_not_specialize=GENERAL)
def decode_kernel(
    projected, decay_logits, beta_logits, gate_logits, conv, a_log, dt_bias, norm_weight,
    windows, states, slots, cu_seqlens, num_kept, y,
    projected_stride, decay_stride, beta_stride, gate_stride, window_stride, state_stride,
    num_heads, lower_bound, norm_eps, eps,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, IS_ONE: tl.constexpr,
    KEEPS_ALL: tl.constexpr, IS_BOUNDED: tl.constexpr,
):  # fmt: skip
    """Heads vary fastest; `IS_ONE`: token n is the only one of sequence n."""
    n = tl.program_id(0) // num_heads
    h = tl.program_id(0) % num_heads
    keys = tl.arange(0, K)
    values = tl.arange(0, V)
    slot = tl.load(slots + n).to(tl.int64)
    is_live = slot != 0
    if IS_ONE:
        first = n.to(tl.int64)
        length = 1
    else:
        first = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1) - first).to(tl.int32)
    kept = length if KEEPS_ALL else tl.load(num_kept + n)
    x_q, x_k, x_v, logits, gate, beta = load_token(
        projected, decay_logits, beta_logits, gate_logits, first, length > 0, keys, values,
        projected_stride, decay_stride, beta_stride, gate_stride, h, num_heads, K, V,
    )  # fmt: skip
    # channels of this head among those of q, k and v
    of_q = h * K + keys
    of_k = (num_heads + h) * K + keys
    of_v = 2 * num_heads * K + h * V + values
    window = windows + slot * window_stride
    q_1, q_2, q_3 = load_window(window, of_q, is_live, W)
    k_1, k_2, k_3 = load_window(window, of_k, is_live, W)
    v_1, v_2, v_3 = load_window(window, of_v, is_live, W)
    places = (
        states + slot * state_stride + h.to(tl.int64) * K * V + keys[:, None] * V + values[None, :]
    )
    S = tl.load(places, mask=is_live & (keys >= 0)[:, None], other=0.0)  # [K, V]
    # all of it is asked for before the weights that the work below needs: nothing is put in between
    tl.debug_barrier()
    wq_0, wq_1, wq_2, wq_3 = load_taps(conv, of_q, W)
    wk_0, wk_1, wk_2, wk_3 = load_taps(conv, of_k, W)
    wv_0, wv_1, wv_2, wv_3 = load_taps(conv, of_v, W)
    bias = tl.load(dt_bias + h * K + keys)
    norm = tl.load(norm_weight + values)
    rate = tl.exp(tl.load(a_log + h))
    if IS_ONE:
        S, out = step(
            S,
            convolved(x_q, q_1, q_2, q_3, wq_0, wq_1, wq_2, wq_3),
            convolved(x_k, k_1, k_2, k_3, wk_0, wk_1, wk_2, wk_3),
            convolved(x_v, v_1, v_2, v_3, wv_0, wv_1, wv_2, wv_3),
            decay_of(logits, bias, rate, lower_bound, IS_BOUNDED),
            tl.sigmoid(beta), gate, norm, eps, norm_eps, K, V,
        )  # fmt: skip
        out = tl.where(is_live, out, 0.0).to(y.dtype.element_ty)
        tl.store(y + (first * num_heads + h) * V + values, out)
        is_kept = is_live & (kept > 0)
        # every thread has read its windows before one is replaced
        tl.debug_barrier()
        tl.store(places, S.to(states.dtype.element_ty), mask=is_kept & (keys >= 0)[:, None])
        store_window(window, of_q, is_kept, x_q, q_1, q_2, W)
        store_window(window, of_k, is_kept, x_k, k_1, k_2, W)
        store_window(window, of_v, is_kept, x_v, v_1, v_2, W)
    else:
        S = S.to(tl.float32)
        for i in range(length):
            t = first + i
            next_q, next_k, next_v, next_logits, next_gate, next_beta = load_token(
                projected, decay_logits, beta_logits, gate_logits, t + 1, i + 1 < length,
                keys, values, projected_stride, decay_stride, beta_stride, gate_stride,
                h, num_heads, K, V,
            )  # fmt: skip
            S, out = step(
                S,
                convolved(x_q, q_1, q_2, q_3, wq_0, wq_1, wq_2, wq_3),
                convolved(x_k, k_1, k_2, k_3, wk_0, wk_1, wk_2, wk_3),
                convolved(x_v, v_1, v_2, v_3, wv_0, wv_1, wv_2, wv_3),
                decay_of(logits, bias, rate, lower_bound, IS_BOUNDED),
                tl.sigmoid(beta), gate, norm, eps, norm_eps, K, V,
            )  # fmt: skip
            out = tl.where(is_live, out, 0.0).to(y.dtype.element_ty)
            tl.store(y + (t * num_heads + h) * V + values, out)
            q_3, q_2, q_1 = q_2, q_1, x_q
            k_3, k_2, k_1 = k_2, k_1, x_k
            v_3, v_2, v_1 = v_2, v_1, x_v
            x_q, x_k, x_v = next_q, next_k, next_v
            logits, gate, beta = next_logits, next_gate, next_beta
            if is_live & (i + 1 == kept):
                tl.debug_barrier()
                tl.store(places, S.to(states.dtype.element_ty))
                store_window(window, of_q, is_live, q_1, q_2, q_3, W)
                store_window(window, of_k, is_live, k_1, k_2, k_3, W)
                store_window(window, of_v, is_live, v_1, v_2, v_3, W)


def shape_of(key_dim: int, value_dim: int, states: Tensor, is_one: bool) -> Launch:
    """Warps, and registers a thread where they are bounded.

    More threads than channels would load those of q, k and v many times over.
    """
    dtype, dim = dtype_class(states.dtype), min(key_dim, value_dim)
    return launch("kda_decode", f"{dtype} d{dim} {'one' if is_one else 'more'}", states.device)


def decode_kda(
    inputs: DecodeInputs,
    weights: DecodeWeights,
    pool: StatePool,
    slots: Tensor,
    cu_seqlens: Tensor | None,
    num_kept: Tensor | None,
    lower_bound: float | None,
    norm_eps: float,
    eps: float,
) -> Tensor:
    """`baltoro.ops.kda.decode.decode_kda`, whose checks have passed."""
    refuse_unserved("decode_kda", *inputs, *weights, *pool)
    H, V = inputs.gate_logits.shape[1:]
    K, W = inputs.decay_logits.shape[2], weights.conv.shape[1]
    if K not in DIMS or V not in DIMS or not 2 <= W <= MAX_WIDTH:
        raise ImplError(
            f"decode_kda: impl='triton' serves head dims {DIMS} and 2 to {MAX_WIDTH} taps, not "
            f"K={K}, V={V}, W={W}"
        )
    for name, x in zip(StatePool._fields, pool, strict=True):
        if not x[0].is_contiguous():
            raise ImplError(
                f"decode_kda: impl='triton' needs {name} whose slots are contiguous, not strides "
                f"{x.stride()} of {list(x.shape)}"
            )
    y = torch.empty_like(inputs.gate_logits, memory_format=torch.contiguous_format)
    rows = [rows_of(x.flatten(1)) for x in inputs]
    if len(slots) > 0:
        decode_kernel[(len(slots) * H,)](
            *rows, *(x.contiguous() for x in weights), *pool, slots, cu_seqlens, num_kept, y,
            *(x.stride(0) for x in rows), *(x.stride(0) for x in pool),
            H, 0.0 if lower_bound is None else lower_bound, norm_eps, eps,
            K=K, V=V, W=W, IS_ONE=cu_seqlens is None, KEEPS_ALL=num_kept is None,
            IS_BOUNDED=lower_bound is not None, **shape_of(K, V, pool.states, cu_seqlens is None),
        )  # fmt: skip
    return y
