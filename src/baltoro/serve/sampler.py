"""From logits to token ids: temperature, top-k, top-p, min-p, penalties, with log-probabilities.

Two doors over one distribution: `sample` draws all rows alike from a generator (the plain loop);
`sample_rows` draws each row by its own settings from noise that depends on its seed, its place in
the reply and the token alone, so a reply does not depend on what runs beside it, nor on whether it
was preempted, nor on the device.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baltoro.serve.request import Sequence as EngineSequence
from baltoro.serve.sampling import Penalties, Sampling

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64; the increment of splitmix64
_MIX = ((30, -4658895280553007687), (27, -7723592293110705685))  # its shifts and multipliers


class Row(NamedTuple):
    """What one row of logits is drawn by."""

    sampling: Sampling
    seed: int
    step: int  # number of tokens of the reply so far
    penalties: Penalties = Penalties()
    prompt_ids: Sequence[int] = ()  # both read only if there are penalties
    reply_ids: Sequence[int] = ()


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
    logprobs_NW = _log_distribution(logits_NW, [sampling] * len(logits_NW))
    if sampling.temperature == 0.0:
        ids_N = logits_NW.argmax(-1)
    else:
        ids_N = torch.multinomial(logprobs_NW.exp(), 1, generator=generator).squeeze(-1)
    return ids_N, logprobs_NW.gather(-1, ids_N[:, None]).squeeze(-1)


def sample_rows(logits_NW: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Draw one token per row by that row's own settings.

    Returns ids `[N]` int64 and log-probabilities `[N, W]` fp32 of the distributions drawn from,
    -inf for what they exclude; at temperature 0 the model's own after penalties. Rows that are not
    finite give NaN.
    """
    logits_NW = logits_NW.float()
    penalised = [n for n, row in enumerate(rows) if not row.penalties.are_off]
    if penalised:
        logits_NW = logits_NW.clone()
    for n in penalised:
        _penalise(logits_NW[n], rows[n])
    logprobs_NW = _log_distribution(logits_NW, [row.sampling for row in rows])
    # Gumbel: the largest of log p - log(-log u) is a draw from p
    noise_NW = torch.zeros_like(logprobs_NW, dtype=torch.float64)
    drawn = [n for n, row in enumerate(rows) if row.sampling.temperature > 0.0]
    if drawn:
        keys = [(rows[n].seed, rows[n].step) for n in drawn]
        uniform_NW = _uniform(keys, logits_NW.shape[-1], logits_NW.device)
        noise_NW[drawn] = -(-uniform_NW.log()).log()
    return (logprobs_NW + noise_NW).argmax(-1), logprobs_NW


def _log_distribution(logits_NW: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Log-probabilities after temperature and restrictions; temperature 0 leaves a row alone."""
    scale = [s.temperature if s.temperature > 0.0 else 1.0 for s in samplings]
    logits_NW = logits_NW / logits_NW.new_tensor(scale)[:, None]
    # greedy rows report the model's own probabilities, so nothing is taken from them
    drawn = [s if s.temperature > 0.0 else Sampling() for s in samplings]
    if any(s != Sampling(temperature=s.temperature) for s in drawn):
        logits_NW = _restrict(logits_NW, drawn)
    return logits_NW.log_softmax(-1)


def _restrict(logits_NW: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """-inf outside the tokens that top-k, top-p and min-p all keep; the likeliest always stays."""
    width = logits_NW.shape[-1]
    top_k_N1 = torch.tensor([min(s.top_k or width, width) for s in samplings])[:, None]
    top_p_N1 = logits_NW.new_tensor([s.top_p for s in samplings])[:, None]
    min_p_N1 = logits_NW.new_tensor([s.min_p for s in samplings])[:, None]
    kth_N1 = logits_NW.sort(-1, descending=True).values.gather(
        -1, top_k_N1.to(logits_NW.device) - 1
    )
    dropped_NW = logits_NW < kth_N1
    probs_NW = logits_NW.softmax(-1)
    dropped_NW |= probs_NW < min_p_N1 * probs_NW.amax(-1, keepdim=True)
    sorted_NW, order_NW = logits_NW.masked_fill(dropped_NW, -torch.inf).sort(-1, descending=True)
    probs_NW = sorted_NW.softmax(-1)
    # a token goes when those before it already reach top_p
    beyond_NW = (probs_NW.cumsum(-1) - probs_NW >= top_p_N1) & (top_p_N1 < 1.0)
    beyond_NW[:, 0] = False
    dropped_NW |= torch.zeros_like(dropped_NW).scatter(-1, order_NW, beyond_NW)
    return logits_NW.masked_fill(dropped_NW, -torch.inf)


def _penalise(logits_W: Tensor, row: Row) -> None:
    """Lower in place the logits of tokens that occurred."""
    penalties = row.penalties
    if penalties.repetition != 1.0:
        seen = torch.tensor(sorted({*row.prompt_ids, *row.reply_ids}), device=logits_W.device)
        values = logits_W[seen]
        factor = torch.where(values > 0, 1.0 / penalties.repetition, penalties.repetition)
        logits_W[seen] = values * factor
    counts = Counter(row.reply_ids)
    if counts:
        ids = torch.tensor(list(counts), device=logits_W.device)
        times = logits_W.new_tensor(list(counts.values()))
        logits_W[ids] -= penalties.presence + penalties.frequency * times


def _uniform(keys: Sequence[tuple[int, int]], width: int, device: torch.device) -> Tensor:
    """`[N, W]` fp64 in (0, 1): splitmix64 of each row's seed and step and of the token."""
    seeds_N, steps_N = (
        torch.tensor([_int64(key[i]) for key in keys], device=device) for i in (0, 1)
    )
    start_N = _mixed(_mixed(seeds_N) + steps_N * _GOLDEN)
    tokens_W = torch.arange(1, width + 1, device=device)
    bits_NW = _shifted(_mixed(start_N[:, None] + tokens_W * _GOLDEN), 11)
    return (bits_NW.double() + 0.5) * 2.0**-53


def _mixed(x: Tensor) -> Tensor:
    for shift, factor in _MIX:
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _int64(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
