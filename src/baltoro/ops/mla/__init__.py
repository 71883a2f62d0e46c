"""Softmax attention over packed sequences, and its absorbed form over the latent cache.

out_t = sum_s softmax_s(scale q_t . k_s) v_s, per head (k3-facts 3.6). No positions enter.
"""

from itertools import pairwise

import torch
from torch import Tensor

from baltoro.ops.impl import ImplError, choose
from baltoro.ops.mla import dense, flash, reference

__all__ = ["latent_attention", "varlen_attention"]


def _triton_latent(
    q_latent: Tensor, kv_latent: Tensor, lengths: list[int], kv_lora_rank: int, scale: float
) -> Tensor:
    """Every sequence lies in one page."""
    try:
        from .triton import paged_latent_attention
    except ModuleNotFoundError as error:
        raise ImplError(f"latent_attention: impl='triton' needs triton ({error})") from error
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=q_latent.device)
    table = torch.arange(len(lengths), dtype=torch.int32, device=q_latent.device)[:, None]
    return paged_latent_attention(
        q_latent, kv_latent, table, seq_lens, None, 1, kv_lora_rank, scale
    )


_VARLEN = {
    "reference": reference.varlen_attention,
    "torch": dense.varlen_attention,
    "flash": flash.varlen_attention,
}
_LATENT = {
    "reference": reference.latent_attention,
    "torch": dense.latent_attention,
    "flash": dense.latent_attention,  # one query a sequence: nothing to pack
    "triton": _triton_latent,
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


def latent_attention(
    q_latent: Tensor,
    kv_latent: Tensor,
    seq_lens: Tensor,
    *,
    kv_lora_rank: int,
    scale: float,
    impl: str,
) -> Tensor:
    """One query per sequence over the latent cache: `[N, H, R]` in the dtype of `q_latent`.

    `q_latent` `[N, H, R + P]`: the query with the key up-projection absorbed, then the shared part;
    `kv_latent` `[N, L, R + P]`: cached rows, whose first `R = kv_lora_rank` columns are the values;
    `seq_lens` int `[N]`: rows in use, at least 1. Rows beyond are never read into the result, so
    they may hold anything. The value up-projection is left to the caller.
    """
    if q_latent.dim() != 3 or kv_latent.dim() != 3 or kv_latent.shape[0] != q_latent.shape[0]:
        raise ValueError(
            f"latent_attention: q_latent {list(q_latent.shape)} and kv_latent "
            f"{list(kv_latent.shape)} do not fit [N, H, R + P] and [N, L, R + P]"
        )
    if kv_latent.shape[2] != q_latent.shape[2] or kv_latent.dtype != q_latent.dtype:
        raise ValueError(
            f"latent_attention: q_latent is {q_latent.dtype} {list(q_latent.shape)} and kv_latent "
            f"{kv_latent.dtype} {list(kv_latent.shape)}; dtype and last dim must be the same"
        )
    if not 1 <= kv_lora_rank <= q_latent.shape[2]:
        raise ValueError(
            f"latent_attention: kv_lora_rank={kv_lora_rank} must be between 1 and the last dim "
            f"{q_latent.shape[2]} of q_latent"
        )
    if seq_lens.shape != q_latent.shape[:1]:
        raise ValueError(
            f"latent_attention: seq_lens has shape {list(seq_lens.shape)}; "
            f"expected [{q_latent.shape[0]}]"
        )
    lengths = seq_lens.tolist()
    for n, length in enumerate(lengths):
        if not 1 <= length <= kv_latent.shape[1]:
            raise ValueError(
                f"latent_attention: seq_lens[{n}]={length} must be between 1 and the "
                f"{kv_latent.shape[1]} rows of kv_latent"
            )
    return choose("attention", impl, _LATENT)(q_latent, kv_latent, lengths, kv_lora_rank, scale)


def _bounds(name: str, cu_seqlens: Tensor, total: int) -> list[int]:
    bounds: list[int] = cu_seqlens.tolist()
    if cu_seqlens.dim() != 1 or not bounds or bounds[0] != 0 or bounds[-1] != total:
        raise ValueError(
            f"varlen_attention: {name} is {bounds}; it must run from 0 to the {total} tokens given"
        )
    if any(stop < start for start, stop in pairwise(bounds)):
        raise ValueError(f"varlen_attention: {name} is {bounds}; it must not decrease")
    return bounds
