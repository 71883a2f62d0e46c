"""Mixture of experts: the router's choice (`route`) and the chosen experts (`moe_experts`).

out_t = sum_a weights_ta W_down[e] glu(W_gate[e] x_t, W_up[e] x_t) with e = expert_ids_ta
(report 2.3).
"""

from typing import Literal

import torch
from torch import Tensor

from baltoro.ops.impl import choose
from baltoro.ops.moe import dense, grouped, reference
from baltoro.ops.moe.routing import Routing, route, router_logits
from baltoro.ops.moe.shared import Glu
from baltoro.ops.mxfp4 import Mxfp4Tensor, check_mxfp4

__all__ = ["Routing", "moe_experts", "moe_experts_mxfp4", "route", "router_logits"]

_EXPERTS = {
    "reference": reference.moe_experts,
    "torch": dense.moe_experts,
    "grouped": grouped.moe_experts,
    "triton": grouped.moe_experts_triton,
}
_TRUSTING = ("grouped", "triton")  # do not wait for the device to look at the ids
_EXPERTS_MXFP4 = {
    "reference": reference.moe_experts_mxfp4,
    "torch": dense.moe_experts_mxfp4,
    "triton": grouped.moe_experts_mxfp4,
}


def moe_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    activation: Literal["situ", "silu"],
    situ_beta: float,
    situ_linear_beta: float | None,
    impl: str,
) -> Tensor:
    """Run each token through its experts and sum their weighted outputs: `[T, Z]`, dtype of `x`.

    `x` `[T, Z]`; `expert_ids` int64 `[T, A]`; `weights` `[T, A]` fp32 (fp64 with fp64 `x`);
    `gate_up_proj` `[E, 2F, Z]` with the gate rows first; `down_proj` `[E, Z, F]`, both in the dtype
    of `x`. Expert outputs are rounded to that dtype, then weighted and summed in the dtype of
    `weights`. Experts without a token get a zero gradient. The caps are ignored by `silu`.
    `grouped` and `triton` (bf16) keep everything on the device and trust the ids.
    """
    glu = _glu(activation, situ_beta, situ_linear_beta)
    for name, weight in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        if weight.dtype != x.dtype:
            raise ValueError(f"moe_experts: {name} is {weight.dtype}, x is {x.dtype}; cast one")
    _check_tokens("moe_experts", x, expert_ids, weights)
    if impl not in _TRUSTING:
        _check_ids("moe_experts", expert_ids, gate_up_proj.shape[0])
    _check_shapes("moe_experts", x, gate_up_proj.shape, down_proj.shape)
    return choose("moe", impl, _EXPERTS)(x, expert_ids, weights, gate_up_proj, down_proj, glu)


def moe_experts_mxfp4(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Mxfp4Tensor,
    down: Mxfp4Tensor,
    *,
    activation: Literal["situ", "silu"],
    situ_beta: float,
    situ_linear_beta: float | None,
    impl: str,
) -> Tensor:
    """`moe_experts` on packed weights, without gradients.

    The `torch` form decodes one expert at a time, and only those in use: equal to the bit to
    `moe_experts` on the weights decoded to the dtype of `x`. `triton` (bf16) decodes in registers,
    exactly too: it differs from products of decoded weights in the order of fp32 sums alone.
    """
    glu = _glu(activation, situ_beta, situ_linear_beta)
    if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
        raise ValueError(
            "moe_experts_mxfp4: x or weights requires a gradient and packed experts have none; "
            "call it under torch.no_grad(), or decode the experts"
        )
    check_mxfp4("moe_experts_mxfp4: gate_up", gate_up)
    check_mxfp4("moe_experts_mxfp4: down", down)
    _check_tokens("moe_experts_mxfp4", x, expert_ids, weights)
    if impl not in _TRUSTING:
        _check_ids("moe_experts_mxfp4", expert_ids, gate_up.packed.shape[0])
    shapes = [(*w.packed.shape[:-1], w.packed.shape[-1] * 2) for w in (gate_up, down)]
    _check_shapes("moe_experts_mxfp4", x, *shapes)
    return choose("moe", impl, _EXPERTS_MXFP4)(x, expert_ids, weights, gate_up, down, glu)


def _glu(
    activation: Literal["situ", "silu"], situ_beta: float, situ_linear_beta: float | None
) -> Glu:
    if activation not in ("situ", "silu"):
        raise ValueError(f"moe_experts: activation={activation!r} must be 'situ' or 'silu'")
    if activation == "situ" and not situ_beta > 0:
        raise ValueError(f"moe_experts: situ_beta={situ_beta!r} must be positive")
    if activation == "situ" and situ_linear_beta is not None and not situ_linear_beta > 0:
        raise ValueError(
            f"moe_experts: situ_linear_beta={situ_linear_beta!r} must be None or positive"
        )
    return Glu(activation, situ_beta, situ_linear_beta)


def _check_tokens(op: str, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"{op}: x has shape {list(x.shape)}; expected [T, Z]")
    if expert_ids.dim() != 2 or expert_ids.shape[0] != x.shape[0] or expert_ids.shape[1] < 1:
        raise ValueError(
            f"{op}: expert_ids has shape {list(expert_ids.shape)}; expected [{x.shape[0]}, A]"
        )
    if expert_ids.dtype != torch.int64:
        raise ValueError(f"{op}: expert_ids is {expert_ids.dtype}; expected torch.int64")
    high = torch.promote_types(x.dtype, torch.float32)
    if weights.shape != expert_ids.shape or weights.dtype != high:
        raise ValueError(
            f"{op}: weights is {weights.dtype} {list(weights.shape)}; "
            f"expected {high} {list(expert_ids.shape)}"
        )


def _check_ids(op: str, expert_ids: Tensor, num_experts: int) -> None:
    if expert_ids.numel() > 0:
        low, top = (int(bound) for bound in torch.aminmax(expert_ids))
        if low < 0 or top >= num_experts:
            raise ValueError(
                f"{op}: expert_ids holds {low if low < 0 else top}; "
                f"ids must be in [0, {num_experts})"
            )


def _check_shapes(
    op: str, x: Tensor, gate_up_shape: tuple[int, ...], down_shape: tuple[int, ...]
) -> None:
    latent = x.shape[1]
    if len(gate_up_shape) != 3 or gate_up_shape[2] != latent or gate_up_shape[1] % 2 != 0:
        raise ValueError(
            f"{op}: the gate and up weight has shape {list(gate_up_shape)}; "
            f"expected [E, 2F, {latent}]"
        )
    expected = (gate_up_shape[0], latent, gate_up_shape[1] // 2)
    if tuple(down_shape) != expected:
        raise ValueError(
            f"{op}: the down weight has shape {list(down_shape)}; expected {list(expected)}"
        )
