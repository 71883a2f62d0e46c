"""One step on the device: move pages, run the model, draw tokens, keep states.

Those that decode and those that prefill go in one call each, since the two execution forms are two
functions of the model. `N` rows of logits are drawn, one for each sequence whose last token is
among those computed.
"""

from collections.abc import Sequence as Series
from typing import Literal

import torch
from torch import Tensor

from baltoro.model.model import Model
from baltoro.serve.pool import PagedCache, PagePool, Span
from baltoro.serve.request import NewToken, Sequence
from baltoro.serve.sampler import Row, sample_rows
from baltoro.serve.scheduler import StepPlan, Work


class Runner:
    """A model and the pages that hold its sequences' state."""

    def __init__(self, model: Model, pool: PagePool) -> None:
        self.model = model
        self.pool = pool
        self.device = model.lm_head.weight.device

    @torch.inference_mode()
    def run(self, plan: StepPlan, weights_version: str) -> list[NewToken | None]:
        """For each of `plan.works` the token drawn; None if it is not due, or has no probability.

        The second is a fault of the weights, whose logits are not finite, or of a grammar that
        lets nothing follow.
        """
        self.pool.prepare(plan.ops)
        hidden = []
        if plan.decodes:
            hidden.append(self._forward(plan.decodes, "decode"))
        if plan.prefills:
            hidden.append(self._forward(plan.prefills, "prefill"))
        self.pool.capture(plan.ops)
        sampled = [work.sequence for work in plan.works if work.is_sampled]
        if not sampled:
            return [None] * len(plan.works)
        drawn = iter(self._draw(torch.cat(hidden), sampled, weights_version))
        return [next(drawn) if work.is_sampled else None for work in plan.works]

    def _forward(self, works: Series[Work], form: Literal["prefill", "decode"]) -> Tensor:
        """Hidden states `[N, D]` of the works that are sampled."""
        spans, ids, bounds, last = [], [], [0], []
        for work in works:
            assert work.sequence.table is not None
            spans.append(Span(work.sequence.table, work.start, work.stop))
            ids += work.sequence.tokens[work.start : work.stop]
            bounds.append(len(ids))
            if work.is_sampled:
                last.append(len(ids) - 1)
        tokens_T = torch.tensor(ids, device=self.device)
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=self.device)
        cache = PagedCache(self.pool, form, spans)
        output = self.model(tokens_T, cu_seqlens, cache, self._features(works))
        return output.hidden[torch.tensor(last, dtype=torch.int64, device=self.device)]

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
            for _ in range(tokens[work.start : work.stop].count(pad)):
                # one that the model wrote itself, or without pictures, is an ordinary token
                if features is not None and used < len(features):
                    rows.append(features[used].to(self.device))
                else:
                    rows.append(self.model.embed_tokens.weight[pad])
                used += 1
        return torch.stack(rows) if rows else None

    def _draw(
        self, hidden_ND: Tensor, sequences: Series[Sequence], weights_version: str
    ) -> list[NewToken | None]:
        logits_NW = self.model.lm_head(hidden_ND).float()
        is_sound = torch.isfinite(logits_NW).all(-1).tolist()
        for n, sequence in enumerate(sequences):
            if sequence.constraint is not None:
                is_sound[n] &= sequence.constraint.mask(logits_NW[n])
        rows = [
            Row(
                sequence.request.sampling,
                sequence.request.seed,
                len(sequence.new_tokens),
                sequence.request.penalties,
                sequence.request.prompt_ids,
                [token.id for token in sequence.new_tokens],
            )
            for sequence in sequences
        ]
        ids_N, logprobs_NW = sample_rows(logits_NW, rows)
        ids = ids_N.tolist()
        logprobs = logprobs_NW.gather(-1, ids_N[:, None]).squeeze(-1).tolist()
        drawn: list[NewToken | None] = []
        for n, sequence in enumerate(sequences):
            count = min(sequence.request.num_logprobs, logprobs_NW.shape[-1])
            top: tuple[tuple[int, float], ...] = ()
            if count and is_sound[n]:
                best = logprobs_NW[n].topk(count)
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                top = tuple((i, value) for i, value in pairs if value > float("-inf"))
            token = NewToken(ids[n], logprobs[n], weights_version, top)
            drawn.append(token if is_sound[n] else None)
        return drawn
