"""Bits per byte of a model and of a bigram, on the same positions."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from model.tiny import tiny_k3
from train.batch import tiny_batch

from baltoro.data.pack import pack
from baltoro.data.row import Row
from baltoro.model.model import Model
from baltoro.train.bigram import Bigram
from baltoro.train.evaluate import evaluate

DOMAINS = ["even", "odd", "absent"]


def score(model, batches, lengths):
    return evaluate(model, batches, bytes_per_token=lengths, domains=DOMAINS)


def test_bits_per_byte_are_the_loss_over_the_bytes_of_the_targets():
    model, batch = Model(tiny_k3()), tiny_batch()
    lengths = torch.arange(64) % 3 + 1
    found = score(model, [batch], lengths)
    logits = model.lm_head(model(batch.tokens, batch.cu_seqlens).hidden)
    losses = torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none").detach()
    in_bits = losses / math.log(2)
    num_bytes = lengths[batch.targets]
    assert found.bits_per_byte == pytest.approx(float(in_bits.sum() / num_bytes.sum()), rel=1e-5)
    odd = batch.columns["domain"] == 1
    expected = float(in_bits[odd].sum() / num_bytes[odd].sum())
    assert found.by_domain["odd"] == pytest.approx(expected, rel=1e-5)
    assert found.by_domain.keys() == {"even", "odd"}


def test_targets_without_bytes_or_weight_count_in_neither_sum():
    model, batch = Model(tiny_k3()), tiny_batch()
    lengths = torch.ones(64, dtype=torch.int64)
    whole = score(model, [batch], lengths)
    dropped = int(batch.targets[4])
    lengths[dropped] = 0
    weights = batch.weights.clone()
    weights[batch.targets == dropped] = 0.0
    by_length = score(model, [batch], lengths)
    by_weight = score(
        model, [dataclasses.replace(batch, weights=weights)], torch.ones(64, dtype=torch.int64)
    )
    assert by_length == by_weight != whole


def test_evaluation_leaves_the_mode_and_the_biases_alone():
    model = Model(tiny_k3()).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    score(model, [tiny_batch()], torch.ones(64, dtype=torch.int64))
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_no_text_at_all_is_nan_and_not_zero():
    found = score(Model(tiny_k3()), [tiny_batch()], torch.zeros(64, dtype=torch.int64))
    assert math.isnan(found.bits_per_byte) and found.by_domain == {}


def row_of(tokens):
    tokens = np.array(tokens)
    return Row(tokens=tokens, columns={"domain": np.zeros(len(tokens), dtype=np.int64)})


def bigram_bits(train, held_out, vocab_size=4):
    bigram = Bigram(vocab_size)
    for tokens in train:
        bigram.add(pack([row_of(tokens)], None))
    found = bigram.score(
        [pack([row_of(held_out)], None)],
        bytes_per_token=torch.ones(vocab_size, dtype=torch.int64),
        domains=["all"],
    )
    return found.bits_per_byte


def test_the_bigram_interpolates_by_witten_and_bell():
    # pairs 0-1 twice, 0-2 once, 1-0 once; followers 1, 2, 1, 0
    unigram = [(1 + 1) / 8, (2 + 1) / 8, (1 + 1) / 8, (0 + 1) / 8]
    expected = -math.log2((2 + 2 * unigram[1]) / (3 + 2))
    assert bigram_bits([[0, 1, 0, 2], [0, 1]], [0, 1]) == pytest.approx(expected)


def test_a_token_never_seen_falls_to_the_unigram():
    assert bigram_bits([[0, 1, 0, 2], [0, 1]], [3, 1]) == pytest.approx(-math.log2(3 / 8))


def test_an_empty_bigram_is_uniform():
    assert bigram_bits([], [0, 1, 2]) == pytest.approx(2.0)


def test_its_probabilities_sum_to_one():
    bits = [bigram_bits([[0, 1, 0, 2], [0, 1]], [0, follower]) for follower in range(4)]
    assert sum(2**-value for value in bits) == pytest.approx(1.0)


def test_counts_are_the_same_however_they_are_merged(monkeypatch):
    pairs = [[0, 1, 2, 0, 1], [2, 2, 1], [0, 1, 1]]
    expected = bigram_bits(pairs, [0, 1, 2, 1])
    bigram = Bigram(4)
    for tokens in pairs:
        bigram.add(pack([row_of(tokens)], None))
        bigram._merge()
    found = bigram.score(
        [pack([row_of([0, 1, 2, 1])], None)],
        bytes_per_token=torch.ones(4, dtype=torch.int64),
        domains=["all"],
    )
    assert found.bits_per_byte == pytest.approx(expected)
