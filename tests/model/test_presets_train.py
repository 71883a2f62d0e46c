import pytest
import torch

from baltoro.model.model import Model
from baltoro.model.presets import preset


@pytest.mark.parametrize("name", ["nano", "mini"])
def test_every_parameter_of_a_preset_gets_a_finite_gradient(name: str) -> None:
    torch.manual_seed(0)
    config = preset(name)
    model = Model(config).train()
    tokens_T = torch.randint(0, config.vocab_size, (96,))
    features = None
    if config.vision is not None:
        patches = torch.randn(24, 3, config.vision.patch_size, config.vision.patch_size)
        features = model.encode_images(patches, torch.tensor([[1, 4, 6]]))
        tokens_T[tokens_T == config.vision.placeholder_token_id] = 0
        tokens_T[10:16] = config.vision.placeholder_token_id
    bounds = torch.tensor([0, 50, 96], dtype=torch.int32)
    hidden = model(tokens_T, bounds, image_features=features).hidden
    model.lm_head(hidden).logsumexp(-1).mean().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert torch.isfinite(parameter.grad).all(), parameter_name
