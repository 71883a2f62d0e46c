"""Quantile Balancing: the exact bias, the histogram that stands for it, ties and padding."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baltoro.ops.impl import ImplError
from baltoro.ops.quantile import (
    exact_bias,
    expert_loads,
    histogram_bias,
    margin_counts,
)
from baltoro.ops.quantile.dense import token_cutoffs

IMPLS = ["reference", "torch"]


def skewed(num_tokens: int, num_experts: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Scores of a router that likes some experts much better than others."""
    taste = torch.linspace(-2, 2, num_experts, dtype=dtype)
    return torch.sigmoid(torch.randn(num_tokens, num_experts, dtype=dtype) + taste)


def estimate(scores: Tensor, bias: Tensor, *, top_k: int, num_bins: int) -> Tensor:
    counts = margin_counts(
        scores, bias, num_experts_per_token=top_k, num_bins=num_bins, impl="torch"
    )
    return histogram_bias(
        counts.histogram, counts.num_tokens, bias, num_experts_per_token=top_k, impl="torch"
    )


def order_statistic(scores: Tensor, bias: Tensor, *, top_k: int) -> Tensor:
    """The ceil(q)-th smallest margin of each expert, less the mean: the bin's own target."""
    cutoffs = (scores + bias).sort(1, descending=True).values[:, top_k]
    margins = (cutoffs[:, None] - scores).sort(0).values
    found = margins[math.ceil(len(scores) * top_k / scores.shape[1]) - 1]
    return found - found.mean()


def test_the_loads_of_the_report_s_example_become_even_in_one_step() -> None:
    scores = torch.tensor(
        [
            [0.5, 0.6, 0.1, 0.3],
            [0.6, 0.9, 0.3, 0.1],
            [0.6, 0.5, 0.4, 0.2],
            [0.7, 0.6, 0.2, 0.4],
            [0.5, 0.7, 0.3, 0.2],
            [0.5, 0.4, 0.7, 0.1],
            [1.0, 0.7, 0.2, 0.3],
            [1.0, 0.8, 0.2, 0.3],
        ]
    )
    bias = torch.zeros(4)
    assert expert_loads(scores, bias, num_experts_per_token=1).tolist() == [4, 3, 1, 0]
    bias = exact_bias(scores, bias, num_experts_per_token=1)
    assert expert_loads(scores, bias, num_experts_per_token=1).tolist() == [2, 2, 2, 2]


def test_the_exact_bias_is_minus_the_upper_quantile_of_the_margins() -> None:
    scores, bias = skewed(120, 6, torch.float64), torch.randn(6, dtype=torch.float64) * 0.1
    cutoffs = token_cutoffs(scores + bias, 2)
    want = -torch.quantile(scores - cutoffs[:, None], 1 - 2 / 6, dim=0, interpolation="lower")
    got = exact_bias(scores, bias, num_experts_per_token=2)
    torch.testing.assert_close(got, want - want.mean(), rtol=0, atol=1e-12)


def test_cutoffs_are_the_best_scores_not_chosen() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.3], [0.4, 0.2, 0.6, 0.8]])
    got = token_cutoffs(scores + torch.tensor([0.0, 0.0, 0.0, -0.5]), 2)
    torch.testing.assert_close(got, torch.tensor([0.1, 0.3]))


@given(
    num_tokens=st.integers(1, 400),
    num_experts=st.integers(2, 9),
    num_bins=st.sampled_from([1, 7, 100, 1000]),
    spread=st.sampled_from([0.0, 0.3, 30.0]),
    data=st.data(),
)
def test_the_histogram_is_within_a_bin_of_the_quantile(
    num_tokens: int, num_experts: int, num_bins: int, spread: float, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, num_experts - 1))
    scores = skewed(num_tokens, num_experts, torch.float64)
    bias = torch.randn(num_experts, dtype=torch.float64) * spread
    width = float((bias.max() - bias.min() + 2) / num_bins)
    got = estimate(scores, bias, top_k=top_k, num_bins=num_bins)
    want = order_statistic(scores, bias, top_k=top_k)
    # an expert's two values lie in one bin before their means are taken off
    error = got - want
    assert float(error.max() - error.min()) <= 2 * width * (1 + 1e-9)


def test_a_thousand_bins_agree_with_the_exact_form_within_a_bin() -> None:
    scores, bias = skewed(8192, 128), torch.zeros(128)
    got = estimate(scores, bias, top_k=4, num_bins=1000)
    want = exact_bias(scores, bias, num_experts_per_token=4)
    assert (got - want).abs().max() <= 2 / 1000


@pytest.mark.parametrize("num_tokens", [0, 1, 37])
@pytest.mark.parametrize("has_mask", [False, True])
def test_both_implementations_count_the_same(num_tokens: int, has_mask: bool) -> None:
    scores = skewed(num_tokens, 5, torch.float64)
    scores[::3] = scores[::3].round(decimals=1)  # ties
    bias = torch.tensor([0.1, -0.2, 0.0, 0.1, 0.0], dtype=torch.float64)
    mask = torch.rand(num_tokens) > 0.4 if has_mask else None
    a, b = (
        margin_counts(scores, bias, num_experts_per_token=2, num_bins=50, mask=mask, impl=impl)
        for impl in IMPLS
    )
    for got, want in zip(a, b, strict=True):
        assert got.dtype == torch.int32 and torch.equal(got, want)
    new = [
        histogram_bias(a.histogram, a.num_tokens, bias, num_experts_per_token=2, impl=impl)
        for impl in IMPLS
    ]
    torch.testing.assert_close(new[0], new[1], rtol=0, atol=1e-12)


def test_counts_do_not_depend_on_how_tokens_are_cut() -> None:
    scores, bias = skewed(1000, 16), torch.randn(16) * 0.2
    whole = margin_counts(scores, bias, num_experts_per_token=3, num_bins=1000, impl="torch")
    parts = [
        margin_counts(part, bias, num_experts_per_token=3, num_bins=1000, impl="torch")
        for part in scores.split([1, 499, 0, 313, 187])
    ]
    for index, want in enumerate(whole):
        assert torch.equal(sum(part[index] for part in parts), want)


@pytest.mark.parametrize("impl", IMPLS)
def test_padding_does_not_count_whatever_it_holds(impl: str) -> None:
    scores, bias = skewed(20, 4), torch.zeros(4)
    mask = torch.arange(20) % 3 > 0
    want = margin_counts(scores[mask], bias, num_experts_per_token=1, num_bins=9, impl=impl)
    scores[~mask] = torch.nan
    got = margin_counts(scores, bias, num_experts_per_token=1, num_bins=9, mask=mask, impl=impl)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1.5, -0.5])
def test_a_score_that_is_no_score_is_left_out_and_seen(value: float, impl: str) -> None:
    scores, bias = skewed(50, 4), torch.zeros(4)
    scores[7, 1] = value
    counts = margin_counts(scores, bias, num_experts_per_token=2, num_bins=100, impl=impl)
    assert int(counts.num_tokens) == 50
    assert int(counts.histogram[1].sum()) == 49


@pytest.mark.parametrize("impl", IMPLS)
def test_scores_at_both_ends_of_the_range_are_counted(impl: str) -> None:
    bias = torch.tensor([7.3, -11.1, 0.4])
    scores = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    for num_bins in (1, 10, 1000):
        counts = margin_counts(scores, bias, num_experts_per_token=1, num_bins=num_bins, impl=impl)
        assert counts.histogram.sum(1).tolist() == [4, 4, 4]


@pytest.mark.parametrize("impl", IMPLS)
def test_equal_scores_go_to_the_lowest_ids_and_move_no_bias(impl: str) -> None:
    scores, bias = torch.full((40, 8), 0.5), torch.zeros(8)
    counts = margin_counts(scores, bias, num_experts_per_token=2, num_bins=1000, impl=impl)
    assert counts.loads.tolist() == [40, 40, 0, 0, 0, 0, 0, 0]
    new = histogram_bias(
        counts.histogram, counts.num_tokens, bias, num_experts_per_token=2, impl=impl
    )
    assert torch.equal(new, bias)
    assert torch.equal(exact_bias(scores, bias, num_experts_per_token=2), bias)


def test_ties_at_the_cutoff_fill_up_from_the_lowest_ids() -> None:
    scores = torch.tensor([[0.5, 0.9, 0.5, 0.5], [0.5, 0.5, 0.9, 0.9]])
    loads = expert_loads(scores, torch.zeros(4), num_experts_per_token=2)
    assert loads.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("impl", IMPLS)
def test_no_tokens_leave_the_bias_bit_for_bit(impl: str) -> None:
    bias = torch.tensor([0.3, -0.1, 0.7])
    counts = margin_counts(torch.zeros(0, 3), bias, num_experts_per_token=1, num_bins=10, impl=impl)
    got = histogram_bias(
        counts.histogram, counts.num_tokens, bias, num_experts_per_token=1, impl=impl
    )
    assert torch.equal(got, bias)
    assert torch.equal(exact_bias(torch.zeros(0, 3), bias, num_experts_per_token=1), bias)


def test_the_new_bias_has_mean_zero_and_the_old_dtype() -> None:
    got = estimate(skewed(500, 12).to(torch.bfloat16), torch.randn(12), top_k=3, num_bins=200)
    assert got.dtype == torch.float32
    assert abs(float(got.double().mean())) < 1e-7


def test_bad_input_is_named() -> None:
    scores, bias = torch.zeros(3, 4), torch.zeros(4)
    with pytest.raises(ValueError, match=r"scores \[3, 4\] and bias \[5\]"):
        exact_bias(scores, torch.zeros(5), num_experts_per_token=1)
    for top_k in (0, 4):
        with pytest.raises(ValueError, match=f"num_experts_per_token={top_k}: .* 1 and E - 1 = 3"):
            expert_loads(scores, bias, num_experts_per_token=top_k)
    with pytest.raises(ValueError, match="num_bins=0"):
        margin_counts(scores, bias, num_experts_per_token=1, num_bins=0, impl="torch")
    with pytest.raises(ValueError, match=r"mask is torch\.int64 \[3\]"):
        expert_loads(scores, bias, num_experts_per_token=1, mask=torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"histogram \[3, 5\] does not fit bias \[4\]"):
        histogram_bias(
            torch.zeros(3, 5), torch.tensor(1), bias, num_experts_per_token=1, impl="torch"
        )
    with pytest.raises(ImplError, match="margin_counts: impl='cuda'"):
        margin_counts(scores, bias, num_experts_per_token=1, num_bins=4, impl="cuda")
