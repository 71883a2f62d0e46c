"""What stands before and between the grouped products on an NVIDIA GPU, each in one pass.

The router's choice takes the largest score as often as a token has experts. For few pairs each
expert finds its own among all of them: those of lower experts stand before its first, and those
before a pair that are its own say how far behind the first it comes. For many, blocks of pairs are
counted, counts become each block's first places, and a pair stands behind its like of the block.

The gated unit reads pre-activations `[TA, 2F]` once; its backward also applies a pair's weight and
takes that weight's gradient, both where the pair stood unsorted. The combination gathers the rows
of a token's experts and sums them, weighted or not, without a copy in token order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baltoro.ops.impl import ImplError
from baltoro.ops.moe.shared import Glu
from baltoro.ops.situ.triton import decay, reciprocal, tanh_and_slope
from baltoro.ops.triton import cdiv, enqueue, padded_width, refuse_unserved

__all__ = [
    "activate", "activate_backward", "choose_backward", "choose_experts", "combine",
    "refuse_unserved", "sort", "sort_slots",
]  # fmt: skip

ROWS = 4  # pairs of a program
COLUMNS = 512  # F or Z at once
WARPS = 4
SUM_EPS = tl.constexpr(1e-20)  # of the released code, in the renormalisation
MAX_EXPERTS = 1024  # scores of a token in one program
MAX_SORTED = 8192  # pairs that every expert looks through
SORT_BLOCK = 2048
COMPARED = 16  # pairs that each of a block is compared with at once


@triton.jit
def glu_parts(
    gate, up, beta, linear_beta,
    IS_SITU: tl.constexpr, IS_CAPPED: tl.constexpr, IS_SQUARE: tl.constexpr, IS_EXACT: tl.constexpr,
):  # fmt: skip
    """Gate factor, its slope, up factor, its slope; see `ops.situ.triton`."""
    if IS_SITU:
        e = decay(gate, 2.0 / beta)
        s = e * e if IS_SQUARE else decay(gate, 1.0)
        capped, slope = tanh_and_slope(gate, e, 1.0 / beta, IS_EXACT)
        sigmoid = tl.where(gate < 0.0, s, 1.0) * reciprocal(1.0 + s, IS_EXACT)
        capped *= beta
        factor = capped * sigmoid
        slope = sigmoid * (slope + capped * (1.0 - sigmoid))
    else:
        sigmoid = tl.sigmoid(gate)
        factor = gate * sigmoid
        slope = sigmoid + factor * (1.0 - sigmoid)
    if IS_CAPPED:
        e = decay(up, 2.0 / linear_beta)
        capped_up, up_slope = tanh_and_slope(up, e, 1.0 / linear_beta, IS_EXACT)
        return factor, slope, linear_beta * capped_up, up_slope
    return factor, slope, up, tl.full(up.shape, 1.0, tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def glu_kernel(
    inner, act, num_rows, beta, linear_beta,
    F: tl.constexpr, IS_SITU: tl.constexpr, IS_CAPPED: tl.constexpr, IS_SQUARE: tl.constexpr,
    IS_EXACT: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """A tile of pairs and columns; grid (pairs, columns)."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    columns = tl.program_id(1) * B + tl.arange(0, B)
    mask = (rows < num_rows)[:, None] & (columns < F)[None, :]
    source = inner + rows[:, None] * (2 * F) + columns[None, :]
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + F, mask=mask, other=0.0).to(tl.float32)
    factor, _, up_factor, _ = glu_parts(
        gate, up, beta, linear_beta, IS_SITU, IS_CAPPED, IS_SQUARE, IS_EXACT
    )
    target = act + rows[:, None] * F + columns[None, :]
    tl.store(target, (factor * up_factor).to(act.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def glu_backward_kernel(
    d_act, inner, weight, pair, d_inner, act, d_weight, num_rows, beta, linear_beta,
    F: tl.constexpr, IS_SITU: tl.constexpr, IS_CAPPED: tl.constexpr, IS_SQUARE: tl.constexpr,
    IS_EXACT: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Pairs over all columns: gradient of `inner`, weighted activation, gradient of the weight."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    is_row = rows < num_rows
    low = inner.dtype.element_ty
    pairs = tl.load(pair + rows, mask=is_row, other=0)
    scale = tl.load(weight + pairs, mask=is_row, other=0.0)
    total = tl.zeros([R], tl.float32)
    for start in tl.range(0, F, B):
        columns = start + tl.arange(0, B)
        mask = is_row[:, None] & (columns < F)[None, :]
        source = rows[:, None] * (2 * F) + columns[None, :]
        single = rows[:, None] * F + columns[None, :]
        gate = tl.load(inner + source, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(inner + source + F, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(d_act + single, mask=mask, other=0.0).to(tl.float32)
        factor, slope, up_factor, up_slope = glu_parts(
            gate, up, beta, linear_beta, IS_SITU, IS_CAPPED, IS_SQUARE, IS_EXACT
        )
        total += tl.sum(d * factor * up_factor, axis=1)
        d *= scale[:, None]
        tl.store(d_inner + source, (d * slope * up_factor).to(low), mask=mask)
        tl.store(d_inner + source + F, (d * factor * up_slope).to(low), mask=mask)
        tl.store(act + single, (scale[:, None] * factor * up_factor).to(low), mask=mask)
    tl.store(d_weight + pairs, total, mask=is_row)


@triton.jit(do_not_specialize=["num_rows"])
def gather_kernel(
    x, other, row, x_out, other_out, num_rows, Z: tl.constexpr, R: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """A tile of rows and columns, of two tensors if there are two; grid (rows, columns)."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    columns = tl.program_id(1) * B + tl.arange(0, B)
    mask = (rows < num_rows)[:, None] & (columns < Z)[None, :]
    source = tl.load(row + rows, mask=rows < num_rows, other=0)
    source = source[:, None] * Z + columns[None, :]
    target = rows[:, None] * Z + columns[None, :]
    value = tl.load(x + source, mask=mask, other=0.0)
    if other is not None:
        tl.store(other_out + target, tl.load(other + source, mask=mask, other=0.0), mask=mask)
    tl.store(x_out + target, value, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def combine_kernel(
    values, row, weights, out, num_tokens,
    A: tl.constexpr, Z: tl.constexpr, IS_WEIGHTED: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """A tile of tokens and columns; grid (tokens, columns)."""
    tokens = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    columns = tl.program_id(1) * B + tl.arange(0, B)
    is_token = tokens < num_tokens
    mask = is_token[:, None] & (columns < Z)[None, :]
    total = tl.zeros([R, B], tl.float32)
    for a in tl.static_range(A):
        source = tokens * A + a
        if row is not None:
            source = tl.load(row + source, mask=is_token, other=0)
        value = tl.load(values + source[:, None] * Z + columns[None, :], mask=mask, other=0.0)
        value = value.to(tl.float32)
        if IS_WEIGHTED:
            value *= tl.load(weights + tokens * A + a, mask=is_token, other=0.0)[:, None]
        total += value
    target = out + tokens[:, None] * Z + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def choose_kernel(
    logits, bias, scores, ids, weights, num_tokens, scaling,
    E: tl.constexpr, A: tl.constexpr, BE: tl.constexpr, BA: tl.constexpr, R: tl.constexpr,
    IS_SOFTMAX: tl.constexpr, IS_RENORMALIZED: tl.constexpr,
):  # fmt: skip
    """The `A` best experts of `R` tokens and their weights; grid (tokens)."""
    tokens = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    experts = tl.arange(0, BE)
    is_expert = (experts < E)[None, :]
    mask = (tokens < num_tokens)[:, None] & is_expert
    places = tokens[:, None] * E + experts[None, :]
    logit = tl.load(logits + places, mask=mask, other=0.0)
    if IS_SOFTMAX:
        logit = tl.where(is_expert, logit, float("-inf"))
        score = tl.exp(logit - tl.max(logit, 1)[:, None])
        score /= tl.sum(score, 1)[:, None]
    else:
        score = tl.where(is_expert, tl.sigmoid(logit), 0.0)
    tl.store(scores + places, score, mask=mask)
    choice = score
    if bias is not None:
        choice += tl.load(bias + experts, mask=experts < E, other=0.0)[None, :]
    choice = tl.where(is_expert, choice, float("-inf"))
    slots = tl.arange(0, BA)
    best_ids = tl.zeros([R, BA], tl.int32)
    best = tl.zeros([R, BA], tl.float32)
    for a in tl.static_range(A):
        # scores that are not numbers must not lead beyond the experts
        chosen = tl.minimum(tl.argmax(choice, 1, tie_break_left=True), E - 1)
        is_chosen = experts[None, :] == chosen[:, None]
        value = tl.sum(tl.where(is_chosen, score, 0.0), 1)
        is_slot = (slots == a)[None, :]
        best = tl.where(is_slot, value[:, None], best)
        best_ids = tl.where(is_slot, chosen[:, None], best_ids)
        choice = tl.where(is_chosen, float("-inf"), choice)
    if IS_RENORMALIZED:
        best /= tl.sum(best, 1)[:, None] + SUM_EPS
    places = tokens[:, None] * A + slots[None, :]
    mask = (tokens < num_tokens)[:, None] & (slots < A)[None, :]
    tl.store(weights + places, best * scaling, mask=mask)
    tl.store(ids + places, best_ids.to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def choose_backward_kernel(
    scores, ids, d_scores, d_weights, d_logits, num_tokens, scaling,
    E: tl.constexpr, A: tl.constexpr, BE: tl.constexpr, BA: tl.constexpr, R: tl.constexpr,
    IS_SOFTMAX: tl.constexpr, IS_RENORMALIZED: tl.constexpr,
):  # fmt: skip
    """The gradient of `R` tokens' logits from those of their weights and scores; grid (tokens)."""
    tokens = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    experts = tl.arange(0, BE)
    mask = (tokens < num_tokens)[:, None] & (experts < E)[None, :]
    places = tokens[:, None] * E + experts[None, :]
    score = tl.load(scores + places, mask=mask, other=0.0)
    slots = tl.arange(0, BA)
    is_slot = (tokens < num_tokens)[:, None] & (slots < A)[None, :]
    chosen = tl.load(ids + tokens[:, None] * A + slots[None, :], mask=is_slot, other=0)
    best = tl.load(scores + tokens[:, None] * E + chosen, mask=is_slot, other=0.0)
    d_best = tl.load(d_weights + tokens[:, None] * A + slots[None, :], mask=is_slot, other=0.0)
    d_best *= scaling
    if IS_RENORMALIZED:
        total = tl.sum(best, 1)[:, None] + SUM_EPS
        d_best = (d_best - tl.sum(d_best * best, 1)[:, None] / total) / total
    if d_scores is None:
        d_score = tl.zeros([R, BE], tl.float32)
    else:
        d_score = tl.load(d_scores + places, mask=mask, other=0.0)
    for a in tl.range(A):
        is_a = (slots == a)[None, :]
        expert = tl.sum(tl.where(is_a, chosen, 0), 1)
        d_a = tl.sum(tl.where(is_a, d_best, 0.0), 1)
        d_score += tl.where(experts[None, :] == expert[:, None], d_a[:, None], 0.0)
    if IS_SOFTMAX:
        d_logit = score * (d_score - tl.sum(d_score * score, 1)[:, None])
    else:
        d_logit = score * (1.0 - score) * d_score
    tl.store(d_logits + places, d_logit, mask=mask)


@triton.jit
def place_own(found, pairs, expert, place, token, pair, row, A: tl.constexpr):
    """Write where the pairs of `expert` among `found` stand, from `place` on; the place after."""
    is_own = found == expert
    count = is_own.to(tl.int32)
    places = (place + tl.cumsum(count, 0) - count).to(tl.int64)
    tl.store(pair + places, pairs.to(tl.int64), mask=is_own)
    if row is not None:
        tl.store(row + pairs, places, mask=is_own)
        tl.store(token + places, (pairs // A).to(tl.int64), mask=is_own)
    return place + tl.sum(count, 0)


@triton.jit(do_not_specialize=["num_pairs"])
def sort_kernel(
    ids, token, pair, row, stops, slots, num_pairs,
    A: tl.constexpr, B: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Where the pairs of one expert stand in the order of experts, then of tokens; grid (E).

    With `slots`, also the expert, the first pair and the end of every `N` of its pairs: those of
    expert e begin at slot start / N + e, behind the last that lower experts can need; what is left
    has -1 for an expert.
    """
    expert = tl.program_id(0)
    pairs = tl.arange(0, B)
    found = tl.load(ids + pairs, mask=pairs < num_pairs, other=1 << 30).to(tl.int32)
    start = tl.sum((found < expert).to(tl.int32), 0)
    for first in tl.range(B, num_pairs, B):
        others = first + pairs
        other = tl.load(ids + others, mask=others < num_pairs, other=1 << 30)
        start += tl.sum((other < expert).to(tl.int32), 0)
    stop = place_own(found, pairs, expert, start, token, pair, row, A)
    for first in tl.range(B, num_pairs, B):
        others = first + pairs
        other = tl.load(ids + others, mask=others < num_pairs, other=1 << 30)
        stop = place_own(other, others, expert, stop, token, pair, row, A)
    if stops is not None:
        tl.store(stops + expert, stop)
    if slots is not None:
        for slot in tl.range(start // N + expert, stop // N + expert + 1):
            first = start + (slot - start // N - expert) * N
            tl.store(slots + 3 * slot, tl.where(first < stop, expert, -1))
            tl.store(slots + 3 * slot + 1, first)
            tl.store(slots + 3 * slot + 2, stop)


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(ids, counts, num_pairs, E: tl.constexpr, BE: tl.constexpr, B: tl.constexpr):
    """How many pairs of a block each expert has, `[blocks, E]`; grid (blocks)."""
    pairs = tl.program_id(0) * B + tl.arange(0, B)
    is_pair = pairs < num_pairs
    found = tl.load(ids + pairs, mask=is_pair, other=0).to(tl.int32)
    experts = tl.arange(0, BE)
    count = tl.histogram(found, BE, mask=is_pair)
    tl.store(counts + tl.program_id(0) * E + experts, count, mask=experts < E)


@triton.jit(do_not_specialize=["num_blocks"])
def first_kernel(
    counts, firsts, stops, num_blocks, E: tl.constexpr, BE: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """From counts to the place of each block's first pair of an expert; one program."""
    experts = tl.arange(0, BE)
    total = tl.zeros([BE], tl.int32)
    for begin in tl.range(0, num_blocks, R):
        blocks = begin + tl.arange(0, R)
        mask = (blocks < num_blocks)[:, None] & (experts < E)[None, :]
        places = blocks[:, None] * E + experts[None, :]
        total += tl.sum(tl.load(counts + places, mask=mask, other=0), 0)
    stop = tl.cumsum(total, 0)
    tl.store(stops + experts, stop, mask=experts < E)
    first = stop - total
    for begin in tl.range(0, num_blocks, R):
        blocks = begin + tl.arange(0, R)
        mask = (blocks < num_blocks)[:, None] & (experts < E)[None, :]
        places = blocks[:, None] * E + experts[None, :]
        count = tl.load(counts + places, mask=mask, other=0)
        tl.store(firsts + places, first[None, :] + tl.cumsum(count, 0) - count, mask=mask)
        first += tl.sum(count, 0)


@triton.jit(do_not_specialize=["num_pairs"])
def place_kernel(
    ids, firsts, token, pair, row, num_pairs,
    E: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A pair's place: behind those of its block and expert that come before it; grid (blocks)."""
    begin = tl.program_id(0) * B
    pairs = begin + tl.arange(0, B)
    is_pair = pairs < num_pairs
    found = tl.load(ids + pairs, mask=is_pair, other=0).to(tl.int32)
    place = tl.load(firsts + tl.program_id(0) * E + found, mask=is_pair, other=0)
    for other_begin in tl.range(begin, begin + B, C):
        others = other_begin + tl.arange(0, C)
        other = tl.load(ids + others, mask=others < num_pairs, other=-1).to(tl.int32)
        is_before = (other[None, :] == found[:, None]) & (others[None, :] < pairs[:, None])
        place += tl.sum(is_before.to(tl.int32), 1)
    place = place.to(tl.int64)
    tl.store(row + pairs, place, mask=is_pair)
    tl.store(pair + place, pairs.to(tl.int64), mask=is_pair)
    tl.store(token + place, (pairs // A).to(tl.int64), mask=is_pair)


def choice_shape(num_experts: int) -> tuple[int, int]:
    """Tokens and warps of a program that chooses."""
    padded = padded_width(num_experts)
    rows = max(1, min(4, 128 // padded))
    return rows, max(1, padded * rows // 256)


def choose_experts(
    logits: Tensor,
    bias: Tensor | None,
    num_active: int,
    is_softmax: bool,
    is_renormalized: bool,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores `[T, E]` fp32, ids `[T, A]` int64 and weights `[T, A]` fp32, without gradients."""
    num_tokens, num_experts = logits.shape
    if num_experts > MAX_EXPERTS or logits.dtype != torch.float32:
        raise ImplError(
            f"route: impl='triton' serves fp32 scores of at most {MAX_EXPERTS} experts, not "
            f"{logits.dtype} {list(logits.shape)}"
        )
    logits = logits.contiguous()
    scores = torch.empty_like(logits)
    ids = logits.new_empty((num_tokens, num_active), dtype=torch.int64)
    weights = logits.new_empty((num_tokens, num_active))
    rows, num_warps = choice_shape(num_experts)
    if num_tokens:
        enqueue(
            choose_kernel, (cdiv(num_tokens, rows),),
            logits, None if bias is None else bias.contiguous(), scores, ids, weights, num_tokens,
            scaling, E=num_experts, A=num_active,
            BE=padded_width(num_experts), BA=padded_width(num_active), R=rows,
            IS_SOFTMAX=is_softmax, IS_RENORMALIZED=is_renormalized, num_warps=num_warps,
        )  # fmt: skip
    return scores, ids, weights


def choose_backward(
    scores: Tensor,
    ids: Tensor,
    d_scores: Tensor | None,
    d_weights: Tensor,
    is_softmax: bool,
    is_renormalized: bool,
    scaling: float,
) -> Tensor:
    """The gradient of the logits `[T, E]`."""
    (num_tokens, num_experts), num_active = scores.shape, ids.shape[1]
    d_logits = torch.empty_like(scores)
    rows, num_warps = choice_shape(num_experts)
    if num_tokens:
        enqueue(
            choose_backward_kernel, (cdiv(num_tokens, rows),),
            scores, ids, None if d_scores is None else d_scores.contiguous(),
            d_weights.contiguous(), d_logits, num_tokens, scaling, E=num_experts, A=num_active,
            BE=padded_width(num_experts), BA=padded_width(num_active), R=rows,
            IS_SOFTMAX=is_softmax, IS_RENORMALIZED=is_renormalized, num_warps=num_warps,
        )  # fmt: skip
    return d_logits


def sort(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`moe.shared.sorted_pairs` and where each expert's end."""
    num_pairs, num_active = expert_ids.numel(), expert_ids.shape[1]
    token, pair, row = (expert_ids.new_empty(num_pairs) for _ in range(3))
    stops = expert_ids.new_empty(num_experts, dtype=torch.int32)
    if num_pairs <= MAX_SORTED:
        enqueue(
            sort_kernel, (num_experts,),
            expert_ids, token, pair, row, stops, None, num_pairs, A=num_active,
            **sort_shape(num_pairs), N=1,
        )  # fmt: skip
        return token, pair, row, stops
    padded, block = max(32, padded_width(num_experts)), counted(num_experts)
    num_blocks = cdiv(num_pairs, block)
    counts = stops.new_empty((num_blocks, num_experts))
    firsts = torch.empty_like(counts)
    enqueue(
        count_kernel, (num_blocks,),
        expert_ids, counts, num_pairs, E=num_experts, BE=padded, B=block, num_warps=WARPS,
    )  # fmt: skip
    enqueue(
        first_kernel, (1,),
        counts, firsts, stops, num_blocks, E=num_experts, BE=padded, R=max(1, 8192 // padded),
        num_warps=2 * WARPS,
    )  # fmt: skip
    enqueue(
        place_kernel, (num_blocks,),
        expert_ids, firsts, token, pair, row, num_pairs, E=num_experts, A=num_active, B=block,
        C=COMPARED, num_warps=block // 64,
    )  # fmt: skip
    return token, pair, row, stops


def sort_slots(expert_ids: Tensor, num_experts: int, slot_size: int) -> tuple[Tensor, Tensor]:
    """Unsorted positions of sorted pairs, and slots of at most `slot_size` of them.

    A slot (int32 `[S, 3]`, S from shapes alone) is an expert, -1 if none, its first pair of the
    slot, and the end of its pairs.
    """
    num_pairs = expert_ids.numel()
    pair = expert_ids.new_empty(num_pairs)
    num_slots = num_pairs // slot_size + num_experts
    slots = expert_ids.new_empty((num_slots, 3), dtype=torch.int32)
    enqueue(
        sort_kernel, (num_experts,),
        expert_ids, None, pair, None, None, slots, num_pairs, A=expert_ids.shape[1],
        **sort_shape(num_pairs), N=slot_size,
    )  # fmt: skip
    return pair, slots


def counted(num_experts: int) -> int:
    """Pairs of a block, where blocks are counted: counts of many experts are for more pairs."""
    return 128 if num_experts <= 128 else 512


def sort_shape(num_pairs: int) -> dict[str, int]:
    """Pairs that an expert looks at together, and warps."""
    block = min(SORT_BLOCK, padded_width(max(num_pairs, 16)))
    return {"B": block, "num_warps": 8 if block > 1024 else 4}


def tile_shape(width: int) -> tuple[int, int]:
    """Rows and columns of the gated unit's tiles, with few columns beyond `width`."""
    block = min((512, 256, 128), key=lambda block: cdiv(width, block) * block)
    return 1024 // block, block


def activate(inner: Tensor, glu: Glu) -> Tensor:
    """Pre-activations `[TA, 2F]` to activations `[TA, F]`."""
    num_rows, width = inner.shape[0], inner.shape[1] // 2
    act = inner.new_empty((num_rows, width))
    rows, block = tile_shape(width)
    if num_rows:
        enqueue(
            glu_kernel, (cdiv(num_rows, rows), cdiv(width, block)),
            inner, act, num_rows, *caps(glu), F=width, **kind(glu, inner.dtype), R=rows, B=block,
            num_warps=WARPS,
        )  # fmt: skip
    return act


def activate_backward(
    d_act: Tensor, inner: Tensor, weight: Tensor, pair: Tensor, glu: Glu
) -> tuple[Tensor, Tensor, Tensor]:
    """From `d_act` `[TA, F]` before weighting: weighted activation, `d_inner` and `d_weight`.

    `weight` and its gradient are `[T, A]`, `pair` their order in the other rows.
    """
    num_rows, width = d_act.shape
    d_inner, act = torch.empty_like(inner), torch.empty_like(d_act)
    d_weight = torch.empty_like(weight)
    rows, block = tile_shape(width)
    if num_rows:
        enqueue(
            glu_backward_kernel, (cdiv(num_rows, rows),),
            d_act, inner, weight, pair, d_inner, act, d_weight, num_rows, *caps(glu), F=width,
            **kind(glu, inner.dtype), R=rows, B=block, num_warps=WARPS,
        )  # fmt: skip
    return act, d_inner, d_weight


def gather(x: Tensor, other: Tensor | None, row: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows `row` `[TA]` of one or two tensors `[T, Z]` of one dtype."""
    num_rows, width = row.shape[0], x.shape[1]
    x_out = x.new_empty((num_rows, width))
    other_out = None
    if other is not None:
        other, other_out = other.contiguous(), torch.empty_like(x_out)
    block = min(COLUMNS, padded_width(width))
    if num_rows:
        enqueue(
            gather_kernel, (cdiv(num_rows, ROWS), cdiv(width, block)),
            x.contiguous(), other, row, x_out, other_out, num_rows, Z=width, R=ROWS, B=block,
            num_warps=WARPS,
        )  # fmt: skip
    return x_out, other_out


def combine(values: Tensor, row: Tensor | None, weights: Tensor, *, is_weighted: bool) -> Tensor:
    """Sum of the rows `row` `[TA]` of `values` `[TA, Z]` for each token, `[T, Z]`; None: in order.

    `weights` `[T, A]` fp32 says how many rows a token has, and weighs them if `is_weighted`.
    """
    (num_tokens, num_active), width = weights.shape, values.shape[1]
    out = values.new_empty((num_tokens, width))
    block = min(COLUMNS, padded_width(width))
    grid = (cdiv(num_tokens, ROWS), cdiv(width, block))
    if num_tokens:
        enqueue(
            combine_kernel, grid,
            values, row, weights, out, num_tokens, A=num_active, Z=width,
            IS_WEIGHTED=is_weighted, R=ROWS, B=block, num_warps=WARPS,
        )  # fmt: skip
    return out


def caps(glu: Glu) -> tuple[float, float]:
    return glu.beta, glu.linear_beta or 1.0


def kind(glu: Glu, dtype: torch.dtype) -> dict[str, bool]:
    is_situ = glu.activation == "situ"
    return {
        "IS_SITU": is_situ, "IS_CAPPED": is_situ and glu.linear_beta is not None,
        "IS_SQUARE": glu.beta == 4.0, "IS_EXACT": dtype == torch.float32,
    }  # fmt: skip
