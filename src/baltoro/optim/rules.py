"""The structure of every parameter of a K3- or Kimi-Linear-shaped model, by its release name.

Names tell which tensor it is, the mixers' head layout tells how it splits, and the stored shape has
to agree. Per head are W_q, W_k and W_v (report section 2.5); low-rank and fused tensors fall into
the matrices they hold. Everything else that is a matrix is one matrix: o_proj, the output gate,
both factors of the decay, the router, the MLPs (the shared experts are one MLP).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baltoro.optim.structure import Elementwise, Kind, MatrixBlocks, Structure


@dataclass(frozen=True, kw_only=True, slots=True)
class KdaHeads:
    """Head layout of a KDA mixer."""

    num_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaHeads:
    """Head layout of an MLA mixer."""

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


Mixer = KdaHeads | MlaHeads

_NORM: tuple[Kind, str] = ("norm", "a norm's gain")
_ELEMENTWISE: dict[str, tuple[Kind, str]] = {
    "embed_tokens": ("embedding", "rows are looked up, not multiplied"),
    "lm_head": ("head", "one row per word, as in Moonlight"),
    "shared_head.head": ("head", "one row per word, as in Moonlight"),
    "norm": _NORM,
    "input_layernorm": _NORM,
    "post_attention_layernorm": _NORM,
    "self_attention_res_norm": _NORM,
    "mlp_res_norm": _NORM,
    "output_attn_res_norm": _NORM,
    "routed_expert_norm": _NORM,
    "enorm": _NORM,
    "hnorm": _NORM,
    "shared_head.norm": _NORM,
    "self_attention_res_proj": ("pseudo_query", "one row: a vector"),
    "mlp_res_proj": ("pseudo_query", "one row: a vector"),
    "output_attn_res_proj": ("pseudo_query", "one row: a vector"),
    "self_attn.q_conv1d": ("conv", "depthwise taps: no channel meets another"),
    "self_attn.k_conv1d": ("conv", "depthwise taps: no channel meets another"),
    "self_attn.v_conv1d": ("conv", "depthwise taps: no channel meets another"),
    "self_attn.b_proj": ("beta", "one row per head: independent vectors"),
    "self_attn.o_norm": _NORM,
    "self_attn.q_a_layernorm": _NORM,
    "self_attn.kv_a_layernorm": _NORM,
}
# zero is not a neutral value for these two, so nothing pulls them there
_UNDECAYED = ("self_attn.A_log", "self_attn.dt_bias")
_VISION = ("vision_tower", "mm_projector")
_WHOLE = {
    "self_attn.f_a_proj": "low-rank factor of the decay",
    "self_attn.f_b_proj": "low-rank factor of the decay",
    "self_attn.g_a_proj": "low-rank factor of the output gate",
    "self_attn.g_b_proj": "low-rank factor of the output gate",
    "self_attn.g_proj": "output gate",
    "self_attn.o_proj": "output projection",
    "self_attn.q_a_proj": "low-rank factor of the query",
    "mlp.gate_proj": "dense MLP",
    "mlp.up_proj": "dense MLP",
    "mlp.down_proj": "dense MLP",
    "gate": "router",
    "experts.down_proj": "one matrix per expert",
    "shared_experts.gate_proj": "shared experts, one MLP",
    "shared_experts.up_proj": "shared experts, one MLP",
    "shared_experts.down_proj": "shared experts, one MLP",
    "routed_expert_down_proj": "into the experts' latent",
    "routed_expert_up_proj": "out of the experts' latent",
}


def k3_structure(
    shapes: Mapping[str, Sequence[int]], mixers: Mapping[str, Mixer], *, per_head: bool = True
) -> dict[str, Structure]:
    """A record for every name of `shapes` (a parameter's name to its shape).

    `mixers` maps the prefix of each token mixer, for example `layers.0.self_attn`, to its head
    layout. With `per_head` off, W_q, W_k and W_v are not split by head (whole-matrix Muon, for
    comparison). Raises `ValueError` for a name without a rule, a mixer that is not described and a
    shape that does not fit the layout.
    """
    structure = {}
    for name, shape in shapes.items():
        record = _record(name, tuple(shape), mixers, per_head)
        if isinstance(record, MatrixBlocks) and record.shape != tuple(shape[-2:]):
            raise ValueError(
                f"{name}: {list(shape)} does not end in {list(record.shape)}, which its layout "
                f"asks for ({record.why}); correct the mixer's record"
            )
        structure[name] = record
    return structure


def _record(
    name: str, shape: tuple[int, ...], mixers: Mapping[str, Mixer], per_head: bool
) -> Structure:
    path = name.removesuffix(".weight")
    parts = path.split(".")
    if any(part in _VISION for part in parts):
        return Elementwise(kind="vision", why="the vision side stays on AdamW")
    leaf, last_two = parts[-1], ".".join(parts[-2:])
    if last_two in _UNDECAYED:
        return Elementwise(kind="decay", use_decay=False, why="sets the decay of a head")
    for key in (last_two, leaf):
        if key in _ELEMENTWISE:
            kind, why = _ELEMENTWISE[key]
            return Elementwise(kind=kind, why=why)
        if key in _WHOLE and len(shape) >= 2:
            return MatrixBlocks(row_parts=shape[-2:-1], col_parts=shape[-1:], why=_WHOLE[key])
    if last_two == "experts.gate_up_proj":
        half = (shape[-2] // 2,) * 2
        return MatrixBlocks(row_parts=half, col_parts=shape[-1:], why="gate and up of each expert")
    if leaf == "eh_proj":
        half = (shape[-1] // 2,) * 2
        return MatrixBlocks(
            row_parts=shape[:1], col_parts=half, why="one matrix for each of two inputs"
        )
    if "self_attn" in parts:
        prefix = path.removesuffix(f".{leaf}")
        if prefix not in mixers:
            raise ValueError(f"{name}: mixers has no entry {prefix!r}; describe its heads")
        record = _projection(leaf, shape, mixers[prefix], per_head)
        if record is not None:
            return record
    raise ValueError(f"{name} {list(shape)}: no rule says what this parameter is; add one")


def _projection(
    leaf: str, shape: tuple[int, ...], mixer: Mixer, per_head: bool
) -> MatrixBlocks | None:
    """W_q, W_k, W_v of a mixer in the form it stores them."""
    heads = mixer.num_heads
    if isinstance(mixer, KdaHeads):
        if leaf not in ("q_proj", "k_proj", "v_proj"):
            return None
        parts = [mixer.head_dim]
        why = "rows by head"
    elif leaf in ("q_proj", "q_b_proj"):
        parts = [mixer.qk_nope_head_dim, mixer.qk_rope_head_dim]
        why = "rows by head, each [own key's part | shared key's part]"
    elif leaf == "kv_b_proj":
        parts = [mixer.qk_nope_head_dim, mixer.v_head_dim]
        why = "rows by head, each [key | value]"
    elif leaf == "kv_a_proj_with_mqa":
        heads, per_head = 1, True  # two matrices, and no heads in either
        parts = [mixer.kv_lora_rank, mixer.qk_rope_head_dim]
        why = "[latent | shared key]"
    else:
        return None
    if not per_head:
        rows = heads * sum(parts)
        return MatrixBlocks(row_parts=(rows,), col_parts=shape[-1:], why="whole, not by head")
    return MatrixBlocks(
        row_parts=tuple(part for part in parts if part),
        col_parts=shape[-1:],
        num_groups=heads,
        why=why,
    )
