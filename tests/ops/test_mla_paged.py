"""Absorbed attention over pages: what it means, and the form in plain PyTorch."""

from dataclasses import dataclass, replace

import pytest
import torch
from ops.earned import randn
from ops.harness import boundaries, relative_error
from torch import Tensor

from baltoro.ops.impl import ImplError
from baltoro.ops.mla import varlen_attention
from baltoro.ops.mla.paged import paged_latent_attention

IMPLS = ["reference", "torch"]
SCALE = 0.3
NOWHERE = 2**30  # a page that no memory holds


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Arguments of `paged_latent_attention`; all rows that no sequence holds are NaN."""

    q_latent: Tensor
    latents: Tensor
    page_table: Tensor
    lengths: Tensor
    cu_seqlens: Tensor | None
    max_tokens: int
    rank: int

    def wide(self) -> "Pages":
        return replace(self, q_latent=self.q_latent.double(), latents=self.latents.double())


def pages_of(
    lengths: list[int],
    num_queries: list[int] | None = None,
    *,
    num_heads: int = 3,
    dims: tuple[int, int] = (16, 8),
    page_size: int = 8,
    spare_pages: int = 2,
    dtype: torch.dtype = torch.float64,
) -> Pages:
    """Sequences of these cached lengths, each with one query unless said otherwise."""
    N, width = len(lengths), sum(dims)
    counts = num_queries or [1] * N
    draw = torch.Generator().manual_seed(sum(lengths) + N)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    used = [-(-length // page_size) for length in lengths]
    max_pages = max(used, default=0) + spare_pages
    latents = torch.full((sum(used) + 2, page_size, width), torch.nan, dtype=torch.float64)
    table = torch.full((N, max_pages), NOWHERE, dtype=torch.int32)
    free = torch.randperm(len(latents), generator=draw).tolist()
    for n, length in enumerate(lengths):
        for j in range(used[n]):
            table[n, j] = page = free.pop()
            rows = min(page_size, length - j * page_size)
            latents[page, :rows] = normal(rows, width)
    return Pages(
        q_latent=(2 * normal(sum(counts), num_heads, width)).to(dtype),
        latents=latents.to(dtype),
        page_table=table,
        lengths=torch.tensor(lengths, dtype=torch.int32),
        cu_seqlens=None if num_queries is None else boundaries(counts),
        max_tokens=max([1, *counts]),
        rank=dims[0],
    )


def attend(pages: Pages, impl: str, device: str = "cpu") -> Tensor:
    return paged_latent_attention(
        pages.q_latent.to(device),
        pages.latents.to(device),
        pages.page_table.to(device),
        pages.lengths.to(device),
        cu_seqlens=None if pages.cu_seqlens is None else pages.cu_seqlens.to(device),
        max_tokens=pages.max_tokens,
        kv_lora_rank=pages.rank,
        scale=SCALE,
        impl=impl,
    ).cpu()


def assert_pages_earned(pages: Pages, impl: str, device: str = "cpu") -> None:
    """Within twice the error of the reference that rounds its probabilities to the same dtype."""
    exact = attend(pages.wide(), "reference")
    usual = relative_error(attend(pages, "reference"), exact)
    got = attend(pages, impl, device)
    error = relative_error(got, exact)
    # probabilities are rounded too, as in every kernel
    allowed = 2 * usual + 6 * torch.finfo(got.dtype).eps / 2
    assert got.dtype == pages.q_latent.dtype and got.shape == exact.shape
    assert error <= allowed, f"error {error:.3g}, earned {allowed:.3g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lengths", "num_queries"),
    [([], None), ([1], None), ([23, 8, 1], None), ([23, 5, 9, 16], [3, 0, 1, 8])],
)
def test_the_plain_form_earns_its_tolerance(lengths, num_queries, dtype):
    pages = pages_of(lengths, num_queries, dtype=dtype)
    assert_pages_earned(pages, "torch")


@pytest.mark.parametrize("impl", IMPLS)
def test_it_equals_attention_over_expanded_keys_and_values(impl):
    num_heads, (rank, shared), nope, length = 3, (8, 4), 6, 13
    pages = pages_of([length], num_heads=num_heads, dims=(rank, shared))
    rows = torch.cat([pages.latents[page] for page in pages.page_table[0, :2]])[:length]
    q_nope, q_shared = randn(1, num_heads, nope), randn(1, num_heads, shared)
    up_k, up_v = randn(num_heads, nope, rank), randn(num_heads, 5, rank)
    q_latent = torch.cat([torch.einsum("nhd,hdr->nhr", q_nope, up_k), q_shared], -1)
    absorbed = torch.einsum("nhr,hvr->nhv", attend(replace(pages, q_latent=q_latent), impl), up_v)
    k_nope = torch.einsum("lr,hdr->lhd", rows[:, :rank], up_k)
    k = torch.cat([k_nope, rows[:, None, rank:].expand(-1, num_heads, -1)], -1)
    expanded = varlen_attention(
        torch.cat([q_nope, q_shared], -1),
        k,
        torch.einsum("lr,hvr->lhv", rows[:, :rank], up_v),
        cu_seqlens_q=torch.tensor([0, 1]),
        cu_seqlens_k=torch.tensor([0, length]),
        causal=True,
        scale=SCALE,
        impl="reference",
    )
    torch.testing.assert_close(absorbed, expanded)


@pytest.mark.parametrize("impl", IMPLS)
def test_each_query_of_a_sequence_sees_up_to_its_own_token(impl):
    pages = pages_of([12, 20], [3, 2])
    together = attend(pages, impl)
    for n, token, length in ((0, 0, 10), (0, 2, 12), (1, 3, 19), (1, 4, 20)):
        alone = replace(
            pages,
            q_latent=pages.q_latent[token : token + 1],
            page_table=pages.page_table[n : n + 1],
            lengths=torch.tensor([length], dtype=torch.int32),
            cu_seqlens=None,
        )
        torch.testing.assert_close(together[token], attend(alone, impl)[0])


@pytest.mark.parametrize("impl", IMPLS)
def test_a_sequence_without_rows_is_padding(impl):
    pages = pages_of([9, 0, 4], [2, 3, 1])
    out = attend(pages, impl)
    assert not out[2:5].any() and out.isfinite().all() and out[:2].all()


def test_wrong_arguments_name_the_field():
    pages = pages_of([9, 4])
    for change, message in (
        ({"page_table": pages.page_table.long()}, "page_table: expected int32"),
        ({"lengths": pages.lengths[:1]}, r"lengths: expected int32 \[2\]"),
        ({"cu_seqlens": torch.tensor([0, 2])}, r"cu_seqlens: expected int32 \[3\]"),
        ({"q_latent": pages.q_latent[:1]}, "2 sequences need as many tokens, not 1"),
        ({"latents": pages.latents[..., 1:]}, "latents: expected torch.float64 rows of 24"),
        ({"latents": pages.latents.float()}, "latents: expected torch.float64 rows of 24"),
        ({"latents": pages.latents[0]}, r"expected \[T, H, R \+ P\]"),
        ({"rank": 25}, "kv_lora_rank=25"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"lengths": torch.tensor([99, 4], dtype=torch.int32)}, r"lengths\[0\]=99"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(replace(pages, **change), "reference")
    with pytest.raises(ValueError, match=r"sequence 0 has 2 queries.*max_tokens=1"):
        attend(replace(pages_of([9, 4], [2, 1]), max_tokens=1), "reference")
    with pytest.raises(ImplError, match="impl='flash' is unknown"):
        attend(pages, "flash")
