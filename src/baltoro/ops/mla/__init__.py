"""Softmax attention over packed sequences; over the latent cache it is in `baltoro.ops.mla.paged`.

out_t = sum_s softmax_s(scale q_t . k_s) v_s, per head (k3-facts 3.6). No positions enter.
"""

from itertools import pairwise

import torch
from torch import Tensor

from baltoro.ops.impl import choose
from baltoro.ops.mla import dense, flash, reference

__all__ = ["varlen_attention"]

_VARLEN = {
    "reference": reference.varlen_attention,
    "torch": dense.varlen_attention,
    "flash": flash.varlen_attention,
}


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    scale: float,
    impl: str,
) -> Tensor:
    """Attention of `N` packed sequences: `[T, H, V]` in the dtype of `q`.

    `q` `[T, H, K]`, `k` `[S, H, K]`, `v` `[S, H, V]`; `cu_seqlens_q` and `cu_seqlens_k` int
    `[N + 1]`, from 0 to `T` and to `S`. `causal` lets the queries of a sequence be the last tokens
    of its keys: query i of m sees the first n - m + i + 1 of n keys. The softmax is fp32 (fp64
    for fp64 input). Without keys nothing can be attended: a sequence with queries needs some, with
    `causal` at least as many as queries.

    While a CUDA graph is captured, which `flash` alone allows, bounds stay on the device unchecked.
    """
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise ValueError(
            f"varlen_attention: q, k, v have shapes {list(q.shape)}, {list(k.shape)}, "
            f"{list(v.shape)}; expected [T, H, K], [S, H, K], [S, H, V]"
        )
    if k.shape[1:] != q.shape[1:] or v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"varlen_attention: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} do not fit "
            "[T, H, K], [S, H, K], [S, H, V]"
        )
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"varlen_attention: q is {q.dtype}, k {k.dtype}, v {v.dtype}; they must be the same"
        )
    if impl == "flash" and q.is_cuda and torch.cuda.is_current_stream_capturing():
        return flash.captured_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale)
    bounds_q = _bounds("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    bounds_k = _bounds("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    if len(bounds_q) != len(bounds_k):
        raise ValueError(
            f"varlen_attention: cu_seqlens_q holds {len(bounds_q) - 1} sequences and cu_seqlens_k "
            f"{len(bounds_k) - 1}; they must describe the same ones"
        )
    for n in range(len(bounds_q) - 1):
        queries, keys = bounds_q[n + 1] - bounds_q[n], bounds_k[n + 1] - bounds_k[n]
        if queries > 0 and keys < (queries if causal else 1):
            raise ValueError(
                f"varlen_attention: sequence {n} has {queries} queries and {keys} keys; "
                f"with causal={causal} it needs at least {queries if causal else 1} keys"
            )
    return choose("attention", impl, _VARLEN)(q, k, v, bounds_q, bounds_k, causal, scale)


def _bounds(name: str, cu_seqlens: Tensor, total: int) -> list[int]:
    bounds: list[int] = cu_seqlens.tolist()
    if cu_seqlens.dim() != 1 or not bounds or bounds[0] != 0 or bounds[-1] != total:
        raise ValueError(
            f"varlen_attention: {name} is {bounds}; it must run from 0 to the {total} tokens given"
        )
    if any(stop < start for start, stop in pairwise(bounds)):
        raise ValueError(f"varlen_attention: {name} is {bounds}; it must not decrease")
    return bounds
