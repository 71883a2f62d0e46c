"""Batches as a function of the step: equal after a restart, over parts, in their shares."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from baltoro.data.dataset import Dataset
from baltoro.data.loader import Loader, LoaderConfig, StageConfig, epoch
from baltoro.data.mixture import DomainStream, natural, normalised, slot_domains
from baltoro.data.pack import PackedBatch
from baltoro.text.images import ImageProcessor

MIXTURE = {"prose": 0.5, "maths": 0.2, "pictures": 0.3}
CONFIG = LoaderConfig(
    seed=5,
    tokens_per_step=1024,
    stages=(
        StageConfig(first_step=0, seq_len=256, mixture=MIXTURE),
        StageConfig(first_step=7, seq_len=512, mixture={"prose": 0.5, "long": 0.5}),
    ),
)


def loader(dataset: Dataset, config: LoaderConfig = CONFIG) -> Loader:
    return Loader(dataset, config, ImageProcessor())


def tensors(batch: PackedBatch) -> list[torch.Tensor]:
    fields = (batch.tokens, batch.targets, batch.weights, batch.cu_seqlens, batch.pixel_values)
    return [
        tensor
        for tensor in (*fields, batch.grid_thws, *batch.columns.values())
        if tensor is not None
    ]


def assert_equal(one: PackedBatch, other: PackedBatch) -> None:
    assert len(tensors(one)) == len(tensors(other))
    for a, b in zip(tensors(one), tensors(other), strict=True):
        assert torch.equal(a, b)


def test_a_continued_run_sees_the_bytes_of_an_uninterrupted_one(dataset, built):
    straight = loader(dataset)
    expected = [next(straight) for _ in range(12)]
    first = loader(dataset)
    for _ in range(5):
        next(first)
    continued = loader(Dataset(built, "train", vocab_size=300))
    continued.load_state_dict(first.state_dict())
    for step in range(5, 12):
        assert_equal(next(continued), expected[step])


def test_a_batch_does_not_depend_on_those_asked_for_before(dataset):
    one = loader(dataset)
    expected = one.batch(9)
    assert_equal(one.batch(2), loader(dataset).batch(2))
    assert_equal(one.batch(9), expected)
    assert_equal(loader(dataset).batch(9), expected)


def test_steps_differ_and_seeds_differ(dataset):
    batch = loader(dataset).batch(1)
    assert not torch.equal(batch.tokens[:200], loader(dataset).batch(2).tokens[:200])
    other = loader(dataset, replace(CONFIG, seed=6)).batch(1)
    assert not torch.equal(batch.tokens[:200], other.tokens[:200])


def test_parts_of_a_step_make_up_the_step(dataset):
    one = loader(dataset)
    whole = one.batch(3)
    parts = [one.batch(3, part, 4) for part in range(4)]
    assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)


def test_parts_that_do_not_divide_the_slots_are_refused(dataset):
    with pytest.raises(ValueError, match="a step has 4 slots"):
        loader(dataset).batch(0, 0, 3)


def test_every_position_of_an_epoch_is_seen_once(dataset):
    domain = dataset.domains.index("prose")
    stream = DomainStream(dataset, domain, seed=1)
    seen = {
        int(number): np.zeros(int(dataset.num_tokens[number]) - 1, dtype=int)
        for number in np.flatnonzero(dataset.domain == domain)
    }
    edges = [*range(0, stream.epoch_size, 100), stream.epoch_size]
    for start, stop in pairwise(edges):
        pieces = stream.pieces(start, stop)
        assert sum(piece.stop - piece.start for piece in pieces) == stop - start
        for piece in pieces:
            seen[piece.document][piece.start : piece.stop] += 1
    assert all((counts == 1).all() for counts in seen.values())


def test_epochs_have_orders_of_their_own(dataset):
    stream = DomainStream(dataset, dataset.domains.index("prose"), seed=1)
    size = stream.epoch_size
    first = [piece.document for piece in stream.pieces(0, size)]
    second = [piece.document for piece in stream.pieces(size, 2 * size)]
    assert sorted(first) == sorted(second) and first != second


def test_documents_with_pictures_are_never_cut(dataset):
    domain = dataset.domains.index("pictures")
    stream = DomainStream(dataset, domain, seed=1)
    pieces = [
        piece
        for start in range(0, 3 * stream.epoch_size, 256)
        for piece in stream.pieces(start, start + 256)
    ]
    for piece in pieces:
        assert (piece.start, piece.stop) == (0, dataset.num_tokens[piece.document] - 1)
    counts = np.bincount([piece.document for piece in pieces])
    assert set(counts[dataset.domain[: len(counts)] == domain]) <= {3, 4}


def test_placeholders_and_patches_agree(dataset):
    one = loader(dataset)
    pad = dataset.tokenizer.media_pad_id
    num_pictures = 0
    for step in range(7):
        batch = one.batch(step)
        num_pads = int((batch.tokens == pad).sum())
        num_patches = 0 if batch.pixel_values is None else len(batch.pixel_values)
        assert num_patches == 4 * num_pads
        num_pictures += 0 if batch.grid_thws is None else len(batch.grid_thws)
    assert num_pictures > 5


def test_no_sequence_is_longer_than_its_stage(dataset):
    one = loader(dataset)
    for step, seq_len in ((2, 256), (8, 512)):
        assert one.batch(step).cu_seqlens.diff().max() <= seq_len


def test_the_domain_column_follows_the_mixture(dataset):
    one = loader(dataset)
    domains = torch.cat([one.batch(step).columns["domain"] for step in range(7)])
    shares = domains.bincount(minlength=len(dataset.domains)) / len(domains)
    expected = torch.tensor(normalised(MIXTURE, dataset.domains))
    assert (shares - expected).abs().max() < 0.08


def test_slots_are_shared_out_evenly_over_any_stretch():
    shares = [0.5, 0.0, 0.3, 0.2]
    domains = slot_domains(shares, seed=2, first=12345, count=1000)
    counts = np.bincount(domains, minlength=4)
    assert np.abs(counts - 1000 * np.array(shares)).max() <= 3


def test_a_cursor_of_other_settings_is_refused(dataset):
    state = loader(dataset).state_dict()
    with pytest.raises(ValueError, match="saved with other data, stages, seed"):
        loader(dataset, replace(CONFIG, seed=6)).load_state_dict(state)


def test_a_cursor_of_another_split_is_refused(dataset, built):
    state = loader(dataset).state_dict()
    held_out = Dataset(built, "held_out", vocab_size=300)
    with pytest.raises(ValueError, match="saved with other data"):
        loader(held_out).load_state_dict(state)


def test_evaluation_reads_each_document_once(built):
    held_out = Dataset(built, "held_out", vocab_size=300)
    batches = list(epoch(held_out, 128, 512, ImageProcessor()))
    assert sum(len(batch.tokens) for batch in batches) == int((held_out.num_tokens - 1).sum())
    assert len(batches) > 1
    targets = torch.cat([batch.targets for batch in batches])
    assert int((targets == held_out.tokenizer.eos_id).sum()) == held_out.num_documents


def test_an_unknown_domain_is_refused(dataset):
    stage = StageConfig(first_step=0, seq_len=256, mixture={"prosa": 1.0})
    with pytest.raises(ValueError, match=r"mixture\.prosa.*did you mean 'prose'"):
        loader(dataset, replace(CONFIG, stages=(stage,)))


def test_a_stage_too_short_for_its_pictures_is_refused(dataset):
    stage = StageConfig(first_step=0, seq_len=16, mixture={"pictures": 1.0})
    with pytest.raises(ValueError, match=r"seq_len=16: domain 'pictures'.*cannot be cut"):
        loader(dataset, replace(CONFIG, stages=(stage,)))


@pytest.mark.parametrize("first_steps", [(), (1,), (0, 5, 5), (0, 9, 4)])
def test_stages_must_rise_from_step_0(first_steps):
    stages = tuple(StageConfig(first_step=s, seq_len=2, mixture={}) for s in first_steps)
    with pytest.raises(ValueError, match="must rise from 0"):
        LoaderConfig(seed=0, tokens_per_step=8, stages=stages)


def test_a_step_must_consist_of_whole_slots():
    stage = StageConfig(first_step=0, seq_len=300, mixture=MIXTURE)
    with pytest.raises(ValueError, match="tokens_per_step=1024: must be a multiple"):
        LoaderConfig(seed=0, tokens_per_step=1024, stages=(stage,))


def test_the_natural_mixture_is_that_of_the_tokens(dataset):
    shares = natural(dataset)
    prose = dataset.num_tokens[dataset.domain == dataset.domains.index("prose")].sum()
    assert shares["prose"] == pytest.approx(prose / dataset.num_tokens.sum())
    assert len({round(share, 9) for share in natural(dataset, 0.0).values()}) == 1
