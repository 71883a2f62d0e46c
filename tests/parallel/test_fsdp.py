"""Sharded training against one process with the whole batch."""

from types import SimpleNamespace

import pytest
import torch
from model.tiny import VISION, tiny_k3
from parallel.ranks import run_ranks
from parallel.trained import LR, small_model, train_alone, work

from baltoro.model.model import Model
from baltoro.optim.config import OptimConfig
from baltoro.parallel.fsdp import ShardedOptimizer, owners_of, shard
from baltoro.train.learner import assignment_of

MESH = SimpleNamespace(ndim=1)  # of no process: refused before anything is sharded


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks found."""
    return run_ranks(work, tmp_path_factory.mktemp("ranks"), 2)


def test_two_ranks_with_parts_of_a_batch_update_as_one_process_with_all_of_it(ranks):
    """Of 20 and 12 tokens: a mean of the ranks' means would differ. Muon and AdamW hardly see a
    factor on all gradients; their norms do."""
    expected, norms = train_alone()
    start = dict(small_model().named_parameters())
    moved = max(float((expected[name] - start[name]).detach().abs().max()) for name in start)
    assert moved > LR
    for rank, (_, runs) in enumerate(ranks):
        for found, found_norms in runs:
            assert found.keys() == expected.keys()
            for name, weight in found.items():
                torch.testing.assert_close(
                    weight, expected[name], rtol=0.0, atol=1e-5, msg=f"rank {rank}: {name}"
                )
            assert found_norms == pytest.approx(norms, rel=1e-5)


def test_weights_and_masters_are_divided(ranks):
    """Each rank has about half of the shards, and half of the masters, together all of both."""
    found = [counts for counts, _ in ranks]
    whole = found[0][2]
    for part in range(2):
        held = [counts[part] for counts in found]
        assert sum(held) == whole and max(held) < 0.51 * whole


def test_owners_are_balanced_and_the_same_in_any_order():
    sizes = {"a": 5, "b": 4, "c": 3, "d": 2, "e": 2}
    owners = owners_of(sizes, 2)
    assert owners == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 0}
    assert owners_of(dict(reversed(sizes.items())), 2) == owners
    assert owners_of({"a": 1}, 3) == {"a": 0}


def test_what_is_not_served_is_refused():
    with pytest.raises(ValueError, match="vision"):
        shard(Model(tiny_k3(vision=VISION)), MESH)
    with pytest.raises(ValueError, match="one dtype"):
        shard(small_model().cast(torch.bfloat16), MESH)
    with pytest.raises(ValueError, match="2 axes"):
        shard(small_model(), SimpleNamespace(ndim=2))
    model = small_model()
    with pytest.raises(ValueError, match="not sharded"):
        ShardedOptimizer(model, assignment_of(model), OptimConfig(), MESH)
