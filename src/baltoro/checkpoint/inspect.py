"""What a checkpoint or a preset is made of: `baltoro inspect`.

Everything is derived from the table of release tensors (`names`); no tensor is allocated and torch
is not imported, so K3 takes a few seconds.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table

from baltoro.checkpoint.directory import CheckpointDirectory
from baltoro.checkpoint.match import match
from baltoro.checkpoint.names import (
    Layout,
    ReleaseTensor,
    fresh_layout,
    is_kimi_linear,
    release_tensors,
    shard_files,
)
from baltoro.checkpoint.release import read_config
from baltoro.config import paths
from baltoro.model.config import ModelConfig
from baltoro.model.presets import PRESETS, preset

REPORT_WIDTH = 120  # where the output is no terminal
NOT_ACTIVE = ("embedding", "vision tower", "projector", "mtp")

_PARTS = (
    ("embed_tokens.", "embedding"),
    ("lm_head.", "head"),
    ("vision_tower.", "vision tower"),
    ("mm_projector.", "projector"),
    ("mtp_layers.", "mtp"),
)
_PARTS_OF_LAYER = (
    (".experts.", "routed experts"),
    (".shared_experts.", "shared experts"),
    (".mlp.", "dense mlp"),
    (".routed_expert_", "latent projections"),
    (".gate.", "router"),
)


def inspect(target: str, *, tensors: bool = False) -> None:
    """Print what a checkpoint or preset holds.

    Configuration, total and active parameters, map of the layers, memory by part, and the names,
    dtypes and shapes of the tensors in the release's layout: of a preset, that of its release, with
    MXFP4 experts for K3.

    Args:
        target: directory of a checkpoint, or the name of a preset
        tensors: print every tensor with its file, one a line, instead of the report
    """
    config, layout, listed, files = survey(target)
    if tensors:
        for tensor in listed:
            print(f"{files[tensor.name]} {tensor.name} {tensor.dtype} {_dims(tensor)}")
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=REPORT_WIDTH)
    console.print(report(target, config, layout, listed, num_files=len(set(files.values()))))


def survey(target: str) -> tuple[ModelConfig, Layout, list[ReleaseTensor], dict[str, str]]:
    """Configuration, spelling, tensors and their files, of a directory or of a preset.

    Raises `ValueError` if `target` is neither, or the directory holds no whole checkpoint.
    """
    if Path(target).is_dir():
        directory = CheckpointDirectory(target)
        config = read_config(directory.raw_config)
        layout, tensors = match(directory, config)
        return config, layout, tensors, {t.name: directory.stored[t.name].file for t in tensors}
    if target not in PRESETS:
        near = get_close_matches(target, PRESETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"presets are {', '.join(PRESETS)}"
        raise ValueError(f"{target}: is neither a directory nor a preset; {hint}")
    config = preset(target)
    # the K3 release packs its experts, Kimi Linear's does not
    experts = "BF16" if is_kimi_linear(config) else "mxfp4"
    layout = fresh_layout(config, dtype="BF16", experts=experts)
    tensors = list(release_tensors(config, layout))
    shards = shard_files(tensors, wrapped=layout.wrapped)
    return config, layout, tensors, {t.name: file for file, ts in shards.items() for t in ts}


def counts(config: ModelConfig, tensors: list[ReleaseTensor]) -> tuple[dict[str, int], int]:
    """Parameters by part, and those active for one text token without the embedding table.

    Elements as on disk: a padded `A_log` counts whole, the router's bias counts, scales do not.
    """
    parts: Counter[str] = Counter()
    for tensor, number in alike(tensors).items():
        parts[part_of(config, tensor)] += tensor.num_elements * number
    active = 0
    for part, size in parts.items():
        if part == "routed experts" and config.moe is not None:
            size = size // config.moe.num_experts * config.moe.num_experts_per_token
        active += 0 if part in NOT_ACTIVE else size
    return dict(parts), active


def alike(tensors: list[ReleaseTensor]) -> dict[ReleaseTensor, int]:
    """One tensor of each kind and layer, with how many there are (one expert stands for all)."""
    first: dict[tuple[object, ...], ReleaseTensor] = {}
    numbers: Counter[tuple[object, ...]] = Counter()
    for tensor in tensors:
        # of an expert's tensor everything but the name and the expert's index
        key: tuple[object, ...] = tensor[1:6] + (tensor.rows[1:] if tensor.rows else ())
        first.setdefault(key, tensor)
        numbers[key] += 1
    return {tensor: numbers[key] for key, tensor in first.items()}


def part_of(config: ModelConfig, tensor: ReleaseTensor) -> str:
    """The part of the model that a tensor belongs to, in words."""
    target = tensor.target
    for start, part in _PARTS:
        if target.startswith(start):
            return "mtp" if tensor.kind == "copy" else part
    for piece, part in _PARTS_OF_LAYER:
        if piece in target:
            return part
    if ".self_attn." in target:
        return config.mixers[int(target.split(".")[1])]
    return "norms and residual reads"


def report(
    title: str,
    config: ModelConfig,
    layout: Layout,
    tensors: list[ReleaseTensor],
    *,
    num_files: int,
) -> Group:
    """Everything `inspect` prints."""
    parts, active = counts(config, tensors)
    total, num_bytes = sum(parts.values()), sum(tensor.num_bytes for tensor in tensors)
    family = "K3 layout" if layout.wrapped else "Kimi Linear layout"
    head = (
        f"{title}: {family}, {layout.dtype}, experts {layout.experts}; "
        f"{len(tensors):,} tensors, {num_bytes:,} bytes, {num_files} files\n"
        f"{total:,} parameters; {active:,} active per text token "
        f"({active + parts['embedding']:,} with the embedding table)"
    )
    return Group(
        head,
        _config_table(config),
        _layer_table(config),
        _memory_table(config, tensors, parts),
        *_state_lines(config),
        _tensor_table(tensors),
    )


def _config_table(config: ModelConfig) -> Table:
    table = _table("configuration", "field", "value")
    for path in paths(config):
        value: object = config
        for name in path.split("."):
            value = getattr(value, name)
        is_leaf = not dataclasses.is_dataclass(value)
        if is_leaf and not path.startswith(("impl.", "mixers", "moe.expert_format")):
            table.add_row(path, str(value))
    return table


def _layer_table(config: ModelConfig) -> Table:
    """One row per residual block, or per twelve layers without attention residuals."""
    step = config.attn_res_block_size or 12
    table = _table("layers", "layers", "token mixers", "channel mixers")
    for first in range(0, config.num_layers, step):
        layers = range(first, min(first + step, config.num_layers))
        mixers = " ".join(config.mixers[layer] for layer in layers)
        channels = Counter("moe" if config.is_moe(layer) else "mlp" for layer in layers)
        words = " ".join(f"{count} {name}" for name, count in channels.items())
        table.add_row(f"{layers[0]}-{layers[-1]}", mixers, words)
    return table


def _memory_table(
    config: ModelConfig, tensors: list[ReleaseTensor], parts: dict[str, int]
) -> Table:
    num_bytes: Counter[str] = Counter()
    for tensor, number in alike(tensors).items():
        num_bytes[part_of(config, tensor)] += tensor.num_bytes * number
    whole = sum(num_bytes.values())
    table = _table("memory", "part", "parameters", "bytes", "share")
    for column in table.columns[1:]:
        column.justify = "right"
    for part, size in sorted(num_bytes.items(), key=lambda item: -item[1]):
        table.add_row(part, f"{parts[part]:,}", f"{size:,}", f"{size / whole:.1%}")
    return table


def _state_lines(config: ModelConfig) -> Iterator[str]:
    """What a sequence keeps, with a bf16 latent cache and convolution window and fp32 states."""
    kda, mla = config.kda, config.mla
    width = kda.num_heads * kda.head_dim
    per_layer = 4 * width * kda.head_dim + 2 * 3 * width * (kda.conv_kernel_size - 1)
    yield (
        f"cache: {config.mixers.count('mla') * 2 * mla.kv_latent_dim:,} bytes per token, "
        f"{config.mixers.count('kda') * per_layer:,} bytes per sequence"
    )


def _tensor_table(tensors: list[ReleaseTensor]) -> Table:
    """Names with their numbers folded: one row per pattern, dtype and shape."""
    folded: Counter[tuple[str, str, str]] = Counter()
    for tensor, number in alike(tensors).items():
        name = tensor.name
        for word, letter in (("layers", "i"), ("experts", "e"), ("blocks", "b")):
            name = re.sub(rf"\b{word}\.\d+\.", f"{word}.{{{letter}}}.", name)
        folded[name, tensor.dtype, _dims(tensor)] += number
    table = _table("tensors", "name", "dtype", "shape", "count")
    table.columns[-1].justify = "right"
    for (name, dtype, dims), count in folded.items():
        table.add_row(name, dtype, dims, f"{count:,}")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _dims(tensor: ReleaseTensor) -> str:
    return "[" + ",".join(str(size) for size in tensor.shape) + "]"
