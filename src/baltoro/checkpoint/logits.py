"""Logits of a batch without any state, for comparing models.

A deep model multiplies rounding: on the golden checkpoints two correct fp32 orders of summation
differ by up to 3e-4 in single logits. So the arithmetic of an fp32 model is done in fp64 here and
rounded once; what is left is the error of the other side.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from baltoro.model.model import Model
from baltoro.model.vision import check_grids


def logits(
    model: Model,
    input_ids: Tensor,
    pixel_values: Tensor | None = None,
    grid_thws: Tensor | None = None,
) -> Tensor:
    """Ids `[B, T]` to fp32 logits `[B, T, W]`, every row a sequence of its own from its start.

    Pictures and clips are given as patches `[I, 3, P, P]` with grids `[G, 3]`; their placeholders
    in `input_ids` are already expanded, one per row of features, and are filled in reading order.
    An fp32 model is run in fp64 (twice its memory for the time of the call), any other in its
    dtype. Gradients flow unless the caller switches them off or the experts are packed. Raises
    `ValueError` on empty input, an id outside the vocabulary, or pictures that do not fit the
    placeholders.
    """
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(
            f"input_ids: expected [B, T] with at least one token, got {list(input_ids.shape)}"
        )
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids: expected whole numbers, got {input_ids.dtype}")
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= model.config.vocab_size:
        raise ValueError(
            f"input_ids: ids lie in [{low}, {high}], outside vocab_size={model.config.vocab_size}"
        )
    if (pixel_values is None) != (grid_thws is None):
        raise ValueError("pixel_values and grid_thws: give both or neither")
    device = model.embed_tokens.weight.device
    features = None
    if pixel_values is not None and grid_thws is not None:
        features = _features(model, pixel_values.to(device), grid_thws)
    batch, length = input_ids.shape
    cu_seqlens = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
    tokens_T = input_ids.to(device, torch.int64).flatten()
    moe = model.config.moe
    is_packed = moe is not None and moe.expert_format == "mxfp4"
    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_packed):
        out = _widened(model, tokens_T, cu_seqlens, image_features=features)
        return _widened(model.lm_head, out.hidden).float().view(batch, length, -1)


def _features(model: Model, pixel_values: Tensor, grid_thws: Tensor) -> Tensor:
    vision = model.config.vision
    if vision is None:
        raise ValueError("pixel_values: this model has no vision tower (vision is None)")
    grids = check_grids(pixel_values, grid_thws, vision)
    return _widened(model.mm_projector, _widened(model.vision_tower, pixel_values, grids))


def _widened(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call `module` with its fp32 weights in fp64; gradients flow to the weights themselves."""
    if next(module.parameters()).dtype != torch.float32:
        return module(*args, **kwargs)
    wide = {
        name: tensor.double() if tensor.dtype == torch.float32 else tensor
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    return functional_call(module, wide, args, kwargs)
