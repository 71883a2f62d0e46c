"""State of a batch of sequences between two calls of the model.

The model asks a cache for what a layer kept and hands back what it must keep; `Cache` says what a
cache offers, `DenseCache` is the plain one: every tensor contiguous, one row per sequence. A
prefix is resumable only with all of it: MLA latents, KDA states and convolution windows at the
same token.
"""

from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from baltoro.model.config import ModelConfig


class KdaInputs(NamedTuple):
    """What a KDA layer made of the new tokens: enough to repeat its state on the first of them."""

    projected: Tensor  # [T, C], inputs of the convolutions
    k: Tensor  # [T, H, K]
    v: Tensor  # [T, H, V]
    g: Tensor  # [T, H, K] fp32
    beta: Tensor  # [T, H] fp32


class Cache(Protocol):
    """What the mixers need of a cache; `form` says which execution form the caller wants."""

    # decode: one new token for every sequence, or a few where drafts are verified
    form: Literal["prefill", "decode"]

    def kda_state(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Convolution window `[N, C, W-1]` and recurrent state `[N, H, K, V]` (fp32)."""
        ...

    def store_kda_state(
        self, layer_idx: int, conv_state: Tensor, state: Tensor, inputs: KdaInputs | None
    ) -> None:
        """Keep a KDA layer's window and state after the new tokens, or the inputs that led there.

        `inputs` is None from a prefill.
        """
        ...

    def append_kv(self, layer_idx: int, kv_latent: Tensor, cu_seqlens: Tensor) -> None:
        """Add the packed latent rows `[T, R]` of the new tokens."""
        ...

    def kv_packed(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """All rows of all sequences, `[S, R]`, and their `cu_seqlens` `[N + 1]`."""
        ...

    def kv_padded(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """For each new token to decode the rows that it sees, `[T, L, R]`, and their number `[T]`.

        Beyond that number the content is undefined.
        """
        ...

    def is_empty(self, layer_idx: int) -> Tensor:
        """`[N]` bool: which sequences have no latent row in this layer yet."""
        ...


class DenseCache:
    """A cache with one contiguous row per sequence; grows by doubling.

    `dtype` is that of the latents and convolution windows; recurrent states are fp32, or fp64
    where that is fp64.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_sequences: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        capacity: int = 256,
    ) -> None:
        self.form: Literal["prefill", "decode"] = "prefill"
        self.num_sequences = num_sequences
        kda, mla = config.kda, config.mla
        mixers = [*config.mixers, *["mla"] * config.num_mtp_layers]
        # a recurrence over the whole sequence: never narrower than fp32
        state_dtype = torch.promote_types(dtype, torch.float32)
        self._kda: dict[int, tuple[Tensor, Tensor]] = {}
        self._kv: dict[int, Tensor] = {}
        self._kv_lens: dict[int, list[int]] = {}
        for layer_idx, mixer in enumerate(mixers):
            if mixer == "mla":
                shape = (num_sequences, capacity, mla.kv_latent_dim)
                self._kv[layer_idx] = torch.empty(shape, dtype=dtype, device=device)
                self._kv_lens[layer_idx] = [0] * num_sequences
                continue
            heads, dim = kda.num_heads, kda.head_dim
            window = (num_sequences, 3 * heads * dim, kda.conv_kernel_size - 1)
            self._kda[layer_idx] = (
                torch.zeros(window, dtype=dtype, device=device),
                torch.zeros(num_sequences, heads, dim, dim, dtype=state_dtype, device=device),
            )

    def kda_state(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        return self._kda[layer_idx]

    def store_kda_state(
        self, layer_idx: int, conv_state: Tensor, state: Tensor, inputs: KdaInputs | None
    ) -> None:
        self._kda[layer_idx] = (conv_state, state)

    def append_kv(self, layer_idx: int, kv_latent: Tensor, cu_seqlens: Tensor) -> None:
        bounds = cu_seqlens.tolist()
        lens = self._kv_lens[layer_idx]
        spans = list(pairwise(bounds))
        ends = [old + end - start for old, (start, end) in zip(lens, spans, strict=True)]
        self._reserve(layer_idx, max(ends))
        buffer = self._kv[layer_idx]
        for n, (start, end) in enumerate(spans):
            buffer[n, lens[n] : ends[n]] = kv_latent[start:end]
        self._kv_lens[layer_idx] = ends

    def kv_packed(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        buffer, ends = self._kv[layer_idx], self._kv_lens[layer_idx]
        rows = torch.cat([buffer[n, :end] for n, end in enumerate(ends)])
        lengths = torch.tensor([0, *ends], device=buffer.device)
        return rows, lengths.cumsum(0).to(torch.int32)

    def kv_padded(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        buffer, ends = self._kv[layer_idx], self._kv_lens[layer_idx]
        return buffer[:, : max(ends)], torch.tensor(ends, device=buffer.device)

    def is_empty(self, layer_idx: int) -> Tensor:
        return torch.tensor([length == 0 for length in self._kv_lens[layer_idx]])

    def repeat(self, count: int) -> "DenseCache":
        """A cache whose every sequence stands `count` times in a row, sharing no memory."""
        copy = object.__new__(DenseCache)
        copy.form = self.form
        copy.num_sequences = self.num_sequences * count
        copy._kv = {i: kv.repeat_interleave(count, 0) for i, kv in self._kv.items()}
        copy._kv_lens = {
            i: [length for length in lens for _ in range(count)]
            for i, lens in self._kv_lens.items()
        }
        copy._kda = {
            i: (window.repeat_interleave(count, 0), state.repeat_interleave(count, 0))
            for i, (window, state) in self._kda.items()
        }
        return copy

    def _reserve(self, layer_idx: int, length: int) -> None:
        buffer = self._kv[layer_idx]
        if length <= buffer.shape[1]:
            return
        grown = buffer.new_empty(buffer.shape[0], max(length, 2 * buffer.shape[1]), buffer.shape[2])
        grown[:, : buffer.shape[1]] = buffer
        self._kv[layer_idx] = grown
