"""Kimi Delta Attention: linear attention that forgets per channel and corrects what it wrote.

    S <- (I - beta k k') diag(exp(g)) S + beta k v'        o = S' q

Two forms of one function: `chunk_kda` to train and prefill, `recurrent_kda` to decode. Tokens are
packed; `q` has length K^-1/2 and `k` unit length (the caller normalises), `g` is the natural
log-decay per channel, `beta` the write strength after its sigmoid.
"""

from typing import NamedTuple

import torch

from ..impl import ImplError, choose
from ..packed import read_boundaries
from . import chunked, reference, step
from .gates import bounded_gate, l2_normalize, log_decay, softplus_gate

__all__ = [
    "KdaOutput",
    "bounded_gate",
    "chunk_kda",
    "l2_normalize",
    "log_decay",
    "recurrent_kda",
    "softplus_gate",
]

CHUNK_SIZES = (16, 32, 64, 128)


class KdaOutput(NamedTuple):
    """Result of both forms."""

    o: torch.Tensor  # [T, H, V] in the dtype of v
    final_state: torch.Tensor  # [N, H, K, V] fp32 (fp64 for fp64 inputs)


def _chunk_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    bounds: list[int],
    initial_state: torch.Tensor,
    chunk_size: int,
    is_bounded: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.recurrent_kda(q, k, v, g, beta, bounds, initial_state)


def _chunk_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    bounds: list[int],
    initial_state: torch.Tensor,
    chunk_size: int,
    is_bounded: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        from .triton import chunk
    except ModuleNotFoundError as error:
        raise ImplError(f"chunk_kda: impl='triton' needs triton ({error})") from error
    return chunk.chunk_kda(q, k, v, g, beta, bounds, initial_state, chunk_size, is_bounded)


_CHUNK = {
    "reference": _chunk_reference,
    "torch": chunked.chunk_kda,
    "triton": _chunk_triton,
}
_RECURRENT = {"reference": reference.recurrent_kda, "torch": step.recurrent_kda}


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    gate_lower_bound: float | None,
    chunk_size: int = 64,
    impl: str,
) -> KdaOutput:
    """KDA over many tokens of each sequence, in chunks of `chunk_size` (16, 32, 64 or 128).

    `q`, `k` `[T, H, K]` and `v` `[T, H, V]` of one dtype; `g` `[T, H, K]` and `beta` `[T, H]` fp32;
    `cu_seqlens` int32 `[N + 1]`; `initial_state` `[N, H, K, V]` fp32, zeros if None. For fp64
    inputs fp32 reads fp64. With a `gate_lower_bound` in [-5, 0) every g must lie in [bound, 0] and
    16-token tiles are one product each; with None any g <= 0 is served, more slowly.

    Raises `ValueError` for shapes and dtypes that do not fit, for `cu_seqlens` that is no partition
    of T and for g outside its range; `ImplError` for an unknown `impl`. Reads `cu_seqlens` and the
    range of g, so on a GPU it waits for the stream.
    """
    run = choose("chunk_kda", impl, _CHUNK)
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size={chunk_size}: must be one of {CHUNK_SIZES}")
    if gate_lower_bound is not None and not -5.0 <= gate_lower_bound < 0.0:
        raise ValueError(f"gate_lower_bound={gate_lower_bound}: must be None or in [-5, 0)")
    bounds, state = _checked(q, k, v, g, beta, cu_seqlens, initial_state, gate_lower_bound)
    is_bounded = gate_lower_bound is not None
    o, final_state = run(q, k, v, g, beta, bounds, state, chunk_size, is_bounded)
    return KdaOutput(o.to(v.dtype), final_state)


def recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    impl: str,
) -> KdaOutput:
    """KDA one token after the other: for one or few new tokens of each sequence.

    Arguments, result and errors as `chunk_kda`; any g <= 0 is served.
    """
    run = choose("recurrent_kda", impl, _RECURRENT)
    bounds, state = _checked(q, k, v, g, beta, cu_seqlens, initial_state, None)
    o, final_state = run(q, k, v, g, beta, bounds, state)
    return KdaOutput(o.to(v.dtype), final_state)


def _checked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None,
    gate_lower_bound: float | None,
) -> tuple[list[int], torch.Tensor]:
    """Sequence boundaries and the first states; every check of both forms."""
    if q.dim() != 3 or v.dim() != 3:
        raise ValueError(f"q {list(q.shape)}, v {list(v.shape)}: expected [T, H, K], [T, H, V]")
    num_tokens, num_heads, key_dim = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    value_dim = v.shape[2]
    _expect("k", k, (num_tokens, num_heads, key_dim), q.dtype)
    _expect("v", v, (num_tokens, num_heads, value_dim), q.dtype)
    _expect("g", g, (num_tokens, num_heads, key_dim), dtype)
    _expect("beta", beta, (num_tokens, num_heads), dtype)
    bounds = read_boundaries(cu_seqlens, num_tokens)
    state_shape = (len(bounds) - 1, num_heads, key_dim, value_dim)
    if initial_state is None:
        initial_state = torch.zeros(state_shape, dtype=dtype, device=q.device)
    else:
        _expect("initial_state", initial_state, state_shape, dtype)
    if g.numel():
        high = float(g.detach().max())
        if not high <= 0.0:
            raise ValueError(f"g={high} (largest): a log-decay must be <= 0")
        if gate_lower_bound is not None and (low := float(g.detach().min())) < gate_lower_bound:
            raise ValueError(
                f"g={low} (smallest): below gate_lower_bound={gate_lower_bound}; "
                "pass gate_lower_bound=None for the form without a bound"
            )
    return bounds, initial_state


def _expect(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if x.shape != shape or x.dtype != dtype:
        raise ValueError(
            f"{name}: expected {dtype} {list(shape)} to go with q, got {x.dtype} {list(x.shape)}"
        )
