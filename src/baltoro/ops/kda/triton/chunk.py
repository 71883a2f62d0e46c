"""`chunk_kda` on Triton kernels: the operators that torch sees, their gradients, their refusals."""

import torch
from triton.runtime import JITFunction

from ...derivatives import no_second_derivatives
from ...impl import ImplError
from .launch import (
    Gate,
    InputGradients,
    Saved,
    input_gradients,
    outputs,
    run_backward,
    run_forward,
    serves_sm90,
)
from .tiles import CHUNK, table_kernel

CHUNK_SIZE = CHUNK.value
DIMS = (16, 32, 64, 128)
LOWEST_BOUND = -5.0


@torch.library.custom_op("baltoro::chunk_kda_forward", mutates_args=())
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    normalize: bool,
    eps: float,
    is_kept: bool,
) -> list[torch.Tensor]:
    gate = Gate(a_log, dt_bias, lower_bound, normalize, eps)
    o, final_state, saved = run_forward(q, k, v, g, beta, cu_seqlens, initial_state, gate, is_kept)
    return [o, final_state, *saved]


@_forward.register_fake
def _(
    q, k, v, g, beta, cu_seqlens, initial_state, a_log, dt_bias, lower_bound, normalize, eps,
    is_kept,
):  # fmt: skip
    o, final_state, saved = outputs(q, v, cu_seqlens, normalize, is_kept)
    return [o, final_state, *saved]


@torch.library.custom_op("baltoro::chunk_kda_backward", mutates_args=())
def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    o: torch.Tensor,
    saved: list[torch.Tensor],
    do: torch.Tensor,
    d_final_state: torch.Tensor | None,
    lower_bound: float | None,
    normalize: bool,
) -> list[torch.Tensor]:
    gate = Gate(a_log, dt_bias, lower_bound, normalize, 0.0)
    return list(
        run_backward(
            q, k, v, g, beta, cu_seqlens, o, Saved(*saved), do.contiguous(), d_final_state, gate
        )
    )


@_backward.register_fake
def _(
    q, k, v, g, beta, cu_seqlens, a_log, dt_bias, o, saved, do, d_final_state, lower_bound,
    normalize,
):  # fmt: skip
    num_sequences = cu_seqlens.shape[0] - 1
    return list(input_gradients(q, k, v, g, beta, num_sequences, a_log is not None))


class _ChunkKda(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, v, g, beta, cu_seqlens, initial_state, a_log, dt_bias, lower_bound, normalize,
        eps,
    ):  # fmt: skip
        o, final_state, *saved = _forward(
            q, k, v, g, beta, cu_seqlens, initial_state, a_log, dt_bias, lower_bound, normalize,
            eps, True,
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, g, beta, cu_seqlens, a_log, dt_bias, o, *saved)
        ctx.lower_bound, ctx.normalize = lower_bound, normalize
        ctx.has_state = initial_state is not None
        return o, final_state

    @staticmethod
    @no_second_derivatives("chunk_kda: impl='triton'")
    def backward(ctx, saved, do, d_final_state):
        q, k, v, g, beta, cu_seqlens, a_log, dt_bias, o, *saved = saved
        if do is None:
            do = torch.zeros_like(o)
        if d_final_state is not None:
            d_final_state = d_final_state.contiguous()
        grads = InputGradients(
            *_backward(
                q, k, v, g, beta, cu_seqlens, a_log, dt_bias, o, saved, do, d_final_state,
                ctx.lower_bound, ctx.normalize,
            )
        )  # fmt: skip
        from_logits = a_log is not None
        return (
            grads.dq, grads.dk, grads.dv, grads.dg, grads.dbeta, None,
            grads.d_initial_state if ctx.has_state else None,
            grads.d_a_log if from_logits else None,
            grads.d_dt_bias if from_logits else None,
            None, None, None,
        )  # fmt: skip


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None,
    gate: Gate,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and final state. Head dims that the scans in bf16 do not serve are computed in fp32."""
    _refuse_unserved(q, v)
    a_log, dt_bias, lower_bound, normalize, eps = gate
    dtype = v.dtype
    if dtype == torch.bfloat16 and not serves_sm90(q, v):
        q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    inputs = (q, k, v, g, beta, initial_state, a_log, dt_bias)
    arguments = (q, k, v, g, beta, cu_seqlens, initial_state, a_log, dt_bias)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        o, final_state = _ChunkKda.apply(*arguments, lower_bound, normalize, eps)
    else:
        o, final_state, *_ = _forward(*arguments, lower_bound, normalize, eps, False)
    return o.to(dtype), final_state


def _name(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _refuse_unserved(q: torch.Tensor, v: torch.Tensor) -> None:
    """Raise `ImplError` for tensors that no kernel here serves."""
    where = "chunk_kda: impl='triton' "
    if q.dtype not in (torch.bfloat16, torch.float32):
        raise ImplError(f"{where}serves bfloat16 and float32, not {_name(q)}")
    for name, dim in (("K", q.shape[-1]), ("V", v.shape[-1])):
        if dim not in DIMS:
            raise ImplError(f"{where}serves head dims {DIMS}, not {name}={dim}")
    if q.device.type == "cuda":
        capability = torch.cuda.get_device_capability(q.device)
        if q.dtype == torch.bfloat16 and capability != (9, 0):
            raise ImplError(
                f"{where}serves bfloat16 on Hopper (compute capability 9.0); this device has "
                f"{capability[0]}.{capability[1]}"
            )
    elif isinstance(table_kernel, JITFunction):
        raise ImplError(f"{where}needs tensors on a CUDA device, not on {q.device}")


def chunk_kda(
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
    """o and final state of `baltoro.ops.kda.chunk_kda`, whose checks have passed."""
    if chunk_size != CHUNK_SIZE:
        raise ImplError(f"chunk_kda: impl='triton' has chunk_size={CHUNK_SIZE}, not {chunk_size}")
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=q.device)
    gate = Gate(None, None, LOWEST_BOUND if is_bounded else None, False, 0.0)
    return _run(q, k, v, g, beta, cu_seqlens, initial_state, gate)


def chunk_kda_fused(
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
    """o and final state of `baltoro.ops.kda.fused.chunk_kda_fused`, whose checks have passed."""
    gate = Gate(a_log.contiguous(), dt_bias.contiguous(), lower_bound, True, eps)
    return _run(q, k, v, decay_logits, beta_logits, cu_seqlens, initial_state, gate)
