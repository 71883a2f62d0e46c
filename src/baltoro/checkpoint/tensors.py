"""Tensors on disk <-> tensors of the model: the arithmetic of the release's layout.

A `Source` gives tensors as the model means them, out of a model or straight from another
checkpoint; `disk_tensor` puts them into the dtype and form of the disk.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from baltoro.checkpoint.names import ReleaseTensor
from baltoro.checkpoint.shards import TORCH_DTYPES, TensorReader
from baltoro.ops.mxfp4 import Mxfp4Tensor, decode_mxfp4, encode_mxfp4


class Source(Protocol):
    """Where tensors come from, by the model's names."""

    def plain(self, tensor: ReleaseTensor) -> Tensor:
        """A parameter or buffer as the model holds it (`A_log` as `[H]`)."""

    def weight(self, tensor: ReleaseTensor) -> Tensor:
        """One matrix of one expert, decoded: `[rows, inputs]`."""

    def mxfp4(self, tensor: ReleaseTensor) -> Mxfp4Tensor:
        """One matrix of one expert, packed."""


def disk_tensor(tensor: ReleaseTensor, source: Source) -> Tensor:
    """`tensor` in the dtype and shape of its entry."""
    if tensor.kind == "packed":
        return source.mxfp4(tensor).packed
    if tensor.kind == "scale":
        return source.mxfp4(tensor).scale
    dtype = TORCH_DTYPES[tensor.dtype]
    if tensor.kind == "weight":
        return source.weight(tensor).to(dtype)
    values = source.plain(tensor).to(dtype)
    return form_a_log(values, tensor.shape) if tensor.kind == "a_log" else values


def cut_a_log(values: Tensor, num_heads: int, name: str) -> Tensor:
    """`A_log` `[H]` from any legal form: `[H]`, `[1, 1, H, 1]`, or longer with a tail of zeros.

    The tail is padding; a value there means that the tensor is something else (one value per
    channel, say), so it raises `ValueError`.
    """
    flat = values.flatten()
    tail = flat[num_heads:]
    if bool((tail != 0).any()):  # also true for NaN
        raise ValueError(
            f"{name}: has {flat.numel()} values for {num_heads} heads and the tail is not zero "
            f"(first {float(tail[tail != 0][0])}); it must be one value per head, padded with zeros"
        )
    return flat[:num_heads]


def form_a_log(a_log: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`[H]` in the form of the disk: reshaped, or padded with zeros."""
    if len(shape) == 1:
        return torch.nn.functional.pad(a_log, (0, shape[0] - a_log.numel()))
    return a_log.reshape(shape)


def needs_scale_hint(weight: Mxfp4Tensor) -> bool:
    """Whether encoding the decoded values again would choose another scale somewhere.

    It would for a group whose largest code stands for 3 or less, and for a group of zeros.
    """
    low, high = weight.packed & 7, weight.packed >> 4 & 7
    largest = torch.maximum(low, high).unflatten(-1, (-1, 16)).amax(-1)
    return bool((largest < 6).any())  # codes 6 and 7 are the values 4 and 6


class Encoded:
    """The matrix encoded last: its codes and its scales are asked for one after the other."""

    def __init__(self) -> None:
        self.key = ""
        self.value: Mxfp4Tensor | None = None

    def of(self, key: str, weight: Tensor, scale_hint: Tensor | None) -> Mxfp4Tensor:
        """`weight` `[rows, inputs]` in MXFP4; `key` names it."""
        if self.value is None or self.key != key:
            hint = None if scale_hint is None else scale_hint.to(weight.device)
            self.key, self.value = key, encode_mxfp4(weight.detach(), hint)
        return self.value


class ModelSource:
    """Tensors of a model, dense or packed."""

    def __init__(
        self, state: Mapping[str, Tensor], scale_hints: Mapping[str, Tensor] | None = None
    ) -> None:
        """`state` by parameter and buffer name; `scale_hints` by `hint_key`."""
        self.state = state
        self.scale_hints = scale_hints or {}
        self.encoded = Encoded()

    def plain(self, tensor: ReleaseTensor) -> Tensor:
        return self.state[tensor.target]

    def weight(self, tensor: ReleaseTensor) -> Tensor:
        if f"{tensor.target}_proj" in self.state:
            return self._rows(tensor, "_proj")
        return decode_mxfp4(self.mxfp4(tensor), torch.float32)

    def mxfp4(self, tensor: ReleaseTensor) -> Mxfp4Tensor:
        if f"{tensor.target}_packed" in self.state:
            return Mxfp4Tensor(self._rows(tensor, "_packed"), self._rows(tensor, "_scale"))
        key = hint_key(tensor)
        return self.encoded.of(key, self._rows(tensor, "_proj"), self.scale_hints.get(key))

    def _rows(self, tensor: ReleaseTensor, field: str) -> Tensor:
        assert tensor.rows is not None
        expert, first, end = tensor.rows
        return self.state[tensor.target + field][expert, first:end]


class DiskSource:
    """Tensors of a checkpoint on disk."""

    def __init__(
        self, reader: TensorReader, tensors: Iterable[ReleaseTensor], *, num_heads: int
    ) -> None:
        """`tensors` are those of the directory, as `match` returned them."""
        self.reader = reader
        self.num_heads = num_heads
        self.names = {(t.target, t.rows, t.kind): t.name for t in tensors}
        self.encoded = Encoded()

    def plain(self, tensor: ReleaseTensor) -> Tensor:
        if (name := self.names.get((tensor.target, None, "a_log"))) is not None:
            return cut_a_log(self.reader.tensor(name), self.num_heads, name)
        return self.reader.tensor(self.names[tensor.target, None, "plain"])

    def weight(self, tensor: ReleaseTensor) -> Tensor:
        if (name := self.names.get((tensor.target, tensor.rows, "weight"))) is not None:
            return self.reader.tensor(name)
        return decode_mxfp4(self.mxfp4(tensor), torch.float32)

    def mxfp4(self, tensor: ReleaseTensor) -> Mxfp4Tensor:
        packed = self.names.get((tensor.target, tensor.rows, "packed"))
        if packed is None:
            return self.encoded.of(hint_key(tensor), self.weight(tensor), None)
        scale = self.names[tensor.target, tensor.rows, "scale"]
        return Mxfp4Tensor(self.reader.tensor(packed), self.reader.tensor(scale))


def hint_key(tensor: ReleaseTensor) -> str:
    """Name of an expert's matrix among the scale hints."""
    return f"{tensor.target}{list(tensor.rows or ())}"
