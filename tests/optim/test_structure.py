"""Records of structure: which matrices a stored tensor holds."""

import pytest
import torch

from baltoro.optim.structure import MatrixBlocks


def test_heads_are_runs_of_rows() -> None:
    blocks = MatrixBlocks(row_parts=(2,), col_parts=(5,), num_groups=3, why="by head")
    x = torch.arange(30.0).view(6, 5)
    (views,) = blocks.views(x)
    assert torch.equal(views[1], x[2:4])


def test_parts_repeat_inside_every_head() -> None:
    blocks = MatrixBlocks(row_parts=(2, 1), col_parts=(4,), num_groups=2, why="[key | value]")
    x = torch.arange(24.0).view(6, 4)
    keys, values = blocks.views(x)
    assert torch.equal(keys, torch.stack([x[0:2], x[3:5]]))
    assert torch.equal(values, torch.stack([x[2:3], x[5:6]]))


def test_experts_stack_and_columns_split() -> None:
    blocks = MatrixBlocks(row_parts=(2, 2), col_parts=(1, 3), why="gate and up, two inputs")
    x = torch.arange(48.0).view(3, 4, 4)
    views = blocks.views(x)
    assert [list(view.shape) for view in views] == [[3, 2, 1], [3, 2, 3], [3, 2, 1], [3, 2, 3]]
    assert torch.equal(views[3], x[:, 2:, 1:])


def test_the_views_cover_every_entry_once_and_write_through() -> None:
    blocks = MatrixBlocks(row_parts=(1, 3), col_parts=(2, 2), num_groups=2, why="")
    x = torch.zeros(5, 8, 4)
    for view in blocks.views(x):
        view.add_(1.0)
    assert torch.equal(x, torch.ones_like(x))


def test_description_counts_matrices() -> None:
    blocks = MatrixBlocks(row_parts=(128, 128), col_parts=(512,), num_groups=96, why="")
    assert blocks.describe((24576, 512)) == "96 x [128, 512] + 96 x [128, 512]"
    assert MatrixBlocks(row_parts=(3,), col_parts=(4,), why="").describe((3, 4)) == "[3, 4]"


@pytest.mark.parametrize(
    ("row_parts", "num_groups", "message"),
    [((), 1, r"row_parts=\(\)"), ((2, 0), 1, r"row_parts=\(2, 0\)"), ((2,), 0, "num_groups=0")],
)
def test_empty_parts_are_refused(row_parts: tuple[int, ...], num_groups: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MatrixBlocks(row_parts=row_parts, col_parts=(2,), num_groups=num_groups, why="")
