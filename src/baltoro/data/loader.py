"""Packed batches as a pure function of configuration, data and step number.

Nothing is drawn and nothing is consumed: batch s is computed from s, so the cursor that a
checkpoint saves is one integer, and a continued run sees the bytes of an uninterrupted one. Long
documents are cut at the edges of slots; what does not fit in this slot begins the next of its
domain. Documents with pictures stay whole, so a slot may be up to one of them shorter or longer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from baltoro.config import digest
from baltoro.data.dataset import Dataset
from baltoro.data.mixture import DomainStream, Piece, normalised, slot_domains
from baltoro.data.pack import PackedBatch, pack
from baltoro.data.row import Row
from baltoro.text.images import ImageProcessor


@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig:
    """A stretch of steps with one context length and one mixture."""

    first_step: int
    seq_len: int  # positions of a slot, the longest sequence
    mixture: dict[str, float]  # domain to share; `mixture.natural` makes one

    def __post_init__(self) -> None:
        if self.first_step < 0:
            raise ValueError(f"stage first_step={self.first_step}: must be 0 or more")
        if self.seq_len < 2:
            raise ValueError(f"stage seq_len={self.seq_len}: must be at least 2")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig:
    """What, in which order and how much at once."""

    seed: int
    tokens_per_step: int  # over all ranks and microbatches
    stages: tuple[StageConfig, ...]  # the first begins at step 0

    def __post_init__(self) -> None:
        first_steps = [stage.first_step for stage in self.stages]
        if not first_steps or first_steps[0] != 0 or first_steps != sorted(set(first_steps)):
            raise ValueError(f"stages with first_step {first_steps}: must rise from 0")
        for stage in self.stages:
            if self.tokens_per_step < 1 or self.tokens_per_step % stage.seq_len:
                raise ValueError(
                    f"tokens_per_step={self.tokens_per_step}: must be a multiple of each stage's "
                    f"seq_len, among them {stage.seq_len}"
                )


class LoaderState(TypedDict):
    """The saved cursor."""

    version: int
    step: int  # the next one
    digest: str  # of configuration and data


class Loader:
    """Iterate for batches of `step`, `step + 1`, …, or ask for any by `batch`."""

    def __init__(self, dataset: Dataset, config: LoaderConfig, images: ImageProcessor) -> None:
        """`images` makes the patches; it must be the model's, as its grid made the placeholders.

        Raises `ValueError` for a mixture that the data cannot serve, or a stage too short for the
        documents with pictures in its mixture.
        """
        self.config = config
        self.step = 0
        self._dataset = dataset
        self._images = images
        self._shares = [normalised(stage.mixture, dataset.domains) for stage in config.stages]
        self._streams = [
            DomainStream(dataset, domain, config.seed) for domain in range(len(dataset.domains))
        ]
        for stage, shares in zip(config.stages, self._shares, strict=True):
            self._check(stage, shares)
        self._known = (0, np.zeros(len(self._streams), dtype=np.int64))  # step, its offsets

    def __iter__(self) -> Iterator[PackedBatch]:
        while True:
            yield next(self)

    def __next__(self) -> PackedBatch:
        batch = self.batch(self.step)
        self.step += 1
        return batch

    def batch(self, step: int, part: int = 0, num_parts: int = 1) -> PackedBatch:
        """The batch of a step, or one of its equal parts: a rank's, a microbatch's.

        Its column `domain` (int64) is the place in `Dataset.domains` of each target.

        Raises `ValueError` if the slots of the step do not divide into `num_parts`.
        """
        stage = self._stage(step)
        seq_len = self.config.stages[stage].seq_len
        num_slots = self.config.tokens_per_step // seq_len
        if num_parts < 1 or num_slots % num_parts or not 0 <= part < num_parts:
            raise ValueError(
                f"part {part} of num_parts={num_parts}: a step has {num_slots} slots "
                f"(tokens_per_step={self.config.tokens_per_step}, seq_len={seq_len}), which must "
                "divide into the parts"
            )
        offsets = self._offsets(step).copy()
        slots_per_part = num_slots // num_parts
        rows: list[Row] = []
        for slot, domain in enumerate(self._slot_domains(stage, step, num_slots)):
            start = int(offsets[domain])
            offsets[domain] += seq_len
            if slot // slots_per_part == part:
                pieces = self._streams[domain].pieces(start, start + seq_len)
                rows += [row(self._dataset, piece, self._images) for piece in pieces]
        return pack(rows, self._dataset.tokenizer.media_pad_id)

    def state_dict(self) -> LoaderState:
        """The cursor."""
        return {"version": 1, "step": self.step, "digest": self._digest()}

    def load_state_dict(self, state: LoaderState) -> None:
        """Continue from a cursor. Raises `ValueError` if it belongs to other data or settings."""
        if state["version"] != 1:
            raise ValueError(f"data cursor version={state['version']}: this program reads 1")
        if state["digest"] != self._digest():
            raise ValueError(
                "data cursor: was saved with other data, stages, seed or tokens_per_step; continue "
                "with the same ones, or start a new run"
            )
        self.step = state["step"]

    def _digest(self) -> str:
        return digest(self.config) + digest(self._dataset.manifest) + self._dataset.split

    def _check(self, stage: StageConfig, shares: Sequence[float]) -> None:
        for name, share, stream in zip(self._dataset.domains, shares, self._streams, strict=True):
            if share and not stream.epoch_size:
                raise ValueError(
                    f"mixture.{name}={share:.3g}: the data has no {self._dataset.split} documents "
                    "of this domain; leave it out"
                )
            if share and stream.longest_with_pictures > stage.seq_len:
                raise ValueError(
                    f"stage seq_len={stage.seq_len}: domain {name!r} has a document with pictures "
                    f"of {stream.longest_with_pictures} positions, which cannot be cut; raise "
                    "seq_len or leave the domain out"
                )

    def _stage(self, step: int) -> int:
        if step < 0:
            raise ValueError(f"step={step}: must be 0 or more")
        return sum(stage.first_step <= step for stage in self.config.stages) - 1

    def _slot_domains(
        self, stage: int, step: int, num_slots: int, num_steps: int = 1
    ) -> np.ndarray:
        first = (step - self.config.stages[stage].first_step) * num_slots
        seed = self.config.seed + stage
        return slot_domains(self._shares[stage], seed, first, num_slots * num_steps)

    def _offsets(self, step: int) -> np.ndarray:
        """Positions of each domain's stream that lie before a step."""
        known_step, offsets = self._known
        if step < known_step:
            known_step, offsets = 0, np.zeros_like(offsets)
        while known_step < step:
            stage = self._stage(known_step)
            later = self.config.stages[stage + 1 :]
            end = min(step, later[0].first_step) if later else step
            seq_len = self.config.stages[stage].seq_len
            num_slots = self.config.tokens_per_step // seq_len
            domains = self._slot_domains(stage, known_step, num_slots, end - known_step)
            offsets = offsets + np.bincount(domains, minlength=len(offsets)) * seq_len
            known_step = end
        self._known = (known_step, offsets)
        return offsets


def row(dataset: Dataset, piece: Piece, images: ImageProcessor) -> Row:
    """A piece of a document as a row, its pictures as patches."""
    tokens = dataset.tokens(piece.document, piece.start, piece.stop + 1)
    columns = {"domain": np.full(len(tokens), dataset.domain[piece.document], dtype=np.int64)}
    pictures = dataset.pictures(piece.document)
    if not pictures:
        return Row(tokens, columns)
    return Row(tokens, columns, *images.process(pictures))


def epoch(
    dataset: Dataset, seq_len: int, tokens_per_batch: int, images: ImageProcessor
) -> Iterator[PackedBatch]:
    """Every document once, in order, for evaluation; long ones cut at `seq_len`.

    A batch closes when the next piece would pass `tokens_per_batch`. Documents with pictures are
    whole, whatever their length. Batches have the column `domain`, as those of `Loader.batch`.
    """
    rows: list[Row] = []
    num_positions = 0
    placeholder_id = dataset.tokenizer.media_pad_id
    for document in range(dataset.num_documents):
        length = int(dataset.num_tokens[document]) - 1
        size = length if dataset.num_pictures[document] else seq_len
        for start in range(0, length, size):
            piece = Piece(document, start, min(start + size, length))
            if rows and num_positions + piece.stop - piece.start > tokens_per_batch:
                yield pack(rows, placeholder_id)
                rows, num_positions = [], 0
            rows.append(row(dataset, piece, images))
            num_positions += piece.stop - piece.start
    if rows:
        yield pack(rows, placeholder_id)
