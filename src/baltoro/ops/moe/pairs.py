"""The (token, expert) pairs on an NVIDIA GPU: the router's choice of them, and their order.

The choice takes the largest score as often as a token has experts. For few pairs each expert finds
its own among all of them: those of lower experts stand before its first, and those before a pair
that are its own say how far behind the first it comes. For many, blocks of pairs are counted,
counts become each block's first places, and a pair stands behind its like of the block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baltoro.ops.impl import ImplError
from baltoro.ops.triton import cdiv, enqueue, padded_width

WARPS = 4
SUM_EPS = tl.constexpr(1e-20)  # of the released code, in the renormalisation
MAX_EXPERTS = 1024  # scores of a token in one program
MAX_SORTED = 8192  # pairs that every expert looks through
SORT_BLOCK = 2048
COMPARED = 16  # pairs that each of a block is compared with at once


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
