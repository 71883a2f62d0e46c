"""The experts of few tokens as kernels, packed and not: on a GPU, and in the interpreter's fp32."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl
from ops.earned import randn
from ops.harness import poisoned_memory, relative_error
from ops.pinned import on_every_device
from torch import Tensor
from triton import knobs

from baltoro.ops.impl import ImplError
from baltoro.ops.moe import few, moe_experts, moe_experts_mxfp4, reference
from baltoro.ops.moe.shared import Glu
from baltoro.ops.mxfp4 import Mxfp4Tensor, decode_mxfp4, encode_mxfp4

gpu = pytest.mark.gpu
GLU = Glu("situ", 4.0, 25.0)
SIZES = [(8, 2, 96, 64), (64, 6, 384, 448), (6, 3, 3584, 160), (64, 2, 96, 64)]  # E, A, Z, F
OPTIONS = {"activation": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0}


def experts_of(sizes: tuple[int, ...], device: str) -> tuple[Mxfp4Tensor, Mxfp4Tensor]:
    num_experts, _, latent, inner = sizes
    draw = torch.Generator(device).manual_seed(0)
    gate_up = torch.randn(num_experts, 2 * inner, latent, generator=draw, device=device)
    down = torch.randn(num_experts, latent, inner, generator=draw, device=device)
    return encode_mxfp4(gate_up / latent**0.5), encode_mxfp4(down / inner**0.5)


def choice_of(num_tokens: int, sizes: tuple[int, ...], kind: str, device: str) -> Tensor:
    num_experts, num_active = sizes[:2]
    ids = randn(num_tokens, num_experts, seed=4).argsort(-1)[:, :num_active]
    if kind == "one":
        ids = torch.arange(num_experts)[-num_active:].repeat(num_tokens, 1)
    elif kind == "odd":
        ids = ids // 2 * 2 + 1
    return ids.to(device)


def check(
    device: str, dtype: torch.dtype, num_tokens: int, sizes: tuple[int, ...], kind: str, glu: Glu
) -> None:
    """Both forms against fp64; experts that nobody visits are not numbers."""
    gate_up, down = experts_of(sizes, device)
    ids = choice_of(num_tokens, sizes, kind, device)
    # rows lie apart, as those of one of several joined projections
    x = randn(num_tokens, sizes[2] + 64).to(device, dtype)[:, 32:-32]
    weights = randn(sizes[1], num_tokens, seed=1).to(device).float().mT
    decoded = [decode_mxfp4(each, dtype) for each in (gate_up, down)]
    exact = reference.moe_experts(
        x.double(), ids, weights.double(), decoded[0].double(), decoded[1].double(), glu
    )
    plain = reference.moe_experts(x, ids, weights, *decoded, glu)
    unused = torch.ones(sizes[0], dtype=torch.bool, device=device)
    unused[ids.flatten()] = False
    for packed, values in zip((gate_up, down), decoded, strict=True):
        packed.scale[unused] = 255
        values[unused] = torch.nan
    allowed = 2 * relative_error(plain, exact) + 6 * torch.finfo(dtype).eps / 2
    for first, second in (decoded, (gate_up, down)):
        with poisoned_memory(), torch.no_grad():
            found = few.moe_experts(x, ids, weights, first, second, glu)
            again = few.moe_experts(x, ids, weights, first, second, glu)
        assert relative_error(found, exact) <= allowed
        assert torch.equal(found, again)


@triton.jit
def decode_kernel(codes, scale, out, ROWS: tl.constexpr, IS_PLAIN: tl.constexpr):
    rows = tl.arange(0, ROWS)[:, None]
    some_codes = tl.load(codes + rows * 32 + tl.arange(0, 32)[None, :])
    some_scales = tl.load(scale + rows * 2 + tl.arange(0, 2)[None, :])
    tile = few.decoded(some_codes, some_scales, ROWS, 64, IS_PLAIN)
    tl.store(out + rows * 64 + tl.arange(0, 64)[None, :], tile)


def check_decoding(device: str, scales: Tensor) -> None:
    """Every byte under these scales, even codes before odd in every eight, to the bit."""
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32).repeat(scales.shape[0], 1)
    scale = scales.to(torch.uint8).repeat_interleave(8)[:, None].repeat(1, 2)
    rows = codes.shape[0]
    padded = 1 << (rows - 1).bit_length()
    codes = torch.cat([codes, codes[:1].expand(padded - rows, 32)]).to(device)
    scale = torch.cat([scale, scale[:1].expand(padded - rows, 2)]).to(device)
    out = torch.empty(padded, 64, dtype=torch.bfloat16, device=device)
    decode_kernel[(1,)](codes, scale, out, ROWS=padded, IS_PLAIN=knobs.runtime.interpret)
    expected = decode_mxfp4(Mxfp4Tensor(codes, scale), torch.bfloat16)
    expected = expected.view(padded, 8, 4, 2).mT.reshape(padded, 64)
    is_number = ~expected.isnan()
    assert torch.equal(out.isnan(), ~is_number)
    assert torch.equal(out[is_number].view(torch.int16), expected[is_number].view(torch.int16))


@gpu
@pytest.mark.parametrize("kind", ["spread", "odd", "one"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 33, 257])
def test_few_tokens_earn_their_tolerance(num_tokens, sizes, kind):
    check("cuda", torch.bfloat16, num_tokens, sizes, kind, GLU)


@gpu
@pytest.mark.parametrize("glu", [Glu("situ", 4.0, None), Glu("silu", 4.0, 25.0)])
def test_every_gated_unit_earns_its_tolerance(glu):
    check("cuda", torch.bfloat16, 33, SIZES[1], "spread", glu)


@gpu
def test_every_code_is_decoded_to_the_bit():
    for first in range(0, 256, 16):
        check_decoding("cuda", torch.arange(first, first + 16))


@gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("num_tokens", [0, 1, 40, 1500])
def test_packed_experts_run_behind_the_operator_without_waiting(num_tokens):
    gate_up, down = experts_of(SIZES[1], "cuda")
    ids = choice_of(num_tokens, SIZES[1], "spread", "cuda")
    x = randn(num_tokens, 384).cuda().bfloat16()
    weights = randn(num_tokens, 6, seed=1).cuda().float()
    decoded = [decode_mxfp4(each, torch.bfloat16) for each in (gate_up, down)]
    with torch.no_grad():
        wide = [each.double() for each in decoded]
        exact = moe_experts(x.double(), ids, weights.double(), *wide, **OPTIONS, impl="reference")
        plain = moe_experts(x, ids, weights, *decoded, **OPTIONS, impl="reference")
        try:
            torch.cuda.set_sync_debug_mode("error")
            dense = moe_experts(x, ids, weights, *decoded, **OPTIONS, impl="triton")
            packed = moe_experts_mxfp4(x, ids, weights, gate_up, down, **OPTIONS, impl="triton")
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for found in (dense, packed):
        assert found.shape == x.shape and found.dtype == x.dtype
        if num_tokens:
            allowed = 2 * relative_error(plain, exact) + 3 * torch.finfo(x.dtype).eps
            assert relative_error(found, exact) <= allowed


@gpu
@pytest.mark.parametrize("num_tokens", [1, 32])
def test_a_cuda_graph_replays_on_other_choices(num_tokens):
    gate_up, down = experts_of(SIZES[1], "cuda")
    ids = choice_of(num_tokens, SIZES[1], "spread", "cuda")
    x = randn(num_tokens, 384).cuda().bfloat16()
    weights = randn(num_tokens, 6, seed=1).cuda().float()

    def run() -> Tensor:
        return moe_experts_mxfp4(x, ids, weights, gate_up, down, **OPTIONS, impl="triton")

    with torch.no_grad():
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        for kind in ("one", "odd"):
            ids.copy_(choice_of(num_tokens, SIZES[1], kind, "cuda"))
            x.copy_(x.flip(1))
            graph.replay()
            assert torch.equal(out, run())


def test_packed_experts_refuse_what_they_cannot_serve():
    gate_up, down = experts_of(SIZES[0], "cpu")
    x, weights = torch.zeros(2, 96), torch.zeros(2, 2)
    ids = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(ImplError, match="serves bf16"):
        moe_experts_mxfp4(x, ids, weights, gate_up, down, **OPTIONS, impl="triton")
    with pytest.raises(ImplError, match="needs tensors on a CUDA device"):
        moe_experts_mxfp4(x.bfloat16(), ids, weights, gate_up, down, **OPTIONS, impl="triton")


def test_weights_whose_rows_lie_apart_are_refused():
    gate_up, down = torch.zeros(2, 32, 32).mT, torch.zeros(2, 32, 16)
    x, weights = torch.zeros(1, 32), torch.zeros(1, 1)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ImplError, match="contiguous"):
        few.moe_experts(x, ids, weights, gate_up, down, GLU)


@pytest.mark.parametrize("is_packed", [False, True])
def test_every_number_of_tokens_has_a_tile_on_every_device(is_packed):
    for mean in (*few.MEANS, 2 * few.MAX_MEAN_TOKENS):
        for num_pairs in (64 * mean - 63, 64 * mean, 64 * mean + 1):
            for tile in on_every_device(partial(few.tile_of, num_pairs, 64, is_packed, False)):
                assert tile.rows >= 16 and tile.tokens >= 8 and tile.inputs % few.GROUP_SIZE == 0
    assert on_every_device(partial(few.tile_of, 1, 64, is_packed, True))
