"""Approximate orthogonalisation of matrices by Newton-Schulz steps (Muon).

    X_0 = M / |M|_F,   X <- a X + (b G + c G G) X  with  G = X X'

For M = U S V' this tends to U V'.

The coefficients are those of the Muon write-up (K. Jordan, 2024), used unchanged by Moonlight
(arXiv 2502.16982) and after it by Kimi: slope 3.4445 at zero, so that small singular values grow
fast; the price is that five steps leave the large ones between about 0.7 and 1.2 instead of at 1.
"""

import torch
from torch import Tensor

from baltoro.ops.impl import ImplError, choose
from baltoro.ops.newton_schulz import dense, reference

__all__ = ["newton_schulz"]


def _triton(x_BRC: Tensor, steps: int, compute_dtype: torch.dtype, is_normed: bool) -> Tensor:
    try:
        from .triton import newton_schulz
    except ModuleNotFoundError as error:
        raise ImplError(f"newton_schulz: impl='triton' needs triton ({error})") from error
    return newton_schulz(x_BRC, steps, compute_dtype, is_normed)


_IMPLS = {
    "reference": reference.newton_schulz,
    "torch": dense.newton_schulz,
    "gram": dense.gram_newton_schulz,
    "triton": _triton,
}


def newton_schulz(
    x: Tensor,
    *,
    steps: int = 5,
    compute_dtype: torch.dtype = torch.float32,
    is_normed: bool = False,
    impl: str,
) -> Tensor:
    """Orthogonalise every matrix of `x` `[..., rows, cols]` by itself; same shape and dtype.

    The norm is taken in fp32 or wider, the products in `compute_dtype`. A zero matrix stays zero
    and one of norm below about 1e-7 gets a smaller result: noise is not blown up. With `is_normed`
    matrices have a norm of at most 1 and are taken as they are. Has no gradient.
    `"gram"` iterates on x x' instead of x, for short, wide matrices and products in fp32 or wider;
    `"triton"` takes bf16 products, for sides of at most 128 in that form and beyond in the loop.
    Raises `ValueError` for fewer than two dims, a dtype that is not floating or `steps` below one,
    `ImplError` for an unknown `impl`.
    """
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(
            f"newton_schulz: x is {x.dtype} {list(x.shape)}: give floating [..., rows, cols]"
        )
    if steps < 1:
        raise ValueError(f"newton_schulz: steps={steps}: must be at least 1")
    if not compute_dtype.is_floating_point:
        raise ValueError(f"newton_schulz: compute_dtype={compute_dtype}: must be floating")
    function = choose("newton_schulz", impl, _IMPLS)
    if x.numel() == 0:
        return x.clone()
    with torch.no_grad():
        return function(x.reshape(-1, *x.shape[-2:]), steps, compute_dtype, is_normed).view(x.shape)
