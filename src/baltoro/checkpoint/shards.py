"""Tensors in safetensors files: reading one, writing a file tensor by tensor."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from baltoro.checkpoint.directory import CheckpointDirectory

# Order of dtypes inside a file, as the safetensors library writes them.
DTYPE_ORDER = ("U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "I8", "U8")
TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "U8": torch.uint8,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}
DTYPE_CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in TORCH_DTYPES.items()}


class TensorReader:
    """Tensors of a checkpoint by name, one file mapped at a time."""

    def __init__(self, directory: CheckpointDirectory) -> None:
        self.directory = directory
        self._file: str | None = None
        self._open: Any = None

    def tensor(self, name: str) -> Tensor:
        """The tensor `name` on the CPU; its file stays mapped until another is needed."""
        file = self.directory.stored[name].file
        if file != self._file:
            self._open = safe_open(self.directory.path / file, framework="pt", device="cpu")
            self._file = file
        return self._open.get_tensor(name)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor to write; `read` makes it when its turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def write_safetensors(path: Path, entries: Sequence[Entry], *, metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file tensor by tensor and syncs it; memory is that of one tensor.

    The bytes are those the safetensors library writes for the same tensors. Raises `ValueError` if
    a tensor is not what its entry says.
    """
    entries = sorted(entries, key=lambda entry: (DTYPE_ORDER.index(entry.dtype), entry.name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for entry in entries:
        end = offset + prod(entry.shape) * TORCH_DTYPES[entry.dtype].itemsize
        shape = list(entry.shape)
        header[entry.name] = {"dtype": entry.dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            tensor = entry.read()
            if DTYPE_CODES.get(tensor.dtype) != entry.dtype or tensor.shape != entry.shape:
                raise ValueError(
                    f"{entry.name}: is {tensor.dtype} {list(tensor.shape)}, "
                    f"expected {entry.dtype} {list(entry.shape)}"
                )
            data = tensor.detach().cpu().contiguous()
            file.write(data.view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
