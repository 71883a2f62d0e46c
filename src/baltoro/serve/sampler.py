"""From logits to token ids: temperature, top-k, top-p, min-p, penalties, with log-probabilities.

Two doors over one distribution: `sample` draws all rows alike from a generator (the plain loop);
`draw` draws each row by its own settings from noise that depends on its seed, its place in the
reply and the token alone, so a reply does not depend on what runs beside it, nor on whether it was
preempted, nor on the device. Settings become tensors once (`Drawing`), then nothing waits for the
device.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baltoro.ops.draw import Noise, perturbed
from baltoro.serve.request import Sequence as EngineSequence
from baltoro.serve.sampling import Penalties, Sampling

_PLAIN = Sampling()  # in the place of settings that are not used


class Row(NamedTuple):
    """What one row of logits is drawn by."""

    sampling: Sampling
    seed: int
    step: int  # number of tokens of the reply so far
    penalties: Penalties = Penalties()
    prompt_ids: Sequence[int] = ()  # both read only if there are penalties
    reply_ids: Sequence[int] = ()


class _Limits(NamedTuple):
    """What a token must satisfy, each `[N, 1]`."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


class _Penalised(NamedTuple):
    """Places `[row, token]` of the logits and what happens to them."""

    seen: tuple[Tensor, Tensor]  # each pair once
    positive: Tensor  # factor of a positive logit there
    negative: Tensor
    written: tuple[Tensor, Tensor]  # tokens of the replies, each pair once
    loss: Tensor  # what is taken off there


class Drawing(NamedTuple):
    """The settings of N rows on the device; None where no row asks for it."""

    scale: Tensor | None  # [N, 1] temperatures
    limits: _Limits | None
    noise: Noise | None
    penalised: _Penalised | None

    @property
    def is_whole(self) -> bool:
        """Whether rows draw from all tokens, as `baltoro.ops.draw` does."""
        return self.limits is None and self.penalised is None

    def advance(self) -> None:
        """Go on to the next token of each reply; not with penalties, which need the last ones."""
        assert self.penalised is None
        if self.noise is not None:
            self.noise.steps.add_(1)


def row_of(sequence: EngineSequence, drafted: Sequence[int] = ()) -> Row:
    """What the token behind a sequence and its `drafted` ones is drawn by."""
    request, num_new = sequence.request, len(sequence.new_tokens) + len(drafted)
    if request.penalties.are_off:
        return Row(request.sampling, request.seed, num_new)
    reply_ids = [*(token.id for token in sequence.new_tokens), *drafted]
    return Row(
        request.sampling, request.seed, num_new, request.penalties, request.prompt_ids, reply_ids
    )


def sample(
    logits_NW: Tensor, sampling: Sampling, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Returns ids `[N]` int64 and their log-probabilities `[N]` fp32 under the distribution that was
    drawn from; at temperature 0 under the model's own. Raises `ValueError` on logits that are not
    finite.
    """
    logits_NW = logits_NW.float()
    if not torch.isfinite(logits_NW).all():
        raise ValueError("logits: not finite; the weights or the inputs hold NaN or overflow")
    rows = [Row(sampling, 0, 0)] * len(logits_NW)
    drawing = drawing_of(rows, logits_NW.shape[1], logits_NW.device)
    logprobs_NW = _log_distribution(logits_NW, drawing)
    if sampling.temperature == 0.0:
        ids_N = logits_NW.argmax(-1)
    else:
        ids_N = torch.multinomial(logprobs_NW.exp(), 1, generator=generator).squeeze(-1)
    return ids_N, logprobs_NW.gather(-1, ids_N[:, None]).squeeze(-1)


def drawing_of(rows: Sequence[Row], width: int, device: torch.device) -> Drawing:
    """The settings of `rows` for logits of `width` words, copied to the device."""
    # greedy rows report the model's own probabilities, so nothing is taken from them
    drawn = [row.sampling if row.sampling.temperature > 0.0 else _PLAIN for row in rows]
    scale = limits = noise = None
    if any(s.temperature != 1.0 for s in drawn):
        scale = torch.tensor([[s.temperature] for s in drawn]).to(device, non_blocking=True)
    if any(s.is_restricted for s in drawn):
        top_k = torch.tensor([[min(s.top_k or width, width)] for s in drawn])
        top_p = torch.tensor([[s.top_p] for s in drawn])
        min_p = torch.tensor([[s.min_p] for s in drawn])
        limits = _Limits(*(x.to(device, non_blocking=True) for x in (top_k, top_p, min_p)))
    if any(s is not _PLAIN for s in drawn):
        is_drawn = torch.tensor([[row.sampling.temperature > 0.0] for row in rows])
        seeds, steps = (
            torch.tensor([_int64(number) for number in numbers])
            for numbers in ([row.seed for row in rows], [row.step for row in rows])
        )
        noise = Noise(*(x.to(device, non_blocking=True) for x in (is_drawn, seeds, steps)))
    penalised = None
    if any(not row.penalties.are_off for row in rows):
        penalised = _penalised(rows, device)
    return Drawing(scale, limits, noise, penalised)


def draw(logits_NW: Tensor, drawing: Drawing) -> tuple[Tensor, Tensor]:
    """Draw one token per row by that row's own settings.

    Returns ids `[N]` int64 and log-probabilities `[N, W]` fp32 of the distributions drawn from,
    -inf for what they exclude; at temperature 0 the model's own after penalties. Rows that are not
    finite give NaN. Does not wait for the device.
    """
    logprobs_NW = _log_distribution(_penalise(logits_NW.float(), drawing.penalised), drawing)
    return perturbed(logprobs_NW, drawing.noise).argmax(-1), logprobs_NW


def sample_rows(logits_NW: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """`draw` by `rows`."""
    return draw(logits_NW, drawing_of(rows, logits_NW.shape[-1], logits_NW.device))


def _log_distribution(logits_NW: Tensor, drawing: Drawing) -> Tensor:
    """Log-probabilities after temperature and restrictions; temperature 0 leaves a row alone."""
    if drawing.scale is not None:
        logits_NW = logits_NW / drawing.scale
    if drawing.limits is not None:
        logits_NW = _restrict(logits_NW, drawing.limits)
    return logits_NW.log_softmax(-1)


def _restrict(logits_NW: Tensor, limits: _Limits) -> Tensor:
    """-inf outside the tokens that top-k, top-p and min-p all keep; the likeliest always stays."""
    kth_N1 = logits_NW.sort(-1, descending=True).values.gather(-1, limits.top_k - 1)
    dropped_NW = logits_NW < kth_N1
    probs_NW = logits_NW.softmax(-1)
    dropped_NW |= probs_NW < limits.min_p * probs_NW.amax(-1, keepdim=True)
    sorted_NW, order_NW = logits_NW.masked_fill(dropped_NW, -torch.inf).sort(-1, descending=True)
    probs_NW = sorted_NW.softmax(-1)
    # a token goes when those before it already reach top_p
    beyond_NW = (probs_NW.cumsum(-1) - probs_NW >= limits.top_p) & (limits.top_p < 1.0)
    beyond_NW[:, 0] = False
    dropped_NW |= torch.zeros_like(dropped_NW).scatter(-1, order_NW, beyond_NW)
    return logits_NW.masked_fill(dropped_NW, -torch.inf)


def _penalised(rows: Sequence[Row], device: torch.device) -> _Penalised:
    seen: list[tuple[int, int]] = []
    written: list[tuple[int, int]] = []
    factors: list[tuple[float, float]] = []
    losses: list[float] = []
    for n, row in enumerate(rows):
        penalties = row.penalties
        if penalties.repetition != 1.0:
            ids = {*row.prompt_ids, *row.reply_ids}
            seen += [(n, token) for token in ids]
            factors += [(1.0 / penalties.repetition, penalties.repetition)] * len(ids)
        if not penalties.are_off:
            counts = Counter(row.reply_ids)
            written += [(n, token) for token in counts]
            losses += [
                penalties.presence + penalties.frequency * count for count in counts.values()
            ]
    seen_2, written_2 = (
        torch.tensor(places, dtype=torch.int64).view(-1, 2).T.to(device, non_blocking=True)
        for places in (seen, written)
    )
    positive, negative = (
        torch.tensor(factors, dtype=torch.float32).view(-1, 2).T.to(device, non_blocking=True)
    )
    loss = torch.tensor(losses, dtype=torch.float32).to(device, non_blocking=True)
    return _Penalised(
        (seen_2[0], seen_2[1]), positive, negative, (written_2[0], written_2[1]), loss
    )


def _penalise(logits_NW: Tensor, penalised: _Penalised | None) -> Tensor:
    """Logits with those of tokens that occurred lowered."""
    if penalised is None:
        return logits_NW
    logits_NW = logits_NW.clone()
    values = logits_NW[penalised.seen]
    factors = torch.where(values > 0, penalised.positive, penalised.negative)
    logits_NW[penalised.seen] = values * factors
    logits_NW[penalised.written] -= penalised.loss
    return logits_NW


def _int64(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
