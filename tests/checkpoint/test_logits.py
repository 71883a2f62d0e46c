import subprocess
import sys

import pytest
import torch
from checkpoint.cases import everything, random_model
from model.tiny import VISION, tiny_k3
from torch import Tensor

import baltoro
from baltoro.model.model import Model


@pytest.fixture
def model() -> Model:
    return random_model(tiny_k3())


def test_every_row_is_a_sequence_of_its_own(model: Model) -> None:
    ids = torch.randint(60, (3, 7))
    together = baltoro.logits(model, ids)
    assert together.shape == (3, 7, 64) and together.dtype == torch.float32
    for row in range(3):
        alone = baltoro.logits(model, ids[row : row + 1])
        torch.testing.assert_close(together[row], alone[0], atol=1e-6, rtol=1e-6)


def test_a_bf16_model_gives_fp32_logits(model: Model) -> None:
    found = baltoro.logits(model.cast(torch.bfloat16), torch.randint(60, (1, 4)))
    assert found.dtype == torch.float32


def test_gradients_reach_the_weights(model: Model) -> None:
    baltoro.logits(model, torch.randint(60, (2, 5))).square().mean().backward()
    gradient = model.layers[2].self_attn.q_b_proj.weight.grad
    assert gradient is not None and gradient.abs().max() > 0


def picture() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, 14, 14), torch.tensor([[1, 2, 4]])  # two cells


def test_pictures_replace_their_placeholders_in_order() -> None:
    model = random_model(everything())
    ids = torch.randint(50, (2, 6))
    ids[0, 4] = ids[1, 1] = VISION.placeholder_token_id
    pixels, grids = picture()
    found = baltoro.logits(model, ids, pixels, grids)
    blank = baltoro.logits(model, ids, torch.zeros_like(pixels), grids)
    torch.testing.assert_close(found[0, :4], blank[0, :4], atol=1e-6, rtol=1e-6)
    assert (found[0, 4] - blank[0, 4]).abs().max() > 1e-3
    assert (found[1, 1] - blank[1, 1]).abs().max() > 1e-3


@pytest.mark.parametrize("ids", [torch.zeros(4), torch.zeros(1, 0), torch.zeros(0, 3)])
def test_input_without_tokens_or_without_rows_is_refused(model: Model, ids: Tensor) -> None:
    with pytest.raises(ValueError, match=r"input_ids: expected \[B, T\]"):
        baltoro.logits(model, ids.long())


@pytest.mark.parametrize("wrong", [-1, 64])
def test_ids_outside_the_vocabulary_are_refused(model: Model, wrong: int) -> None:
    with pytest.raises(ValueError, match="outside vocab_size=64"):
        baltoro.logits(model, torch.tensor([[1, wrong]]))


def test_ids_that_are_not_whole_numbers_are_refused(model: Model) -> None:
    with pytest.raises(ValueError, match=r"whole numbers, got torch\.float32"):
        baltoro.logits(model, torch.zeros(1, 3))


def test_pictures_and_grids_come_together() -> None:
    model, (pixels, grids) = random_model(everything()), picture()
    ids = torch.full((1, 2), VISION.placeholder_token_id)
    for arguments in ((pixels, None), (None, grids)):
        with pytest.raises(ValueError, match="give both or neither"):
            baltoro.logits(model, ids, *arguments)


def test_more_placeholders_than_rows_are_refused() -> None:
    ids = torch.full((1, 3), VISION.placeholder_token_id)
    with pytest.raises(ValueError, match="2 rows for 3 placeholder"):
        baltoro.logits(random_model(everything()), ids, *picture())


def test_a_model_without_sight_refuses_pictures(model: Model) -> None:
    with pytest.raises(ValueError, match="no vision tower"):
        baltoro.logits(model, torch.tensor([[1, 2]]), *picture())


def test_the_package_and_its_text_room_come_without_torch() -> None:
    code = (
        "import sys, baltoro, baltoro.text.xtml, baltoro.checkpoint.inspect\n"
        "assert 'torch' not in sys.modules\n"
        "assert not hasattr(baltoro, 'unheard_of')\n"
        "baltoro.load\n"
        "assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
