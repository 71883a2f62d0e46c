"""`draw_tokens` on an NVIDIA GPU: a row's logits are read once, in parts, and the parts joined.

A part leaves its largest logit and the sum of exponentials under it, its best token with noise,
that token's logit, and whether all were finite.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baltoro.ops.draw import Noise
from baltoro.ops.draw.noise import GOLDEN, MIX
from baltoro.ops.triton import cdiv, padded_width, refuse_unserved

BLOCK = 4096  # logits at once
MAX_PARTS = 32  # of a row
PROGRAMS = 528  # rows and parts that fill the device
NUM_WARPS = 8
GOLDEN_RATIO = tl.constexpr(GOLDEN)
FIRST_FACTOR, SECOND_FACTOR = tl.constexpr(MIX[0][1]), tl.constexpr(MIX[1][1])


@triton.jit
def shifted(x, BITS: tl.constexpr):
    """Shift right without the sign."""
    MASK: tl.constexpr = 2 ** (64 - BITS) - 1
    return (x >> BITS) & MASK


@triton.jit
def mixed(x):
    x = (x ^ shifted(x, 30)) * FIRST_FACTOR
    x = (x ^ shifted(x, 27)) * SECOND_FACTOR
    return x ^ shifted(x, 31)


@triton.jit
def part_kernel(
    logits, scale, is_drawn, seeds, steps, maxima, sums, best, best_logits, ids, is_finite,
    width, row_stride, blocks_per_part,
    B: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_NOISE: tl.constexpr,
):  # fmt: skip
    """One part of a row; grid (rows, parts)."""
    n = tl.program_id(0)
    place = n * tl.num_programs(1) + tl.program_id(1)
    first = tl.program_id(1) * blocks_per_part * B
    temperature = 1.0
    if HAS_SCALE:
        temperature = tl.load(scale + n)
    start = tl.zeros([], tl.int64)
    is_noisy = False
    if HAS_NOISE:
        start = mixed(mixed(tl.load(seeds + n)) + tl.load(steps + n) * GOLDEN_RATIO)
        is_noisy = tl.load(is_drawn + n) != 0
    top = float("-inf")
    total = 0.0
    best_score = tl.full([], float("-inf"), tl.float64)
    best_logit = float("-inf")
    best_id = first
    num_wrong = 0
    for i in range(blocks_per_part):
        columns = first + i * B + tl.arange(0, B)
        is_here = columns < width
        x = tl.load(logits + n.to(tl.int64) * row_stride + columns, mask=is_here, other=0.0)
        x = x.to(tl.float32)
        # inf - inf and NaN - NaN are not 0
        num_wrong += tl.sum((x - x != 0.0).to(tl.int32), 0)
        if HAS_SCALE:
            x = tl.div_rn(x, temperature)
        x = tl.where(is_here, x, float("-inf"))
        new_top = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), 0)
        top = new_top
        score = x.to(tl.float64)
        if HAS_NOISE:
            bits = shifted(mixed(start + (columns + 1).to(tl.int64) * GOLDEN_RATIO), 11)
            u = (bits.to(tl.float64) + 0.5) * (2.0**-53)
            score += tl.where(is_noisy, -tl.log(-tl.log(u)), 0.0)
        highest = tl.max(score, 0)
        chosen = tl.min(tl.where(score == highest, columns, 1 << 30), 0)
        is_better = highest > best_score
        logit = tl.max(tl.where(columns == chosen, x, float("-inf")), 0)
        best_id = tl.where(is_better, chosen, best_id)
        best_logit = tl.where(is_better, logit, best_logit)
        best_score = tl.where(is_better, highest, best_score)
    tl.store(maxima + place, top)
    tl.store(sums + place, total)
    tl.store(best + place, best_score)
    tl.store(best_logits + place, best_logit)
    tl.store(ids + place, best_id)
    tl.store(is_finite + place, num_wrong == 0)


@triton.jit
def join_kernel(
    maxima, sums, best, best_logits, part_ids, is_finite, ids, numbers, num_rows, num_parts, width,
    BP: tl.constexpr,
):  # fmt: skip
    """The parts of one row; grid (rows)."""
    n = tl.program_id(0)
    parts = tl.arange(0, BP)
    is_part = parts < num_parts
    places = n * num_parts + parts
    tops = tl.load(maxima + places, mask=is_part, other=float("-inf"))
    top = tl.max(tops, 0)
    total = tl.sum(tl.load(sums + places, mask=is_part, other=0.0) * tl.exp(tops - top), 0)
    scores = tl.load(best + places, mask=is_part, other=float("-inf"))
    highest = tl.max(scores, 0)
    chosen = tl.load(part_ids + places, mask=is_part, other=1 << 30)
    token = tl.min(tl.where(scores == highest, chosen, 1 << 30), 0)
    logits = tl.load(best_logits + places, mask=is_part, other=float("-inf"))
    logit = tl.max(tl.where(chosen == token, logits, float("-inf")), 0)
    logprob = logit - top - tl.log(total)
    is_whole = tl.min(tl.load(is_finite + places, mask=is_part, other=1).to(tl.int32), 0) != 0
    # logits that are not numbers must not lead beyond the words
    token = tl.minimum(token, width - 1)
    tl.store(ids + n, token.to(tl.int64))
    tl.store(numbers + n, token.to(tl.float64))
    tl.store(numbers + num_rows + n, logprob.to(tl.float64))
    is_sound = is_whole & (logprob - logprob == 0.0)
    tl.store(numbers + 2 * num_rows + n, is_sound.to(tl.float64))


def draw_tokens(logits: Tensor, scale: Tensor | None, noise: Noise | None) -> tuple[Tensor, Tensor]:
    """Ids and numbers of `baltoro.ops.draw.draw_tokens`."""
    refuse_unserved("draw_tokens", logits)
    N, W = logits.shape
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    num_blocks = cdiv(W, BLOCK)
    blocks_per_part = cdiv(num_blocks, min(MAX_PARTS, max(1, PROGRAMS // max(N, 1))))
    num_parts = cdiv(num_blocks, blocks_per_part)
    floats = logits.new_empty((3, N, num_parts), dtype=torch.float32)
    best = logits.new_empty((N, num_parts), dtype=torch.float64)
    part_ids = logits.new_empty((N, num_parts), dtype=torch.int32)
    is_finite = logits.new_empty((N, num_parts), dtype=torch.bool)
    ids = logits.new_empty(N, dtype=torch.int64)
    numbers = logits.new_empty((3, N), dtype=torch.float64)
    if N > 0:
        scale = None if scale is None else scale.contiguous()
        is_drawn, seeds, steps = (
            (None, None, None) if noise is None else [x.contiguous() for x in noise]
        )
        part_kernel[(N, num_parts)](
            rows, scale, is_drawn, seeds, steps, floats[0], floats[1], best, floats[2], part_ids,
            is_finite, W, rows.stride(0), blocks_per_part,
            B=BLOCK, HAS_SCALE=scale is not None, HAS_NOISE=noise is not None,
            num_warps=NUM_WARPS,
        )  # fmt: skip
        join_kernel[(N,)](
            floats[0], floats[1], best, floats[2], part_ids, is_finite, ids, numbers, N, num_parts,
            W, BP=padded_width(num_parts), num_warps=1,
        )  # fmt: skip
    return ids, numbers
