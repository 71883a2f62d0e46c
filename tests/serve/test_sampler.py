import math

import pytest
import torch

from baltoro.serve.sampler import Sampling, sample

LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


def drawn(sampling: Sampling, count: int = 400) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    ids, _ = sample(LOGITS.expand(count, -1), sampling, generator)
    return set(ids.tolist())


def test_temperature_zero_takes_the_likeliest_and_reports_the_model_s_own_probability() -> None:
    ids, logprobs = sample(LOGITS, Sampling(temperature=0.0))
    assert ids.tolist() == [0]
    assert logprobs.item() == pytest.approx(math.log(0.5))


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), {0, 1, 2, 3}),
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_k=9), {0, 1, 2, 3}),
        (Sampling(top_p=0.5), {0}),
        (Sampling(top_p=0.51), {0, 1}),
        (Sampling(top_p=1e-9), {0}),
        (Sampling(min_p=0.2), {0, 1, 2}),
        (Sampling(min_p=1.0), {0}),
        (Sampling(top_k=3, top_p=0.8), {0, 1}),
    ],
)
def test_only_the_kept_tokens_are_drawn(sampling: Sampling, kept: set[int]) -> None:
    assert drawn(sampling) == kept


def test_log_probabilities_are_of_the_restricted_distribution() -> None:
    ids, logprobs = sample(
        LOGITS.expand(50, -1), Sampling(top_k=2), torch.Generator().manual_seed(1)
    )
    for token, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True):
        assert logprob == pytest.approx(math.log([0.625, 0.375][token]), abs=1e-6)


def test_equal_seeds_draw_equal_tokens() -> None:
    rows = LOGITS.expand(64, -1)
    a, b = (sample(rows, Sampling(), torch.Generator().manual_seed(3))[0] for _ in range(2))
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("min_p", 2.0),
    ],
)
def test_a_value_out_of_range_is_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field}="):
        Sampling(**{field: value})  # type: ignore[arg-type]


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        sample(torch.tensor([[0.0, float("nan")]]), Sampling())
