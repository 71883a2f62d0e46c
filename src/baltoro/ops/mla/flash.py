"""Attention of a pack in bf16 or fp16 on an NVIDIA GPU: FlashAttention, and cuDNN where long.

FlashAttention takes a pack in one call. It wants one width for queries, keys and values, so values
are padded with zeros, and on Hopper it reaches half of cuDNN's speed. There a sequence from `LONG`
tokens on, whose queries are all its tokens, goes to cuDNN by itself. cuDNN's backward gives NaN
where a tile of 128 keys is half full (pytorch issue 196678): such a sequence is padded at its end,
which no real query sees, to one of eight lengths between powers of two, since cuDNN plans every
length anew.
"""

from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from baltoro.ops.impl import ImplError
from baltoro.ops.mla.dense import widen

LONG = 2048
_MAX_DIM = 256
_CUDNN_DIMS = (192, 128)  # of keys and values


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds_q: list[int],
    bounds_k: list[int],
    causal: bool,
    scale: float,
) -> Tensor:
    _refuse_unserved(q, v)
    if q.shape[0] == 0:
        return q.new_empty((0, *v.shape[1:])) + 0 * (q.sum() + k.sum() + v.sum())
    runs = _runs([stop - start for start, stop in pairwise(bounds_q)])
    is_short = all(run[0] < LONG for run in runs)
    if is_short or not causal or bounds_q != bounds_k or not _is_for_cudnn(q, k, v):
        return _by_flash(q, k, v, bounds_q, bounds_k, causal, scale)
    sizes = [sum(run) for run in runs]
    outs = []
    for run, q_part, k_part, v_part in zip(
        runs, q.split(sizes), k.split(sizes), v.split(sizes), strict=True
    ):
        if run[0] >= LONG:
            outs.append(_by_cudnn(q_part, k_part, v_part, scale))
        elif sum(run) > 0:
            bounds = list(accumulate(run, initial=0))
            outs.append(_by_flash(q_part, k_part, v_part, bounds, bounds, causal, scale))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def captured_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    scale: float,
) -> Tensor:
    """The same from bounds that stay on the device: any sequence may be as long as the pack."""
    _refuse_unserved(q, v)
    is_single = len(cu_seqlens_q) == 2 and len(q) == len(k) >= LONG
    if causal and is_single and _is_for_cudnn(q, k, v):
        return _by_cudnn(q, k, v, scale)
    starts_q, starts_k = (bounds.int() for bounds in (cu_seqlens_q, cu_seqlens_k))
    return _attend(q, k, v, starts_q, starts_k, len(q), len(k), causal, scale)


def _refuse_unserved(q: Tensor, v: Tensor) -> None:
    width = max(q.shape[2], v.shape[2])
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or width > _MAX_DIM:
        raise ImplError(
            f"varlen_attention: impl='flash' serves bf16 and fp16 heads of at most {_MAX_DIM} on a "
            f"GPU, not {q.dtype} {list(q.shape)} on {q.device}; use impl='torch'"
        )


def _is_for_cudnn(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if (q.shape[2], v.shape[2]) != _CUDNN_DIMS:
        return False
    q_HTK, k_HTK, v_HTV = (_as_heads(x) for x in (q, k, v))
    return can_use_cudnn_attention(SDPAParams(q_HTK, k_HTK, v_HTV, None, 0.0, True, False))


def _runs(lengths: list[int]) -> list[list[int]]:
    """Neighbouring lengths for one call: long ones alone, the others together."""
    runs: list[list[int]] = []
    for length in lengths:
        if length < LONG and runs and runs[-1][0] < LONG:
            runs[-1].append(length)
        else:
            runs.append([length])
    return runs


def padded_length(length: int) -> int:
    """The least of eight lengths between powers of two that holds `length >= 1024` tokens."""
    step = 1 << (length.bit_length() - 4)
    return -(-length // step) * step


def _by_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One sequence, causal."""
    missing = padded_length(len(q)) - len(q)
    rows = [F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x for x in (q, k, v)]
    q_HTK, k_HTK, v_HTV = (_as_heads(x) for x in rows)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q_HTK, k_HTK, v_HTV, is_causal=True, scale=scale)
    return out[0].transpose(0, 1)[: len(q)]


def _as_heads(x: Tensor) -> Tensor:
    """`[T, H, K]` to `[1, H, T, K]`."""
    return x.transpose(0, 1).unsqueeze(0)


def _by_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds_q: list[int],
    bounds_k: list[int],
    causal: bool,
    scale: float,
) -> Tensor:
    starts_q, starts_k = (
        torch.tensor(bounds, dtype=torch.int32).to(q.device, non_blocking=True)
        for bounds in (bounds_q, bounds_k)
    )
    longest_q = max(stop - start for start, stop in pairwise(bounds_q))
    longest_k = max(stop - start for start, stop in pairwise(bounds_k))
    return _attend(q, k, v, starts_q, starts_k, longest_q, longest_k, causal, scale)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    causal: bool,
    scale: float,
) -> Tensor:
    value_dim = v.shape[2]
    q, k, v = (widen(tensor, max(q.shape[2], value_dim)) for tensor in (q, k, v))
    window = (-1, 0) if causal else (-1, -1)
    out = varlen_attn(
        q, k, v, starts_q, starts_k, longest_q, longest_k, scale=scale, window_size=window
    )
    assert isinstance(out, Tensor)
    return out[..., :value_dim]
