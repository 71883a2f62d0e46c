"""How a model's state is laid out in pages of one size.

A page holds either `page_size` latent rows of every MLA layer, or the recurrent state and the
convolution window of as many KDA layers (one group). The size follows from the equality

    page_size = ceil(bytes of a KDA layer's state and window / bytes of a latent row)

rounded up to the unit of prefix matching, the hash block; for K3 in bf16 with a hash block of 512
that is 6144 tokens.
"""

from dataclasses import dataclass

from baltoro.model.config import ModelConfig

MIN_HASH_BLOCK, MAX_HASH_BLOCK = 16, 512
UNITS_PER_PAGE = 8  # hash blocks that a page should hold at least, where the minimum allows it


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolLayout:
    """Which layers share a page and how many tokens a page of latents holds."""

    kda_layers: tuple[int, ...]  # layer indices
    mla_layers: tuple[int, ...]
    hash_block: int  # tokens of one unit of prefix matching
    state_bytes: int  # recurrent state of one KDA layer
    window_bytes: int  # convolution window of one KDA layer
    latent_bytes: int  # one token in one MLA layer
    cold_bytes: int  # state and window of one KDA layer with int8 states (`cold`)

    def __post_init__(self) -> None:
        if not self.kda_layers or not self.mla_layers:
            raise ValueError(
                f"mixers: the engine serves hybrids; this model has {len(self.kda_layers)} KDA and "
                f"{len(self.mla_layers)} MLA layers and needs at least one of each"
            )
        if self.hash_block < 1:
            raise ValueError(f"hash_block={self.hash_block}: must be at least 1 token")

    @property
    def page_size(self) -> int:
        """Tokens of one page of latents, a multiple of the hash block."""
        kda_bytes = self.state_bytes + self.window_bytes
        return -(-kda_bytes // (self.latent_bytes * self.hash_block)) * self.hash_block

    @property
    def layers_per_page(self) -> int:
        """All MLA layers share a page, and as many KDA layers do."""
        return len(self.mla_layers)

    @property
    def layer_bytes(self) -> int:
        """One layer's part of a page."""
        return self.page_size * self.latent_bytes

    @property
    def page_bytes(self) -> int:
        return self.layers_per_page * self.layer_bytes

    @property
    def state_groups(self) -> tuple[tuple[int, ...], ...]:
        """KDA layers by page: one sequence's state is one page of each group."""
        size = self.layers_per_page
        starts = range(0, len(self.kda_layers), size)
        return tuple(self.kda_layers[start : start + size] for start in starts)

    @property
    def num_cold_pages(self) -> int:
        """Pages of one sequence's state where it is packed."""
        return -(-len(self.kda_layers) * self.cold_bytes // self.page_bytes)

    @property
    def state_waste(self) -> float:
        """Share of a state's pages that is padding: uneven groups, and rounding of the page."""
        held = len(self.kda_layers) * (self.state_bytes + self.window_bytes)
        return 1.0 - held / (len(self.state_groups) * self.page_bytes)


def pool_layout(
    config: ModelConfig, *, dtype_bytes: int, hash_block: int | None = None
) -> PoolLayout:
    """The layout for a model whose latents and windows take `dtype_bytes` per number.

    Recurrent states take 4 bytes, or 8 where latents do. Without a `hash_block` it is the largest
    power of two from 16 to 512 that leaves a page at least eight. MTP layers are not in the pool.
    Raises `ValueError` for a model without KDA or without MLA layers.
    """
    kda = config.kda
    state_bytes = kda.num_heads * kda.head_dim**2 * max(4, dtype_bytes)
    window_bytes = 3 * kda.num_heads * kda.head_dim * (kda.conv_kernel_size - 1) * dtype_bytes
    latent_bytes = config.mla.kv_latent_dim * dtype_bytes
    if hash_block is None:
        hash_block = MAX_HASH_BLOCK
        tokens = (state_bytes + window_bytes) // latent_bytes
        while hash_block > MIN_HASH_BLOCK and hash_block * UNITS_PER_PAGE > tokens:
            hash_block //= 2
    return PoolLayout(
        kda_layers=tuple(i for i, mixer in enumerate(config.mixers) if mixer == "kda"),
        mla_layers=tuple(i for i, mixer in enumerate(config.mixers) if mixer == "mla"),
        hash_block=hash_block,
        state_bytes=state_bytes,
        window_bytes=window_bytes,
        latent_bytes=latent_bytes,
        cold_bytes=window_bytes + kda.num_heads * kda.head_dim * (kda.head_dim + 4),
    )
