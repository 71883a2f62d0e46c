"""The definition of Kimi Delta Attention: one token after the other (report eq. 1).

    S <- diag(exp(g_t)) S      u_t = beta_t (v_t - S' k_t)      S <- S + k_t u_t'      o_t = S' q_t

Computed in fp32, or fp64 for fp64 inputs; differentiable by autograd.
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
    q_THK, k_THK, v_THV, g_THK, beta_TH = (x.to(dtype) for x in (q, k, v, g, beta))
    outputs: list[torch.Tensor] = []
    final_states: list[torch.Tensor] = []
    for n, state_HKV in enumerate(initial_state.unbind(0)):
        for t in range(bounds[n], bounds[n + 1]):
            state_HKV = g_THK[t].exp()[..., None] * state_HKV
            predicted_HV = (k_THK[t][..., None] * state_HKV).sum(-2)
            u_HV = beta_TH[t][:, None] * (v_THV[t] - predicted_HV)
            state_HKV = state_HKV + k_THK[t][..., None] * u_HV[:, None, :]
            outputs.append((q_THK[t][..., None] * state_HKV).sum(-2))
        final_states.append(state_HKV)
    o_THV = torch.stack(outputs) if outputs else torch.zeros_like(v_THV)
    return o_THV, torch.stack(final_states)
