"""The definition of the short convolution: one sequence, one token after the other.

X = W - 1, the inputs kept.
"""

import torch
import torch.nn.functional as F


def short_conv(
    x: torch.Tensor, weight: torch.Tensor, bounds: list[int], initial_state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[T, D]` and the last `W - 1` inputs of each sequence `[N, D, W - 1]`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    weight_DW = weight.to(dtype)
    outputs: list[torch.Tensor] = []
    final_states: list[torch.Tensor] = []
    for n, state_DX in enumerate(initial_state.unbind(0)):
        for t in range(bounds[n], bounds[n + 1]):
            window_DW = torch.cat([state_DX, x[t][:, None]], dim=1)
            outputs.append(F.silu((window_DW.to(dtype) * weight_DW).sum(1)))
            state_DX = window_DW[:, 1:]
        final_states.append(state_DX)
    y_TD = torch.stack(outputs) if outputs else x.to(dtype)
    return y_TD.to(x.dtype), torch.stack(final_states)
