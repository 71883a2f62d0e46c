"""The two gated linear units: SiTU-GLU with soft caps (K3) and SwiGLU (Kimi Linear).

SiTU-GLU: beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta) (report eq. 12).
"""

from torch import Tensor

from baltoro.ops.impl import ImplError, choose
from baltoro.ops.situ import dense, reference

__all__ = ["situ_glu", "swiglu"]


def _triton(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    try:
        from . import triton
    except ModuleNotFoundError as error:
        raise ImplError(f"situ_glu: impl='triton' needs triton ({error})") from error
    return triton.situ_glu(gate, up, beta, linear_beta)


_SITU_GLU = {"reference": reference.situ_glu, "torch": dense.situ_glu, "triton": _triton}
_SWIGLU = {"reference": reference.swiglu, "torch": dense.swiglu}


def situ_glu(
    gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None, impl: str
) -> Tensor:
    """SiTU-GLU of `gate` and `up`, both `[..., F]` of one dtype.

    Computed in fp32 (fp64 for fp64 input) and rounded once. The sigmoid takes the uncapped gate;
    `linear_beta=None` leaves `up` uncapped.
    """
    _check_pair("situ_glu", gate, up)
    if not beta > 0:
        raise ValueError(f"situ_glu: beta={beta!r} must be positive")
    if linear_beta is not None and not linear_beta > 0:
        raise ValueError(f"situ_glu: linear_beta={linear_beta!r} must be None or positive")
    return choose("situ_glu", impl, _SITU_GLU)(gate, up, beta, linear_beta)


def swiglu(gate: Tensor, up: Tensor, *, impl: str) -> Tensor:
    """`silu(gate) * up`, both `[..., F]`, each step rounded to the input dtype."""
    _check_pair("swiglu", gate, up)
    return choose("swiglu", impl, _SWIGLU)(gate, up)


def _check_pair(op: str, gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"{op}: gate is {gate.dtype} {list(gate.shape)} and up is {up.dtype} {list(up.shape)}; "
            "they must have the same dtype and shape"
        )
