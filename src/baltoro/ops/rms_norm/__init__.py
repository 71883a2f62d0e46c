"""RMS normalisation: the backbone's `rms_norm`, and the gated one on the output of KDA.

y = x / sqrt(mean(x^2) + eps), then the weight (k3-facts 3.1); gated: times sigmoid(gate_logits).
"""

from torch import Tensor

from baltoro.ops.impl import ImplError, choose
from baltoro.ops.rms_norm import dense, reference

__all__ = ["gated_rms_norm", "rms_norm"]


def _triton_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    try:
        from .triton import rms_norm
    except ModuleNotFoundError as error:
        raise ImplError(f"rms_norm: impl='triton' needs triton ({error})") from error
    return rms_norm(x, weight, eps)


def _triton_gated_rms_norm(x: Tensor, weight: Tensor, gate_logits: Tensor, eps: float) -> Tensor:
    try:
        from .triton import gated_rms_norm
    except ModuleNotFoundError as error:
        raise ImplError(f"gated_rms_norm: impl='triton' needs triton ({error})") from error
    return gated_rms_norm(x, weight, gate_logits, eps)


_RMS_NORM = {
    "reference": reference.rms_norm,
    "torch": dense.rms_norm,
    "triton": _triton_rms_norm,
}
_GATED_RMS_NORM = {
    "reference": reference.gated_rms_norm,
    "torch": dense.gated_rms_norm,
    "triton": _triton_gated_rms_norm,
}


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, impl: str) -> Tensor:
    """Normalise the last dim of `x` `[..., D]` and multiply by `weight` `[D]`.

    The statistics are fp32 (fp64 for fp64 input); the quotient is cast to the dtype of `x` before
    the weight multiplies it, as the released model does. Returns the shape and dtype of `x`.
    """
    _check_weight("rms_norm", x, weight)
    return choose("rms_norm", impl, _RMS_NORM)(x, weight, eps)


def gated_rms_norm(
    x: Tensor, weight: Tensor, gate_logits: Tensor, *, eps: float, impl: str
) -> Tensor:
    """`rms(x) * weight * sigmoid(gate_logits)` over the last dim (k3-facts 3.5, step 6).

    `x` and `gate_logits` `[T, H, V]`, `weight` `[V]`. All of it in fp32 (fp64 for fp64 input),
    rounded once to the dtype of `x`.
    """
    _check_weight("gated_rms_norm", x, weight)
    if gate_logits.shape != x.shape:
        raise ValueError(
            f"gated_rms_norm: gate_logits has shape {list(gate_logits.shape)}; "
            f"it must have the shape of x, {list(x.shape)}"
        )
    return choose("gated_rms_norm", impl, _GATED_RMS_NORM)(x, weight, gate_logits, eps)


def _check_weight(op: str, x: Tensor, weight: Tensor) -> None:
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: weight has shape {list(weight.shape)}; "
            f"it must be [D] with D the last dim of x {list(x.shape)}"
        )
