"""Newton-Schulz in batched products of plain PyTorch, the Gram matrix on the shorter side.

`newton_schulz` is the loop over X; `gram_newton_schulz` iterates on G = X X' alone. With
P = a + b G + c G G every matrix is a polynomial in the first G, so all commute:

    X <- P X   is   F <- P F,  G <- P G P,   and X <- F X once at the end

For sides r < c that is 4 r^2 c + 34 r^3 operations in five steps instead of 20 r^2 c + 10 r^3, and
two readings of X instead of ten. G holds squares of singular values: what rounding moves below zero
grows by a^2 a step and never comes back, so the products on the short side are fp32 or wider.
"""

import torch
from torch import Tensor

from baltoro.ops.impl import ImplError
from baltoro.ops.newton_schulz.shared import COEFFICIENTS, MAX_GRAM_STEPS, as_wide, normed


def newton_schulz(x_BRC: Tensor, steps: int, compute_dtype: torch.dtype, is_normed: bool) -> Tensor:
    """`[B, R, C]` matrices (R rows, C columns) to their orthogonal factors."""
    a, b, c = COEFFICIENTS
    y_BRC = as_wide(x_BRC)
    if not is_normed:
        y_BRC = normed(y_BRC, torch.promote_types(x_BRC.dtype, torch.float32))
    y_BRC = y_BRC.to(compute_dtype)
    for _ in range(steps):
        gram_BRR = torch.bmm(y_BRC, y_BRC.mT)
        poly_BRR = torch.baddbmm(gram_BRR, gram_BRR, gram_BRR, beta=b, alpha=c)
        y_BRC = torch.baddbmm(y_BRC, poly_BRR, y_BRC, beta=a)
    return (y_BRC if y_BRC.shape == x_BRC.shape else y_BRC.mT).to(x_BRC.dtype).contiguous()


def gram_newton_schulz(
    x_BRC: Tensor, steps: int, compute_dtype: torch.dtype, is_normed: bool
) -> Tensor:
    """`[B, R, C]` matrices to their orthogonal factors; refuses products below fp32."""
    if compute_dtype.itemsize < 4:
        raise ImplError(
            f"newton_schulz: impl='gram' serves float32 and float64 products, not {compute_dtype}: "
            "a rounded Gram matrix loses small singular values; use 'triton' on a GPU or 'torch'"
        )
    y_BRC = as_wide(x_BRC).to(torch.promote_types(x_BRC.dtype, compute_dtype))
    y_BRC = (y_BRC if is_normed else normed(y_BRC, y_BRC.dtype)).to(compute_dtype)
    for first in range(0, steps, MAX_GRAM_STEPS):
        gram_BRR = torch.bmm(y_BRC, y_BRC.mT)
        y_BRC = torch.bmm(_factor(gram_BRR, min(MAX_GRAM_STEPS, steps - first)), y_BRC)
    return (y_BRC if y_BRC.shape == x_BRC.shape else y_BRC.mT).to(x_BRC.dtype).contiguous()


def _factor(gram_BRR: Tensor, steps: int) -> Tensor:
    """What `steps` steps multiply a matrix by, from its Gram matrix."""
    poly_BRR = factor_BRR = _polynomial(gram_BRR)
    for _ in range(steps - 1):
        gram_BRR = torch.bmm(torch.bmm(poly_BRR, gram_BRR), poly_BRR)
        poly_BRR = _polynomial(gram_BRR)
        factor_BRR = torch.bmm(poly_BRR, factor_BRR)
    return factor_BRR


def _polynomial(gram_BRR: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    poly_BRR = torch.baddbmm(gram_BRR, gram_BRR, gram_BRR, beta=b, alpha=c)
    poly_BRR.diagonal(dim1=1, dim2=2).add_(a)
    return poly_BRR
