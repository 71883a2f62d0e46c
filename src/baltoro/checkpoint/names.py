"""The tensors of a checkpoint in the release's layout: name, dtype, shape, order, place in a model.

One table serves loading, saving, converting and inspecting. It needs a configuration and a spelling
(`Layout`) and allocates nothing: the 497,220 tensors of K3 are listed in about a second.

The names are those of the releases' index files. What differs from the model's own parameter names
is said here and nowhere else:

    gate.e_score_correction_bias   <-> gate.expert_bias
    experts.{e}.w1, w3             <-> experts.gate_up_proj[e], the rows of w1 above those of w3
    experts.{e}.w2                 <-> experts.down_proj[e]
    layers.{L + j}.*               <-> mtp_layers.{j}.*
    layers.{L + j}.embed_tokens.weight, .shared_head.head.weight: copies of the model's matrices
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

from baltoro.model.config import FP32_SUFFIXES, MlaConfig, ModelConfig, MoeConfig, VisionConfig

DTYPE_BYTES: Mapping[str, int] = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4}
FLOAT_DTYPES = ("BF16", "F16", "F32")
MXFP4_GROUP = 32  # inputs that share one scale byte

# F32 on disk and in the model, whatever the dtype of the rest.
RELEASE_FP32_SUFFIXES = (*FP32_SUFFIXES, ".e_score_correction_bias")

SINGLE_FILE_BYTES = 5_000_000_000  # above this a checkpoint is cut into shards
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

Kind = Literal["plain", "a_log", "weight", "packed", "scale", "copy"]


class ReleaseTensor(NamedTuple):
    """One tensor of a checkpoint."""

    name: str  # on disk
    dtype: str  # safetensors code: BF16, F16, F32, U8
    shape: tuple[int, ...]
    unit: int  # place in the release's order of shards, from 0
    kind: Kind  # weight, packed, scale: a matrix of one expert; copy: a repeated matrix
    target: str  # parameter or buffer of the model; of an expert: the stem, `...experts.gate_up`
    rows: tuple[int, int, int] | None = None  # of an expert: index, first row, end row

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def num_elements(self) -> int:
        """Weights it stands for: two per packed byte, none for a scale or a copy."""
        if self.kind in ("scale", "copy"):
            return 0
        return prod(self.shape) * (2 if self.kind == "packed" else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a checkpoint spells what the model holds."""

    wrapped: bool  # K3's configuration with text_config inside; else Kimi Linear's flat one
    prefix: str  # of the language tensors, with its dot
    head: str  # name of the output matrix
    dtype: str = "BF16"  # of every tensor that is neither F32 by rule nor an expert's
    experts: str = "mxfp4"  # "mxfp4", or a dtype code
    a_log: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shape by target, if odd
    stored: Mapping[str, str] = field(default_factory=dict)  # dtype by name, if not by the rule

    def with_formats(self, *, dtype: str, experts: str) -> "Layout":
        """The same spelling with other number formats."""
        stored = {
            name: code
            for name, code in self.stored.items()
            if (experts == self.experts if ".experts." in name else dtype == self.dtype)
        }
        return dataclasses.replace(self, dtype=dtype, experts=experts, stored=stored)


def is_fp32(name: str) -> bool:
    """Whether a tensor of this name, on disk or in the model, is F32 by rule."""
    return name.endswith(RELEASE_FP32_SUFFIXES)


def is_kimi_linear(config: ModelConfig) -> bool:
    """Whether Kimi Linear's configuration class can say everything the model has."""
    return (
        config.vision is None
        and config.attn_res_block_size is None
        and config.activation == "silu"
        and config.kda.gate_lower_bound is None
        and not config.kda.use_full_rank_gate
        and not config.mla.use_output_gate
        and (config.moe is None or config.moe.latent_size is None)
    )


def fresh_layout(config: ModelConfig, *, dtype: str, experts: str) -> Layout:
    """Spelling for a model that was not loaded: Kimi Linear's if that can say it, else K3's."""
    if is_kimi_linear(config):
        return Layout(
            wrapped=False, prefix="model.", head="lm_head.weight", dtype=dtype, experts=experts
        )
    return Layout(
        wrapped=True,
        prefix="language_model.model.",
        head="language_model.lm_head.weight",
        dtype=dtype,
        experts=experts,
    )


def default_a_log_shape(config: ModelConfig, *, wrapped: bool) -> tuple[int, ...]:
    """K3: padded with zeros to the head width, if that is longer; Kimi Linear: `[1, 1, H, 1]`."""
    heads = config.kda.num_heads
    return (max(heads, config.kda.head_dim),) if wrapped else (1, 1, heads, 1)


def release_tensors(config: ModelConfig, layout: Layout) -> Iterator[ReleaseTensor]:
    """Every tensor of the checkpoint, in the release's order: layers, globals, projector, tower.

    Raises `ValueError` when an expert width is not a multiple of the MXFP4 group.
    """
    if config.moe is not None and layout.experts == "mxfp4":
        check_mxfp4_widths(config.hidden_size, config.moe)
    last = config.num_layers + config.num_mtp_layers
    for index in range(last):
        yield from _layer(config, layout, index)
    for suffix, shape in _globals(config):
        yield _plain(layout, layout.prefix + suffix, shape, last, suffix)
    yield _plain(
        layout, layout.head, (config.vocab_size, config.hidden_size), last, "lm_head.weight"
    )
    if config.vision is not None:
        for name, shape in _projector(config.vision, config.hidden_size):
            yield _plain(layout, name, shape, last + 1, name)
        for name, shape in _tower(config.vision):
            yield _plain(layout, name, shape, last + 2, name)


def check_mxfp4_widths(hidden_size: int, moe: MoeConfig) -> None:
    """Raises `ValueError` if a row of an expert matrix does not fill whole groups of 32."""
    for name, width in (
        ("moe.latent_size" if moe.latent_size else "hidden_size", moe.latent_size or hidden_size),
        ("moe.expert_intermediate_size", moe.expert_intermediate_size),
    ):
        if width % MXFP4_GROUP:
            raise ValueError(
                f"{name}={width}: MXFP4 experts need a multiple of {MXFP4_GROUP}; "
                "save with experts='bf16' or 'fp32'"
            )


def shard_files(tensors: list[ReleaseTensor], *, wrapped: bool) -> dict[str, list[ReleaseTensor]]:
    """Files of a checkpoint that has no source to follow.

    Up to 5 GB: one `model.safetensors` without an index. Above: a K3 layout has one file per layer,
    then one each for globals, projector and tower, numbered as the release does
    (`model-00001-of-000096`); a Kimi Linear layout fills files up to 5 GB in order
    (`model-00001-of-00020`).
    """
    if sum(tensor.num_bytes for tensor in tensors) <= SINGLE_FILE_BYTES:
        return {SINGLE_FILE: tensors}
    shards: list[list[ReleaseTensor]] = []
    filled = 0
    for tensor in tensors:
        full = (
            tensor.unit >= len(shards)
            if wrapped
            else not shards or filled + tensor.num_bytes > SINGLE_FILE_BYTES
        )
        if full:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    digits = 6 if wrapped else 5
    return {
        f"model-{number:05d}-of-{len(shards):0{digits}d}.safetensors": shard
        for number, shard in enumerate(shards, start=1)
    }


def _plain(
    layout: Layout,
    name: str,
    shape: tuple[int, ...],
    unit: int,
    target: str,
    kind: Kind = "plain",
) -> ReleaseTensor:
    dtype = "F32" if is_fp32(name) else layout.dtype
    return ReleaseTensor(name, layout.stored.get(name, dtype), shape, unit, kind, target)


def _globals(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    size = config.hidden_size
    yield "embed_tokens.weight", (config.vocab_size, size)
    yield "norm.weight", (size,)
    if config.attn_res_block_size is not None:
        yield "output_attn_res_norm.weight", (size,)
        yield "output_attn_res_proj.weight", (1, size)


def _layer(config: ModelConfig, layout: Layout, index: int) -> Iterator[ReleaseTensor]:
    size = config.hidden_size
    head = f"{layout.prefix}layers.{index}."
    is_mtp = index >= config.num_layers
    target = f"mtp_layers.{index - config.num_layers}." if is_mtp else f"layers.{index}."

    def plain(suffix: str, shape: tuple[int, ...]) -> ReleaseTensor:
        return _plain(layout, head + suffix, shape, index, target + suffix)

    if is_mtp:
        for suffix in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight"):
            yield plain(suffix, (size,))
        yield plain("eh_proj.weight", (size, 2 * size))
        for suffix, original in (
            ("embed_tokens.weight", "embed_tokens.weight"),
            ("shared_head.head.weight", "lm_head.weight"),
        ):
            matrix = (config.vocab_size, size)
            yield _plain(layout, head + suffix, matrix, index, original, "copy")
    yield plain("input_layernorm.weight", (size,))
    yield plain("post_attention_layernorm.weight", (size,))
    if config.attn_res_block_size is not None and not is_mtp:
        for site in ("self_attention_res", "mlp_res"):
            yield plain(f"{site}_norm.weight", (size,))
            yield plain(f"{site}_proj.weight", (1, size))
    if is_mtp or config.mixers[index] == "mla":
        yield from (plain(f"self_attn.{suffix}", shape) for suffix, shape in _mla(config.mla, size))
    else:
        yield from (plain(f"self_attn.{suffix}", shape) for suffix, shape in _kda(config))
        a_log = f"{target}self_attn.A_log"
        form = layout.a_log.get(a_log) or default_a_log_shape(config, wrapped=layout.wrapped)
        yield _plain(layout, f"{head}self_attn.A_log", form, index, a_log, "a_log")
    if config.moe is not None and (is_mtp or config.is_moe(index)):
        yield from _moe(config, config.moe, layout, index, head, target)
    else:
        glu = _glu(size, config.intermediate_size)
        yield from (plain(f"mlp.{suffix}", shape) for suffix, shape in glu)


def _glu(size: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "gate_proj.weight", (inner, size)
    yield "up_proj.weight", (inner, size)
    yield "down_proj.weight", (size, inner)


def _kda(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    kda, size = config.kda, config.hidden_size
    width = kda.num_heads * kda.head_dim
    for letter in "qkv":
        yield f"{letter}_proj.weight", (width, size)
        yield f"{letter}_conv1d.weight", (width, 1, kda.conv_kernel_size)
    yield "f_a_proj.weight", (kda.head_dim, size)
    yield "f_b_proj.weight", (width, kda.head_dim)
    yield "b_proj.weight", (kda.num_heads, size)
    if kda.use_full_rank_gate:
        yield "g_proj.weight", (width, size)
    else:
        yield "g_a_proj.weight", (kda.head_dim, size)
        yield "g_b_proj.weight", (width, kda.head_dim)
    yield "dt_bias", (width,)
    yield "o_norm.weight", (kda.head_dim,)
    yield "o_proj.weight", (size, width)


def _mla(mla: MlaConfig, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    heads = mla.num_heads
    if mla.q_lora_rank is None:
        yield "q_proj.weight", (heads * mla.qk_head_dim, size)
    else:
        yield "q_a_proj.weight", (mla.q_lora_rank, size)
        yield "q_a_layernorm.weight", (mla.q_lora_rank,)
        yield "q_b_proj.weight", (heads * mla.qk_head_dim, mla.q_lora_rank)
    yield "kv_a_proj_with_mqa.weight", (mla.kv_latent_dim, size)
    yield "kv_a_layernorm.weight", (mla.kv_lora_rank,)
    yield "kv_b_proj.weight", (heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    if mla.use_output_gate:
        yield "g_proj.weight", (heads * mla.v_head_dim, size)
    yield "o_proj.weight", (size, heads * mla.v_head_dim)


def _moe(
    config: ModelConfig, moe: MoeConfig, layout: Layout, index: int, head: str, target: str
) -> Iterator[ReleaseTensor]:
    size, latent, inner = config.hidden_size, moe.latent_size, moe.expert_intermediate_size
    head, target = f"{head}block_sparse_moe.", f"{target}block_sparse_moe."

    def plain(suffix: str, shape: tuple[int, ...]) -> ReleaseTensor:
        return _plain(layout, head + suffix, shape, index, target + suffix)

    yield plain("gate.weight", (moe.num_experts, size))
    yield _plain(
        layout,
        f"{head}gate.e_score_correction_bias",
        (moe.num_experts,),
        index,
        f"{target}gate.expert_bias",
    )
    if latent is not None:
        yield plain("routed_expert_down_proj.weight", (latent, size))
        if moe.use_latent_norm:
            yield plain("routed_expert_norm.weight", (latent,))
        yield plain("routed_expert_up_proj.weight", (size, latent))
    if moe.num_shared_experts > 0:
        for suffix, shape in _glu(size, moe.num_shared_experts * inner):
            yield plain(f"shared_experts.{suffix}", shape)
    width = latent or size
    gate_up, down = f"{target}experts.gate_up", f"{target}experts.down"
    for expert in range(moe.num_experts):
        stem = f"{head}experts.{expert}."
        w1, w3, w2 = (expert, 0, inner), (expert, inner, 2 * inner), (expert, 0, width)
        yield from _expert(layout, f"{stem}w1", (inner, width), index, gate_up, w1)
        yield from _expert(layout, f"{stem}w2", (width, inner), index, down, w2)
        yield from _expert(layout, f"{stem}w3", (inner, width), index, gate_up, w3)


def _expert(
    layout: Layout,
    stem: str,
    shape: tuple[int, int],
    unit: int,
    target: str,
    rows: tuple[int, int, int],
) -> Iterator[ReleaseTensor]:
    height, width = shape
    if layout.experts != "mxfp4":
        name = f"{stem}.weight"
        dtype = layout.stored.get(name, layout.experts)
        yield ReleaseTensor(name, dtype, shape, unit, "weight", target, rows)
        return
    codes, scales = (height, width // 2), (height, width // MXFP4_GROUP)
    yield ReleaseTensor(f"{stem}.weight_packed", "U8", codes, unit, "packed", target, rows)
    yield ReleaseTensor(f"{stem}.weight_scale", "U8", scales, unit, "scale", target, rows)


def _tower(vision: VisionConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    size, patch = vision.hidden_size, vision.patch_size
    yield "vision_tower.patch_embed.proj.weight", (size, 3, patch, patch)
    grid = (vision.pos_emb_height, vision.pos_emb_width, size)
    yield "vision_tower.patch_embed.pos_emb.weight", grid
    for index in range(vision.num_layers):
        block = f"vision_tower.encoder.blocks.{index}."
        yield f"{block}norm0.weight", (size,)
        yield f"{block}norm1.weight", (size,)
        yield f"{block}wqkv.weight", (3 * vision.qkv_hidden_size, size)
        yield f"{block}wo.weight", (size, vision.qkv_hidden_size)
        yield f"{block}mlp.fc0.weight", (vision.intermediate_size, size)
        yield f"{block}mlp.fc1.weight", (size, vision.intermediate_size)
    yield "vision_tower.encoder.final_layernorm.weight", (size,)


def _projector(vision: VisionConfig, hidden_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    merged = vision.merged_size
    yield "mm_projector.proj.0.weight", (merged, merged)
    yield "mm_projector.proj.2.weight", (hidden_size, merged)
    yield "mm_projector.post_norm.weight", (hidden_size,)
