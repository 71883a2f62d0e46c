"""Cross entropy on an NVIDIA GPU, a range of tokens at a time: products by cuBLAS, the rest fused.

The logits of a range are made twice, once for the loss and once for the gradients, where a kernel
turns them in place into dl_tw (exp(x_tw - lse_t) - [w = target_t]), the factor of the two products
that follow. Kept for the backward: the inputs and the log-sum-exp per token.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..derivatives import no_second_derivatives
from ..launch_table import Launch, dtype_class, launch, width_class
from ..triton import as_operator, cdiv, enqueue, refuse_unserved

RANGE_NUMBERS = 2**28  # logits of a range


@triton.jit(do_not_specialize=["ignore_index"])
def loss_kernel(logits, targets, losses, lse, vocab_size, ignore_index, BW: tl.constexpr):
    """One token: one pass over its logits."""
    t = tl.program_id(0).to(tl.int64)
    row = logits + t * vocab_size
    top = float("-inf")
    total = 0.0
    for first in range(0, vocab_size, BW):
        columns = first + tl.arange(0, BW)
        x = tl.load(row + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), 0)
        top = new_top
    log_sum = top + tl.log(total)
    target = tl.load(targets + t)
    is_id = (target >= 0) & (target < vocab_size)
    picked = tl.load(row + target, mask=is_id, other=float("nan")).to(tl.float32)
    tl.store(losses + t, tl.where(target == ignore_index, 0.0, log_sum - picked))
    tl.store(lse + t, log_sum)


@triton.jit(do_not_specialize=["ignore_index"])
def gradient_kernel(
    logits, targets, lse, d_losses, vocab_size, ignore_index, BW: tl.constexpr
):  # fmt: skip
    """A stretch of one token's logits, replaced by their gradients."""
    t = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BW + tl.arange(0, BW)
    is_here = columns < vocab_size
    target = tl.load(targets + t)
    place = logits + t * vocab_size + columns
    x = tl.load(place, mask=is_here, other=0.0).to(tl.float32)
    prob = tl.exp(x - tl.load(lse + t))
    d_logit = (prob - tl.where(columns == target, 1.0, 0.0)) * tl.load(d_losses + t)
    d_logit = tl.where(target == ignore_index, 0.0, d_logit)
    tl.store(place, d_logit.to(logits.dtype.element_ty), mask=is_here)


def _ranges(num_tokens: int, vocab_size: int) -> Iterator[slice]:
    """Ranges of tokens of at most `RANGE_NUMBERS` logits, in multiples of 128 if they can be."""
    most = max(1, RANGE_NUMBERS // vocab_size)
    step = most // 128 * 128 or most
    for start in range(0, num_tokens, step):
        yield slice(start, min(start + step, num_tokens))


def _logits_of(hidden: Tensor, weight: Tensor, rows: slice, buffer: Tensor | None) -> Tensor:
    """Logits of a range; in the memory of the first range where there is one."""
    if buffer is None:
        return torch.mm(hidden[rows], weight.mT)
    return torch.mm(hidden[rows], weight.mT, out=buffer[: rows.stop - rows.start])


def launch_of(kernel: str, weight: Tensor) -> Launch:
    """Logits of a block and warps. A class is a dtype and a vocabulary to 32,768 words or above."""
    width = width_class(weight.shape[0], 32768, 65536)
    return launch(kernel, f"{dtype_class(weight.dtype)} {width}", weight.device)


def _forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor]:
    losses, lse = _outputs(hidden)
    W = weight.shape[0]
    shape = launch_of("cross_entropy_loss", weight)
    buffer = None
    for rows in _ranges(hidden.shape[0], W):
        logits = _logits_of(hidden, weight, rows, buffer)
        buffer = logits if buffer is None else buffer
        enqueue(
            loss_kernel, (logits.shape[0],),
            logits, targets[rows], losses[rows], lse[rows], W, ignore_index,
            BW=shape["block"], num_warps=shape["num_warps"],
        )  # fmt: skip
    return losses, lse


def _outputs(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Unfilled losses and log-sum-exp `[T]`."""
    T = hidden.shape[0]
    return hidden.new_empty(T, dtype=torch.float32), hidden.new_empty(T, dtype=torch.float32)


def _forward_outputs(hidden, weight, targets, ignore_index):
    return _outputs(hidden)


_forward_operator = as_operator("linear_cross_entropy_forward", _forward, _forward_outputs)


def _backward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    d_losses: Tensor,
    ignore_index: int,
) -> tuple[Tensor, Tensor]:
    W = weight.shape[0]
    shape = launch_of("cross_entropy_gradient", weight)
    d_hidden = hidden.new_empty(hidden.shape)
    d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    buffer = None
    for rows in _ranges(hidden.shape[0], W):
        logits = _logits_of(hidden, weight, rows, buffer)
        buffer = logits if buffer is None else buffer
        enqueue(
            gradient_kernel, (logits.shape[0], cdiv(W, shape["block"])),
            logits, targets[rows], lse[rows], d_losses[rows], W, ignore_index,
            BW=shape["block"], num_warps=shape["num_warps"],
        )  # fmt: skip
        torch.mm(logits, weight, out=d_hidden[rows])
        # what an ignored row holds may not reach the weight, not even times 0
        kept = hidden[rows].masked_fill((targets[rows] == ignore_index).unsqueeze(1), 0.0)
        d_weight += torch.mm(logits.mT, kept)
    return d_hidden, d_weight.to(weight.dtype)


def _backward_outputs(hidden, weight, targets, lse, d_losses, ignore_index):
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


_backward_operator = as_operator("linear_cross_entropy_backward", _backward, _backward_outputs)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, ignore_index):
        losses, lse = _forward_operator(hidden, weight, targets, ignore_index)
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.ignore_index = ignore_index
        return losses

    @staticmethod
    @no_second_derivatives("cross_entropy: impl='triton'")
    def backward(ctx, saved, d_losses):
        gradients = _backward_operator(*saved, d_losses.contiguous(), ctx.ignore_index)
        return *gradients, None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int
) -> Tensor:
    """`baltoro.ops.cross_entropy.linear_cross_entropy`, whose checks of shapes have passed."""
    refuse_unserved("cross_entropy", hidden, weight)
    targets = targets.contiguous()
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, targets, ignore_index)
    return _forward_operator(hidden, weight, targets, ignore_index)[0]
