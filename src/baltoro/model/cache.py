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
from baltoro.ops.kda.decode import DecodeInputs, StatePool
from baltoro.ops.mla.rows import latent_rows


class KdaStep(Protocol):
    """A KDA layer's decode (`baltoro.ops.kda.decode`) on any states: outputs `[T, H, V]`."""

    def __call__(
        self,
        inputs: DecodeInputs,
        pool: StatePool,
        slots: Tensor,
        cu_seqlens: Tensor | None,
        num_kept: Tensor | None,
    ) -> Tensor: ...


class LatentRows(NamedTuple):
    """What an MLA layer keeps of new tokens, the norm still to come (`baltoro.ops.mla.rows`)."""

    raw: Tensor  # [T, R + P]
    weight: Tensor  # [R]
    eps: float
    norm_impl: str
    append_impl: str

    def normed(self) -> Tensor:
        """The rows themselves."""
        return latent_rows(self.raw, self.weight, eps=self.eps, impl=self.norm_impl)


class LatentPages(NamedTuple):
    """Where the latents of some sequences lie, their new tokens' own among them."""

    latents: Tensor  # [pages, page_size, R]
    page_table: Tensor  # [N, max_pages] int32
    lengths: Tensor  # [N] int32
    cu_seqlens: Tensor | None = None  # [N + 1] int32 of the new tokens; None: one of each
    max_tokens: int = 1  # most new tokens of a sequence


class ScanInputs(NamedTuple):
    """What a KDA layer's projections give for packed tokens."""

    projected: Tensor  # [T, C], q, k and v side by side, before the convolution
    decay_logits: Tensor  # [T, H, K]
    beta_logits: Tensor  # [T, H]


class ScanOutput(NamedTuple):
    """What a KDA layer makes of them: outputs, and what comes before the next tokens."""

    o: Tensor  # [T, H, V]
    conv_state: Tensor  # [N, C, W - 1]
    state: Tensor  # [N, H, K, V], fp32


class KdaScan(Protocol):
    """A KDA layer over many tokens of sequences that begin with these windows and states."""

    def __call__(
        self,
        inputs: ScanInputs,
        cu_seqlens: Tensor,
        conv_state: Tensor | None,
        state: Tensor | None,
    ) -> ScanOutput: ...


class Attend(Protocol):
    """An MLA layer's attention of packed queries `[T, H, K]` over latents `[S, R]`."""

    def __call__(
        self, q_THK: Tensor, kv_SR: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
    ) -> Tensor: ...


class Cache(Protocol):
    """What the mixers need of a cache; `form` says which execution form the caller wants."""

    # decode: one new token for every sequence, or a few where drafts are verified
    form: Literal["prefill", "decode"]

    def prefill_kda(
        self, layer_idx: int, scan: KdaScan, inputs: ScanInputs, cu_seqlens: Tensor
    ) -> Tensor:
        """Prefill: have a layer `scan` the new tokens, `[T, H, V]`; its states move on."""
        ...

    def decode_kda(self, layer_idx: int, step: KdaStep, inputs: DecodeInputs) -> Tensor:
        """Decode: have a layer's `step` read and move on the states where they lie."""
        ...

    def append_kv(self, layer_idx: int, rows: LatentRows, cu_seqlens: Tensor) -> None:
        """Add the packed rows of the new tokens."""
        ...

    def attended(self, layer_idx: int, attend: Attend, q_THK: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Prefill: have a layer `attend` to all rows of the sequences, `[T, H, V]`."""
        ...

    def latent_pages(self, layer_idx: int) -> LatentPages:
        """Decode: where the rows of all sequences are; what is behind their ends is undefined."""
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
        self._kda: dict[int, StatePool] = {}  # a sequence's slot is its number plus one
        self._kv: dict[int, Tensor] = {}
        self._kv_lens: dict[int, list[int]] = {}
        for layer_idx, mixer in enumerate(mixers):
            if mixer == "mla":
                shape = (num_sequences, capacity, mla.kv_latent_dim)
                self._kv[layer_idx] = torch.empty(shape, dtype=dtype, device=device)
                self._kv_lens[layer_idx] = [0] * num_sequences
                continue
            heads, dim = kda.num_heads, kda.head_dim
            window = (num_sequences + 1, 3 * heads * dim, kda.conv_kernel_size - 1)
            state = (num_sequences + 1, heads, dim, dim)
            self._kda[layer_idx] = StatePool(
                torch.zeros(window, dtype=dtype, device=device),
                torch.zeros(state, dtype=state_dtype, device=device),
            )
        self._slots = torch.arange(1, num_sequences + 1, device=device)

    def prefill_kda(
        self, layer_idx: int, scan: KdaScan, inputs: ScanInputs, cu_seqlens: Tensor
    ) -> Tensor:
        windows, states = self._kda[layer_idx]
        out = scan(inputs, cu_seqlens, windows[1:], states[1:])
        windows[1:] = out.conv_state
        states[1:] = out.state
        return out.o

    def decode_kda(self, layer_idx: int, step: KdaStep, inputs: DecodeInputs) -> Tensor:
        return step(inputs, self._kda[layer_idx], self._slots, None, None)

    def append_kv(self, layer_idx: int, rows: LatentRows, cu_seqlens: Tensor) -> None:
        kv_latent = rows.normed()
        bounds = cu_seqlens.tolist()
        lens = self._kv_lens[layer_idx]
        spans = list(pairwise(bounds))
        ends = [old + end - start for old, (start, end) in zip(lens, spans, strict=True)]
        self._reserve(layer_idx, max(ends))
        buffer = self._kv[layer_idx]
        for n, (start, end) in enumerate(spans):
            buffer[n, lens[n] : ends[n]] = kv_latent[start:end]
        self._kv_lens[layer_idx] = ends

    def attended(self, layer_idx: int, attend: Attend, q_THK: Tensor, cu_seqlens: Tensor) -> Tensor:
        buffer, ends = self._kv[layer_idx], self._kv_lens[layer_idx]
        kv_SR = torch.cat([buffer[n, :end] for n, end in enumerate(ends)])
        bounds = torch.tensor([0, *ends]).cumsum(0).to(torch.int32)
        return attend(q_THK, kv_SR, cu_seqlens, bounds)

    def latent_pages(self, layer_idx: int) -> LatentPages:
        buffer, ends = self._kv[layer_idx], self._kv_lens[layer_idx]
        table = torch.arange(len(ends), dtype=torch.int32, device=buffer.device)[:, None]
        return LatentPages(
            buffer, table, torch.tensor(ends, dtype=torch.int32, device=buffer.device)
        )

    def is_empty(self, layer_idx: int) -> Tensor:
        return torch.tensor([length == 0 for length in self._kv_lens[layer_idx]])

    def _reserve(self, layer_idx: int, length: int) -> None:
        buffer = self._kv[layer_idx]
        if length <= buffer.shape[1]:
            return
        grown = buffer.new_empty(buffer.shape[0], max(length, 2 * buffer.shape[1]), buffer.shape[2])
        grown[:, : buffer.shape[1]] = buffer
        self._kv[layer_idx] = grown
