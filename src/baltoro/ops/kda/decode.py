"""A whole KDA layer between its projections, on states that stay in their slots: decode.

    q, k, v <- silu(conv(projected))    then `recurrent_kda` from raw q, k and logits
    y = rms(o) * weight * sigmoid(gate_logits)

The same function as short convolution, unit length, decay map, `recurrent_kda` and gated norm one
after another. `impl="triton"` is one kernel: it reads a state once and writes it once, reads no
values on the host and allocates nothing but its output, so it runs under CUDA graphs.

Drafted tokens: a state takes in the first `num_kept` of a sequence's tokens, and all tokens have
outputs. With 0 a verification leaves state and window as they were; the tokens that were accepted
stand in front of the next ones in the next call, and are kept there.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..impl import ImplError, choose
from ..packed import read_boundaries
from ..rms_norm import gated_rms_norm
from ..short_conv import short_conv
from . import recurrent_kda
from .gates import l2_normalize, log_decay

NULL_SLOT = 0


class DecodeInputs(NamedTuple):
    """What a layer's projections give for the new tokens, all of one dtype."""

    projected: Tensor  # [T, C], C = H * (2 K + V): q, k and v side by side, before the convolution
    decay_logits: Tensor  # [T, H, K]
    beta_logits: Tensor  # [T, H]
    gate_logits: Tensor  # [T, H, V], of the output gate


class DecodeWeights(NamedTuple):
    """A layer's small weights: fp32, or fp64 for fp64 inputs."""

    conv: Tensor  # [C, W], the last tap on the current token
    A_log: Tensor  # [H]
    dt_bias: Tensor  # [H * K]
    norm: Tensor  # [V]


class StatePool(NamedTuple):
    """States and convolution windows of many sequences; slots may lie any distance apart."""

    windows: Tensor  # [slots, C, W - 1] in the dtype of the inputs, oldest first
    states: Tensor  # [slots, H, K, V] fp32 or bf16 (fp64 for fp64 inputs)


def _composed(
    inputs: DecodeInputs,
    weights: DecodeWeights,
    pool: StatePool,
    slots: Tensor,
    cu_seqlens: Tensor | None,
    num_kept: Tensor | None,
    lower_bound: float | None,
    norm_eps: float,
    eps: float,
    *,
    impl: str,
) -> Tensor:
    device = slots.device
    bounds = list(range(len(slots) + 1))
    if cu_seqlens is not None:
        bounds = read_boundaries(cu_seqlens, len(inputs.projected))
    live = [n for n, slot in enumerate(slots.tolist()) if slot != NULL_SLOT]
    if not live:
        return torch.zeros_like(inputs.gate_logits)
    live_slots = slots[torch.tensor(live, device=device)].long()
    windows, states = pool.windows[live_slots], pool.states[live_slots]
    lengths = [bounds[n + 1] - bounds[n] for n in live]

    def after(counts: list[int]) -> tuple[Tensor | slice, Tensor, Tensor, Tensor]:
        """Tokens that are the first of each sequence, their o, windows and states behind."""
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
        tokens: Tensor | slice = slice(None)
        if sum(counts) < len(inputs.projected):
            spans = [
                torch.arange(bounds[n], bounds[n] + count)
                for n, count in zip(live, counts, strict=True)
            ]
            tokens = torch.cat(spans).to(device)
        mixed, new_windows = short_conv(
            inputs.projected[tokens],
            weights.conv,
            cu_seqlens=starts,
            initial_state=windows,
            impl=impl,
        )
        logits_THK = inputs.decay_logits[tokens]
        H, K = logits_THK.shape[1:]
        q, k, v = mixed.split([H * K, H * K, mixed.shape[1] - 2 * H * K], -1)
        o, new_states = recurrent_kda(
            l2_normalize(q.unflatten(-1, (H, K)), eps=eps, scale=K**-0.5),
            l2_normalize(k.unflatten(-1, (H, K)), eps=eps),
            v.unflatten(-1, (H, -1)),
            log_decay(logits_THK, weights.A_log, weights.dt_bias, lower_bound=lower_bound),
            torch.sigmoid(inputs.beta_logits[tokens].to(weights.A_log.dtype)),
            cu_seqlens=starts,
            initial_state=states.to(weights.A_log.dtype),
            impl=impl,
        )
        return tokens, o, new_windows, new_states

    tokens, o_THV, new_windows, new_states = after(lengths)
    y_THV = gated_rms_norm(o_THV, weights.norm, inputs.gate_logits[tokens], eps=norm_eps, impl=impl)
    if isinstance(tokens, Tensor):
        y_THV = torch.zeros_like(inputs.gate_logits).index_copy_(0, tokens, y_THV)
    if num_kept is not None:
        kept = num_kept.tolist()
        for n, length in zip(live, lengths, strict=True):
            if not 0 <= kept[n] <= length:
                raise ValueError(f"num_kept[{n}]={kept[n]}: must be from 0 to all {length}")
        _, _, new_windows, new_states = after([kept[n] for n in live])
    pool.windows[live_slots] = new_windows
    pool.states[live_slots] = new_states.to(pool.states.dtype)
    return y_THV


def _triton(
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
    try:
        from .triton import decode
    except ModuleNotFoundError as error:
        raise ImplError(f"decode_kda: impl='triton' needs triton ({error})") from error
    return decode.decode_kda(
        inputs, weights, pool, slots, cu_seqlens, num_kept, lower_bound, norm_eps, eps
    )


_IMPLS: dict[str, Callable[..., Tensor]] = {
    "reference": partial(_composed, impl="reference"),
    "torch": partial(_composed, impl="torch"),
    "triton": _triton,
}


def decode_kda(
    inputs: DecodeInputs,
    weights: DecodeWeights,
    pool: StatePool,
    slots: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    num_kept: Tensor | None = None,
    gate_lower_bound: float | None,
    norm_eps: float,
    eps: float = 1e-6,
    impl: str,
) -> Tensor:
    """A KDA layer's outputs before `o_proj`, `[T, H, V]`; its states move on where they lie.

    `slots` int32 or int64 `[N]`: the slot of each sequence; no two are the same, but slot 0 is
    padding and may come again: it is not read or written, and its tokens' outputs are 0.
    `cu_seqlens` int32 `[N + 1]`, or None if token n is the one of sequence n. `num_kept` int32
    `[N]`: how many of a sequence's tokens its state and window take in, from 0 to all, or None for
    all. `gate_lower_bound` in [-5, 0), or None for the softplus decay; `norm_eps` of the gated
    norm, `eps` of the unit length of q and k.

    Raises `ValueError` for shapes and dtypes that do not fit, `ImplError` for an unknown `impl` or
    inputs that it does not serve. `triton` trusts the values of `slots`, `cu_seqlens` and
    `num_kept`: a check would wait for the device. No gradients.
    """
    run = choose("decode_kda", impl, _IMPLS)
    _check(inputs, weights, pool, slots, cu_seqlens, num_kept)
    if gate_lower_bound is not None and not -5.0 <= gate_lower_bound < 0.0:
        raise ValueError(f"gate_lower_bound={gate_lower_bound}: must be None or in [-5, 0)")
    with torch.no_grad():
        return run(
            inputs, weights, pool, slots, cu_seqlens, num_kept, gate_lower_bound, norm_eps, eps
        )


def _check(
    inputs: DecodeInputs,
    weights: DecodeWeights,
    pool: StatePool,
    slots: Tensor,
    cu_seqlens: Tensor | None,
    num_kept: Tensor | None,
) -> None:
    projected, decay_logits, beta_logits, gate_logits = inputs
    if decay_logits.dim() != 3 or gate_logits.dim() != 3 or weights.conv.dim() != 2:
        raise ValueError(
            f"decay_logits {list(decay_logits.shape)}, gate_logits {list(gate_logits.shape)}, conv "
            f"{list(weights.conv.shape)}: expected [T, H, K], [T, H, V], [C, W]"
        )
    T, H, K = decay_logits.shape
    V, W = gate_logits.shape[2], weights.conv.shape[1]
    C = H * (2 * K + V)
    dtype = projected.dtype
    wide = torch.promote_types(dtype, torch.float32)
    states_dtype = torch.bfloat16 if pool.states.dtype == torch.bfloat16 else wide
    num_slots = pool.states.shape[0]
    for name, x, shape, expected in (
        ("projected", projected, (T, C), dtype),
        ("decay_logits", decay_logits, (T, H, K), dtype),
        ("beta_logits", beta_logits, (T, H), dtype),
        ("gate_logits", gate_logits, (T, H, V), dtype),
        ("conv", weights.conv, (C, W), wide),
        ("A_log", weights.A_log, (H,), wide),
        ("dt_bias", weights.dt_bias, (H * K,), wide),
        ("norm", weights.norm, (V,), wide),
        ("windows", pool.windows, (num_slots, C, W - 1), dtype),
        ("states", pool.states, (num_slots, H, K, V), states_dtype),
    ):
        if x.shape != shape or x.dtype != expected:
            raise ValueError(
                f"{name}: expected {expected} {list(shape)} to go with the other inputs, got "
                f"{x.dtype} {list(x.shape)}"
            )
    if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slots: expected int32 or int64 [N], got {slots.dtype} {slots.shape}")
    N = slots.shape[0]
    if cu_seqlens is None and N != T:
        raise ValueError(f"cu_seqlens=None: {N} slots need as many tokens, not {T}")
    for name, given, length in (("cu_seqlens", cu_seqlens, N + 1), ("num_kept", num_kept, N)):
        if given is not None and (given.dtype != torch.int32 or given.shape != (length,)):
            raise ValueError(
                f"{name}: expected int32 [{length}] to go with {N} slots, got {given.dtype} "
                f"{list(given.shape)}"
            )
