"""Rewriting a checkpoint with other number formats, without building the model."""

from pathlib import Path
from typing import Literal

from baltoro.checkpoint.directory import CheckpointDirectory
from baltoro.checkpoint.load import check_copies, release_record
from baltoro.checkpoint.match import match
from baltoro.checkpoint.names import release_tensors
from baltoro.checkpoint.release import read_config
from baltoro.checkpoint.save import EXPERT_FORMATS, ExpertFormat, write_checkpoint
from baltoro.checkpoint.shards import TensorReader
from baltoro.checkpoint.tensors import DiskSource

DTYPES = {"bf16": "BF16", "fp32": "F32"}


def convert(
    source: str,
    target: str,
    *,
    experts: ExpertFormat | None = None,
    dtype: Literal["bf16", "fp32"] | None = None,
    overwrite: bool = False,
) -> None:
    """Write the checkpoint SOURCE again as TARGET, with other number formats.

    Tensors are read, converted and written one by one; memory is that of one tensor and one mapped
    shard. Spelling, form of A_log, tokenizer and preprocessor stay as they are. TARGET appears
    whole or not at all.

    Args:
        source: directory of a K3 or Kimi Linear checkpoint
        target: directory to write; an existing checkpoint there is replaced
        experts: format of the routed experts; as they are if not given
        dtype: format of all other tensors but those that are fp32 by rule; as they are if not given
        overwrite: replace TARGET even if it holds something else than a checkpoint
    """
    directory = CheckpointDirectory(source)
    config = read_config(directory.raw_config)
    layout, tensors = match(directory, config)
    if experts is not None and config.moe is None:
        raise ValueError(f"experts={experts!r}: {source} has no routed experts")
    reader = TensorReader(directory)
    check_copies(reader, tensors)
    layout = layout.with_formats(
        dtype=DTYPES[dtype] if dtype else layout.dtype,
        experts=EXPERT_FORMATS[experts] if experts else layout.experts,
    )
    write_checkpoint(
        Path(target),
        config,
        layout,
        list(release_tensors(config, layout)),
        DiskSource(reader, tensors, num_heads=config.kda.num_heads),
        companions=directory.companions(),
        release=release_record(directory, layout, scale_hints={}),
        overwrite=overwrite,
    )
