"""One step on the device: move pages, run the model, draw tokens, keep states.

Those that decode and those that prefill go in one call each, since the two execution forms are two
functions of the model. `N` rows of logits are drawn: one for each sequence whose last token is
among those computed, and one for each drafted token. The row behind a draft is drawn as if the
draft were right, from the noise of its own place in the reply; so what is drawn as long as the
drafts are right is, token for token, what is drawn without them.

With a resident batch the decoding sequences are computed one step ahead: once a step's tokens are
drawn, the next step's are computed from where they lie on the device, and only then does the host
read the former. What was computed ahead for a sequence that ended or lost its pages is dropped.
"""

from collections import Counter
from collections.abc import Sequence as Series
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baltoro.model.model import Model
from baltoro.serve.drawn import DrawnTokens, draw_rows, latest_ids
from baltoro.serve.pack import Piece, Span, sent
from baltoro.serve.pages import Table
from baltoro.serve.pool import PagedCache, PagePool, VerifyCache
from baltoro.serve.prefill import PrefillBatch
from baltoro.serve.request import Constraint, NewToken, Sequence
from baltoro.serve.resident import FED, Place, ResidentBatch
from baltoro.serve.sampler import Drawing, Row, drawing_of, row_of
from baltoro.serve.scheduler import StepPlan, Work


class StepOutput(NamedTuple):
    """What a step computed; its states are in the pages once `Runner.keep` was called."""

    # for each work what was drawn behind its last token and behind each drafted one, nothing if
    # none is due; None is a fault of the weights, whose logits are not finite, or of a grammar
    # that lets nothing follow
    drawn: list[list[NewToken | None]]
    mixture: Tensor | None  # [T, D] of all new tokens, for the draft; None from a resident batch
    verify: VerifyCache | None  # of the decodes, if there are drafts


class Runner:
    """A model and the pages that hold its sequences' state.

    With a `batch` no drafts are served. `packs` come with one.
    """

    def __init__(
        self,
        model: Model,
        pool: PagePool,
        batch: ResidentBatch | None = None,
        packs: PrefillBatch | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.batch = batch
        self.packs = packs
        self.device = model.lm_head.weight.device
        # a model whose decode is kernels has its tokens drawn by one
        is_kernel = model.config.impl.attention_decode == "triton"
        self._draw_impl = "triton" if is_kernel else "torch"
        # prefills that had no pack, by what there was too little of
        self.missed_steps: Counter[str] = Counter()
        self.missed_tokens: Counter[str] = Counter()
        self._ahead: DrawnTokens | None = None
        self._placed: list[tuple[Sequence, Table | None]] = []  # rows of the batch
        self._num_pages: list[int] = []  # of each
        self._drawing: Drawing | None = None  # of these rows, by which they were drawn last
        self._bounds: list[Constraint] = []  # of these rows, once they have a drawing
        self.renew()

    @property
    def is_ahead(self) -> bool:
        """Whether tokens of the next step are computed already."""
        return self._ahead is not None

    def renew(self) -> None:
        """The model's weights may have become other tensors; call it before the next step."""
        if self.batch is None:
            return
        self._placed = []
        is_new = self.batch.prepare()
        if self.packs is not None and (is_new or not self.packs.is_ready):
            self.packs.capture()

    def rest(self) -> None:
        """Nothing runs any more: forget what was computed ahead, and the sequences of the rows."""
        self._ahead, self._drawing = None, None
        self._placed, self._num_pages, self._bounds = [], [], []

    @torch.inference_mode()
    def run(self, plan: StepPlan, weights_version: str) -> StepOutput:
        """Compute all tokens of a plan and draw those that follow.

        Their `weights_version` is that of the weights that they were computed with.
        """
        self.pool.prepare(plan.ops)
        parts: list[DrawnTokens] = []
        decodes: Series[Work] = plan.decodes
        usual = [w for w in decodes if not _is_picture(w)] if self.batch is not None else []
        if usual:
            parts.append(self._covered(usual) or self._launch(usual, weights_version))
            decodes = [w for w in decodes if w.sequence not in parts[0].tables]
        hidden, mixtures = [], []
        verify = None
        if decodes:
            spans = _spans(decodes)
            if any(work.draft for work in decodes):
                verify = VerifyCache(self.pool, spans)
            hidden_ND, mixture_TD = self._forward(
                decodes, verify or PagedCache(self.pool, "decode", spans)
            )
            hidden.append(hidden_ND)
            mixtures.append(mixture_TD)
        if plan.prefills and self._has_pack(plan.prefills):
            hidden.append(self._prefill(plan.prefills))
        elif plan.prefills:
            cache = PagedCache(self.pool, "prefill", _spans(plan.prefills))
            hidden_ND, mixture_TD = self._forward(plan.prefills, cache)
            hidden.append(hidden_ND)
            mixtures.append(mixture_TD)
        works = [w for w in (*decodes, *plan.prefills) if w.is_sampled]
        if works:
            logits_NW = self.model.lm_head(torch.cat(hidden))
            parts.append(self._draw(logits_NW, works, weights_version))
        if verify is None:
            self.pool.capture(plan.ops)
        self._ahead = self._go_ahead(plan, parts, weights_version)
        drawn: dict[Sequence, list[NewToken | None]] = {w.sequence: [] for w in plan.works}
        for part in parts:
            for sequence, token in zip(part.sequences, part.read(), strict=True):
                if sequence in part.tables:
                    drawn[sequence].append(token)
        return StepOutput(
            list(drawn.values()), torch.cat(mixtures) if self.batch is None else None, verify
        )

    @torch.inference_mode()
    def keep(self, plan: StepPlan, output: StepOutput, stops: Series[int]) -> None:
        """With drafts: have states that take in each work's tokens up to `stops`, no others."""
        if output.verify is None:
            return
        pairs = list(zip(plan.decodes, stops[: len(plan.decodes)], strict=True))
        counts = [stop - work.start for work, stop in pairs]
        captured = [_captured(work, stop) - work.start for work, stop in pairs]
        output.verify.replay([0] * len(pairs), captured)
        self.pool.capture(plan.ops)
        output.verify.replay(captured, counts)

    def _covered(self, decodes: Series[Work]) -> DrawnTokens | None:
        """What was computed ahead, as far as it is these works; None if it is none of them."""
        if self._ahead is None:
            return None
        tables = self._ahead.tables
        covered = {
            work.sequence: work.sequence.table
            for work in decodes
            if work.sequence in tables and tables[work.sequence] is work.sequence.table
        }
        return self._ahead._replace(tables=covered) if covered else None

    def _launch(self, works: Series[Work], version: str) -> DrawnTokens:
        """The works as rows of the batch, from the host's tokens."""
        assert self.batch is not None and not any(work.draft for work in works)
        sequences = [work.sequence for work in works]
        self._place([(s, s.tokens[s.num_computed]) for s in sequences])
        self._drawing = None
        drawn = self._draw(self.batch.run(len(works)), works, version)
        self.batch.feed(drawn.ids)
        return drawn

    def _go_ahead(
        self, plan: StepPlan, parts: list[DrawnTokens], version: str
    ) -> DrawnTokens | None:
        """Compute the next token of each sequence that goes on for certain, or of none.

        None goes ahead beside one whose next token depends on what the host makes of the last.
        """
        if self.batch is None or not parts:
            return None
        works = [work for work in plan.works if work.is_sampled]
        rows = [(work.sequence, work.sequence.table) for work in works]
        # rows with a drawing were found to need nothing of the host but for what binds them
        is_known = self._drawing is not None and rows == self._placed
        is_bound = any(not bound.is_free(2) for bound in self._bounds)
        if is_bound if is_known else any(map(_needs_host, works)):
            return None
        size = self.pool.layout.page_size
        going = [
            (sequence, table)
            for work, (sequence, table) in zip(works, rows, strict=True)
            if table and sequence.num_left > 1 and work.stop < len(table.kv_pages) * size
        ]
        if not going:
            return None
        if going != self._placed:
            self.batch.feed(latest_ids(parts, [sequence for sequence, _ in going]))
            self._drawing = None
            self._place([(sequence, FED) for sequence, _ in going])
        else:
            self._extend([table for _, table in going])
        if self._drawing is None:
            settings = [
                Row(s.request.sampling, s.request.seed, len(s.new_tokens) + 1) for s, _ in going
            ]
            self._drawing = drawing_of(settings, self.model.config.vocab_size, self.device)
            self._bounds = [s.constraint for s, _ in going if s.constraint is not None]
        else:
            self._drawing.advance()
        logits_NW = self.batch.run(len(going))
        ahead = [sequence for sequence, _ in going]
        drawn = draw_rows(logits_NW, self._drawing, ahead, version, {}, impl=self._draw_impl)
        self.batch.feed(drawn.ids)
        return drawn

    def _place(self, rows: Series[tuple[Sequence, int]]) -> None:
        """Sequences and the tokens to compute as the batch's rows."""
        assert self.batch is not None
        places = []
        for sequence, token in rows:
            assert sequence.table is not None
            position = len(sequence.tokens) if token == FED else sequence.num_computed
            places.append(Place(sequence.table, position, token))
        self.batch.place(places)
        self._placed = [(s, p.table) for (s, _), p in zip(rows, places, strict=True)]
        self._num_pages = [len(place.table.kv_pages) for place in places]

    def _extend(self, tables: list[Table]) -> None:
        """Show the batch the pages that its rows were given since."""
        assert self.batch is not None
        counts = [len(table.kv_pages) for table in tables]
        if counts == self._num_pages:
            return
        self.batch.extend(
            [
                (row, number, tables[row].kv_pages[number])
                for row, (old, new) in enumerate(zip(self._num_pages, counts, strict=True))
                for number in range(old, new)
            ]
        )
        self._num_pages = counts

    def _has_pack(self, works: Series[Work]) -> bool:
        """Whether the fixed rows have room for all of it; they have none for pictures."""
        if self.packs is None:
            return False
        spans = _spans(works)
        if any(map(self._has_picture, works)):
            reason = "pictures"
        elif self.packs.shape_of(spans) is not None:
            return True
        else:
            reason = self.packs.lacking(spans)
        self.missed_steps[reason] += 1
        self.missed_tokens[reason] += sum(work.end - work.start for work in works)
        return False

    def _has_picture(self, work: Work) -> bool:
        """Whether a row of a picture is among its new tokens."""
        sequence, vision = work.sequence, self.model.config.vision
        if vision is None or sequence.request.image_features is None:
            return False
        return vision.placeholder_token_id in sequence.tokens[work.start : work.stop]

    def _prefill(self, works: Series[Work]) -> Tensor:
        """Hidden states `[N, D]` of the rows to draw, from fixed rows."""
        assert self.packs is not None
        hidden_TD, last = self.packs.run(_spans(works), lambda p: _tokens(works[p.number], p))
        rows = [row for work, row in zip(works, last, strict=True) if work.is_sampled]
        return hidden_TD[sent([np.array(rows, np.int64)], self.device)[0]]

    def _forward(self, works: Series[Work], cache: PagedCache) -> tuple[Tensor, Tensor]:
        """Hidden states `[N, D]` of the rows to draw, and all mixtures `[T, D]`."""
        pieces = [piece for part in cache.pieces for piece in part]
        ids, ends = list[int](), [0] * len(works)
        for piece in pieces:
            ids += _tokens(works[piece.number], piece)
            ends[piece.number] = len(ids)
        last = [
            row
            for work, end in zip(works, ends, strict=True)
            if work.is_sampled
            for row in range(end - 1 - len(work.draft), end)
        ]
        bounds = list(accumulate((work.end - work.start for work in works), initial=0))
        tokens_T, rows = sent([np.array(x, np.int64) for x in (ids, last)], self.device)
        (cu_seqlens,) = sent([np.array(bounds, np.int32)], self.device)
        output = self.model(tokens_T, cu_seqlens, cache, self._features(works, pieces))
        return output.hidden[rows], cache.by_sequence(output.mixture)

    def _features(self, works: Series[Work], pieces: Series[Piece]) -> Tensor | None:
        """Image rows of the placeholders among the new tokens; None if no prompt has pictures."""
        vision = self.model.config.vision
        if vision is None or all(w.sequence.request.image_features is None for w in works):
            return None
        pad = vision.placeholder_token_id
        rows = []
        for piece in pieces:
            work = works[piece.number]
            features = work.sequence.request.image_features
            used = work.sequence.tokens[: piece.start].count(pad)
            for _ in range(_tokens(work, piece).count(pad)):
                # one that the model wrote itself, or without pictures, is an ordinary token
                if features is not None and used < len(features):
                    rows.append(features[used].to(self.device))
                else:
                    rows.append(self.model.embed_tokens.weight[pad])
                used += 1
        return torch.stack(rows) if rows else None

    def _draw(self, logits_NW: Tensor, works: Series[Work], version: str) -> DrawnTokens:
        """What follows each work and each of its drafted tokens."""
        rows = [row_of(w.sequence, w.draft[:j]) for w in works for j in range(len(w.draft) + 1)]
        sequences = [w.sequence for w in works for _ in range(len(w.draft) + 1)]
        drawing = drawing_of(rows, logits_NW.shape[-1], self.device)
        drafts = {work.sequence: work.draft for work in works}
        return draw_rows(logits_NW, drawing, sequences, version, drafts, impl=self._draw_impl)


def _is_picture(work: Work) -> bool:
    """Whether its token may be a picture's, whose row the batch does not have."""
    sequence = work.sequence
    return sequence.request.image_features is not None and not sequence.new_tokens


def _needs_host(work: Work) -> bool:
    """Whether the next token depends on what the host makes of the last."""
    sequence = work.sequence
    is_free = sequence.constraint is None or sequence.constraint.is_free(2)
    return not (is_free and sequence.request.penalties.are_off)


def _spans(works: Series[Work]) -> list[Span]:
    spans = []
    for work in works:
        assert work.sequence.table is not None
        spans.append(Span(work.sequence.table, work.start, work.end))
    return spans


def _tokens(work: Work, piece: Piece) -> list[int]:
    """The new tokens of a piece of a work, drafted ones among them."""
    tokens = work.sequence.tokens[piece.start : min(piece.stop, work.stop)]
    return [*tokens, *work.draft] if piece.stop == work.end else tokens


def _captured(work: Work, stop: int) -> int:
    """Where the state of a work that ends at `stop` is to be copied away, or else its end."""
    assert work.sequence.table is not None
    captures = work.sequence.table.captures
    return captures[0][0] if captures else stop
