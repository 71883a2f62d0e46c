"""Rows to batches: what follows what, what counts, and what is refused."""

import numpy as np
import pytest
import torch

from baltoro.data.pack import pack
from baltoro.data.row import Row

PAD = 99


def row(*tokens: int, **columns: list[float]) -> Row:
    return Row(np.array(tokens), {name: np.array(column) for name, column in columns.items()})


def test_targets_follow_their_tokens_and_never_cross_a_boundary():
    batch = pack([row(1, 2, 3), row(4, 5)], None)
    assert batch.tokens.tolist() == [1, 2, 4]
    assert batch.targets.tolist() == [2, 3, 5]
    assert batch.cu_seqlens.tolist() == [0, 2, 3]
    assert batch.weights.tolist() == [1, 1, 1]


def test_types_are_those_that_the_model_takes():
    batch = pack([Row(np.array([1, 2], dtype=np.uint16))], None)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.weights.dtype == torch.float32


def test_columns_are_aligned_with_targets():
    batch = pack([row(1, 2, 3, logprobs=[0.0, -1.0, -2.0]), row(4, 5, logprobs=[0.0, -3.0])], None)
    assert batch.columns["logprobs"].tolist() == [-1.0, -2.0, -3.0]
    assert batch.columns["logprobs"].dtype == torch.float32


def test_weights_of_a_row_are_those_of_its_predicted_tokens():
    batch = pack([row(1, 2, 3, weights=[1.0, 0.0, 0.5])], None)
    assert batch.weights.tolist() == [0.0, 0.5]
    assert not batch.columns


def test_a_place_of_a_picture_is_never_a_target_that_counts():
    batch = pack([row(1, PAD, PAD, 2)], PAD)
    assert batch.weights.tolist() == [0, 0, 1]


def test_patches_stand_in_the_order_of_rows():
    patches = [np.full((count, 3, 14, 14), value, np.float32) for count, value in ((4, 1), (8, 2))]
    grids = [np.array([[1, 2, 2]]), np.array([[1, 2, 4]])]
    rows = [Row(np.array([1, PAD, 2]), {}, *pair) for pair in zip(patches, grids, strict=True)]
    batch = pack([rows[0], row(7, 8), rows[1]], PAD)
    assert batch.pixel_values is not None and batch.grid_thws is not None
    assert batch.pixel_values[:, 0, 0, 0].tolist() == [1] * 4 + [2] * 8
    assert batch.grid_thws.tolist() == [[1, 2, 2], [1, 2, 4]]


def test_a_batch_of_text_has_no_pictures():
    assert pack([row(1, 2)], PAD).pixel_values is None


def test_a_batch_moves_whole():
    batch = pack([row(1, PAD, 2, domain=[0, 0, 1])], PAD).to("meta")
    tensors = [
        batch.tokens,
        batch.targets,
        batch.weights,
        batch.cu_seqlens,
        *batch.columns.values(),
    ]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least one row"),
        ([row(1, 2, a=[0, 0]), row(1, 2)], "give every row the same"),
        ([row(1, 2, PAD)], "ends inside a picture"),
    ],
)
def test_rows_that_cannot_be_packed_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        pack(rows, PAD)


def test_a_row_of_one_token_is_refused():
    with pytest.raises(ValueError, match="at least two"):
        row(1)


def test_a_column_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"'logprobs': has shape \[1\]"):
        row(1, 2, logprobs=[0.0])


def test_a_column_may_not_take_a_name_of_the_batch():
    with pytest.raises(ValueError, match="name is taken"):
        row(1, 2, targets=[0, 0])


def test_patches_without_grids_are_refused():
    with pytest.raises(ValueError, match="give both or neither"):
        Row(np.array([1, 2]), {}, np.zeros((4, 3, 14, 14), np.float32))
