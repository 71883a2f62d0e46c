"""KDA in chunks of C tokens: dense products inside a chunk, a scan over chunks between them.

Inside a chunk the written values solve a unit lower triangular system (the WY/UT transform); with
A = (I + diag(beta) Akk)^-1, and per chunk in order,

    X = v - kp S       v_new = A (beta X)       o = qp S + Aqk v_new       S <- gamma S + kc' v_new

where kp, qp, kc are keys and queries decayed since the chunk began or until it ends. The backward
pass is written out: the same scan mirrored (kp <-> kc, A <-> A'), then gradients per chunk.
"""

from typing import Any

import torch

from .inverse import unit_lower_inverse
from .layout import ChunkLayout, chunk_layout
from .pairs import pair_gradients, pair_products, state_gradients


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
    """Outputs `[T, H, V]` and final states `[N, H, K, V]`, both in the dtype of `initial_state`."""
    if q.shape[0] == 0:
        return v.to(initial_state.dtype), initial_state.clone()
    layout = chunk_layout(bounds, chunk_size, q.shape[1], q.device)
    o, final_state = _ChunkKda.apply(
        q, k, v, g, beta, initial_state, layout, chunk_size, is_bounded
    )
    return o, final_state


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
        num_heads, dtype = q.shape[1], initial_state.dtype
        ctx.layout, ctx.chunk_size, ctx.is_bounded = layout, chunk_size, is_bounded
        ctx.dtypes = [x.dtype for x in (q, k, v, g, beta)]
        q, k, v, g, beta = (
            layout.to_chunks(x, dtype, chunk_size) for x in (q, k, v, g, beta[..., None])
        )
        aqk, akk, row, col = pair_products(q, k, g, is_bounded)
        inverse = unit_lower_inverse(akk * beta)
        aqk.diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
        x, v_new, state_in, final_state = _forward_scan(
            v, k * row, k * col, row[:, -1], inverse * beta.mT, initial_state, layout
        )
        o = torch.baddbmm(torch.bmm(aqk, v_new), q * row, state_in)
        ctx.save_for_backward(q, k, g, beta, row, col, aqk, akk, inverse, x, v_new, state_in)
        return layout.to_tokens(o, num_heads, dtype), final_state

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        do, dfinal_state = grads
        q, k, g, beta, row, col, aqk, akk, inverse, x, v_new, state_in = ctx.saved_tensors
        layout: ChunkLayout = ctx.layout
        num_heads, dtype = dfinal_state.shape[1], dfinal_state.dtype
        do = layout.to_chunks(do, dtype, ctx.chunk_size)
        kp, qp, kc, gamma = k * row, q * row, k * col, row[:, -1]
        y, dv, dstate_out, dinitial_state = _reverse_scan(
            torch.bmm(aqk.mT, do),
            torch.bmm(qp.mT, do),
            kp,
            kc,
            gamma,
            (inverse * beta.mT).mT,
            dfinal_state,
            layout,
        )
        daqk = torch.bmm(do, v_new.mT).tril_(-1)
        dakk = torch.bmm(dv, v_new.mT).tril_(-1).neg_()
        dq, dk, dg = pair_gradients(q, k, g, daqk, dakk, ctx.is_bounded)
        rq = torch.bmm(do, state_in.mT).mul_(row)
        rk = torch.bmm(dv, state_in.mT).mul_(row).neg_()
        wk = torch.bmm(v_new, dstate_out.mT).mul_(col)
        dg += state_gradients(q, k, rq, rk, wk)
        dg += (gamma * (state_in * dstate_out).sum(-1))[:, None]
        diagonal = (do * v_new).sum(-1, keepdim=True)
        dq.add_(rq).addcmul_(diagonal, k)
        dk.add_(rk).add_(wk).addcmul_(diagonal, q)
        # <A' y, X - Akk v_new>, which unlike <dv, v_new> / beta^2 also holds at beta = 0
        dbeta = (torch.bmm(inverse.mT, y) * torch.baddbmm(x, akk, v_new, alpha=-1)).sum(-1)
        dq, dk, dv, dg, dbeta = (
            layout.to_tokens(x, num_heads, d)
            for x, d in zip((dq, dk, dv, dg, dbeta[..., None]), ctx.dtypes, strict=True)
        )
        return dq, dk, dv, dg, dbeta[..., 0], dinitial_state, None, None, None


def _forward_scan(
    v: torch.Tensor,
    kp: torch.Tensor,
    kc: torch.Tensor,
    gamma: torch.Tensor,
    solve: torch.Tensor,
    initial_state: torch.Tensor,
    layout: ChunkLayout,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """X, v_new `[B, C, V]`, states entering each chunk `[B, K, V]`, final states."""
    num_heads = initial_state.shape[1]
    x, v_new = torch.empty_like(v), torch.empty_like(v)
    state_in = v.new_empty(v.shape[0], *initial_state.shape[2:])
    state = initial_state.index_select(0, layout.order).flatten(0, 1)
    for first, num_active in layout.steps:
        rows = slice(first * num_heads, (first + num_active) * num_heads)
        active = state[: num_active * num_heads]
        state_in[rows] = active
        torch.baddbmm(v[rows], kp[rows], active, alpha=-1, out=x[rows])
        torch.bmm(solve[rows], x[rows], out=v_new[rows])
        active.mul_(gamma[rows, :, None]).baddbmm_(kc[rows].mT, v_new[rows])
    return x, v_new, state_in, state.view(initial_state.shape).index_select(0, layout.rank)


def _reverse_scan(
    y: torch.Tensor,
    inflow: torch.Tensor,
    kp: torch.Tensor,
    kc: torch.Tensor,
    gamma: torch.Tensor,
    solve: torch.Tensor,
    dfinal_state: torch.Tensor,
    layout: ChunkLayout,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y (finished in place), dv `[B, C, V]`, gradients of the leaving states and of the first ones.

    `y` comes in as Aqk' do and `inflow` as qp' do `[B, K, V]`.
    """
    num_heads = dfinal_state.shape[1]
    dv, dstate_out = torch.empty_like(y), torch.empty_like(inflow)
    dstate = dfinal_state.index_select(0, layout.order).flatten(0, 1)
    for first, num_active in reversed(layout.steps):
        rows = slice(first * num_heads, (first + num_active) * num_heads)
        active = dstate[: num_active * num_heads]
        dstate_out[rows] = active
        y[rows].baddbmm_(kc[rows], active)
        torch.bmm(solve[rows], y[rows], out=dv[rows])
        active.mul_(gamma[rows, :, None]).add_(inflow[rows])
        active.baddbmm_(kp[rows].mT, dv[rows], alpha=-1)
    return y, dv, dstate_out, dstate.view(dfinal_state.shape).index_select(0, layout.rank)
