"""Loading a checkpoint in the official layout: K3's or Kimi Linear's.

The names, shapes and dtypes of the whole directory are checked before anything is allocated.
Tensors are then read file by file, so the peak is the model and one mapped shard.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from baltoro.checkpoint.directory import CheckpointDirectory
from baltoro.checkpoint.match import match
from baltoro.checkpoint.names import FLOAT_DTYPES, Layout, ReleaseTensor
from baltoro.checkpoint.release import read_config
from baltoro.checkpoint.shards import DTYPE_CODES, TORCH_DTYPES, TensorReader
from baltoro.checkpoint.tensors import DiskSource, hint_key, needs_scale_hint
from baltoro.model.config import ImplConfig, ModelConfig, gpu_impl
from baltoro.model.counts import meta_model
from baltoro.model.model import Model
from baltoro.ops.mxfp4 import Mxfp4Tensor, decode_mxfp4
from baltoro.text.bpe import TOKENIZER_FILE
from baltoro.text.images import CONFIG_FILE as PREPROCESSOR_FILE
from baltoro.text.images import ImageProcessor
from baltoro.text.markers import OPEN
from baltoro.text.processor import Processor
from baltoro.text.tiktoken_file import RANKS_FILE
from baltoro.text.tokenizer import load_tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """What a checkpoint says beside its tensors; `save` writes it again from `model.release`."""

    layout: Layout  # spelling and number formats to write
    raw_config: Mapping[str, Any]  # config.json, parsed
    config_text: str  # and as it was written
    weight_map: Mapping[str, str]  # file of every tensor
    index_metadata: Mapping[str, Any] | None  # None: a single file without an index
    metadata: Mapping[str, str]  # of the safetensors files
    companions: Mapping[str, bytes]  # tokenizer, preprocessor and code files by name
    scale_hints: Mapping[str, Tensor]  # scale bytes that encoding would choose otherwise


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    experts: Literal["decoded", "packed"] = "decoded",
    impl: str | ImplConfig = "torch",
) -> Model:
    """The model in a checkpoint directory, in evaluation mode.

    `dtype` is that of all tensors the release does not keep in fp32 (convolutions, `A_log`,
    `dt_bias`, `o_norm`, router bias); None takes the narrowest that holds what is stored without
    rounding. MXFP4 experts are decoded to `dtype`, or stay packed with `experts="packed"`, for
    inference. `impl` names the implementation of every operator; `gpu` is the kernels that serve a
    bf16 model on an NVIDIA GPU.

    Sets `model.config`, `model.release`, and from the files beside the tensors `model.tokenizer`
    and `model.processor` (a `text.processor.Processor` for text, pictures or both). They are None
    where the files are absent; so is a tokenizer of Kimi Linear's, whose special tokens mean other
    things.

    Raises `FileNotFoundError` if there is no such directory, `ValueError` if it is not a whole
    checkpoint, its configuration cannot be honoured, or tensors are missing, unused or misshapen
    (the error lists them).
    """
    if experts not in ("decoded", "packed"):
        raise ValueError(f"experts={experts!r}: choose 'decoded' or 'packed'")
    if dtype is not None and DTYPE_CODES.get(dtype) not in FLOAT_DTYPES:
        raise ValueError(f"dtype={dtype}: choose torch.bfloat16, torch.float16 or torch.float32")
    directory = CheckpointDirectory(path)
    config = read_config(directory.raw_config)
    layout, tensors = match(directory, config)
    config = _with_choices(config, layout, experts, impl, directory)
    processor = _processor(directory, config, layout)
    reader = TensorReader(directory)
    check_copies(reader, tensors)
    held = dtype or _widest_held(layout)
    model = meta_model(config).cast(held)
    state = {
        name: torch.empty_like(tensor, device=device)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    hints = _fill(state, reader, tensors, num_heads=config.kda.num_heads)
    model.load_state_dict(state, strict=True, assign=True)
    if dtype is not None:
        code = DTYPE_CODES[dtype]
        kept = layout.experts if layout.experts == "mxfp4" else code
        layout = layout.with_formats(dtype=code, experts=kept)
    model.release = release_record(directory, layout, scale_hints=hints)
    model.processor = processor
    if processor is not None and processor.has_tokenizer:
        model.tokenizer = processor.tokenizer
    return model.eval()


def release_record(
    directory: CheckpointDirectory, layout: Layout, *, scale_hints: Mapping[str, Tensor]
) -> Release:
    """What `save` needs to know of `directory` to write the like of it in `layout`."""
    index = directory.index
    return Release(
        layout=layout,
        raw_config=directory.raw_config,
        config_text=directory.config_text,
        weight_map={name: stored.file for name, stored in directory.stored.items()},
        index_metadata=None if index is None else index.get("metadata", {}),
        metadata=directory.metadata,
        companions=directory.companions(),
        scale_hints=scale_hints,
    )


def check_copies(reader: TensorReader, tensors: list[ReleaseTensor]) -> None:
    """Raises `ValueError` if an MTP layer's embedding or head is not a copy of the model's."""
    originals = {tensor.target: tensor.name for tensor in tensors if tensor.kind == "plain"}
    for tensor in tensors:
        if tensor.kind != "copy":
            continue
        original = originals[tensor.target]
        if not torch.equal(reader.tensor(tensor.name), reader.tensor(original)):
            raise ValueError(
                f"{tensor.name}: differs from {original}; an MTP layer with its own embedding or "
                "head cannot be represented"
            )


def _with_choices(
    config: ModelConfig,
    layout: Layout,
    experts: str,
    impl: str | ImplConfig,
    directory: CheckpointDirectory,
) -> ModelConfig:
    moe = config.moe
    if experts == "packed":
        if moe is None or layout.experts != "mxfp4":
            raise ValueError(
                f"experts='packed': {directory.path} holds no packed experts; "
                "load with experts='decoded'"
            )
        moe = dataclasses.replace(moe, expert_format="mxfp4")
    config = dataclasses.replace(config, moe=moe)
    if isinstance(impl, str):
        impl = gpu_impl(config) if impl == "gpu" else ImplConfig.all(impl)
    return dataclasses.replace(config, impl=impl)


def _processor(
    directory: CheckpointDirectory, config: ModelConfig, layout: Layout
) -> Processor | None:
    """Tokenizer and image processor from the files beside the tensors."""
    path = directory.path
    tokenizer = images = None
    has_tokenizer = any((path / name).is_file() for name in (RANKS_FILE, TOKENIZER_FILE))
    # Kimi Linear's own gives the same ids other meanings, so it is not one of ours
    if has_tokenizer and (layout.wrapped or OPEN in directory.text_of("tokenizer_config.json")):
        tokenizer = load_tokenizer(path)
    if config.vision is not None and (path / PREPROCESSOR_FILE).is_file():
        images = ImageProcessor.load(path)
        vision, found = config.vision, images.config
        expected = (vision.patch_size, vision.merge_height, vision.merge_width)
        if (found.patch_size, found.merge_height, found.merge_width) != expected:
            raise ValueError(
                f"{path / PREPROCESSOR_FILE}: patch and merge sizes are not the {expected} of "
                "vision_config; they belong to different models"
            )
    if tokenizer is None and images is None:
        return None
    return Processor(tokenizer, images)


def _widest_held(layout: Layout) -> torch.dtype:
    dtype = TORCH_DTYPES[layout.dtype]
    if layout.experts == "mxfp4":
        return dtype
    return torch.promote_types(dtype, TORCH_DTYPES[layout.experts])


def _fill(
    state: dict[str, Tensor],
    reader: TensorReader,
    tensors: list[ReleaseTensor],
    *,
    num_heads: int,
) -> dict[str, Tensor]:
    """Reads every tensor into its place; returns the scale hints of decoded experts."""
    source = DiskSource(reader, tensors, num_heads=num_heads)
    hints: dict[str, Tensor] = {}
    with torch.no_grad():
        for tensor in sorted(tensors, key=lambda tensor: reader.directory.stored[tensor.name].file):
            if tensor.rows is None:
                if tensor.kind != "copy":
                    state[tensor.target].copy_(source.plain(tensor))
                continue
            expert, first, end = tensor.rows
            if f"{tensor.target}_packed" in state:
                field = f"{tensor.target}_{tensor.kind}"
                state[field][expert, first:end].copy_(reader.tensor(tensor.name))
            elif tensor.kind == "weight":
                place = state[f"{tensor.target}_proj"][expert, first:end]
                place.copy_(source.weight(tensor))
            elif tensor.kind == "packed":
                place = state[f"{tensor.target}_proj"][expert, first:end]
                packed = source.mxfp4(tensor)
                place.copy_(_decode(packed, place))
                if needs_scale_hint(packed):
                    hints[hint_key(tensor)] = packed.scale.clone()
    return hints


def _decode(packed: Mxfp4Tensor, place: Tensor) -> Tensor:
    # float16 cannot hold every MXFP4 value: decode to fp32 and let copy_ round
    dtype = torch.float32 if place.dtype == torch.float16 else place.dtype
    return decode_mxfp4(Mxfp4Tensor(*(field.to(place.device) for field in packed)), dtype)
