"""The largest attention logit of every head, by its definition."""

import itertools

import torch

from baltoro.ops.mla import largest
from baltoro.ops.mla.largest import largest_logits


def plain(q, k, bounds, scale):
    best = torch.full((q.shape[1],), -torch.inf)
    for start, end in itertools.pairwise(bounds):
        for i in range(start, end):
            for j in range(start, i + 1):
                best = torch.maximum(best, scale * (q[i] * k[j]).sum(-1))
    return best


def test_the_maximum_runs_over_earlier_tokens_of_the_same_sequence(monkeypatch):
    q, k = torch.randn(19, 3, 4), torch.randn(19, 3, 4)
    bounds = [0, 7, 7, 19]
    expected = plain(q, k, bounds, 0.5)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    torch.testing.assert_close(largest_logits(q, k, cu_seqlens, scale=0.5, impl="torch"), expected)
    monkeypatch.setattr(largest, "_BLOCK_ELEMENTS", {"cpu": 40})
    torch.testing.assert_close(largest_logits(q, k, cu_seqlens, scale=0.5, impl="torch"), expected)


def test_the_next_token_s_key_does_not_count():
    q = torch.tensor([10.0, 1.0, 1.0, 10.0, 1.0]).view(5, 1, 1)
    k = torch.tensor([1.0, 10.0, 1.0, 1.0, 10.0]).view(5, 1, 1)
    cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    assert largest_logits(q, k, cu_seqlens, scale=1.0, impl="torch").tolist() == [10.0]


def test_a_head_without_tokens_has_minus_infinity():
    empty = torch.zeros(0, 2, 4)
    cu_seqlens = torch.zeros(1, dtype=torch.int32)
    assert (
        largest_logits(empty, empty, cu_seqlens, scale=1.0, impl="torch").tolist()
        == [-torch.inf] * 2
    )
