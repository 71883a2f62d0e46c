"""Pieces of the Hopper kernels. A tile is [64 channels, 32 tokens], a wgmma accumulator.

Sums along time stay in registers and tensor cores: a running sum is a product with a triangle of
ones, its summand cut into bf16 parts that lose nothing. Tiles of tokens travel through shared
memory as they lie in device memory, [tokens, channels], and are read and written transposed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_wait,
)

# renamed in Triton 3.7
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
SHIFT: gl.constexpr = gl.constexpr(112.0)
CHUNK: gl.constexpr = gl.constexpr(64)
HALF: gl.constexpr = gl.constexpr(32)
STRIP: gl.constexpr = gl.constexpr(64)
ACC: gl.constexpr = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
)  # [64 channels, 32 tokens]
PAIR: gl.constexpr = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
)  # [64 tokens, 64 tokens]
LEFT: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, PAIR, 2))
LINE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
LHS: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, ACC, 2))
CHANNELS: gl.constexpr = gl.constexpr(gl.SliceLayout(1, ACC))
TOKENS: gl.constexpr = gl.constexpr(gl.SliceLayout(0, ACC))
TILE: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
TILE32: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))
SQUARE: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(64, 16, rank=2))
VECTOR: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
COPY64: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
COPY128: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
ONES: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
SQUARE_ROWS: gl.constexpr = gl.constexpr(gl.SliceLayout(1, ONES))
SQUARE_COLUMNS: gl.constexpr = gl.constexpr(gl.SliceLayout(0, ONES))
COPY64F: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def tile_offsets(row_stride, rows: gl.constexpr, cols: gl.constexpr, layout: gl.constexpr):
    """Offsets [rows, cols] of a row-major tile, and its row numbers [rows, 1]."""
    i = gl.arange(0, rows, layout=gl.SliceLayout(1, layout))
    j = gl.arange(0, cols, layout=gl.SliceLayout(0, layout))
    return i[:, None] * row_stride + j[None, :], i[:, None]


@gluon.jit
def copy_tile(smem, pointer, row_stride, length, layout: gl.constexpr):
    """Start the copy of the first `length` rows of a tile; the rest become zeros."""
    offsets, i = tile_offsets(row_stride, smem.shape[0], smem.shape[1], layout)
    async_copy.async_copy_global_to_shared(
        smem, pointer + offsets, mask=(i < length) & (offsets >= 0)
    )


@gluon.jit
def copy_line(smem, pointer, N: gl.constexpr):
    i = gl.arange(0, N, layout=LINE)
    async_copy.async_copy_global_to_shared(smem, pointer + i)


@gluon.jit
def left_rows(value):
    """A [64, R] accumulator as a left operand in bf16."""
    return gl.convert_layout(value.to(gl.bfloat16), LEFT, assert_trivial=True)


@gluon.jit
def half_tile(smem, h: gl.constexpr):
    """Rows of one half as [columns, 32 rows], fp32."""
    return smem.slice(h * HALF, HALF, 0).permute((1, 0)).load(ACC).to(gl.float32)


@gluon.jit
def normed_half(smem, h: gl.constexpr, norm, scale, NORMALIZE: gl.constexpr):
    """Half a tile of q or k, times its inverse norms and `scale`."""
    x = half_tile(smem, h)
    if NORMALIZE:
        x *= (gl.load(norm) * scale)[None, :]
    return x


@gluon.jit
def store_half(smem, h: gl.constexpr, value):
    smem.slice(h * HALF, HALF, 0).permute((1, 0)).store(value.to(smem.dtype))


@gluon.jit
def times(a, b):
    """a [64, R] (registers, rounded to bf16) times b [R, 32] in shared memory; not awaited."""
    zero = gl.zeros([STRIP, HALF], gl.float32, layout=ACC)
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def left(value):
    return gl.convert_layout(value.to(gl.bfloat16), LHS, assert_trivial=True)


@gluon.jit
def rounded(x):
    """fp32 values nearest to x among those of bf16: two integer operations, no conversion unit."""
    bits = x.to(gl.int32, bitcast=True)
    return ((bits + 0x8000) & -0x10000).to(gl.float32, bitcast=True)


@gluon.jit
def truncated(x):
    """The leading bf16 of x, as fp32."""
    return (x.to(gl.int32, bitcast=True) & -0x10000).to(gl.float32, bitcast=True)


@gluon.jit
def ones_where(is_one):
    """A [32, 32] right operand of ones and zeros."""
    return gl.allocate_shared_memory(
        gl.bfloat16, [HALF, HALF], SQUARE, gl.where(is_one, 1.0, 0.0).to(gl.bfloat16)
    )


@gluon.jit
def sum_where(x, ones, acc, PARTS: gl.constexpr):
    """acc + x [64, 32] times a matrix of ones, x to 8 bits a part in bf16 parts; not awaited."""
    for _ in gl.static_range(PARTS - 1):
        part = truncated(x)
        x -= part
        acc = warpgroup_mma(left(part), ones, acc, is_async=True)
    return warpgroup_mma(left(x), ones, acc, is_async=True)


@gluon.jit
def again(x):
    """x, but what follows is computed anew rather than kept in registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def inverse(x):
    """1 / x to 1 ulp; 0 for infinity."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def sigmoid(x):
    return inverse(1.0 + gl.exp2(-LOG2E * x))


@gluon.jit
def half_gate(
    smem, h: gl.constexpr, up_to, length, bias, rate, lower_bound, FROM_LOGITS: gl.constexpr
):
    """Base-2 log-decay of one half: first token [64], running sum after it [64, 32], its end."""
    x = half_tile(smem, h)
    column = gl.arange(0, HALF, layout=TOKENS)[None, :]
    if FROM_LOGITS:
        x = lower_bound * LOG2E * sigmoid(rate * (x + bias[:, None]))
        x = gl.where(column < length - h * HALF, x, 0.0)
    else:
        x = x * LOG2E
    first = gl.sum(gl.where(column == 0, x, 0.0), 1)
    x = gl.where(column == 0, 0.0, x)
    running = sum_where(x, up_to, gl.zeros([STRIP, HALF], gl.float32, layout=ACC), 3)
    running = warpgroup_mma_wait(0, deps=[running])
    return first, running, gl.sum(x, 1)


@gluon.jit
def store_tile(pointer, smem, row_stride, length, layout: gl.constexpr):
    offsets, i = tile_offsets(row_stride, smem.shape[0], smem.shape[1], layout)
    gl.store(pointer + offsets, smem.load(layout), mask=(i < length) & (offsets >= 0))
