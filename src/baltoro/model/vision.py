"""MoonViT-V2 and the projector (report section 2.4; the released code where they differ).

Patches of images and clips are packed like tokens: each media item of grid (t, h, w) is one
sequence of t * h * w rows, attended jointly and without a mask. After the last block the frames
are averaged and each 2x2 cell of patches becomes one row of the language model.

Local letters: I patches, C the tower's width, G media items.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from baltoro.model.config import VisionConfig
from baltoro.ops.mla import varlen_attention

ROPE_BASE = 10000.0
MAX_GRID = 512  # patches on a side


class TowerNorm(nn.Module):
    """torch's RMSNorm with no eps given: the machine epsilon of the computing dtype."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., C]` to `[..., C]`."""
        return functional.rms_norm(x, self.weight.shape, self.weight)


class PatchConv(nn.Module):
    """The 14x14 convolution with stride 14 on single patches, which is one matrix product."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.patch_size
        self.weight = nn.Parameter(torch.empty(config.hidden_size, 3, size, size))

    def forward(self, patches: Tensor) -> Tensor:
        """`[I, 3, P, P]` to `[I, C]`."""
        return functional.linear(patches.flatten(1), self.weight.flatten(1))


class PositionEmbedding(nn.Module):
    """A learned grid of positions, resized to each item, plus a fixed code per frame of a clip."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.max_frames = config.pos_emb_time
        height, width = config.pos_emb_height, config.pos_emb_width
        self.weight = nn.Parameter(torch.empty(height, width, config.hidden_size))

    def forward(self, frames: int, height: int, width: int) -> Tensor:
        """Embedding `[t * h * w, C]` of one media item."""
        grid_HWC: Tensor = self.weight
        if (height, width) != tuple(self.weight.shape[:2]):
            resized = functional.interpolate(
                self.weight.permute(2, 0, 1)[None], size=(height, width), mode="bilinear"
            )
            grid_HWC = resized[0].permute(1, 2, 0)
        if frames == 1:
            # a picture gets no time code, not even that of frame 0
            return grid_HWC.flatten(0, 1)
        time_TC = self._time_code(frames).to(grid_HWC)
        return (grid_HWC[None] + time_TC[:, None, None]).flatten(0, 2)

    def _time_code(self, frames: int) -> Tensor:
        half = self.weight.shape[-1] // 2
        device = self.weight.device
        exponent = torch.arange(half, dtype=torch.float32, device=device) / half
        angle = torch.arange(frames, device=device)[:, None] * ROPE_BASE**-exponent
        return torch.cat([angle.sin(), angle.cos()], -1)


class PatchEmbed(nn.Module):
    """Patches to rows, with their positions."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = PatchConv(config)
        self.pos_emb = PositionEmbedding(config)

    def forward(self, patches: Tensor, grids: list[tuple[int, int, int]]) -> Tensor:
        """`[I, 3, P, P]` to `[I, C]`."""
        return self.proj(patches) + torch.cat([self.pos_emb(*grid) for grid in grids])


class TowerMlp(nn.Module):
    """fc1(gelu_tanh(fc0 x))."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc0 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.fc1 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[I, C]` to `[I, C]`."""
        return self.fc1(functional.gelu(self.fc0(x), approximate="tanh"))


class TowerBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: VisionConfig, impl: str) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.impl = impl
        self.norm0 = TowerNorm(config.hidden_size)
        self.norm1 = TowerNorm(config.hidden_size)
        self.wqkv = nn.Linear(config.hidden_size, 3 * config.qkv_hidden_size, bias=False)
        self.wo = nn.Linear(config.qkv_hidden_size, config.hidden_size, bias=False)
        self.mlp = TowerMlp(config)

    def forward(self, x: Tensor, rotation: Tensor, cu_seqlens: Tensor) -> Tensor:
        """`[I, C]` to `[I, C]`; `rotation` is complex `[I, K / 2]`."""
        qkv = self.wqkv(self.norm0(x)).view(-1, 3, self.num_heads, self.head_dim)
        q_IHK, k_IHK, v_IHK = qkv.unbind(1)
        out = varlen_attention(
            _rotate(q_IHK, rotation),
            _rotate(k_IHK, rotation),
            v_IHK,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            causal=False,
            scale=self.head_dim**-0.5,
            impl=self.impl,
        )
        x = x + self.wo(out.flatten(1))
        return x + self.mlp(self.norm1(x))


class Encoder(nn.Module):
    """The stack of blocks and the final norm."""

    def __init__(self, config: VisionConfig, impl: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TowerBlock(config, impl) for _ in range(config.num_layers))
        self.final_layernorm = TowerNorm(config.hidden_size)


class VisionTower(nn.Module):
    """MoonViT-V2: patches to merged cells."""

    def __init__(self, config: VisionConfig, impl: str) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.encoder = Encoder(config, impl)

    def forward(self, patches: Tensor, grids: list[tuple[int, int, int]]) -> Tensor:
        """`[I, 3, P, P]` to `[rows, cells * C]`, the items one after another."""
        x = self.patch_embed(patches.to(self.patch_embed.proj.weight.dtype), grids)
        rotation = torch.cat(
            [rotation_table(h, w, self.config.head_dim, x.device).repeat(t, 1) for t, h, w in grids]
        )
        ends = torch.tensor([0, *(t * h * w for t, h, w in grids)], device=x.device).cumsum(0)
        cu_seqlens = ends.to(torch.int32)
        for block in self.encoder.blocks:
            x = block(x, rotation, cu_seqlens)
        x = self.encoder.final_layernorm(x)
        items = x.split([t * h * w for t, h, w in grids])
        return torch.cat(
            [self._merge(item, *grid) for item, grid in zip(items, grids, strict=True)]
        )

    def _merge(self, item: Tensor, frames: int, height: int, width: int) -> Tensor:
        """Mean over frames, then each cell's patches side by side, row-major (sd2_tpool)."""
        rows, columns = self.config.merge_height, self.config.merge_width
        mean = item.view(frames, height // rows, rows, width // columns, columns, -1).mean(0)
        return mean.permute(0, 2, 1, 3, 4).reshape(height * width // (rows * columns), -1)


class Projector(nn.Module):
    """Merged cells to rows of the language model; exact GELU here, tanh GELU in the tower."""

    def __init__(self, config: VisionConfig, hidden_size: int) -> None:
        super().__init__()
        width = config.merged_size
        self.proj = nn.Sequential(
            nn.Linear(width, width, bias=False),
            nn.GELU(),
            nn.Linear(width, hidden_size, bias=False),
        )
        self.post_norm = nn.RMSNorm(hidden_size, eps=config.projector_eps)

    def forward(self, cells: Tensor) -> Tensor:
        """`[rows, cells * C]` to `[rows, D]`."""
        return self.post_norm(self.proj(cells))


def check_grids(
    patches: Tensor, grid_thws: Tensor, config: VisionConfig
) -> list[tuple[int, int, int]]:
    """The grids `[G, 3]` as tuples, after checking them against the patches.

    Raises `ValueError` on a wrong shape, a side that the merge does not divide or that is too
    long, too many frames, or patch rows that do not add up.
    """
    size = config.patch_size
    if patches.dim() != 4 or tuple(patches.shape[1:]) != (3, size, size):
        raise ValueError(
            f"pixel_values: expected [patches, 3, {size}, {size}], got {list(patches.shape)}"
        )
    if grid_thws.dim() != 2 or grid_thws.shape[1] != 3:
        raise ValueError(f"grid_thws: expected [items, 3], got {list(grid_thws.shape)}")
    grids = [(int(t), int(h), int(w)) for t, h, w in grid_thws.tolist()]
    for t, h, w in grids:
        if not 1 <= t <= config.pos_emb_time:
            raise ValueError(
                f"grid_thws: {t} frames; between 1 and {config.pos_emb_time} are legal"
            )
        if h < 1 or w < 1 or h % config.merge_height or w % config.merge_width:
            raise ValueError(
                f"grid_thws: {h}x{w} patches are not whole {config.merge_height}x"
                f"{config.merge_width} cells; pad the image as the processor does"
            )
        if max(h, w) > MAX_GRID:
            raise ValueError(f"grid_thws: {h}x{w} patches; at most {MAX_GRID} on a side")
    total = sum(t * h * w for t, h, w in grids)
    if total != patches.shape[0]:
        raise ValueError(f"grid_thws cover {total} patches, pixel_values hold {patches.shape[0]}")
    return grids


def rotation_table(height: int, width: int, head_dim: int, device: torch.device | str) -> Tensor:
    """Complex unit factors `[h * w, head_dim / 2]`, patches row-major.

    Even pairs turn with the column, odd pairs with the row (the released code, against its
    comment).
    """
    exponent = torch.arange(0, head_dim, 4, dtype=torch.float32, device=device) / head_dim
    frequency = ROPE_BASE**-exponent
    row = torch.arange(height, device=device)[:, None, None] * frequency
    column = torch.arange(width, device=device)[None, :, None] * frequency
    shape = (height, width, head_dim // 4)
    angle = torch.stack([column.expand(shape), row.expand(shape)], -1).reshape(height * width, -1)
    return torch.polar(torch.ones_like(angle), angle)


def _rotate(x_IHK: Tensor, rotation: Tensor) -> Tensor:
    # fp32: adjacent channels are one complex number
    pairs = torch.view_as_complex(x_IHK.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation[:, None]).flatten(-2).to(x_IHK.dtype)
