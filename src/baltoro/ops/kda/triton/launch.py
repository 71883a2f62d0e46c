"""Launches of the four KDA kernels, and the pinned shapes they run with.

Nothing here looks at the data: the number of chunks is bounded from T and N, so the launches can be
captured in a CUDA graph and reused for any packing of the same T and N.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from baltoro.ops.kda.triton.gradients import gradients_kernel
from baltoro.ops.kda.triton.gradients_sm90 import gradients_sm90_kernel
from baltoro.ops.kda.triton.prep import prep_kernel
from baltoro.ops.kda.triton.prep_sm90 import prep_sm90_kernel
from baltoro.ops.kda.triton.scan import forward_scan_kernel, reverse_scan_kernel
from baltoro.ops.kda.triton.scan_sm90 import (
    forward_scan_sm90_kernel,
    reverse_scan_sm90_kernel,
)
from baltoro.ops.kda.triton.tiles import CHUNK, table_kernel

C = CHUNK.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How one kernel is cut and compiled."""

    tile: int  # value columns of a scan's program, key channels of a gradient program
    warps: int
    stages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """The kernels' shapes for one class of inputs."""

    prep: Shape
    forward: Shape
    reverse: Shape
    gradients: Shape
    is_sm90: bool = False


# Measured on one H200 (docs/LOG.md); `bench/kda.py --tune` prints the candidates.
MANY_HEADS = Shapes(
    prep=Shape(tile=128, warps=8, stages=1),
    forward=Shape(tile=64, warps=4, stages=2),
    reverse=Shape(tile=64, warps=4, stages=2),
    gradients=Shape(tile=64, warps=8, stages=1),
)
FEW_HEADS = Shapes(
    prep=Shape(tile=128, warps=8, stages=1),
    forward=Shape(tile=16, warps=4, stages=3),
    reverse=Shape(tile=16, warps=4, stages=3),
    gradients=Shape(tile=64, warps=8, stages=1),
)
# fp32 tensors take twice the shared memory; they serve checks, not speed.
FLOAT32 = Shapes(
    prep=Shape(tile=128, warps=8, stages=1),
    forward=Shape(tile=16, warps=4, stages=1),
    reverse=Shape(tile=16, warps=4, stages=1),
    gradients=Shape(tile=16, warps=8, stages=1),
)
# Below this many scan programs of 64 columns, the card is better filled by narrow ones.
FEW_PROGRAMS = 132


def shapes_for(dtype: torch.dtype, num_sequences: int, num_heads: int, value_dim: int) -> Shapes:
    """The pinned shapes for tensors of `dtype`."""
    if dtype == torch.float32:
        return FLOAT32
    is_few = num_sequences * num_heads * value_dim // 64 < FEW_PROGRAMS
    return FEW_HEADS if is_few else MANY_HEADS


class Gate(NamedTuple):
    """How g and beta are read: as they are, or as logits of the bounded gate and of the sigmoid."""

    a_log: torch.Tensor | None  # [H] fp32; None: g and beta are given
    dt_bias: torch.Tensor | None  # [H * K] fp32
    lower_bound: float
    normalize: bool  # q and k are raw: divide them by their norms, and q by sqrt(K)
    eps: float


class Saved(NamedTuple):
    """What the forward pass keeps for the backward pass (M chunks of C = 64 rows)."""

    kp: torch.Tensor  # [M, H, C, K]
    kc: torch.Tensor  # [M, H, C, K]
    qp: torch.Tensor  # [M, H, C, K]
    ainv: torch.Tensor  # [M, H, C, C], strictly lower
    aqk: torch.Tensor  # [M, H, C, C], lower
    gamma: torch.Tensor  # [M, H, K] fp32
    beta: torch.Tensor  # [M, H, C] fp32, after the sigmoid
    norms: torch.Tensor  # [M, H, 2, C] fp32, inverse norms of q and k
    table: torch.Tensor  # [M, 3] int32
    offsets: torch.Tensor  # [N + 1] int32
    v_new: torch.Tensor  # [M, H, C, V]
    states: torch.Tensor  # [M, H, K, V], entering each chunk


def num_chunks(num_tokens: int, num_sequences: int) -> int:
    """Most chunks that `num_sequences` packed sequences of `num_tokens` tokens in all can have."""
    return (num_tokens + num_sequences * (C - 1)) // C


def precision(dtype: torch.dtype) -> str:
    """Precision of matrix products on tensors of `dtype`; it matters to fp32 alone."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    value_dim: int,
    gate: Gate,
    shapes: Shapes,
    is_kept: bool,
) -> Saved:
    """Run the chunk table and the first kernel; `v_new` and `states` are allocated, not filled."""
    T, H, K = q.shape
    N = cu_seqlens.numel() - 1
    M = num_chunks(T, N)
    low = q.dtype
    kept = M if is_kept else 0
    saved = Saved(
        kp=q.new_empty(M, H, C, K),
        kc=q.new_empty(M, H, C, K),
        qp=q.new_empty(M, H, C, K),
        ainv=q.new_empty(M, H, C, C),
        aqk=q.new_empty(M, H, C, C),
        gamma=q.new_empty(M, H, K, dtype=torch.float32),
        beta=q.new_empty(M, H, C, dtype=torch.float32),
        norms=q.new_empty(M if gate.normalize else 0, H, 2, C, dtype=torch.float32),
        table=cu_seqlens.new_empty(M, 3),
        offsets=cu_seqlens.new_empty(N + 1),
        v_new=q.new_empty(kept, H, C, value_dim),
        states=q.new_empty(kept, H, K, value_dim),
    )
    if M == 0:
        saved.offsets.zero_()
        return saved
    table_kernel[(M,)](
        cu_seqlens, saved.table, saved.offsets, N, PADDED=triton.next_power_of_2(N), num_warps=1
    )
    if shapes.is_sm90:
        prep_sm90_kernel[(H, M)](
            q, k, g, beta, gate.a_log, gate.dt_bias, saved.table,
            saved.kp, saved.kc, saved.qp, saved.ainv, saved.aqk, saved.gamma, saved.beta,
            saved.norms,
            K**-0.5 if gate.normalize else 1.0, gate.eps, gate.lower_bound, H,
            K=K, FROM_LOGITS=gate.a_log is not None, NORMALIZE=gate.normalize, num_warps=4,
        )  # fmt: skip
        return saved
    prep_kernel[(H, M)](
        q, k, g, beta, gate.a_log, gate.dt_bias, saved.table,
        saved.kp, saved.kc, saved.qp, saved.ainv, saved.aqk, saved.gamma, saved.beta, saved.norms,
        K**-0.5 if gate.normalize else 1.0, gate.eps, gate.lower_bound, H,
        K=K, FROM_LOGITS=gate.a_log is not None, NORMALIZE=gate.normalize,
        PRECISION=precision(low), INVERSE_PRECISION=precision(low),
        num_warps=shapes.prep.warps, num_stages=shapes.prep.stages,
    )  # fmt: skip
    return saved


def scan_forward(
    saved: Saved,
    v: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    shapes: Shapes,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [T, H, V] and the final state [N, H, K, V] fp32; fills `saved.v_new` and `saved.states`."""
    _, H, V = v.shape
    K = saved.kp.shape[-1]
    N = cu_seqlens.numel() - 1
    o = torch.empty_like(v)
    final_state = v.new_empty(N, H, K, V, dtype=torch.float32)
    if shapes.is_sm90:
        forward_scan_sm90_kernel[(H * V // 64, N)](
            saved.kp, saved.kc, saved.qp, saved.ainv, saved.aqk, saved.gamma, saved.beta,
            v, initial_state, saved.offsets, cu_seqlens, o, saved.v_new, saved.states, final_state,
            H, K=K, V=V, HAS_INITIAL=initial_state is not None,
            IS_KEPT=saved.states.shape[0] > 0, num_warps=4,
        )  # fmt: skip
        return o, final_state
    tile = min(shapes.forward.tile, V)
    forward_scan_kernel[(H * V // tile, N)](
        saved.kp, saved.kc, saved.qp, saved.ainv, saved.aqk, saved.gamma, saved.beta,
        v, initial_state, saved.offsets, cu_seqlens, o, saved.v_new, saved.states, final_state, H,
        K=K, V=V, BV=tile, HAS_INITIAL=initial_state is not None,
        IS_KEPT=saved.states.shape[0] > 0, PRECISION=precision(v.dtype),
        STAGES=shapes.forward.stages, num_warps=shapes.forward.warps,
    )  # fmt: skip
    return o, final_state


def scan_reverse(
    saved: Saved,
    do: torch.Tensor,
    d_final_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    shapes: Shapes,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dv [T, H, V], the gradient of each chunk's last state, and of the initial state."""
    _, H, V = do.shape
    K = saved.kp.shape[-1]
    N = cu_seqlens.numel() - 1
    dv = torch.empty_like(do)
    d_states = torch.empty_like(saved.states)
    d_initial_state = do.new_empty(N, H, K, V, dtype=torch.float32)
    if shapes.is_sm90:
        reverse_scan_sm90_kernel[(H * V // 64, N)](
            saved.kp, saved.kc, saved.qp, saved.ainv, saved.aqk, saved.gamma, saved.beta,
            do, d_final_state, saved.offsets, cu_seqlens, dv, d_states, d_initial_state, H,
            K=K, V=V, HAS_FINAL=d_final_state is not None, num_warps=4,
        )  # fmt: skip
        return dv, d_states, d_initial_state
    tile = min(shapes.reverse.tile, V)
    reverse_scan_kernel[(H * V // tile, N)](
        saved.kp, saved.kc, saved.qp, saved.ainv, saved.aqk, saved.gamma, saved.beta,
        do, d_final_state, saved.offsets, cu_seqlens, dv, d_states, d_initial_state, H,
        K=K, V=V, BV=tile, HAS_FINAL=d_final_state is not None, PRECISION=precision(do.dtype),
        STAGES=shapes.reverse.stages, num_warps=shapes.reverse.warps,
    )  # fmt: skip
    return dv, d_states, d_initial_state


class InputGradients(NamedTuple):
    """Gradients of the fourth kernel, in the dtypes of their inputs."""

    dq: torch.Tensor
    dk: torch.Tensor
    dg: torch.Tensor
    dbeta: torch.Tensor
    d_a_log: torch.Tensor | None  # [H] fp32
    d_dt_bias: torch.Tensor | None  # [H * K] fp32


def input_gradients(
    saved: Saved,
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    do: torch.Tensor,
    dv: torch.Tensor,
    d_states: torch.Tensor,
    gate: Gate,
    shapes: Shapes,
) -> InputGradients:
    """Run the fourth kernel."""
    _, H, K = q.shape
    V = v.shape[-1]
    M = saved.table.shape[0]
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    dg, dbeta = torch.empty_like(g), torch.empty_like(beta)
    from_logits = gate.a_log is not None
    parts = q.new_empty(2, M if from_logits else 0, H, K, dtype=torch.float32)
    tile = min(shapes.gradients.tile, K)
    if M > 0:
      if shapes.is_sm90:
        gradients_sm90_kernel[(H * K // 64, M)](
            q, k, g, v, o, do, dv, saved.v_new, saved.states, d_states, saved.gamma, saved.beta,
            saved.norms, gate.a_log, gate.dt_bias, saved.table,
            dq, dk, dg, dbeta, parts[0], parts[1],
            K**-0.5 if gate.normalize else 1.0, gate.lower_bound, H,
            K=K, V=V, FROM_LOGITS=from_logits, NORMALIZE=gate.normalize, num_warps=4,
        )  # fmt: skip
      else:
        gradients_kernel[(H * K // tile, M)](
            q, k, g, v, o, do, dv, saved.v_new, saved.states, d_states, saved.gamma, saved.beta,
            saved.norms, gate.a_log, gate.dt_bias, saved.table,
            dq, dk, dg, dbeta, parts[0], parts[1],
            K**-0.5 if gate.normalize else 1.0, gate.lower_bound, H,
            K=K, V=V, BK=tile, FROM_LOGITS=from_logits, NORMALIZE=gate.normalize,
            PRECISION=precision(q.dtype),
            num_warps=shapes.gradients.warps, num_stages=shapes.gradients.stages,
        )  # fmt: skip
    if not from_logits:
        return InputGradients(dq, dk, dg, dbeta, None, None)
    d_bias_HK, d_rate_HK = parts.sum(1)
    return InputGradients(dq, dk, dg, dbeta, d_rate_HK.sum(1), d_bias_HK.flatten())
