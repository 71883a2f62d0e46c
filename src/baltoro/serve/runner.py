"""One step on the device: move pages, run the model, draw tokens, keep states.

Those that decode and those that prefill go in one call each, since the two execution forms are two
functions of the model. `N` rows of logits are drawn: one for each sequence whose last token is
among those computed, and one for each drafted token. The row behind a draft is drawn as if the
draft were right, from the noise of its own place in the reply; so what is drawn as long as the
drafts are right is, token for token, what is drawn without them.
"""

from collections.abc import Sequence as Series
from operator import and_
from typing import NamedTuple

import torch
from torch import Tensor

from baltoro.model.model import Model
from baltoro.serve.pool import PagedCache, PagePool, Span, VerifyCache
from baltoro.serve.request import Constraint, NewToken
from baltoro.serve.sampler import row_of, sample_rows
from baltoro.serve.scheduler import StepPlan, Work


class StepOutput(NamedTuple):
    """What a step computed; its states are in the pages once `Runner.keep` was called."""

    # for each work what was drawn behind its last token and behind each drafted one, nothing if
    # none is due; None is a fault of the weights, whose logits are not finite, or of a grammar
    # that lets nothing follow
    drawn: list[list[NewToken | None]]
    mixture: Tensor  # [T, D] of all new tokens, for the draft
    verify: VerifyCache | None  # of the decodes, if there are drafts


class Runner:
    """A model and the pages that hold its sequences' state."""

    def __init__(self, model: Model, pool: PagePool) -> None:
        self.model = model
        self.pool = pool
        self.device = model.lm_head.weight.device

    @torch.inference_mode()
    def run(self, plan: StepPlan, weights_version: str) -> StepOutput:
        """Compute all tokens of a plan and draw those that follow."""
        self.pool.prepare(plan.ops)
        hidden, mixtures = [], []
        verify = None
        if plan.decodes:
            spans = _spans(plan.decodes)
            if any(work.draft for work in plan.decodes):
                verify = VerifyCache(self.pool, spans)
            cache = verify or PagedCache(self.pool, "decode", spans)
            hidden_ND, mixture_TD = self._forward(plan.decodes, cache)
            hidden.append(hidden_ND)
            mixtures.append(mixture_TD)
        if plan.prefills:
            cache = PagedCache(self.pool, "prefill", _spans(plan.prefills))
            hidden_ND, mixture_TD = self._forward(plan.prefills, cache)
            hidden.append(hidden_ND)
            mixtures.append(mixture_TD)
        drawn = self._draw(torch.cat(hidden), plan.works, weights_version)
        return StepOutput(drawn, torch.cat(mixtures), verify)

    @torch.inference_mode()
    def keep(self, plan: StepPlan, output: StepOutput, stops: Series[int]) -> None:
        """Have states that take in each work's tokens up to `stops`, and those to be kept apart."""
        if output.verify is None:
            self.pool.capture(plan.ops)
            return
        pairs = list(zip(plan.decodes, stops[: len(plan.decodes)], strict=True))
        counts = [stop - work.start for work, stop in pairs]
        captured = [_captured(work, stop) - work.start for work, stop in pairs]
        output.verify.replay([0] * len(pairs), captured)
        self.pool.capture(plan.ops)
        output.verify.replay(captured, counts)

    def _forward(self, works: Series[Work], cache: PagedCache) -> tuple[Tensor, Tensor]:
        """Hidden states `[N, D]` of the rows to draw, and all mixtures `[T, D]`."""
        ids, bounds, last = list[int](), [0], list[int]()
        for work in works:
            ids += work.sequence.tokens[work.start : work.stop]
            ids += work.draft
            bounds.append(len(ids))
            if work.is_sampled:
                last += range(len(ids) - 1 - len(work.draft), len(ids))
        tokens_T = torch.tensor(ids, device=self.device)
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=self.device)
        output = self.model(tokens_T, cu_seqlens, cache, self._features(works))
        rows = torch.tensor(last, dtype=torch.int64, device=self.device)
        return output.hidden[rows], output.mixture

    def _features(self, works: Series[Work]) -> Tensor | None:
        """Image rows of the placeholders among the new tokens; None if no prompt has pictures."""
        vision = self.model.config.vision
        if vision is None or all(w.sequence.request.image_features is None for w in works):
            return None
        pad = vision.placeholder_token_id
        rows = []
        for work in works:
            request, tokens = work.sequence.request, work.sequence.tokens
            features = request.image_features
            used = tokens[: work.start].count(pad)
            new = (*tokens[work.start : work.stop], *work.draft)
            for _ in range(new.count(pad)):
                # one that the model wrote itself, or without pictures, is an ordinary token
                if features is not None and used < len(features):
                    rows.append(features[used].to(self.device))
                else:
                    rows.append(self.model.embed_tokens.weight[pad])
                used += 1
        return torch.stack(rows) if rows else None

    def _draw(
        self, hidden_ND: Tensor, works: Series[Work], weights_version: str
    ) -> list[list[NewToken | None]]:
        places = [(w, j) for w in works if w.is_sampled for j in range(len(w.draft) + 1)]
        if not places:
            return [[] for _ in works]
        logits_NW = self.model.lm_head(hidden_ND).float()
        is_sound = torch.isfinite(logits_NW).all(-1).tolist()
        for n, (work, j) in enumerate(places):
            if j == 0 and work.sequence.constraint is not None:
                stop = n + len(work.draft) + 1
                may_follow = _constrain(work.sequence.constraint, work.draft, logits_NW[n:stop])
                is_sound[n:stop] = map(and_, is_sound[n:stop], may_follow)
        rows = [row_of(work.sequence, work.draft[:j]) for work, j in places]
        ids_N, logprobs_NW = sample_rows(logits_NW, rows)
        ids = ids_N.tolist()
        logprobs = logprobs_NW.gather(-1, ids_N[:, None]).squeeze(-1).tolist()
        drawn: dict[Work, list[NewToken | None]] = {work: [] for work in works}
        for n, (work, _) in enumerate(places):
            count = min(work.sequence.request.num_logprobs, logprobs_NW.shape[-1])
            top: tuple[tuple[int, float], ...] = ()
            if count and is_sound[n]:
                best = logprobs_NW[n].topk(count)
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                top = tuple((i, value) for i, value in pairs if value > float("-inf"))
            token = NewToken(ids[n], logprobs[n], weights_version, top)
            drawn[work].append(token if is_sound[n] else None)
        return list(drawn.values())


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


def _spans(works: Series[Work]) -> list[Span]:
    spans = []
    for work in works:
        assert work.sequence.table is not None
        spans.append(Span(work.sequence.table, work.start, work.end))
    return spans


def _captured(work: Work, stop: int) -> int:
    """Where the state of a work that ends at `stop` is to be copied away, or else its end."""
    assert work.sequence.table is not None
    capture = work.sequence.table.capture
    return stop if capture is None else capture[0]
