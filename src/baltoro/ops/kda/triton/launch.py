"""Launches of the four KDA kernels, and the tensors between them.

Nothing here looks at the data: the number of chunks is bounded from T and N, so the launches can be
captured in a CUDA graph and replayed for any packing of the same T and N. Two sets of kernels serve
the same calls: for bf16 on Hopper, and portable ones, exact in fp32 and for a gate without a bound.
"""

import math
from typing import NamedTuple

import torch

from ...launch_table import Launch, derived, dtype_class, launch
from ...triton import cdiv, enqueue, padded_width
from .gradients import gradients_kernel, row_gradients_kernel
from .gradients_sm90 import gradients_sm90_kernel
from .prep import prep_kernel
from .prep_sm90 import prep_sm90_kernel
from .scan import forward_scan_kernel, reverse_scan_kernel
from .scan_sm90 import forward_scan_sm90_kernel, reverse_scan_sm90_kernel
from .segments import SEQUENCES, fold_kernel, segment_ends_kernel
from .segments_sm90 import segment_ends_sm90_kernel
from .tiles import CHUNK, table_kernel

C = CHUNK.value
SM90_DIMS = (64, 128)
SM90_COLUMNS = 64  # value columns of a Hopper scan, key channels of a Hopper gradient strip
SCAN_DTYPE = "fp32"  # of the portable scans: in bf16 the Hopper ones serve all that is not widened


class Gate(NamedTuple):
    """How g and beta are read: as they are, or as logits of the decay map and of the sigmoid."""

    a_log: torch.Tensor | None  # [H] fp32; None: g and beta are given
    dt_bias: torch.Tensor | None  # [H * K] fp32
    lower_bound: float | None  # None: the softplus map, and any g <= 0
    normalize: bool  # q and k are raw: bring them to unit length, and q to K ** -0.5
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
    norms: torch.Tensor  # [M, H, 2, C] fp32, inverse norms of q and k; empty if not normalised
    table: torch.Tensor  # [M, 3] int32
    offsets: torch.Tensor  # [N + 1] int32
    v_new: torch.Tensor  # [M, H, C, V]; empty if nothing is kept
    states: torch.Tensor  # [M, H, K * V], entering each chunk; the Hopper kernels hold [V, K]
    transitions: torch.Tensor  # [slots, H, K, K] fp32, transposed; no slots if nothing is cut


class InputGradients(NamedTuple):
    """Gradients in the dtypes of their inputs; the last two are empty if g and beta were given."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dg: torch.Tensor
    dbeta: torch.Tensor
    d_initial_state: torch.Tensor  # [N, H, K, V] fp32
    d_a_log: torch.Tensor  # [H] fp32
    d_dt_bias: torch.Tensor  # [H * K] fp32


def num_chunks(num_tokens: int, num_sequences: int) -> int:
    """Most chunks that `num_sequences` packed sequences of `num_tokens` tokens in all can have."""
    return (num_tokens + num_sequences * (C - 1)) // C


def serves_sm90(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the Hopper scans serve these tensors; their states are [V, K]."""
    dims = (q.shape[-1], v.shape[-1])
    return q.dtype == torch.bfloat16 and all(dim in SM90_DIMS for dim in dims)


def scan_shape(
    K: int, V: int, is_sm90: bool, device: torch.device
) -> tuple[int, dict[str, object]]:
    """Columns that a program of a scan has, and what its kernel is compiled with."""
    if is_sm90:
        return SM90_COLUMNS, {"K": K, "V": V, "num_warps": 4}
    shape = launch("kda_scan", SCAN_DTYPE, device)
    columns = min(K, V, shape["columns"])  # in segments a program has columns of either
    constants = {"K": K, "V": V, "BV": columns, "PRECISION": "tf32x3"}
    return columns, {**constants, "num_warps": shape["num_warps"]}


def segment_length(
    num_tokens: int, num_sequences: int, num_programs: int, device: torch.device
) -> int:
    """Chunks in a segment of a scan; 0 if sequences, of `num_programs` each, are not cut.

    They are cut where there is room for three times their programs, since the first pass has to be
    won back; the second pass then fills the device about once. A segment is not so short that the
    fold, a step for each, would take longer than it.
    """
    chunks = num_chunks(num_tokens, num_sequences)
    programs, sequences = max(1, num_programs), max(1, num_sequences)
    shape = _segment_shape(programs, chunks // sequences, device)
    abreast = shape["programs"] // programs
    if sequences > SEQUENCES.value or abreast < 3 * sequences:
        return 0
    return max(shape["chunks"], cdiv(chunks, abreast), math.isqrt(chunks))


@derived
def _segment_shape(programs: int, chunks: int, device: torch.device) -> Launch:
    """For up to that many programs and from that many chunks of a sequence, powers of two."""
    most = padded_width(min(max(programs, 8), 128))
    least = 1 << (min(max(chunks, 16), 256).bit_length() - 1)
    return launch("kda_segments", f"p{most} c{least}", device)


def segment_slots(num_tokens: int, num_sequences: int, length: int) -> int:
    """Most segments that packed sequences can have; no cut leaves one for each."""
    return num_chunks(num_tokens, num_sequences) // length + num_sequences if length else 0


def outputs(
    q: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, normalize: bool, is_kept: bool
) -> tuple[torch.Tensor, torch.Tensor, Saved]:
    """Unfilled o `[T, H, V]`, final state `[N, H, K, V]` fp32, and what passes between kernels."""
    T, H, K = q.shape
    V = v.shape[-1]
    N = cu_seqlens.shape[0] - 1
    M = num_chunks(T, N)
    kept = M if is_kept else 0
    columns, _ = scan_shape(K, V, serves_sm90(q, v), q.device)
    slots = segment_slots(T, N, segment_length(T, N, H * V // columns, q.device))
    saved = Saved(
        kp=q.new_empty(M, H, C, K),
        kc=q.new_empty(M, H, C, K),
        qp=q.new_empty(M, H, C, K),
        ainv=q.new_empty(M, H, C, C),
        aqk=q.new_empty(M, H, C, C),
        gamma=q.new_empty(M, H, K, dtype=torch.float32),
        beta=q.new_empty(M, H, C, dtype=torch.float32),
        norms=q.new_empty(M if normalize else 0, H, 2, C, dtype=torch.float32),
        table=cu_seqlens.new_empty(M, 3),
        offsets=cu_seqlens.new_empty(N + 1),
        v_new=q.new_empty(kept, H, C, V),
        states=q.new_empty(kept, H, K * V),
        transitions=q.new_empty(slots, H, K, K, dtype=torch.float32),
    )
    return torch.empty_like(v), v.new_empty(N, H, K, V, dtype=torch.float32), saved


def input_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    num_sequences: int,
    from_logits: bool,
) -> InputGradients:
    """Unfilled gradients."""
    _, H, K = q.shape
    return InputGradients(
        dq=torch.empty_like(q),
        dk=torch.empty_like(k),
        dv=torch.empty_like(v),
        dg=torch.empty_like(g),
        dbeta=torch.empty_like(beta),
        d_initial_state=q.new_empty(num_sequences, H, K, v.shape[-1], dtype=torch.float32),
        d_a_log=q.new_empty(H if from_logits else 0, dtype=torch.float32),
        d_dt_bias=q.new_empty(H * K if from_logits else 0, dtype=torch.float32),
    )


def run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None,
    gate: Gate,
    is_kept: bool,
) -> tuple[torch.Tensor, torch.Tensor, Saved]:
    """Table, first and second kernel: o, the final state and what the backward pass needs."""
    _, H, K = q.shape
    N = cu_seqlens.shape[0] - 1
    o, final_state, saved = outputs(q, v, cu_seqlens, gate.normalize, is_kept)
    M = saved.table.shape[0]
    enqueue(
        table_kernel, (max(M, 1),), cu_seqlens, saved.table, saved.offsets, N, M,
        PADDED=padded_width(N), num_warps=1,
    )  # fmt: skip
    is_sm90 = serves_sm90(q, v)
    scale = K**-0.5 if gate.normalize else 1.0
    prep_arguments = (
        q, k, g, beta, gate.a_log, gate.dt_bias, saved.table, *saved[:8],
        scale, gate.eps, gate.lower_bound or 0.0, H,
    )  # fmt: skip
    from_logits = gate.a_log is not None
    if M > 0 and is_sm90 and gate.lower_bound is not None:
        enqueue(
            prep_sm90_kernel, (H, M), *prep_arguments,
            K=K, FROM_LOGITS=from_logits, NORMALIZE=gate.normalize, num_warps=4,
            **launch("kda_prep_sm90", f"k{K}", q.device),
        )  # fmt: skip
    elif M > 0:
        shape = launch("kda_prep", dtype_class(q.dtype), q.device)
        enqueue(
            prep_kernel, (H, M), *prep_arguments,
            K=K, BK=min(K, shape["columns"]), FROM_LOGITS=from_logits,
            IS_BOUNDED=gate.lower_bound is not None, NORMALIZE=gate.normalize,
            PRECISION="tf32x3", num_warps=shape["num_warps"], num_stages=1,
        )  # fmt: skip
    scan_forward(v, cu_seqlens, initial_state, o, final_state, saved, is_sm90, is_kept)
    return o, final_state, saved


def scan_forward(
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None,
    o: torch.Tensor,
    final_state: torch.Tensor,
    saved: Saved,
    is_sm90: bool,
    is_kept: bool,
) -> None:
    """Second kernel: fills `o`, `final_state` and what of `saved` the first one did not."""
    T, H, V = v.shape
    K = saved.gamma.shape[-1]
    N = cu_seqlens.shape[0] - 1
    columns, constants = scan_shape(K, V, is_sm90, v.device)
    length = segment_length(T, N, H * V // columns, v.device)
    slots = saved.transitions.shape[0]
    ends = saved.gamma.new_empty(slots, H, V, K)
    constants["HAS_INITIAL"] = initial_state is not None
    if length:
        enqueue(
            segment_ends_sm90_kernel if is_sm90 else segment_ends_kernel,
            (H * (V + K) // columns, slots),
            saved.kp, saved.kc, saved.ainv, saved.gamma, saved.beta, v, initial_state,
            saved.offsets, cu_seqlens, ends, saved.transitions, H, N, length,
            **constants,
        )  # fmt: skip
        fold(ends, saved, length, is_reverse=False)
    enqueue(
        forward_scan_sm90_kernel if is_sm90 else forward_scan_kernel,
        (H * V // columns, slots or N),
        *saved[:7], v, initial_state, saved.offsets, cu_seqlens, o, saved.v_new, saved.states,
        final_state, ends, H, N, length,
        IS_KEPT=is_kept, IS_CUT=length > 0, **constants,
    )  # fmt: skip


def scan_reverse(
    do: torch.Tensor,
    d_final_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    saved: Saved,
    grads: InputGradients,
    d_states: torch.Tensor,
    is_sm90: bool,
) -> None:
    """Third kernel: fills dv, `d_initial_state` and `d_states`."""
    T, H, V = do.shape
    K = saved.gamma.shape[-1]
    N = cu_seqlens.shape[0] - 1
    columns, constants = scan_shape(K, V, is_sm90, do.device)
    length = segment_length(T, N, H * V // columns, do.device)
    slots = saved.transitions.shape[0]
    ends = saved.gamma.new_empty(slots, H, V, K)
    for i in (1, 2) if length else (0,):
        enqueue(
            reverse_scan_sm90_kernel if is_sm90 else reverse_scan_kernel,
            (H * V // columns, slots or N),
            *saved[:7], do, d_final_state, saved.offsets, cu_seqlens, grads.dv, d_states,
            grads.d_initial_state, ends, H, N, length,
            HAS_FINAL=d_final_state is not None, PASS=i, **constants,
        )  # fmt: skip
        if i == 1:
            fold(ends, saved, length, is_reverse=True)


def fold(ends: torch.Tensor, saved: Saved, length: int, is_reverse: bool) -> None:
    """Let every end of `ends` `[slots, H, V, K]` include what came from the segments before."""
    _, H, V, K = ends.shape
    N = saved.offsets.shape[0] - 1
    shape = launch("kda_fold", dtype_class(ends.dtype), ends.device)
    columns = min(V, shape["columns"])
    enqueue(
        fold_kernel, (H * V // columns, N), ends, saved.transitions, saved.offsets, H, length,
        K=K, V=V, BV=columns, IS_REVERSE=is_reverse, PRECISION="tf32x3",
        num_warps=shape["num_warps"], num_stages=shape["num_stages"],
    )  # fmt: skip


def run_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    o: torch.Tensor,
    saved: Saved,
    do: torch.Tensor,
    d_final_state: torch.Tensor | None,
    gate: Gate,
) -> InputGradients:
    """Third and fourth kernel."""
    _, H, K = q.shape
    V = v.shape[-1]
    N = cu_seqlens.shape[0] - 1
    M = saved.table.shape[0]
    is_sm90 = serves_sm90(q, v)
    from_logits = gate.a_log is not None
    grads = input_gradients(q, k, v, g, beta, N, from_logits)
    d_states = torch.empty_like(saved.states)
    scan_reverse(do, d_final_state, cu_seqlens, saved, grads, d_states, is_sm90)
    parts = q.new_empty(2, M if from_logits else 0, H, K, dtype=torch.float32)
    arguments = (
        q, k, g, v, o, do, grads.dv, saved.v_new, saved.states, d_states, saved.gamma, saved.beta,
        saved.norms, gate.a_log, gate.dt_bias, saved.table,
        grads.dq, grads.dk, grads.dg, grads.dbeta, parts[0], parts[1],
        K**-0.5 if gate.normalize else 1.0, gate.lower_bound, H,
    )  # fmt: skip
    if M > 0 and is_sm90 and gate.lower_bound is not None:
        enqueue(
            gradients_sm90_kernel, (H * K // SM90_COLUMNS, M), *arguments,
            K=K, V=V, FROM_LOGITS=from_logits, NORMALIZE=gate.normalize, num_warps=4,
        )  # fmt: skip
    elif M > 0:
        portable_gradients(q, k, v, g, o, saved, do, d_states, grads, parts, gate)
    if from_logits:
        d_bias_HK, d_rate_HK = parts.sum(1)
        grads.d_a_log.copy_(d_rate_HK.sum(1))
        grads.d_dt_bias.copy_(d_bias_HK.flatten())
    return grads


def portable_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    o: torch.Tensor,
    saved: Saved,
    do: torch.Tensor,
    d_states: torch.Tensor,
    grads: InputGradients,
    parts: torch.Tensor,
    gate: Gate,
) -> None:
    """Products of rows, then strips of channels: fills `grads`, whose dv is there, and `parts`."""
    _, H, K = q.shape
    V = v.shape[-1]
    M = saved.table.shape[0]
    dtype = dtype_class(q.dtype)
    from_logits = gate.a_log is not None
    pairs = saved.aqk.new_empty(M, H, 2, C, C)
    products = saved.beta.new_empty(M, H, 3, C)
    shape = launch("kda_row_gradients", dtype, q.device)
    enqueue(
        row_gradients_kernel, (H, M),
        v, o, do, grads.dv, saved.v_new, saved.beta, saved.table, grads.dbeta, pairs, products, H,
        V=V, BV=min(V, shape["values"]), FROM_LOGITS=from_logits, NORMALIZE=gate.normalize,
        PRECISION="tf32x3", num_warps=shape["num_warps"], num_stages=1,
    )  # fmt: skip
    shape = launch("kda_gradients", dtype, q.device)
    columns = min(K, shape["columns"])
    enqueue(
        gradients_kernel, (H * K // columns, M),
        q, k, g, do, grads.dv, saved.v_new, saved.states, d_states, saved.gamma, saved.norms, pairs,
        products, gate.a_log, gate.dt_bias, saved.table, grads.dq, grads.dk, grads.dg, *parts,
        K**-0.5 if gate.normalize else 1.0, gate.lower_bound or 0.0, H,
        K=K, V=V, BK=columns, BV=min(V, shape["values"]), FROM_LOGITS=from_logits,
        IS_BOUNDED=gate.lower_bound is not None, NORMALIZE=gate.normalize,
        IS_TRANSPOSED=serves_sm90(q, v), PARTS=2 if dtype == "bf16" else 3,
        PRECISION="tf32x3", num_warps=shape["num_warps"], num_stages=1,
    )  # fmt: skip
