"""KDA in chunks of C tokens: dense products inside a chunk, a scan over chunks between them.

Inside a chunk the written values solve a unit lower triangular system (the WY/UT transform); with
A = (I + diag(beta) Akk)^-1, and per chunk in order,

    X = v - kp S       v_new = A (beta X)       o = qp S + Aqk v_new       S <- gamma S + kc' v_new

where kp, qp, kc are keys and queries decayed since the chunk began or until it ends. The backward
pass is written out: the same scan mirrored (kp <-> kc, A <-> A'), then gradients per chunk.
"""

from typing import Any, NamedTuple

import torch

from ..derivatives import no_second_derivatives
from .inverse import unit_lower_inverse
from .layout import ChunkLayout, chunk_layout
from .pairs import pair_gradients, pair_products, state_gradients

# Elements of a [B, C, K] tensor of one block: on a CPU the dozen of them in use stay in its cache
# and in the allocator's, on a GPU the whole pack is one block.
_CPU_BLOCK = 2**17


class _Saved(NamedTuple):
    """What the backward pass of a block needs from its forward pass."""

    q: torch.Tensor  # [B, C, K], as k, g, row and col
    k: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor  # [B, C, 1]
    row: torch.Tensor
    col: torch.Tensor
    aqk: torch.Tensor  # [B, C, C], as akk and inverse
    akk: torch.Tensor
    inverse: torch.Tensor
    x: torch.Tensor  # [B, C, V], as v_new
    v_new: torch.Tensor
    state_in: torch.Tensor  # [B, K, V] state entering each chunk


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
    """Outputs `[T, H, V]` in the dtype of v and final states `[N, H, K, V]`."""
    num_tokens, num_heads, key_dim = q.shape
    if num_tokens == 0:
        return v.clone(), initial_state.clone()
    block_size = _CPU_BLOCK // (chunk_size * key_dim)
    if not q.is_cpu:
        block_size = (num_tokens + len(bounds) * chunk_size) * num_heads
    layout = chunk_layout(bounds, chunk_size, num_heads, block_size, q.device)
    inputs = (q, k, v, g, beta, initial_state)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        o, final_state = _ChunkKda.apply(*inputs, layout, chunk_size, is_bounded)
        return o, final_state
    return _forward(*inputs, layout, chunk_size, is_bounded, None)


class _ChunkKda(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor,
        layout: ChunkLayout,
        chunk_size: int,
        is_bounded: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        saved: list[_Saved] = []
        o, final_state = _forward(
            q, k, v, g, beta, initial_state, layout, chunk_size, is_bounded, saved
        )
        ctx.layout, ctx.chunk_size, ctx.is_bounded = layout, chunk_size, is_bounded
        ctx.dtypes = [x.dtype for x in (q, k, v, g, beta)]
        # o for its way back to the inputs, which are not kept
        ctx.save_for_backward(o, *(tensor for block in saved for tensor in block))
        return o, final_state

    @staticmethod
    @no_second_derivatives("chunk_kda: impl='torch'")
    def backward(
        ctx: Any, saved: tuple[torch.Tensor, ...], *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        do, dfinal_state = grads
        _, *of_blocks = saved
        layout: ChunkLayout = ctx.layout
        num_tokens, num_heads, value_dim = do.shape
        key_dim, dtype = dfinal_state.shape[2], dfinal_state.dtype
        outputs = [
            do.new_empty(num_tokens * num_heads + 1, width, dtype=d)
            for width, d in zip((key_dim, key_dim, value_dim, key_dim, 1), ctx.dtypes, strict=True)
        ]
        dstate = dfinal_state.index_select(0, layout.order).flatten(0, 1)
        width = len(_Saved._fields)
        for i, block in reversed(list(enumerate(layout.blocks))):
            of_block = _Saved(*of_blocks[i * width : (i + 1) * width])
            do_chunks = block.chunks(do, dtype, ctx.chunk_size)
            for chunks, rows in zip(
                _backward_block(of_block, do_chunks, dstate, block.steps, ctx.is_bounded),
                outputs,
                strict=True,
            ):
                block.store(chunks, rows)
        dq, dk, dv, dg, dbeta = (x[:-1].view(num_tokens, num_heads, -1) for x in outputs)
        dinitial_state = dstate.view(dfinal_state.shape).index_select(0, layout.rank)
        return dq, dk, dv, dg, dbeta[..., 0], dinitial_state, None, None, None


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    layout: ChunkLayout,
    chunk_size: int,
    is_bounded: bool,
    saved: list[_Saved] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the blocks in order; appends what their backward needs to `saved` if there is one."""
    num_tokens, num_heads, value_dim = v.shape
    dtype = initial_state.dtype
    o = v.new_empty(num_tokens * num_heads + 1, value_dim)
    state = initial_state.index_select(0, layout.order).flatten(0, 1)
    for block in layout.blocks:
        o_chunks, kept = _forward_block(
            *(block.chunks(x, dtype, chunk_size) for x in (q, k, v, g, beta[..., None])),
            state=state,
            steps=block.steps,
            is_bounded=is_bounded,
        )
        block.store(o_chunks, o)
        if saved is not None:
            saved.append(kept)
    final_state = state.view(initial_state.shape).index_select(0, layout.rank)
    return o[:-1].view(v.shape), final_state


def _forward_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    state: torch.Tensor,
    steps: list[int],
    is_bounded: bool,
) -> tuple[torch.Tensor, _Saved]:
    """Outputs `[B, C, V]`; `state` `[N * H, K, V]` is advanced in place."""
    aqk, akk, row, col = pair_products(q, k, g, is_bounded)
    inverse = unit_lower_inverse(akk * beta)
    aqk.diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
    x, v_new = torch.empty_like(v), torch.empty_like(v)
    state_in = v.new_empty(len(v), *state.shape[1:])
    columns = (
        v,
        k * row,
        (k * col).mT,
        row[:, -1, :, None],
        inverse * beta.mT,
        x,
        v_new,
        state_in,
    )
    for v_s, kp_s, kc_s, gamma_s, solve_s, x_s, v_new_s, state_s in zip(
        *(tensor.split(steps) for tensor in columns), strict=True
    ):
        active = state[: len(v_s)]
        state_s.copy_(active)
        torch.baddbmm(v_s, kp_s, active, alpha=-1, out=x_s)
        torch.bmm(solve_s, x_s, out=v_new_s)
        active.mul_(gamma_s).baddbmm_(kc_s, v_new_s)
    o = torch.bmm(aqk, v_new).baddbmm_(q * row, state_in)
    return o, _Saved(q, k, g, beta, row, col, aqk, akk, inverse, x, v_new, state_in)


def _backward_block(
    saved: _Saved, do: torch.Tensor, dstate: torch.Tensor, steps: list[int], is_bounded: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv, dg, dbeta of a block; `dstate` `[N * H, K, V]` is carried back in place."""
    q, k, g, beta, row, col, aqk, akk, inverse, x, v_new, state_in = saved
    gamma = row[:, -1]
    y = torch.bmm(aqk.mT, do)
    dv, dstate_out = torch.empty_like(y), torch.empty_like(state_in)
    columns = (
        y,
        k * col,
        (k * row).mT,
        gamma[..., None],
        (inverse * beta.mT).mT,
        torch.bmm((q * row).mT, do),
        dv,
        dstate_out,
    )
    for y_s, kc_s, kp_s, gamma_s, solve_s, inflow_s, dv_s, dstate_s in reversed(
        list(zip(*(tensor.split(steps) for tensor in columns), strict=True))
    ):
        active = dstate[: len(y_s)]
        dstate_s.copy_(active)
        y_s.baddbmm_(kc_s, active)
        torch.bmm(solve_s, y_s, out=dv_s)
        active.mul_(gamma_s).add_(inflow_s).baddbmm_(kp_s, dv_s, alpha=-1)
    daqk = torch.bmm(do, v_new.mT).tril_(-1)
    dakk = torch.bmm(dv, v_new.mT).tril_(-1).neg_()
    dq, dk, dg = pair_gradients(q, k, g, daqk, dakk, is_bounded)
    rq = torch.bmm(do, state_in.mT).mul_(row)
    rk = torch.bmm(dv, state_in.mT).mul_(row).neg_()
    wk = torch.bmm(v_new, dstate_out.mT).mul_(col)
    dg += state_gradients(q, k, rq, rk, wk)
    dg += (gamma * (state_in * dstate_out).sum(-1))[:, None]
    diagonal = (do * v_new).sum(-1, keepdim=True)
    dq.add_(rq).addcmul_(diagonal, k)
    dk.add_(rk).add_(wk).addcmul_(diagonal, q)
    # <A' y, X - Akk v_new>, which unlike <dv, v_new> / beta^2 also holds at beta = 0
    error = torch.baddbmm(x, akk, v_new, alpha=-1)
    dbeta = (torch.bmm(inverse.mT, y) * error).sum(-1, keepdim=True)
    return dq, dk, dv, dg, dbeta
