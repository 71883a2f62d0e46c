"""Writing a checkpoint in the official layout: names, dtypes, shapes, shards and index.

The directory appears whole or not at all. Tensors are written one by one: saving needs the memory
of the largest tensor beside the model.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from baltoro.checkpoint.config_json import write_config, write_preprocessor
from baltoro.checkpoint.directory import CONFIG_FILE, whole_directory, write_file
from baltoro.checkpoint.load import Release
from baltoro.checkpoint.names import (
    FLOAT_DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    Layout,
    ReleaseTensor,
    fresh_layout,
    release_tensors,
    shard_files,
)
from baltoro.checkpoint.shards import DTYPE_CODES, Entry, write_safetensors
from baltoro.checkpoint.tensors import ModelSource, Source, disk_tensor
from baltoro.model.config import ModelConfig
from baltoro.model.model import Model
from baltoro.text.images import CONFIG_FILE as PREPROCESSOR_FILE

ExpertFormat = Literal["mxfp4", "bf16", "fp32"]
EXPERT_FORMATS: Mapping[str, str] = {"mxfp4": "mxfp4", "bf16": "BF16", "fp32": "F32"}


def save(
    model: Model,
    path: str | Path,
    *,
    experts: ExpertFormat | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> None:
    """Writes `model` to the directory `path` in the release's layout.

    A model that was loaded is written as it was found: prefix, form of `A_log`, shards, dtypes and
    packed experts, its tokenizer and preprocessor beside it. A new one is written as K3 does, or as
    Kimi Linear does if that can say it; up to 5 GB in one `model.safetensors`, above that in shards
    with an index (`names.shard_files`). `experts` and `dtype` change the format of the routed
    experts and of everything else that is not fp32 by rule.

    Raises `ValueError`, before anything is written, if the model cannot be said in the layout or
    `path` holds something else than a checkpoint; `overwrite` replaces that too.
    """
    release: Release | None = model.release
    state = dict([*model.named_parameters(), *model.named_buffers()])
    layout = _layout(model, release, experts, dtype)
    tensors = list(release_tensors(model.config, layout))
    _check_covers(state, tensors)
    write_checkpoint(
        Path(path),
        model.config,
        layout,
        tensors,
        ModelSource(state, {} if release is None else release.scale_hints),
        companions=fresh_companions(model) if release is None else release.companions,
        release=release,
        overwrite=overwrite,
    )


def fresh_companions(model: Model) -> dict[str, bytes]:
    """Files beside the tensors of a model that was not loaded, by name."""
    companions = {}
    if model.config.vision is not None:
        text = json.dumps(write_preprocessor(model.config.vision), indent=2) + "\n"
        companions[PREPROCESSOR_FILE] = text.encode()
    if model.tokenizer is not None:
        with tempfile.TemporaryDirectory() as directory:
            model.tokenizer.save(Path(directory))
            for path in Path(directory).iterdir():
                companions[path.name] = path.read_bytes()
    return companions


def write_checkpoint(
    path: Path,
    config: ModelConfig,
    layout: Layout,
    tensors: list[ReleaseTensor],
    source: Source,
    *,
    companions: Mapping[str, bytes],
    release: Release | None,
    overwrite: bool,
) -> None:
    """Writes the directory: configuration, companions, shards and index, from any source.

    `release` is that of the checkpoint it follows, if any.
    """
    written = write_config(config, layout, raw=None if release is None else release.raw_config)
    text = json.dumps(written, indent=2) + "\n"
    metadata: Mapping[str, str] = {"format": "pt"}
    index_metadata: Mapping[str, Any] = {}
    if release is not None:
        text = release.config_text if written == release.raw_config else text
        metadata, index_metadata = release.metadata, release.index_metadata or {}
    files = _files(tensors, layout, release)
    with whole_directory(path, overwrite=overwrite) as directory:
        write_file(directory / CONFIG_FILE, text.encode())
        for name, data in companions.items():
            write_file(directory / name, data)
        for name, shard in files.items():
            entries = [_entry(tensor, source) for tensor in shard]
            write_safetensors(directory / name, entries, metadata=metadata)
        if list(files) != [SINGLE_FILE]:
            write_file(directory / INDEX_FILE, _index(files, index_metadata).encode())


def _layout(
    model: Model, release: Release | None, experts: str | None, dtype: torch.dtype | None
) -> Layout:
    config = model.config
    if experts is not None and experts not in EXPERT_FORMATS:
        raise ValueError(f"experts={experts!r}: choose one of {', '.join(EXPERT_FORMATS)}")
    if experts is not None and config.moe is None:
        raise ValueError(f"experts={experts!r}: the model has no routed experts")
    held = model.embed_tokens.weight.dtype if dtype is None else dtype
    if release is None or dtype is not None:
        code = DTYPE_CODES.get(held, "")
        if code not in FLOAT_DTYPES:
            raise ValueError(
                f"dtype={held}: cannot be saved; cast the model to bfloat16, float16 or float32"
            )
    if release is None:
        is_packed = config.moe is not None and config.moe.expert_format == "mxfp4"
        chosen = EXPERT_FORMATS[experts] if experts else ("mxfp4" if is_packed else code)
        return fresh_layout(config, dtype=code, experts=chosen)
    layout = release.layout
    chosen = layout.experts
    if dtype is not None and chosen != "mxfp4":
        chosen = code
    if experts is not None:
        chosen = EXPERT_FORMATS[experts]
    return layout.with_formats(dtype=code if dtype is not None else layout.dtype, experts=chosen)


def _check_covers(state: Mapping[str, Tensor], tensors: list[ReleaseTensor]) -> None:
    covered = {tensor.target for tensor in tensors if tensor.rows is None}
    for stem in {tensor.target for tensor in tensors if tensor.rows is not None}:
        fields = ("_proj",) if f"{stem}_proj" in state else ("_packed", "_scale")
        covered |= {stem + field for field in fields}
    odd = sorted(covered ^ state.keys())
    if odd:
        raise ValueError(
            f"{len(odd)} tensors of the model have no place in the release's layout, or the other "
            f"way round, first {odd[0]}; merge or remove what was added to the model"
        )


def _files(
    tensors: list[ReleaseTensor], layout: Layout, release: Release | None
) -> dict[str, list[ReleaseTensor]]:
    if release is None or release.weight_map.keys() != {tensor.name for tensor in tensors}:
        return shard_files(tensors, wrapped=layout.wrapped)
    files: dict[str, list[ReleaseTensor]] = {}
    for tensor in tensors:
        files.setdefault(release.weight_map[tensor.name], []).append(tensor)
    return dict(sorted(files.items()))


def _entry(tensor: ReleaseTensor, source: Source) -> Entry:
    return Entry(tensor.name, tensor.dtype, tensor.shape, lambda: disk_tensor(tensor, source))


def _index(files: Mapping[str, list[ReleaseTensor]], metadata: Mapping[str, Any]) -> str:
    total = sum(tensor.num_bytes for shard in files.values() for tensor in shard)
    weight_map = {tensor.name: name for name, shard in files.items() for tensor in shard}
    index = {
        "metadata": {**metadata, "total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(index, indent=2) + "\n"
