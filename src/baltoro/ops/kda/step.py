"""KDA token by token in few launches: the decode step, batched over sequences.

One new token for each sequence is a single step without a loop. Longer inputs loop over time, the
sequences ranked by falling length so that those still running are a prefix of the states.
"""

import torch


def recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    bounds: list[int],
    initial_state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[T, H, V]` and final states `[N, H, K, V]`, both in the dtype of `initial_state`."""
    dtype = initial_state.dtype
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    num_sequences = len(bounds) - 1
    if bounds == list(range(num_sequences + 1)):
        return _step(q, k, v, g.exp(), beta, initial_state)
    edges = torch.tensor(bounds)
    lengths, order = (edges[1:] - edges[:-1]).sort(descending=True, stable=True)
    active = lengths > torch.arange(int(lengths[0]))[:, None]
    time, ranked = active.nonzero(as_tuple=True)
    token = (edges[:-1][order[ranked]] + time).to(q.device)
    num_active: list[int] = active.sum(1).tolist()
    columns = (x.index_select(0, token).split(num_active) for x in (q, k, v, g.exp(), beta))
    order = order.to(q.device)
    state = initial_state.index_select(0, order)
    outputs: list[torch.Tensor] = []
    finished: list[torch.Tensor] = []
    for q_now, k_now, v_now, decay_now, beta_now in zip(*columns, strict=True):
        if len(q_now) < len(state):
            finished.append(state[len(q_now) :])
            state = state[: len(q_now)]
        o, state = _step(q_now, k_now, v_now, decay_now, beta_now, state)
        outputs.append(o)
    finished.append(state)
    o = torch.cat(outputs).index_select(0, token.argsort()) if outputs else v
    return o, torch.cat(finished[::-1]).index_select(0, order.argsort())


def _step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each sequence: `q`, `k`, `decay` `[N, H, K]`, `v` `[N, H, V]`."""
    num_sequences, num_heads, key_dim, value_dim = state.shape
    heads = num_sequences * num_heads
    decayed = state.reshape(heads, key_dim, value_dim) * decay.reshape(heads, key_dim, 1)
    k = k.reshape(heads, 1, key_dim)
    error = torch.baddbmm(v.reshape(heads, 1, value_dim), k, decayed, alpha=-1)
    # an outer product by broadcasting: for one row of keys it is quicker than a matrix product
    written = torch.addcmul(decayed, k.mT, error * beta.reshape(heads, 1, 1))
    o = torch.bmm(q.reshape(heads, 1, key_dim), written)
    return o.view(v.shape), written.view(state.shape)
