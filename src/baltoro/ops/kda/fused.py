"""`chunk_kda` from what the projections give: norm, decay map and sigmoid are part of the operator.

    q <- q / |q| / sqrt(K)    k <- k / |k|    g = log_decay(logits)    beta = sigmoid(beta_logits)

The same function as those maps followed by `chunk_kda`; a kernel saves their trips to memory. With
`impl="triton"` no tensor's values are read, so it runs under CUDA graphs and `torch.compile`.
"""

from collections.abc import Callable
from functools import partial

import torch

from ..impl import ImplError, choose
from . import KdaOutput, chunk_kda
from .gates import l2_normalize, log_decay


def _composed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay_logits: torch.Tensor,
    beta_logits: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None,
    lower_bound: float | None,
    eps: float,
    *,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return chunk_kda(
        l2_normalize(q, eps=eps, scale=q.shape[-1] ** -0.5),
        l2_normalize(k, eps=eps),
        v,
        log_decay(decay_logits, a_log, dt_bias, lower_bound=lower_bound),
        torch.sigmoid(beta_logits.to(a_log.dtype)),
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        chunk_size=_chunk_size(q),
        gate_lower_bound=lower_bound,
        impl=impl,
    )


def _chunk_size(q: torch.Tensor) -> int:
    """On a CPU half as many rows as a state has: of 16, 32 and 64 the fastest at K 32, 64, 128.

    Elsewhere a step of the scan costs its launches, whatever it computes.
    """
    if not q.is_cpu:
        return 64
    return next((size for size in (64, 32) if 2 * size <= q.shape[-1]), 16)


def _triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay_logits: torch.Tensor,
    beta_logits: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None,
    lower_bound: float | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        from .triton import chunk
    except ModuleNotFoundError as error:
        raise ImplError(f"chunk_kda_fused: impl='triton' needs triton ({error})") from error
    return chunk.chunk_kda_fused(
        q, k, v, decay_logits, beta_logits, a_log, dt_bias, cu_seqlens, initial_state,
        lower_bound, eps,
    )  # fmt: skip


_FUSED: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "reference": partial(_composed, impl="reference"),
    "torch": partial(_composed, impl="torch"),
    "triton": _triton,
}


def chunk_kda_fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay_logits: torch.Tensor,
    beta_logits: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    gate_lower_bound: float | None,
    eps: float = 1e-6,
    impl: str,
) -> KdaOutput:
    """KDA over many tokens of each sequence, from raw queries, keys and logits.

    `q`, `k`, `decay_logits` `[T, H, K]`, `v` `[T, H, V]` and `beta_logits` `[T, H]` of one dtype;
    `A_log` `[H]` and `dt_bias` `[H * K]` fp32 (fp64 for fp64 inputs); `gate_lower_bound` in
    [-5, 0), or None for the softplus decay; `eps` inside the root of the norm. The rest, and the
    result, as in `chunk_kda`.

    Raises `ValueError` for shapes and dtypes that do not fit; `ImplError` for an unknown `impl` or
    inputs that it does not serve. `triton` trusts that `cu_seqlens` is a partition of T: the check
    would wait for the device.
    """
    run = choose("chunk_kda_fused", impl, _FUSED)
    if gate_lower_bound is not None and not -5.0 <= gate_lower_bound < 0.0:
        raise ValueError(f"gate_lower_bound={gate_lower_bound}: must be None or in [-5, 0)")
    if q.dim() != 3 or v.dim() != 3:
        raise ValueError(f"q {list(q.shape)}, v {list(v.shape)}: expected [T, H, K], [T, H, V]")
    num_tokens, num_heads, key_dim = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens: expected int32 [N + 1] with N >= 1, got {cu_seqlens.dtype} "
            f"{list(cu_seqlens.shape)}"
        )
    states = (cu_seqlens.shape[0] - 1, num_heads, key_dim, v.shape[2])
    for name, x, shape, dtype in (
        ("k", k, (num_tokens, num_heads, key_dim), q.dtype),
        ("v", v, (num_tokens, num_heads, v.shape[2]), q.dtype),
        ("decay_logits", decay_logits, (num_tokens, num_heads, key_dim), q.dtype),
        ("beta_logits", beta_logits, (num_tokens, num_heads), q.dtype),
        ("A_log", A_log, (num_heads,), wide),
        ("dt_bias", dt_bias, (num_heads * key_dim,), wide),
        ("initial_state", initial_state, states, wide),
    ):
        if x is not None and (x.shape != shape or x.dtype != dtype):
            raise ValueError(
                f"{name}: expected {dtype} {list(shape)} to go with q, got {x.dtype} "
                f"{list(x.shape)}"
            )
    o, final_state = run(
        q, k, v, decay_logits, beta_logits, A_log, dt_bias, cu_seqlens, initial_state,
        gate_lower_bound, eps,
    )  # fmt: skip
    return KdaOutput(o, final_state)
