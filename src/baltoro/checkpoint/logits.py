"""Logits of a batch without any state, for comparing models."""

import torch
from torch import Tensor

from baltoro.model.model import Model


def logits(
    model: Model,
    input_ids: Tensor,
    pixel_values: Tensor | None = None,
    grid_thws: Tensor | None = None,
) -> Tensor:
    """Ids `[B, T]` to fp32 logits `[B, T, W]`, every row a sequence of its own from its start.

    Pictures and clips are given as patches `[I, 3, P, P]` with grids `[G, 3]`; their placeholders
    in `input_ids` are already expanded, one per row of features, and are filled in reading order.
    Gradients flow unless the caller switches them off. Raises `ValueError` on empty input, an id
    outside the vocabulary, or pictures that do not fit the placeholders.
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
        features = model.encode_images(pixel_values.to(device), grid_thws)
    batch, length = input_ids.shape
    cu_seqlens = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
    tokens_T = input_ids.to(device, torch.int64).flatten()
    out = model(tokens_T, cu_seqlens, image_features=features)
    return model.lm_head(out.hidden).float().view(batch, length, -1)
