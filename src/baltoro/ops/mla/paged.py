"""Absorbed attention over a latent cache in pages: decode, and drafts to verify.

out_t = sum_s softmax_s(scale q_t . c_s) c_s[:R], per head, c_s the cached row of token s: the same
as attention over expanded keys and values, if q_t holds the key up-projection and the value
up-projection follows. A sequence may have several queries, each of which sees the rows up to its
own token. `impl="triton"` reads no values on the host, so it runs under CUDA graphs.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..impl import ImplError, choose
from ..packed import read_boundaries
from . import dense, reference

_Attend = Callable[[Tensor, Tensor, list[int], int, float], Tensor]
_Run = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, int, int, float], Tensor]


def _gathered(
    q_latent: Tensor,
    latents: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    cu_seqlens: Tensor | None,
    max_tokens: int,
    kv_lora_rank: int,
    scale: float,
    *,
    attend: _Attend,
) -> Tensor:
    num_tokens, page_size = q_latent.shape[0], latents.shape[1]
    bounds = list(range(len(lengths) + 1))
    if cu_seqlens is not None:
        bounds = read_boundaries(cu_seqlens, num_tokens)
    out_THR = q_latent.new_zeros((*q_latent.shape[:2], kv_lora_rank))
    for n, length in enumerate(lengths.tolist()):
        tokens = slice(bounds[n], bounds[n + 1])
        num_queries = bounds[n + 1] - bounds[n]
        if num_queries == 0 or length == 0:
            continue
        capacity = page_table.shape[1] * page_size
        if not num_queries <= length <= capacity or num_queries > max_tokens:
            raise ValueError(
                f"paged_latent_attention: sequence {n} has {num_queries} queries and "
                f"lengths[{n}]={length}; expected at most max_tokens={max_tokens} queries, and "
                f"as many rows at least and {capacity} at most"
            )
        first, *others = page_table[n, : -(-length // page_size)].tolist()
        # of one page nothing is copied
        rows_LR = latents[[first, *others]].flatten(0, 1) if others else latents[first]
        rows_LR = rows_LR[:length]
        seen = list(range(length - num_queries + 1, length + 1))
        rows_TLR = rows_LR.expand(num_queries, -1, -1)
        out_THR[tokens] = attend(q_latent[tokens], rows_TLR, seen, kv_lora_rank, scale)
    return out_THR


def _triton(
    q_latent: Tensor,
    latents: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    cu_seqlens: Tensor | None,
    max_tokens: int,
    kv_lora_rank: int,
    scale: float,
) -> Tensor:
    try:
        from .triton import paged_latent_attention
    except ModuleNotFoundError as error:
        raise ImplError(f"paged_latent_attention: impl='triton' needs triton ({error})") from error
    return paged_latent_attention(
        q_latent, latents, page_table, lengths, cu_seqlens, max_tokens, kv_lora_rank, scale
    )


_IMPLS: dict[str, _Run] = {
    "reference": partial(_gathered, attend=reference.latent_attention),
    "torch": partial(_gathered, attend=dense.latent_attention),
    "triton": _triton,
}


def paged_latent_attention(
    q_latent: Tensor,
    latents: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    max_tokens: int = 1,
    kv_lora_rank: int,
    scale: float,
    impl: str,
) -> Tensor:
    """Attention of few new tokens of each sequence over its cached rows: `[T, H, R]`.

    `q_latent` `[T, H, R + P]`: queries with the key up-projection absorbed, then the shared part;
    `latents` `[pages, page_size, R + P]` in the same dtype, whose first `R = kv_lora_rank` columns
    are the values; pages may lie any distance apart. `page_table` int32 `[N, max_pages]`: pages of
    each sequence in order, anything behind those in use. `lengths` int32 `[N]`: rows of each
    sequence, its new tokens' own among them; of m queries number i sees the first
    `lengths - m + i + 1`. A sequence of length 0 is padding, its outputs are 0. `cu_seqlens` int32
    `[N + 1]`, or None if token n is the one of sequence n; `max_tokens` is the most that a sequence
    has. Rows beyond a length, and pages behind, may hold anything.

    Raises `ValueError` for shapes and dtypes that do not fit, `ImplError` for an unknown `impl` or
    inputs that it does not serve. `triton` trusts the values of the last three tensors and sizes
    its launch by `max_tokens` alone; it serves Hopper, a positive `scale`, and several pages a
    sequence if they hold a multiple of 8 tokens and lie a whole number of rows apart. A result's
    bits depend on all lengths of a call. No gradients from `triton`.
    """
    run = choose("paged_latent_attention", impl, _IMPLS)
    if q_latent.dim() != 3 or latents.dim() != 3 or page_table.dim() != 2:
        raise ValueError(
            f"q_latent {list(q_latent.shape)}, latents {list(latents.shape)}, page_table "
            f"{list(page_table.shape)}: expected [T, H, R + P], [pages, page_size, R + P], "
            "[N, max_pages]"
        )
    width, dtype = q_latent.shape[2], q_latent.dtype
    if latents.shape[2] != width or latents.dtype != dtype:
        raise ValueError(
            f"latents: expected {dtype} rows of {width} as q_latent has, got {latents.dtype} "
            f"{list(latents.shape)}"
        )
    if not 1 <= kv_lora_rank <= width:
        raise ValueError(f"kv_lora_rank={kv_lora_rank}: must be between 1 and the {width} columns")
    num_sequences = page_table.shape[0]
    for name, x, shape in (
        ("page_table", page_table, (num_sequences, page_table.shape[1])),
        ("lengths", lengths, (num_sequences,)),
        ("cu_seqlens", cu_seqlens, (num_sequences + 1,)),
    ):
        if x is not None and (x.dtype != torch.int32 or x.shape != shape):
            raise ValueError(
                f"{name}: expected int32 {list(shape)} to go with page_table, got {x.dtype} "
                f"{list(x.shape)}"
            )
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: must be at least 1")
    if cu_seqlens is None and num_sequences != q_latent.shape[0]:
        raise ValueError(
            f"cu_seqlens=None: {num_sequences} sequences need as many tokens, not "
            f"{q_latent.shape[0]}"
        )
    return run(q_latent, latents, page_table, lengths, cu_seqlens, max_tokens, kv_lora_rank, scale)
