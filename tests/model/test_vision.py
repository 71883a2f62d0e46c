import math

import pytest
import torch
from model.tiny import VISION, tiny_k3
from torch import Tensor

from baltoro.model.model import Model
from baltoro.model.vision import check_grids, rotation_table


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model(tiny_k3(vision=VISION)).eval()


def patches(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 14, 14, generator=torch.Generator().manual_seed(seed))


def test_a_clip_gives_as_many_rows_as_one_frame(model: Model) -> None:
    still = model.encode_images(patches(24), torch.tensor([[1, 4, 6]]))
    clip = model.encode_images(patches(72), torch.tensor([[3, 4, 6]]))
    assert still.shape == clip.shape == (6, 32)


def test_items_of_a_pack_do_not_see_each_other(model: Model) -> None:
    a, b = patches(16, 1), patches(48, 2)
    both = model.encode_images(torch.cat([a, b]), torch.tensor([[1, 4, 4], [2, 4, 6]]))
    alone = [
        model.encode_images(a, torch.tensor([[1, 4, 4]])),
        model.encode_images(b, torch.tensor([[2, 4, 6]])),
    ]
    torch.testing.assert_close(both, torch.cat(alone))


def test_frames_of_a_clip_see_each_other(model: Model) -> None:
    x = patches(32)
    y = x.clone()
    y[16:] = patches(16, 5)
    grid = torch.tensor([[2, 4, 4]])
    assert not torch.allclose(model.encode_images(x, grid), model.encode_images(y, grid))


def test_the_time_code_is_sine_then_cosine_and_absent_from_pictures(model: Model) -> None:
    pos_emb = model.vision_tower.patch_embed.pos_emb
    still, clip = pos_emb(1, 6, 6), pos_emb(4, 6, 6).view(4, 36, 24)
    torch.testing.assert_close(still, pos_emb.weight.flatten(0, 1))
    code = clip[3] - still
    expected = [math.sin(3 * 10000 ** (-i / 12)) for i in range(12)]
    torch.testing.assert_close(code[0, :12], torch.tensor(expected), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(clip[0, :, 12:] - still[:, 12:], torch.ones(36, 12))


def test_even_pairs_turn_with_the_column_and_odd_pairs_with_the_row() -> None:
    table = rotation_table(3, 5, 8, "cpu").view(3, 5, 4)
    angle = torch.angle(table)
    torch.testing.assert_close(
        angle[0, :, 0], torch.arange(5.0) - 2 * math.pi * (torch.arange(5) > 3)
    )
    torch.testing.assert_close(angle[:, 0, 1], torch.arange(3.0))
    torch.testing.assert_close(angle[2, 4, 2:], torch.tensor([4e-2, 2e-2]))


def test_a_cell_holds_its_patches_row_major(model: Model) -> None:
    item = torch.arange(16.0)[:, None].expand(16, 24)
    cells = model.vision_tower._merge(item, 1, 4, 4).view(4, 4, 24)[..., 0]
    assert cells.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


def test_tower_and_projector_get_gradients(model: Model) -> None:
    model.encode_images(patches(48), torch.tensor([[2, 4, 6]])).square().sum().backward()
    for name, parameter in model.named_parameters():
        if name.startswith(("vision_tower", "mm_projector")):
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize(
    ("count", "grid", "message"),
    [
        (24, [[1, 4, 5]], "not whole 2x2 cells"),
        (24, [[5, 2, 2]], "5 frames; between 1 and 4"),
        (24, [[0, 2, 2]], "0 frames"),
        (25, [[1, 4, 6]], "cover 24 patches, pixel_values hold 25"),
        (24, [[1, 2, 514]], "at most 512 on a side"),
        (24, [[1, 0, 2]], "not whole"),
        (24, [[4, 6]], r"grid_thws: expected \[items, 3\]"),
    ],
)
def test_wrong_grids_are_refused(count: int, grid: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_grids(patches(count), torch.tensor(grid), VISION)


def test_patches_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected \[patches, 3, 14, 14\]"):
        check_grids(torch.zeros(4, 3, 16, 16), torch.tensor([[1, 2, 2]]), VISION)
