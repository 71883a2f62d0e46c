"""Drafts: cheap guesses at the next tokens of a reply, which the model verifies in one call.

A guess is kept only where it is the token that the model itself draws there (`runner`), so a draft
decides how fast a reply is written and never what it says. Two are built in:

- n-gram (prompt look-up): what followed the last time that a sequence's last few tokens occurred.
- MTP: the model's first multi-token layer, applied again to its own output for each further token.
  It draws from its distribution with the noise that the model will draw with, so the two agree
  about as often as two distributions can.
"""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Series
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from baltoro.model.model import Model
from baltoro.serve.pack import Span
from baltoro.serve.pool import PagedCache, PagePool, VerifyCache
from baltoro.serve.request import Sequence
from baltoro.serve.sampler import row_of, sample_rows

T = TypeVar("T")
MAX_DRAFT_TOKENS = 8
_ID_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationConfig:
    """Which draft guesses, and how far."""

    draft: Literal["ngram", "mtp"]
    max_tokens: int = 7  # guessed at once
    min_match: int = 2  # n-gram: tokens that must have occurred before
    max_match: int = 4  # n-gram: tokens looked for first
    window: int = 16384  # n-gram: how many tokens back

    def __post_init__(self) -> None:
        if self.draft not in ("ngram", "mtp"):
            raise ValueError(f"speculation.draft={self.draft!r}: must be 'ngram' or 'mtp'")
        if not 1 <= self.max_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(
                f"speculation.max_tokens={self.max_tokens}: must be from 1 to {MAX_DRAFT_TOKENS}"
            )
        if not 1 <= self.min_match <= self.max_match:
            raise ValueError(
                f"speculation.min_match={self.min_match}: must be from 1 to max_match="
                f"{self.max_match}"
            )
        if self.window <= self.max_match:
            raise ValueError(
                f"speculation.window={self.window}: must be above max_match={self.max_match}"
            )


class Seen(NamedTuple):
    """Tokens of a sequence that the model computed and that stay."""

    sequence: Sequence
    start: int
    mixture: Tensor  # [tokens, D], the model's last mixture for each


class Draft(Protocol):
    """Guesses the next tokens of sequences. What it remembers of one goes with its pages."""

    def propose(self, sequences: Series[Sequence]) -> list[list[int]]:
        """For each sequence up to `MAX_DRAFT_TOKENS` ids that may follow; none without a guess."""

    def observe(self, seen: Series[Seen]) -> None:
        """Take in a step's tokens, after it was committed."""

    def rest(self) -> None:
        """Forget the sequences that are gone."""


def made_draft(config: SpeculationConfig, model: Model, pool: PagePool) -> Draft:
    """The draft that a configuration names."""
    if config.draft == "mtp":
        return MtpDraft(model, pool, config.max_tokens)
    return NgramDraft(config)


class NgramDraft:
    """Continues a sequence as it went on after the latest place that ends like it."""

    def __init__(self, config: SpeculationConfig) -> None:
        self.config = config
        self._texts: dict[Sequence, bytearray] = {}  # tokens, four bytes each

    def propose(self, sequences: Series[Sequence]) -> list[list[int]]:
        _drop_gone(self._texts)
        return [self._continuation(sequence) for sequence in sequences]

    def observe(self, seen: Series[Seen]) -> None:
        """It reads the tokens themselves when asked."""

    def rest(self) -> None:
        _drop_gone(self._texts)

    def _continuation(self, sequence: Sequence) -> list[int]:
        text = self._texts.setdefault(sequence, bytearray())
        text += array("i", sequence.tokens[len(text) // _ID_BYTES :]).tobytes()
        for length in range(self.config.max_match, self.config.min_match - 1, -1):
            follow = _latest_end(text, length, self.config.window)
            if follow is not None:
                break
        else:
            return []
        tokens = sequence.tokens[follow : follow + self.config.max_tokens]
        while len(tokens) < self.config.max_tokens:
            # it ran into the sequence's end: what repeats goes on repeating
            tokens.append(tokens[len(tokens) - (len(sequence.tokens) - follow)])
        return tokens


def _latest_end(text: bytearray, length: int, window: int) -> int | None:
    """The token behind the latest earlier occurrence of the last `length` tokens."""
    size = length * _ID_BYTES
    first = max(0, len(text) - window * _ID_BYTES)
    end = len(text) - 1  # not the last occurrence itself
    while (place := text.rfind(text[-size:], first, end)) >= 0 and len(text) > size:
        if place % _ID_BYTES == 0:
            return place // _ID_BYTES + length
        end = place + size - 1
    return None


class _Last(NamedTuple):
    """The MTP layer's output behind a sequence's last computed token."""

    num_computed: int
    hidden: Tensor  # [D]
    mixture: Tensor  # [D]


class MtpDraft:
    """The model's own multi-token layer, with its latents in the pages of the sequences.

    After a hit on a prefix from CPU memory, or on one whose next token was another, some of these
    latents are stale: guesses get worse, replies don't. Raises `ValueError` for a model without
    such a layer.
    """

    def __init__(self, model: Model, pool: PagePool, max_tokens: int) -> None:
        if model.config.num_mtp_layers < 1:
            raise ValueError(
                "speculation.draft='mtp': this model has no multi-token layer "
                "(num_mtp_layers=0); use 'ngram'"
            )
        self.model = model
        self.pool = pool
        self.max_tokens = max_tokens
        self._last: dict[Sequence, _Last] = {}

    @torch.inference_mode()
    def propose(self, sequences: Series[Sequence]) -> list[list[int]]:
        drafts: dict[Sequence, list[int]] = {sequence: [] for sequence in sequences}
        going = [sequence for sequence in sequences if self._is_known(sequence)]
        if going:
            hidden_ND = torch.stack([self._last[sequence].hidden for sequence in going])
            mixture_ND = torch.stack([self._last[sequence].mixture for sequence in going])
        while going:
            ids_N, drawn = self._draw(going, drafts, hidden_ND)
            spans = [(n, self._next(going[n], drafts[going[n]])) for n in drawn]
            kept = [(n, span) for n, span in spans if span is not None]
            going = [going[n] for n, _ in kept]
            if going:
                kept_N = torch.tensor([n for n, _ in kept], device=ids_N.device)
                cache = PagedCache(self.pool, "decode", [span for _, span in kept])
                hidden_ND, mixture_ND = self._run(
                    ids_N[kept_N], mixture_ND[kept_N], range(len(going) + 1), cache
                )
        for sequence, draft in drafts.items():
            if sequence.constraint is not None:
                sequence.constraint.rollback(len(draft))
        return list(drafts.values())

    @torch.inference_mode()
    def rest(self) -> None:
        _drop_gone(self._last)

    def observe(self, seen: Series[Seen]) -> None:
        _drop_gone(self._last)
        seen = [one for one in seen if one.sequence.table is not None]
        # few tokens each: attention over the latents themselves instead of expanding them all
        few = [one for one in seen if len(one.mixture) <= MAX_DRAFT_TOKENS + 1]
        many = [one for one in seen if len(one.mixture) > MAX_DRAFT_TOKENS + 1]
        if few:
            self._take_in(few, VerifyCache(self.pool, _spans(few)))
        if many:
            self._take_in(many, PagedCache(self.pool, "prefill", _spans(many)))

    def _is_known(self, sequence: Sequence) -> bool:
        last = self._last.get(sequence)
        return last is not None and last.num_computed == sequence.num_computed

    def _draw(
        self, going: Series[Sequence], drafts: dict[Sequence, list[int]], hidden_ND: Tensor
    ) -> tuple[Tensor, list[int]]:
        """Ids `[N]`, and which of them went to their drafts: those that no grammar excludes."""
        logits_NW = self.model.lm_head(hidden_ND).float()
        for sequence, logits_W in zip(going, logits_NW, strict=True):
            if sequence.constraint is not None:
                sequence.constraint.mask(logits_W)
        ids_N, _ = sample_rows(logits_NW, [row_of(s, drafts[s]) for s in going])
        drawn = []
        for n, (sequence, token_id) in enumerate(zip(going, ids_N.tolist(), strict=True)):
            if sequence.constraint is None or sequence.constraint.accept(token_id):
                drafts[sequence].append(token_id)
                drawn.append(n)
        return ids_N, drawn

    def _take_in(self, seen: Series[Seen], cache: PagedCache) -> None:
        ids, bounds = list[int](), [0]
        for sequence, start, mixture_TD in seen:
            ids += sequence.tokens[start + 1 : start + 1 + len(mixture_TD)]
            bounds.append(len(ids))
        mixture_TD = torch.cat([one.mixture for one in seen])
        tokens_T = torch.tensor(ids, device=mixture_TD.device)
        hidden_TD, mixture_TD = self._run(tokens_T, mixture_TD, bounds, cache)
        ends_N = torch.tensor(bounds[1:], device=mixture_TD.device) - 1
        rows = zip(hidden_TD[ends_N], mixture_TD[ends_N], strict=True)
        for one, (hidden_D, mixture_D) in zip(seen, rows, strict=True):
            self._last[one.sequence] = _Last(one.sequence.num_computed, hidden_D, mixture_D)

    def _next(self, sequence: Sequence, draft: Series[int]) -> Span | None:
        """Where the last drafted token goes, to guess one more; None if that is not wanted."""
        assert sequence.table is not None
        place = sequence.num_computed + len(draft) - 1
        has_page = place < len(sequence.table.kv_pages) * self.pool.layout.page_size
        if not has_page or len(draft) == min(self.max_tokens, sequence.num_left - 1):
            return None
        return Span(sequence.table, place, place + 1)

    def _run(
        self, tokens_T: Tensor, mixture_TD: Tensor, bounds: Iterable[int], cache: PagedCache
    ) -> tuple[Tensor, Tensor]:
        cu_seqlens = torch.tensor(list(bounds), dtype=torch.int32, device=tokens_T.device)
        out = self.model.predict_next(tokens_T, mixture_TD, cu_seqlens, cache)
        return out.hidden, out.mixture


def _spans(seen: Series[Seen]) -> list[Span]:
    spans = []
    for sequence, start, mixture in seen:
        assert sequence.table is not None
        spans.append(Span(sequence.table, start, start + len(mixture)))
    return spans


def _drop_gone(memory: dict[Sequence, T]) -> None:
    """Forget sequences that lost their pages."""
    for sequence in [sequence for sequence in memory if sequence.table is None]:
        del memory[sequence]
