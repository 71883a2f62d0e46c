"""Tokens that are drawn together, from rows of logits to the host, which need not wait for them."""

from collections.abc import Mapping
from collections.abc import Sequence as Series
from typing import NamedTuple

import torch
from torch import Tensor

from baltoro.ops.draw import Drawn, as_numbers, draw_tokens
from baltoro.serve.pages import Table
from baltoro.serve.request import Constraint, NewToken, Sequence
from baltoro.serve.sampler import Drawing, draw


class DrawnTokens(NamedTuple):
    """Tokens on their way to the host."""

    sequences: list[Sequence]  # of each row
    tables: dict[Sequence, Table | None]  # that they were computed with
    is_allowed: list[bool]  # by the grammars
    version: str  # of the weights
    ids: Tensor  # [N] int64, on the device
    numbers: Tensor  # [3, N] fp64: id, log-probability, whether logits were finite
    top: Tensor | None  # [2, N, k] fp64: likeliest ids and their log-probabilities
    arrival: torch.cuda.Event | None  # None on a CPU

    def read(self) -> list[NewToken | None]:
        """Wait for them; None where logits were at fault, or a grammar lets nothing follow."""
        if self.arrival is not None:
            self.arrival.synchronize()
        columns = zip(*self.numbers.tolist(), self.is_allowed, strict=True)
        return [
            NewToken(int(token_id), logprob, self.version, self._top(n))
            if is_sound and is_allowed
            else None
            for n, (token_id, logprob, is_sound, is_allowed) in enumerate(columns)
        ]

    def _top(self, n: int) -> tuple[tuple[int, float], ...]:
        count = self.sequences[n].request.num_logprobs
        if self.top is None or not count:
            return ()
        pairs = self.top[:, n, :count].T.tolist()
        return tuple((int(i), value) for i, value in pairs if value > float("-inf"))


def draw_rows(
    logits_NW: Tensor,
    drawing: Drawing,
    sequences: list[Sequence],
    version: str,
    drafts: Mapping[Sequence, Series[int]],
    *,
    impl: str,
) -> DrawnTokens:
    """Draw a token of each row and send it on its way.

    `sequences` has that of each row. Grammars bind the rows of the sequences in `drafts` alone,
    where each has one for its last token and for each drafted one. `impl` is that of
    `baltoro.ops.draw`, which draws where nothing restricts a row.
    """
    is_allowed = [True] * len(sequences)
    most = max(sequence.request.num_logprobs for sequence in sequences)
    bound = {s: (s.constraint, draft) for s, draft in drafts.items() if s.constraint is not None}
    top = None
    if drawing.is_whole and not bound and not most:
        found = draw_tokens(logits_NW, drawing.scale, drawing.noise, impl=impl)
    else:
        lowest_N = logits_NW.amin(-1)  # NaN if there is one
        logits_NW = logits_NW.float()
        for sequence, (constraint, draft) in bound.items():
            n = sequences.index(sequence)
            rows = slice(n, n + len(draft) + 1)
            is_allowed[rows] = _constrain(constraint, draft, logits_NW[rows])
        ids_N, logprobs_NW = draw(logits_NW, drawing)
        logprobs_N = logprobs_NW.gather(-1, ids_N[:, None]).squeeze(-1)
        found = Drawn(ids_N, as_numbers(ids_N, logprobs_N, lowest_N))
        if most:
            best = logprobs_NW.topk(min(most, logprobs_NW.shape[-1]))
            top = _sent(torch.stack([best.indices.double(), best.values.double()]))
    numbers = _sent(found.numbers)
    arrival = torch.cuda.Event() if numbers is not found.numbers else None
    if arrival is not None:
        arrival.record(torch.cuda.current_stream(logits_NW.device))
    tables = {sequence: sequence.table for sequence in sequences}
    return DrawnTokens(sequences, tables, is_allowed, version, found.ids, numbers, top, arrival)


def latest_ids(parts: Series[DrawnTokens], sequences: Series[Sequence]) -> Tensor:
    """The last ids drawn for `sequences`, `[N]` on the device."""
    rows = [sequence for part in parts for sequence in part.sequences]
    place = {sequence: n for n, sequence in enumerate(rows)}
    ids = torch.cat([part.ids for part in parts])
    chosen = torch.tensor([place[sequence] for sequence in sequences])
    return ids[chosen.to(ids.device, non_blocking=True)]


def _sent(x: Tensor) -> Tensor:
    """A copy on the host, which has arrived once the stream is through."""
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def _constrain(constraint: Constraint, draft: Series[int], logits_NW: Tensor) -> list[bool]:
    """Mask the rows behind a sequence and its draft; whether each can be reached and drawn from."""
    may_follow = []
    num_accepted = 0
    for j, logits_W in enumerate(logits_NW):
        if j and not constraint.accept(draft[j - 1]):
            break
        num_accepted = j
        may_follow.append(constraint.mask(logits_W))
        if not may_follow[-1]:
            break
    constraint.rollback(num_accepted)
    return may_follow + [False] * (len(logits_NW) - len(may_follow))
