import pytest
import torch
from ops.harness import boundaries

from baltoro.ops.packed import read_boundaries


def test_boundaries_come_back_as_numbers_and_empty_sequences_are_allowed() -> None:
    assert read_boundaries(boundaries([0, 3, 0, 2]), 5) == [0, 0, 3, 3, 5]


@pytest.mark.parametrize(
    ("cu_seqlens", "says"),
    [
        (torch.tensor([0, 5]), "expected int32"),
        (torch.tensor([0], dtype=torch.int32), "N >= 1"),
        (torch.tensor([[0, 5]], dtype=torch.int32), r"\[1, 2\]"),
        (torch.tensor([1, 5], dtype=torch.int32), "must start at 0"),
        (torch.tensor([0, 4], dtype=torch.int32), "number of tokens, 5"),
        (torch.tensor([0, 4, 3, 5], dtype=torch.int32), "must not decrease"),
    ],
)
def test_what_is_no_partition_of_the_tokens_is_refused(cu_seqlens: torch.Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_boundaries(cu_seqlens, 5)
