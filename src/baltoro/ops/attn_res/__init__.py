"""Attention residuals: a softmax over earlier outputs in place of the residual sum (report 2.2).

score_j = sum_d v_jd / rms(v_j) * norm_weight_d * proj_weight_d,  out = sum_j softmax_j(score) v_j.
"""

from collections.abc import Sequence

from torch import Tensor

from baltoro.ops.attn_res import dense, reference
from baltoro.ops.impl import ImplError, choose

__all__ = ["attn_res_mix"]


def _triton(
    sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float
) -> Tensor:
    try:
        from . import triton
    except ModuleNotFoundError as error:
        raise ImplError(f"attn_res: impl='triton' needs triton ({error})") from error
    return triton.attn_res_mix(sources, norm_weight, proj_weight, eps)


_MIX = {"reference": reference.attn_res_mix, "torch": dense.attn_res_mix, "triton": _triton}


def attn_res_mix(
    sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, *, eps: float, impl: str
) -> Tensor:
    """Mix `S >= 1` sources, each `[T, D]` of one dtype, into `[T, D]` of that dtype.

    `norm_weight` and `proj_weight` are `[D]`; they are cast up before their product. Scores,
    softmax and mixture are fp32 (fp64 for fp64 sources), rounded once at the end; the values are
    the raw, un-normalised sources, and there is no temperature (k3-facts 3.2).
    """
    if len(sources) == 0:
        raise ValueError("attn_res_mix: sources is empty; it needs at least one tensor [T, D]")
    first = sources[0]
    if first.dim() != 2:
        raise ValueError(f"attn_res_mix: sources[0] has shape {list(first.shape)}; expected [T, D]")
    shape, dtype = first.shape, first.dtype
    for index, source in enumerate(sources):
        if source.shape != shape or source.dtype != dtype:
            raise ValueError(
                f"attn_res_mix: sources[{index}] is {source.dtype} {list(source.shape)}; "
                f"all must be {first.dtype} {list(first.shape)} as sources[0] is"
            )
    width = shape[1:]
    if norm_weight.shape != width or proj_weight.shape != width:
        is_norm = norm_weight.shape != width
        name, weight = ("norm_weight", norm_weight) if is_norm else ("proj_weight", proj_weight)
        raise ValueError(
            f"attn_res_mix: {name} has shape {list(weight.shape)}; "
            f"it must be [D] with D = {shape[1]}"
        )
    return choose("attn_res", impl, _MIX)(sources, norm_weight, proj_weight, eps)
