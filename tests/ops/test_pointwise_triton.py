"""The Triton kernels around the products, on a GPU: as close to fp64 as plain code that rounds."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from ops.earned import Allocations, Op, assert_earned, randn
from ops.harness import poisoned_memory
from torch import Tensor

from baltoro.ops.attn_res import attn_res_mix
from baltoro.ops.attn_res import triton as attn_res_kernels
from baltoro.ops.cross_entropy import linear_cross_entropy
from baltoro.ops.cross_entropy import triton as cross_entropy_kernels
from baltoro.ops.impl import ImplError
from baltoro.ops.rms_norm import gated_rms_norm, rms_norm
from baltoro.ops.situ import situ_glu

gpu = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = [0, 1, 63, 65, 127, 1000]
# a token's probabilities share the rounding of its scores, sums over a row in another order
STEPS = {torch.float32: 20.0, torch.bfloat16: 6.0}


def targets_of(num_tokens: int, vocab_size: int, device: torch.device) -> Tensor:
    ids = torch.arange(num_tokens, device=device) * 7 % vocab_size
    return torch.where(ids % 5 == 2, -100, ids)


def mix(impl: str, norm_weight: Tensor, proj_weight: Tensor, *sources: Tensor) -> Tensor:
    return attn_res_mix(sources, norm_weight, proj_weight, eps=1e-5, impl=impl)


def norm(impl: str, x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, eps=1e-5, impl=impl)


def gated(impl: str, x: Tensor, weight: Tensor, gate_logits: Tensor) -> Tensor:
    return gated_rms_norm(x, weight, gate_logits, eps=1e-5, impl=impl)


def situ(impl: str, gate: Tensor, up: Tensor) -> Tensor:
    return situ_glu(gate, up, beta=4.0, linear_beta=25.0, impl=impl)


def uncapped(impl: str, gate: Tensor, up: Tensor) -> Tensor:
    return situ_glu(gate, up, beta=4.0, linear_beta=None, impl=impl)


def halves(impl: str, gate_up: Tensor) -> Tensor:
    return situ(impl, *gate_up.chunk(2, -1))


def loss(impl: str, hidden: Tensor, weight: Tensor) -> Tensor:
    targets = targets_of(hidden.shape[0], weight.shape[0], hidden.device)
    return linear_cross_entropy(hidden, weight, targets, impl=impl)


def sources_of(num_sources: int, num_tokens: int, width: int, spread: float = 2.0) -> list[Tensor]:
    """Both weights and the sources; scores have a standard deviation of about `spread`."""
    sources = [randn(num_tokens, width, seed=j) for j in range(num_sources)]
    return [1 + randn(width) / 4, spread * randn(width, seed=50) / width**0.5, *sources]


OPS: dict[str, tuple[Op, list[Tensor]]] = {
    "attn_res_mix": (mix, sources_of(4, 70, 96)),
    "rms_norm": (norm, [3 * randn(70, 96), randn(96)]),
    "gated_rms_norm": (gated, [randn(70, 3, 32), randn(32), 2 * randn(70, 3, 32, seed=1)]),
    "situ_glu": (situ, [4 * randn(70, 48), 20 * randn(70, 48, seed=1)]),
    "linear_cross_entropy": (loss, [randn(70, 48), randn(101, 48)]),
}
every_op = pytest.mark.parametrize("name", OPS)


def leaves_of(name: str, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [x.to("cuda", dtype).requires_grad_() for x in OPS[name][1]]


def with_gradients(op: Op, leaves: list[Tensor]) -> list[Tensor]:
    out = op("triton", *leaves)
    probe = randn(*out.shape, seed=99).to(out)
    return [out, *torch.autograd.grad(out, leaves, probe)]


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize(("num_sources", "width"), [(1, 48), (5, 768)])
def test_the_mixture_earns_its_tolerance(num_sources, width, num_tokens, dtype):
    inputs = sources_of(num_sources, num_tokens, width)
    assert_earned(mix, inputs, dtype, rounding_steps=STEPS[dtype], impl="triton", device="cuda")


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_sources", "width"), [(9, 2048), (12, 1100), (9, 7168)])
def test_the_mixture_earns_its_tolerance_at_other_widths(num_sources, width, dtype):
    inputs = sources_of(num_sources, 70, width)
    assert_earned(mix, inputs, dtype, rounding_steps=STEPS[dtype], impl="triton", device="cuda")


@pytest.fixture
def few_programs(monkeypatch):
    """So few that each takes many tokens of a ring, and slots are filled again and again."""
    rings = attn_res_kernels.forward_ring, attn_res_kernels.backward_ring
    monkeypatch.setattr(attn_res_kernels.ring, "num_multiprocessors", lambda device: 3)
    for find in rings:
        find.cache_clear()
    yield
    for find in rings:
        find.cache_clear()


@gpu
@pytest.mark.parametrize(
    ("num_sources", "width"),
    [
        *((1, 8), (2, 776), (5, 768), (9, 768), (4, 1032), (9, 2048)),
        *((3, 4104), (9, 7168), (10, 7168), (2, 8192)),
    ],
)
def test_the_mixture_through_a_ring_earns_its_tolerance(num_sources, width, few_programs):
    for num_tokens, spread in ((1, 2.0), (200, 2.0), (70, 20.0)):
        inputs = sources_of(num_sources, num_tokens, width, spread)
        assert_earned(mix, inputs, torch.bfloat16, impl="triton", device="cuda")


@gpu
def test_rows_that_no_ring_takes_are_served(monkeypatch):
    taken = []
    monkeypatch.setattr(attn_res_kernels, "enqueue", lambda kernel, *_, **__: taken.append(kernel))
    for width, start, is_taken in ((64, 0, False), (64, 8, False), (64, 1, True), (60, 0, True)):
        flat = torch.zeros(3 * 64 + 8, device="cuda", dtype=torch.bfloat16)
        source = flat[start : start + 3 * width].view(3, width)
        mix("triton", flat[:width], flat[:width], source, source)
        assert (taken == [attn_res_kernels.forward_kernel]) == is_taken
        taken.clear()
    monkeypatch.undo()
    inputs = sources_of(9, 70, 60)
    assert_earned(mix, inputs, torch.bfloat16, impl="triton", device="cuda")


@gpu
@pytest.mark.parametrize(("num_sources", "width"), [(5, 768), (9, 7168)])
def test_a_mixture_of_one_source_nearly_alone_earns_its_tolerance(num_sources, width):
    # where dout . v_j and its mean cancel: rounding the mixture before would be 20 times too much
    inputs = sources_of(num_sources, 70, width, spread=width**0.5 / 4)
    assert_earned(mix, inputs, torch.bfloat16, impl="triton", device="cuda")


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("width", [5, 384, 768, 7168])
def test_the_norm_earns_its_tolerance(width, num_tokens, dtype):
    inputs = [3 * randn(num_tokens, width), randn(width)]
    assert_earned(norm, inputs, dtype, impl="triton", device="cuda")


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize(("num_heads", "width"), [(6, 128), (3, 24)])
def test_the_gated_norm_earns_its_tolerance(num_heads, width, num_tokens, dtype):
    shape = (num_tokens, num_heads, width)
    inputs = [randn(*shape), randn(width), 2 * randn(*shape, seed=1)]
    assert_earned(gated, inputs, dtype, impl="triton", device="cuda")


@gpu
@pytest.mark.parametrize("op", [situ, uncapped])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_the_gated_unit_earns_its_tolerance(num_tokens, scale, dtype, op):
    inputs = [scale * randn(num_tokens, 448), 5 * scale * randn(num_tokens, 448, seed=1)]
    assert_earned(op, inputs, dtype, impl="triton", device="cuda")


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_of_one_tensor_are_read_where_they_are(dtype):
    for width in (3072, 37):
        inputs = [4 * randn(65, 2 * width)]
        assert_earned(halves, inputs, dtype, impl="triton", device="cuda")


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("vocab_size", [101, 9000])
def test_the_loss_earns_its_tolerance(vocab_size, num_tokens, dtype):
    inputs = [randn(num_tokens, 64), randn(vocab_size, 64)]
    assert_earned(loss, inputs, dtype, impl="triton", device="cuda")


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranges_of_tokens_give_the_same_loss_and_never_all_logits(dtype, monkeypatch):
    monkeypatch.setattr(cross_entropy_kernels, "RANGE_NUMBERS", 130 * 101)
    inputs = [randn(1000, 64), randn(101, 64)]
    assert_earned(loss, inputs, dtype, impl="triton", device="cuda")
    leaves = [x.to("cuda", dtype).requires_grad_() for x in inputs]
    with Allocations() as allocations:
        with_gradients(loss, leaves)
    assert allocations.largest() <= 1000 * 64


@gpu
@every_op
def test_runs_repeat_to_the_bit_and_read_no_fresh_memory(name):
    op, leaves = OPS[name][0], leaves_of(name)
    first = with_gradients(op, leaves)
    with poisoned_memory():
        second = with_gradients(op, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@gpu
@every_op
def test_inference_gives_the_bits_of_training(name):
    op, leaves = OPS[name][0], leaves_of(name)
    with torch.no_grad():
        out = op("triton", *leaves)
    assert torch.equal(out, op("triton", *leaves))


@gpu
@every_op
def test_rows_that_are_not_contiguous_are_served(name):
    op, leaves = OPS[name][0], leaves_of(name)
    spread = [x.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_() for x in leaves]
    for a, b in zip(with_gradients(op, leaves), with_gradients(op, spread), strict=True):
        assert torch.equal(a, b)


@gpu
@pytest.mark.parametrize("name", ["rms_norm", "situ_glu"])
def test_a_part_of_wider_rows_is_served_and_so_is_its_gradient(name):
    op, leaves = OPS[name][0], leaves_of(name)
    wide = [torch.cat([x, x], -1).detach().requires_grad_() for x in leaves]
    parts = [x[..., : x.shape[-1] // 2] for x in wide]
    out = torch.cat([op("triton", *parts)] * 2, -1)
    probe = randn(*leaves[0].shape, seed=99).to(out)
    expected = with_gradients(op, leaves)[1:]
    got = torch.autograd.grad(out[..., : probe.shape[-1]], wide, probe)
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b[..., : a.shape[-1]])


@gpu
@every_op
def test_a_cuda_graph_replays_on_other_values(name):
    op, leaves = OPS[name][0], leaves_of(name)
    others = [x.detach().flip(0).clone() for x in leaves]
    expected = with_gradients(op, [x.clone().requires_grad_() for x in others])
    probe = randn(*expected[0].shape, seed=99).to(expected[0])

    def run() -> list[Tensor]:
        out = op("triton", *leaves)
        return [out, *torch.autograd.grad(out, leaves, probe)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        for leaf, other in zip(leaves, others, strict=True):
            leaf.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(expected, captured, strict=True))


@gpu
@every_op
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch 2.11
def test_it_compiles_into_one_graph_with_its_backward(name):
    op, leaves = OPS[name][0], leaves_of(name)

    def total(*x: Tensor) -> Tensor:
        return op("triton", *x).float().square().sum()

    eager = torch.autograd.grad(total(*leaves), leaves)
    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
    for a, b in zip(eager, torch.autograd.grad(compiled(*leaves), leaves), strict=True):
        assert torch.equal(a, b)


@gpu
@pytest.mark.parametrize("name", ["attn_res_mix", "rms_norm", "situ_glu"])
def test_the_last_rows_of_more_numbers_than_an_int32_counts_are_right(name):
    op, width, num_tokens = OPS[name][0], 2048, 2**20 + 70
    inputs = {
        "attn_res_mix": [*sources_of(0, 0, width), randn(70, width), randn(70, width, seed=1)],
        "rms_norm": [randn(70, width), randn(width)],
        "situ_glu": [randn(70, width), randn(70, width, seed=1)],
    }[name]
    small = [x.to("cuda", torch.bfloat16).requires_grad_() for x in inputs]
    large = []
    for x in small:
        if x.dim() == 2:
            padded = torch.zeros(num_tokens, width, dtype=torch.bfloat16, device="cuda")
            padded[-70:] = x.detach()
            x = padded.requires_grad_()
        large.append(x)
    out = op("triton", *large)
    expected = op("triton", *small)
    assert torch.equal(out[-70:], expected)
    probe = randn(70, width, seed=99).to(out)
    d_out = torch.zeros_like(out)
    d_out[-70:] = probe
    wanted = torch.autograd.grad(expected, small, probe)
    for x, a, b in zip(small, torch.autograd.grad(out, large, d_out), wanted, strict=True):
        if x.dim() == 2:
            assert torch.equal(a[-70:], b)


@gpu
def test_one_source_comes_back_as_it_is():
    norm_weight, proj_weight, source = (x.to("cuda") for x in sources_of(1, 65, 96))
    source = source.bfloat16()
    out = mix("triton", norm_weight.float(), proj_weight.float(), source)
    assert torch.equal(out, source)


@gpu
def test_the_weight_multiplies_the_rounded_quotient():
    x, weight = 3 * randn(65, 96).bfloat16(), randn(96).bfloat16()
    out = norm("triton", x.cuda(), weight.cuda()).cpu()
    plain = norm("reference", x, weight)
    assert (out == plain).float().mean() > 0.99


@gpu
def test_an_ignored_row_reaches_nothing_and_no_id_has_no_loss():
    hidden, weight = randn(5, 64).bfloat16().cuda(), randn(101, 64).bfloat16().cuda()
    hidden[2] = float("nan")
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    targets = torch.tensor([1, 2, -100, 4, 100], device="cuda")
    losses = linear_cross_entropy(*leaves, targets, impl="triton")
    d_hidden, d_weight = torch.autograd.grad(losses.sum(), leaves)
    assert losses[2] == 0 and losses.isfinite().all()
    assert torch.equal(d_hidden[2], torch.zeros_like(d_hidden[2]))
    assert d_hidden.isfinite().all() and d_weight.isfinite().all()
    targets = torch.tensor([1, 101, 3, -1, 100], device="cuda")
    losses = linear_cross_entropy(*leaves, targets, impl="triton")
    assert losses.isnan().tolist() == [False, True, True, True, False]


@gpu
@every_op
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_two_devices_are_refused_with_the_reason(name, dtype):
    op, leaves = OPS[name][0], leaves_of(name, dtype)
    leaves[-1] = leaves[-1].detach().cpu()
    with pytest.raises(ImplError, match="needs one device, not"):
        op("triton", *leaves)


@every_op
def test_a_cpu_tensor_is_refused_with_the_reason(name):
    op, inputs = OPS[name]
    with pytest.raises(ImplError, match="needs tensors on a CUDA device, not on cpu"):
        op("triton", *(x.bfloat16() for x in inputs))


@every_op
def test_fp64_is_refused_with_the_reason(name):
    op, inputs = OPS[name]
    with pytest.raises(ImplError, match="serves bfloat16 and float32, not float64"):
        op("triton", *inputs)
