"""The kernels of paged absorbed attention on a GPU, held to fp64 and to themselves."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from ops.harness import boundaries, poisoned_memory, relative_error
from ops.test_mla_paged import SCALE, Pages, assert_pages_earned, attend, pages_of

from baltoro.ops.impl import ImplError
from baltoro.ops.mla import triton as kernels
from baltoro.ops.mla.paged import paged_latent_attention

gpu = pytest.mark.gpu
K3 = (512, 64)
fp16, bf16 = torch.float16, torch.bfloat16


def on_device(pages: Pages) -> dict:
    return {
        "q_latent": pages.q_latent.cuda(),
        "latents": pages.latents.cuda(),
        "page_table": pages.page_table.cuda(),
        "lengths": pages.lengths.cuda(),
        "cu_seqlens": None if pages.cu_seqlens is None else pages.cu_seqlens.cuda(),
        "max_tokens": pages.max_tokens,
        "kv_lora_rank": pages.rank,
        "scale": SCALE,
        "impl": "triton",
    }


@gpu
@pytest.mark.parametrize(
    ("dims", "num_heads", "page_size", "dtype"),
    [
        (K3, 16, 64, bf16),
        (K3, 1, 192, fp16),
        (K3, 5, 16, bf16),
        (K3, 96, 64, bf16),
        (K3, 96, 192, fp16),
        (K3, 17, 16, bf16),
        ((64, 16), 1, 64, bf16),
        ((64, 16), 17, 16, bf16),
        ((96, 32), 5, 64, bf16),
        ((96, 32), 33, 64, bf16),
        ((128, 0), 16, 16, bf16),
        ((128, 0), 96, 64, bf16),
    ],
)
def test_the_kernels_earn_their_tolerance(dims, num_heads, page_size, dtype):
    pages = pages_of(
        [1, 64, 0, 65, 447], num_heads=num_heads, dims=dims, page_size=page_size, dtype=dtype
    )
    with poisoned_memory():
        assert_pages_earned(pages, "triton", "cuda")


@gpu
@pytest.mark.parametrize(
    ("dims", "num_heads", "page_size"),
    [(K3, 2, 64), (K3, 96, 128), (K3, 7, 48), ((64, 16), 2, 48), ((128, 0), 7, 128)],
)
def test_several_queries_of_a_sequence_earn_their_tolerance(dims, num_heads, page_size):
    pages = pages_of(
        [300, 129, 64, 0, 8],
        [8, 1, 0, 2, 8],
        num_heads=num_heads,
        dims=dims,
        page_size=page_size,
        dtype=bf16,
    )
    with poisoned_memory():
        assert_pages_earned(pages, "triton", "cuda")


@pytest.fixture
def divide(monkeypatch):
    """Has the work divided among a number of programs."""
    shape_of = kernels.shape_of

    def among(num_programs: int) -> None:
        monkeypatch.setattr(
            kernels,
            "shape_of",
            lambda *sizes: shape_of(*sizes)._replace(num_programs=num_programs),
        )

    return among


@gpu
@pytest.mark.parametrize("num_programs", [1, 2, 3, 7, 264])
@pytest.mark.parametrize("num_heads", [8, 16, 40])
def test_parts_merge_to_what_one_program_gives(num_heads, num_programs, divide):
    pages = pages_of([1000, 65, 0], num_heads=num_heads, dims=K3, dtype=bf16)
    exact = attend(pages.wide(), "reference")
    divide(num_programs)
    with poisoned_memory():
        out = attend(pages, "triton", "cuda")
    assert relative_error(out, exact) < 4e-3
    assert torch.equal(out, attend(pages, "triton", "cuda"))


@gpu
def test_a_score_far_above_all_others_wins_in_every_range():
    pages = pages_of([700], num_heads=4, dims=(64, 16), dtype=bf16)
    for token in (0, 63, 64, 350, 699):
        latents = pages.latents.clone()
        row = latents[int(pages.page_table[0, token // 8]), token % 8]
        row.copy_(30 * pages.q_latent[0, 0])
        out = attend(replace(pages, latents=latents), "triton", "cuda")
        torch.testing.assert_close(out[0, 0], row[:64], rtol=1e-2, atol=0)


@gpu
@pytest.mark.parametrize("num_heads", [16, 96])
def test_runs_repeat_to_the_bit_and_read_no_fresh_memory(num_heads):
    pages = pages_of([900] * 6, num_heads=num_heads, dims=K3, page_size=64, dtype=bf16)
    first = attend(pages, "triton", "cuda")
    with poisoned_memory():
        assert torch.equal(attend(pages, "triton", "cuda"), first)


@gpu
@pytest.mark.parametrize("num_heads", [16, 96])
def test_the_place_of_pages_and_padding_change_no_bit(num_heads):
    pages = pages_of([300, 500], num_heads=num_heads, dims=K3, page_size=64, dtype=bf16)
    order = torch.arange(len(pages.latents)).flip(0)
    turned = torch.where(pages.page_table < len(order), len(order) - 1 - pages.page_table, 0)
    other = replace(
        pages,
        q_latent=torch.cat([pages.q_latent, torch.full_like(pages.q_latent[:1], torch.nan)]),
        latents=pages.latents[order],
        page_table=torch.cat([turned, turned[:1]]).to(torch.int32),
        lengths=torch.cat([pages.lengths, pages.lengths[:1] * 0]),
    )
    expected = attend(pages, "triton", "cuda")
    out = attend(other, "triton", "cuda")
    assert torch.equal(out[:2], expected) and not out[2].any()


@gpu
@pytest.mark.parametrize("num_heads", [16, 96])
def test_a_cuda_graph_replays_on_other_lengths_and_pages(num_heads):
    long = pages_of(
        [500, 30, 64],
        [2, 1, 1],
        num_heads=num_heads,
        dims=K3,
        page_size=64,
        dtype=bf16,
    )
    order = torch.tensor([2, 0, 1])
    other = replace(
        long,
        page_table=long.page_table[order],
        lengths=torch.tensor([64, 410, 0], dtype=torch.int32),
        cu_seqlens=boundaries([1, 2, 1]),
    )
    expected = attend(other, "triton", "cuda")
    arguments = on_device(long)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        paged_latent_attention(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_latent_attention(**arguments)
    for name in ("page_table", "lengths", "cu_seqlens"):
        arguments[name].copy_(getattr(other, name))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), expected)


@gpu
def test_pages_far_beyond_four_gigabytes_are_reached():
    pages = pages_of([70, 9], num_heads=2, dims=(64, 16), page_size=64, dtype=bf16)
    expected = attend(pages, "triton", "cuda")
    arguments = on_device(pages)
    gap, shape = 80 * 2**24, pages.latents.shape
    memory = torch.empty(gap * shape[0], dtype=bf16, device="cuda")
    apart = memory.as_strided(shape, (gap, shape[2], 1))
    apart.copy_(arguments["latents"])
    arguments["latents"] = apart
    assert torch.equal(paged_latent_attention(**arguments).cpu(), expected)


@gpu
def test_rows_of_one_page_a_sequence_may_be_any_number():
    pages = pages_of(
        [150, 1, 64], num_heads=3, dims=(64, 16), page_size=151, spare_pages=0, dtype=bf16
    )
    assert pages.page_table.shape == (3, 1)
    assert_pages_earned(pages, "triton", "cuda")


@gpu
def test_what_no_kernel_serves_on_the_device_is_refused_with_the_reason():
    with pytest.raises(ImplError, match="serves bfloat16 and float16, not float32"):
        attend(pages_of([9], dtype=torch.float32), "triton", "cuda")
    with pytest.raises(ImplError, match=r"up to 512 and up to 64 columns more.*not 16 and 80"):
        attend(pages_of([9], dims=(16, 80), dtype=bf16), "triton", "cuda")
    arguments = on_device(pages_of([9], dtype=bf16))
    arguments["latents"] = arguments["latents"].mT.contiguous().mT
    with pytest.raises(ImplError, match="needs contiguous pages"):
        paged_latent_attention(**arguments)
    with pytest.raises(ImplError, match=r"pages of a multiple of 8 tokens.*page_size=12"):
        attend(pages_of([9], page_size=12, dtype=bf16), "triton", "cuda")
    arguments = on_device(pages_of([9], dims=(16, 8), dtype=bf16))
    gap = arguments["latents"].new_zeros(3, 8 * 24 + 1)[:, :-1].unflatten(1, (8, 24))
    with pytest.raises(ImplError, match="a whole number of rows apart"):
        paged_latent_attention(**arguments | {"latents": gap})
    with pytest.raises(ImplError, match=r"a positive scale, not -0\.1"):
        paged_latent_attention(**arguments | {"scale": -0.1})


def test_what_no_kernel_serves_is_refused_with_the_reason():
    with pytest.raises(ImplError, match="needs tensors on a CUDA device, not on cpu"):
        attend(pages_of([9], dtype=bf16), "triton")
