"""The largest attention logits in Triton against plain code, interpreted and on a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from ops.harness import poisoned_memory
from ops.hopper import resources
from ops.interpreted import assert_runs_interpreted, needs_interpreter

from baltoro.ops.impl import ImplError
from baltoro.ops.mla import largest_triton as kernels
from baltoro.ops.mla.largest import largest_logits

# lengths of packs: long and short, empty ones, one token, beyond a tile, padded to a bound
PACKS = [[300, 1, 0, 77, 129, 0, 0], [1], [128, 128], [513]]

INTERPRETED = """
from ops.test_largest_triton import PACKS, below_zero, difference
below_zero("cpu")
for lengths in PACKS:
    assert difference(lengths, 2, 48, "cpu") < 1e-5, lengths
"""


def difference(lengths: list[int], heads: int, dim: int, device: str, dtype=torch.float32) -> float:
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(sum(lengths), heads, dim, generator=draw) for _ in range(2))
    # a key that no query may see, since it comes later or is another sequence's, would be found
    q[0], k[-1] = 50.0, 50.0
    q, k = (x.to(device, dtype) for x in (q, k))
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    got = largest_logits(q, k, bounds, scale=0.125, impl="triton")
    want = largest_logits(q.float(), k.float(), bounds, scale=0.125, impl="torch")
    return float((got - want).abs().max() / want.abs().max())


def below_zero(device: str) -> None:
    """Negative logits throughout, in tiles that are not full."""
    draw = torch.Generator().manual_seed(1)
    for lengths in PACKS:
        q, k = (torch.rand(sum(lengths), 2, 16, generator=draw).to(device) for _ in range(2))
        bounds = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        got, want = (
            largest_logits(q, -k, bounds, scale=1.0, impl=impl) for impl in ("triton", "torch")
        )
        assert float(want.max()) < 0
        torch.testing.assert_close(got, want)


@pytest.mark.gpu
def test_logits_may_all_be_negative():
    below_zero("cuda")


@pytest.mark.slow
@needs_interpreter
def test_the_kernel_finds_what_plain_code_finds_in_the_interpreter():
    assert_runs_interpreted(INTERPRETED)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [192, 96])
def test_the_kernel_compiles_without_spills(dim):
    arguments = {
        "q": "*bf16", "k": "*bf16", "starts": "*i32", "largest": "*fp32", "num_tokens": "i32",
        **dict.fromkeys(("q_stride", "q_head", "k_stride", "k_head"), "i32:16"),
        "K": dim, "P": 64 if dim % 64 == 0 else 32, "Q": kernels.QUERIES, "L": kernels.KEYS,
        "STAGES": kernels.NUM_STAGES, "PRECISION": "tf32",
    }  # fmt: skip
    assert resources(kernels.largest_kernel, arguments, kernels.NUM_WARPS).stack_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lengths", PACKS)
def test_the_kernel_finds_what_plain_code_finds(lengths, dtype):
    with poisoned_memory():
        for dim in (192, 96, 16):
            assert difference(lengths, 3, dim, "cuda", dtype) < 1e-5


@pytest.mark.gpu
def test_no_tokens_have_no_logits_and_odd_heads_are_refused():
    none = torch.empty(0, 2, 192, device="cuda")
    bounds = torch.zeros(2, dtype=torch.int32, device="cuda")
    assert largest_logits(none, none, bounds, scale=1.0, impl="triton").tolist() == [-torch.inf] * 2
    odd = torch.empty(0, 2, 24, device="cuda")
    with pytest.raises(ImplError, match=r"multiples of 16 and positive scales, not 24"):
        largest_logits(odd, odd, bounds, scale=1.0, impl="triton")
