"""The experts of few tokens on an NVIDIA GPU: bound by the bytes of the weights that they read.

Three launches after the order of pairs: gate and up with the gated unit, down, the combination. A
program holds a tile of one expert's rows against a tile of that expert's tokens (a slot), weights
as the left operand: tokens fill the narrow side of the tensor cores. Slots are found on the device
and bounded by shapes, so a CUDA graph can hold all of it. Where pairs are much fewer than experts,
each is a slot, and they need no order.

Packed weights (MXFP4) stay packed in memory and are decoded in registers, where E2M1 becomes bf16
by moving bits: sign and magnitude of a code in the places of bf16's are the code times 2^-126, so a
product with 2^126 gives the code's value and one with 2^(s - 127) the weight's, both exact. The
four even and four odd codes of four bytes come out apart; `in_code_order` moves the other operand's
columns alike.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from baltoro.ops.impl import ImplError
from baltoro.ops.launch_table import derived, launch
from baltoro.ops.moe import pieces
from baltoro.ops.moe.pairs import sort_slots
from baltoro.ops.moe.pieces import glu_parts
from baltoro.ops.moe.shared import Glu
from baltoro.ops.mxfp4 import GROUP_SIZE, Mxfp4Tensor
from baltoro.ops.triton import cdiv, enqueue

GROUP = tl.constexpr(GROUP_SIZE)
MEANS = (2, 6, 12, 28, 40, 64)  # most tokens of an expert in the mean, by class
MAX_MEAN_TOKENS = 256  # of an expert: with more, products of bf16 weights are grouped ones

# four bytes b0 to b3 to their low codes ($0, $1) and their high codes ($2, $3), each times 2^126;
# a product with 2^m + 2^n puts a code's sign at bit 15 and its magnitude at bits 8 to 6
UNPACK = tl.constexpr("""{
    .reg .b32 low, high, code, bias;
    mov.b32 bias, 0x7e807e80;
    prmt.b32 low, $4, 0, 0x4140;
    prmt.b32 high, $4, 0, 0x4342;
    and.b32 code, low, 0x000f000f;
    mul.lo.u32 code, code, 0x1040;
    and.b32 code, code, 0x81c081c0;
    mul.rn.bf16x2 $0, code, bias;
    and.b32 code, high, 0x000f000f;
    mul.lo.u32 code, code, 0x1040;
    and.b32 code, code, 0x81c081c0;
    mul.rn.bf16x2 $1, code, bias;
    and.b32 code, low, 0x00f000f0;
    mul.lo.u32 code, code, 0x104;
    and.b32 code, code, 0x81c081c0;
    mul.rn.bf16x2 $2, code, bias;
    and.b32 code, high, 0x00f000f0;
    mul.lo.u32 code, code, 0x104;
    and.b32 code, code, 0x81c081c0;
    mul.rn.bf16x2 $3, code, bias;
}""")

# four scale bytes s to 2^(s - 127): 0 is a subnormal number, 255 is none
FACTORS = tl.constexpr("""{
    .reg .b32 byte, quiet, power, least;
    mov.b32 least, 0x00400040;
    prmt.b32 byte, $2, 0, 0x4140;
    add.u32 quiet, byte, 0x00010001;
    shr.u32 quiet, quiet, 2;
    and.b32 quiet, quiet, least;
    shl.b32 power, byte, 7;
    or.b32 power, power, quiet;
    max.u16x2 $0, power, least;
    prmt.b32 byte, $2, 0, 0x4342;
    add.u32 quiet, byte, 0x00010001;
    shr.u32 quiet, quiet, 2;
    and.b32 quiet, quiet, least;
    shl.b32 power, byte, 7;
    or.b32 power, power, quiet;
    max.u16x2 $1, power, least;
}""")


@triton.jit
def in_code_order(tile, ROWS: tl.constexpr, B: tl.constexpr):
    """Columns `[.., B]` in the order of decoded codes: even before odd in every eight."""
    eights = tl.permute(tl.reshape(tile, [ROWS, B // 8, 4, 2]), [0, 1, 3, 2])
    return tl.reshape(eights, [ROWS, B])


@triton.jit
def decoded(codes, scale, ROWS: tl.constexpr, B: tl.constexpr, IS_PLAIN: tl.constexpr):
    """Bytes `[ROWS, B / 2]` and scale bytes `[ROWS, B / 32]` to bf16 in `in_code_order`."""
    if IS_PLAIN:
        # Triton's interpreter has no inline assembly, and computes in fp32 only
        byte = codes.to(tl.int32)
        low = (((byte & 7) << 22) | ((byte & 8) << 28)).to(tl.float32, bitcast=True)
        high = (((byte & 112) << 18) | ((byte & 128) << 24)).to(tl.float32, bitcast=True)
        low, high = low * 2.0**126, high * 2.0**126
        exponent = scale.to(tl.int32)
        bits = (exponent << 23) | tl.where(((exponent + 1) & 254) == 0, 1 << 22, 0)
        factor = bits.to(tl.float32, bitcast=True)
    else:
        low, high = tl.inline_asm_elementwise(
            UNPACK, "=r,=r,=r,=r,r", [codes], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        factor = tl.inline_asm_elementwise(
            FACTORS, "=r,=r,r", [scale], tl.bfloat16, is_pure=True, pack=4
        )
    low = tl.reshape(low, [ROWS, B // 8, 4])
    high = tl.reshape(high, [ROWS, B // 8, 4])
    both = tl.reshape(tl.permute(tl.join(low, high), [0, 1, 3, 2]), [ROWS, B // GROUP, GROUP])
    return tl.reshape(both * factor[:, :, None], [ROWS, B]).to(tl.bfloat16)


@triton.jit
def product(
    weight, scale, rows, is_row, x, is_token, WIDTH: tl.constexpr,
    IS_PACKED: tl.constexpr, IS_PLAIN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Weights `[M, WIDTH]` of `rows` times tokens at `x` `[N, WIDTH]`: fp32 `[M, N]`."""
    total = tl.zeros([M, N], tl.float32)
    is_row = is_row[:, None]
    is_token = is_token[:, None]
    for first in tl.range(0, WIDTH, B, num_stages=STAGES):
        inputs = first + tl.arange(0, B)
        is_x, is_weight = is_token, is_row
        if WIDTH % B != 0:
            is_x = is_token & (inputs < WIDTH)[None, :]
            is_weight = is_row & (inputs < WIDTH)[None, :]
        if IS_PACKED:
            code_bytes = first // 2 + tl.arange(0, B // 2)
            groups = first // GROUP + tl.arange(0, B // GROUP)
            is_code, is_group = is_row, is_row
            if WIDTH % B != 0:
                is_code = is_row & (code_bytes < WIDTH // 2)[None, :]
                is_group = is_row & (groups < WIDTH // GROUP)[None, :]
            codes = tl.load(
                weight + rows[:, None] * (WIDTH // 2) + code_bytes[None, :], mask=is_code, other=0
            )
            exponents = tl.load(
                scale + rows[:, None] * (WIDTH // GROUP) + groups[None, :], mask=is_group, other=0
            )
            tile = decoded(codes, exponents, M, B, IS_PLAIN)
            token_tile = tl.load(x[:, None] + inputs[None, :], mask=is_x, other=0.0)
            token_tile = in_code_order(token_tile, N, B)
        else:
            tile = tl.load(
                weight + rows[:, None] * WIDTH + inputs[None, :], mask=is_weight, other=0.0
            )
            token_tile = tl.load(x[:, None] + inputs[None, :], mask=is_x, other=0.0)
        if IS_PLAIN:
            tile, token_tile = tile.to(tl.float32), token_tile.to(tl.float32)
        total = tl.dot(tile, tl.trans(token_tile), total)
    return total


@triton.jit
def slot_of(ids, pair, slots, N: tl.constexpr, IS_SINGLE: tl.constexpr):
    """The expert of this program's slot (-1: none), places of its pairs, which exist, the pairs."""
    index = tl.program_id(1)
    if IS_SINGLE:
        expert = tl.load(ids + index).to(tl.int32)
        places = index + tl.arange(0, N)
        is_token = places == index
        pairs = places
    else:
        expert = tl.load(slots + 3 * index)
        places = tl.load(slots + 3 * index + 1) + tl.arange(0, N)
        is_token = (places < tl.load(slots + 3 * index + 2)) & (expert >= 0)
        pairs = tl.load(pair + places, mask=is_token, other=0)
    return expert, places.to(tl.int64), is_token, pairs.to(tl.int64)


@triton.jit
def gate_up_kernel(
    x, weight, scale, ids, pair, slots, act, x_stride, beta, linear_beta,
    A: tl.constexpr, Z: tl.constexpr, F: tl.constexpr,
    IS_SITU: tl.constexpr, IS_CAPPED: tl.constexpr, IS_SQUARE: tl.constexpr, IS_EXACT: tl.constexpr,
    IS_PACKED: tl.constexpr, IS_SINGLE: tl.constexpr, IS_PLAIN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`M / 2` gate rows and their up rows for the tokens of a slot; grid (row tiles, slots)."""
    expert, places, is_token, pairs = slot_of(ids, pair, slots, N, IS_SINGLE)
    if expert >= 0:
        H: tl.constexpr = M // 2
        inner = tl.program_id(0) * H + tl.arange(0, M) % H
        rows = expert.to(tl.int64) * (2 * F) + inner + tl.where(tl.arange(0, M) < H, 0, F)
        tokens = x + pairs // A * x_stride
        total = product(
            weight, scale, rows, inner < F, tokens, is_token, Z,
            IS_PACKED, IS_PLAIN, M, N, B, STAGES,
        )  # fmt: skip
        # rounded as pre-activations in memory would be
        total = total.to(act.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(tl.permute(tl.reshape(total, [2, H, N]), [1, 2, 0]))
        factor, _, up_factor, _ = glu_parts(
            gate, up, beta, linear_beta, IS_SITU, IS_CAPPED, IS_SQUARE, IS_EXACT
        )
        columns = tl.program_id(0) * H + tl.arange(0, H)
        is_column = columns < F
        tl.store(
            act + places[None, :] * F + columns[:, None],
            (factor * up_factor).to(act.dtype.element_ty),
            mask=is_column[:, None] & is_token[None, :],
        )


@triton.jit
def down_kernel(
    act, weight, scale, ids, pair, slots, y, F: tl.constexpr, Z: tl.constexpr,
    IS_PACKED: tl.constexpr, IS_SINGLE: tl.constexpr, IS_PLAIN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`M` outputs for the tokens of a slot, at their unsorted places; grid (row tiles, slots)."""
    expert, places, is_token, pairs = slot_of(ids, pair, slots, N, IS_SINGLE)
    if expert >= 0:
        columns = tl.program_id(0) * M + tl.arange(0, M)
        rows = expert.to(tl.int64) * Z + columns
        total = product(
            weight, scale, rows, columns < Z, act + places * F, is_token, F,
            IS_PACKED, IS_PLAIN, M, N, B, STAGES,
        )  # fmt: skip
        tl.store(
            y + pairs[None, :] * Z + columns[:, None],
            total.to(y.dtype.element_ty),
            mask=(columns < Z)[:, None] & is_token[None, :],
        )


class Tile(NamedTuple):
    """Sizes of a program of either product, its warps, and its loads in flight."""

    rows: int
    tokens: int
    inputs: int
    num_warps: int
    num_stages: int


def tile_of(
    num_pairs: int, num_experts: int, is_packed: bool, is_single: bool, device: torch.device
) -> Tile:
    """How to launch both products."""
    kind = "single"
    if not is_single:
        mean = -(-num_pairs // num_experts)
        kind = next((f"t{most}" for most in MEANS if mean <= most), "more")
    return _tile("mxfp4" if is_packed else "bf16", kind, device)


@derived
def _tile(dtype: str, kind: str, device: torch.device) -> Tile:
    return Tile(**launch("moe_few", f"{dtype} {kind}", device))


def moe_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor | Mxfp4Tensor,
    down: Tensor | Mxfp4Tensor,
    glu: Glu,
) -> Tensor:
    """`ops.moe.moe_experts` and `moe_experts_mxfp4` without gradients, ids unchecked."""
    gate_up, gate_up_scale = _fields(gate_up)
    down, down_scale = _fields(down)
    scales = [scale for scale in (gate_up_scale, down_scale) if scale is not None]
    if not all(tensor.is_contiguous() for tensor in (gate_up, down, *scales)):
        raise ImplError(
            "moe_experts: impl='triton' needs contiguous weights and scales for few tokens"
        )
    is_packed = gate_up_scale is not None
    num_experts, num_outputs = down.shape[:2]
    width = gate_up.shape[1] // 2
    num_pairs, num_active = expert_ids.numel(), expert_ids.shape[1]
    if num_pairs == 0:
        return x.new_empty(x.shape)
    x = x if x.stride(1) == 1 else x.contiguous()  # rows may lie apart
    ids = expert_ids.contiguous()
    # then few pairs share an expert
    is_single = x.shape[0] == 1 or num_pairs * 8 <= num_experts
    tile = tile_of(num_pairs, num_experts, is_packed, is_single, x.device)
    pair, slots, num_slots = None, None, num_pairs
    if not is_single:
        pair, slots = sort_slots(ids, num_experts, tile.tokens)
        num_slots = slots.shape[0]
    act = x.new_empty((num_pairs, width))
    y = x.new_empty((num_pairs, num_outputs))
    form = {"IS_PACKED": is_packed, "IS_SINGLE": is_single, "IS_PLAIN": knobs.runtime.interpret}
    form |= _sizes(tile)
    enqueue(
        gate_up_kernel, (cdiv(2 * width, tile.rows), num_slots),
        x, gate_up, gate_up_scale, ids, pair, slots, act, x.stride(0), *pieces.caps(glu),
        A=num_active, Z=num_outputs, F=width, **pieces.kind(glu, x.dtype), **form,
    )  # fmt: skip
    enqueue(
        down_kernel, (cdiv(num_outputs, tile.rows), num_slots),
        act, down, down_scale, ids, pair, slots, y, F=width, Z=num_outputs,
        **form,
    )  # fmt: skip
    return pieces.combine(y, None, weights.contiguous(), is_weighted=True)


def _fields(weight: Tensor | Mxfp4Tensor) -> tuple[Tensor, Tensor | None]:
    return (weight, None) if isinstance(weight, Tensor) else (weight.packed, weight.scale)


def _sizes(tile: Tile) -> dict[str, int]:
    return {
        "M": tile.rows, "N": tile.tokens, "B": tile.inputs,
        "STAGES": tile.num_stages, "num_warps": tile.num_warps,
    }  # fmt: skip
