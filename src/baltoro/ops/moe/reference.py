"""The mixture of experts, expert by expert, written as the formula reads."""

import torch
from torch import Tensor

from baltoro.ops.moe.shared import Glu
from baltoro.ops.mxfp4 import Mxfp4Tensor, decode_mxfp4
from baltoro.ops.situ import reference as situ


def moe_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    glu: Glu,
) -> Tensor:
    out_TZ = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    for expert in range(gate_up_proj.shape[0]):
        token, slot = torch.nonzero(expert_ids == expert, as_tuple=True)
        gate, up = (x[token] @ gate_up_proj[expert].T).chunk(2, dim=-1)
        if glu.activation == "situ":
            act = situ.situ_glu(gate, up, glu.beta, glu.linear_beta)
        else:
            act = situ.swiglu(gate, up)
        y = (act @ down_proj[expert].T).to(weights.dtype)
        out_TZ = out_TZ.index_add(0, token, y * weights[token, slot].unsqueeze(-1))
    return out_TZ.to(x.dtype)


def moe_experts_mxfp4(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Mxfp4Tensor,
    down: Mxfp4Tensor,
    glu: Glu,
) -> Tensor:
    gate_up_proj, down_proj = decode_mxfp4(gate_up, x.dtype), decode_mxfp4(down, x.dtype)
    return moe_experts(x, expert_ids, weights, gate_up_proj, down_proj, glu)
