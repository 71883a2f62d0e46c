"""Experts divided over four ranks against one process."""

from types import SimpleNamespace

import pytest
import torch
from model.tiny import tiny_k3
from parallel.divided import (
    CASES,
    COUNTS,
    NUM_RANKS,
    cut,
    model_of_experts,
    run_model,
    whole,
    whole_penalty,
    work,
)
from parallel.ranks import run_ranks

from baltoro.model.model import Model
from baltoro.parallel.experts import divide_experts


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of four ranks found; one that waits for another fails after a minute."""
    return run_ranks(work, tmp_path_factory.mktemp("ranks"), NUM_RANKS)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_tokens_of_every_rank_find_their_experts_and_gradients_their_tokens(ranks, case):
    """Also where a rank has no token, and where it is sent none."""
    counts, num_wanted = CASES[case]
    expected = whole(counts, num_wanted)
    assert all(value.abs().max() > 0 for value in expected)
    for rank, (cases, _, _) in enumerate(ranks):
        names = ("result", "d x", "d weights", "d gate_up_proj", "d down_proj")
        for name, found, value in zip(names, cases[case], cut(expected, counts, rank), strict=True):
            torch.testing.assert_close(found, value, msg=lambda m, n=name, r=rank: f"{r} {n}: {m}")


@pytest.mark.parametrize("case", range(len(CASES)))
def test_second_derivatives_travel_too(ranks, case):
    counts, num_wanted = CASES[case]
    expected = whole_penalty(counts, num_wanted)
    assert all(value.abs().max() > 0 for value in expected)
    for rank, (_, _, penalties) in enumerate(ranks):
        for found, value in zip(penalties[case], cut(expected, counts, rank), strict=True):
            torch.testing.assert_close(found, value)


def test_a_model_does_not_see_that_its_experts_are_elsewhere(ranks):
    expected = run_model(model_of_experts(), COUNTS)
    assert len(expected) == 1 + 2 * 4
    for rank, (_, found, _) in enumerate(ranks):
        assert found.keys() == expected.keys()
        for name, value in zip(expected, cut(expected.values(), COUNTS, rank), strict=True):
            torch.testing.assert_close(found[name], value, msg=lambda m, n=name: f"{n}: {m}")


def test_ranks_that_do_not_divide_the_experts_are_refused():
    with pytest.raises(ValueError, match="4 ranks do not divide num_experts=6"):
        divide_experts(Model(tiny_k3()), SimpleNamespace(size=lambda: 4))
