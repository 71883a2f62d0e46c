"""What stands before the KDA operator: the two decay maps and the unit length of queries and keys.

Bounded decay (K3):         g = lower_bound * sigmoid(exp(A_log) * (logits + dt_bias))
Softplus decay (Kimi Linear): g = -exp(A_log) * softplus(logits + dt_bias)

They are different functions, not one with a clamp. Both return fp32 (fp64 for fp64 inputs).
"""

import torch
import torch.nn.functional as F


def bounded_gate(
    decay_logits: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, *, lower_bound: float
) -> torch.Tensor:
    """Log-decay in `[lower_bound, 0]`, report section 2.1.1.

    `decay_logits` `[T, H, K]` of any float dtype, `A_log` `[H]`, `dt_bias` `[H * K]`; `lower_bound`
    in `[-5, 0)`. The bias is added before the per-head scale. Returns g `[T, H, K]`.
    """
    if not -5.0 <= lower_bound < 0.0:
        raise ValueError(f"lower_bound={lower_bound}: must be in [-5, 0)")
    shifted, scale = _shifted_and_scale(decay_logits, A_log, dt_bias)
    return torch.sigmoid(shifted * scale) * lower_bound


def softplus_gate(
    decay_logits: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> torch.Tensor:
    """Log-decay `<= 0` without a lower bound; softplus is linear above 20.

    Arguments and result as `bounded_gate`.
    """
    shifted, scale = _shifted_and_scale(decay_logits, A_log, dt_bias)
    return F.softplus(shifted) * -scale


def log_decay(
    decay_logits: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    lower_bound: float | None,
) -> torch.Tensor:
    """The decay map of a model: bounded, or softplus if `lower_bound` is None.

    Arguments and result as `bounded_gate`.
    """
    if lower_bound is None:
        return softplus_gate(decay_logits, A_log, dt_bias)
    return bounded_gate(decay_logits, A_log, dt_bias, lower_bound=lower_bound)


def l2_normalize(x: torch.Tensor, *, eps: float = 1e-6, scale: float = 1.0) -> torch.Tensor:
    """`scale * x / sqrt(sum(x^2) + eps)` over the last dim, in fp32, returned in `x.dtype`.

    The sum is not a mean and `eps` is inside the root. Queries take `scale = K ** -0.5`.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    if torch.is_grad_enabled():
        wide = x.to(dtype)
        inverse_length = torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
        return (wide * (inverse_length * scale)).to(x.dtype)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    inverse_length = length.square_().add_(eps).rsqrt_()
    if scale != 1.0:
        inverse_length.mul_(scale)
    return (x * inverse_length).to(x.dtype)


def _shifted_and_scale(
    decay_logits: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if decay_logits.dim() != 3:
        raise ValueError(f"decay_logits: expected [T, H, K], got {list(decay_logits.shape)}")
    num_heads, head_dim = decay_logits.shape[1:]
    if A_log.shape != (num_heads,):
        raise ValueError(f"A_log: expected [H] = [{num_heads}], got {list(A_log.shape)}")
    if dt_bias.shape != (num_heads * head_dim,):
        raise ValueError(
            f"dt_bias: expected [H * K] = [{num_heads * head_dim}], got {list(dt_bias.shape)}"
        )
    dtype = torch.promote_types(decay_logits.dtype, torch.float32)
    shifted = decay_logits.to(dtype) + dt_bias.to(dtype).view(num_heads, head_dim)
    return shifted, A_log.to(dtype).exp()[:, None]
