"""The Triton kernels of KDA on a GPU, held to fp64 by twice the error of plain code that rounds."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from ops.harness import (
    GATES,
    KEYS,
    Packed,
    assert_within_budget,
    boundaries,
    in_two_parts,
    kda_inputs,
    one_by_one,
    outcome,
    poisoned_memory,
)

from baltoro.ops.impl import ImplError
from baltoro.ops.kda import bounded_gate, chunk_kda, l2_normalize
from baltoro.ops.kda.fused import chunk_kda_fused

LENGTHS = [130, 0, 33, 1, 64]
BOUND = -5.0
gpu = pytest.mark.gpu


def low(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


class _Product(torch.autograd.Function):
    """A matrix product of bf16 operands summed in fp32, and its gradients computed likewise."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(low(a), low(b))
        return low(a) @ low(b)

    @staticmethod
    def backward(ctx, d):
        a, b = ctx.saved_tensors
        return low(d) @ b.mT, a.mT @ low(d)


class _Scale(torch.autograd.Function):
    """a * x row by row, with the gradient of a from tensors stored in bf16."""

    @staticmethod
    def forward(ctx, a, x):
        ctx.save_for_backward(a, low(x))
        return a * x

    @staticmethod
    def backward(ctx, d):
        a, x = ctx.saved_tensors
        return (x * low(d)).sum(-1, keepdim=True), a * d


product, scaled = _Product.apply, _Scale.apply


def rounded_chunks(batch: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """KDA in chunks of 64, a decay for every pair; operands and stored tensors in bf16."""
    t = {name: x.float() for name, x in batch.tokens.items()}
    edges, o, final = batch.cu_seqlens.tolist(), [], []
    for n, (start, end) in enumerate(itertools.pairwise(edges)):
        S = batch.states["initial_state"][n].float()
        for first in range(start, end, 64):
            rows = slice(first, min(first + 64, end))
            q, k, v, g, beta = (t[x][rows].transpose(0, 1) for x in ("q", "k", "v", "g", "beta"))
            G = g.cumsum(1)
            decay = (G[:, :, None] - G[:, None]).clamp(max=0).exp()
            columns = k[:, None, :, :, None].expand(-1, q.shape[1], -1, -1, -1)
            aqk = product((q[:, :, None] * decay)[..., None, :], columns)[..., 0, 0].tril()
            akk = product((k[:, :, None] * decay)[..., None, :], columns)[..., 0, 0].tril(-1)
            eye = torch.eye(akk.shape[1], device=akk.device)
            below = torch.linalg.inv(eye + scaled(beta[..., None], akk)) - eye
            x = scaled(beta[..., None], v - product(k * G.exp(), S))
            written = x + product(below, x)
            o.append((product(q * G.exp(), S) + product(aqk, written)).transpose(0, 1))
            kept = product((k * (G[:, -1:] - G).exp()).mT, written)
            S = scaled(G[:, -1, :, None].exp(), S) + kept
        final.append(S)
    return torch.cat(o).to(batch.tokens["v"].dtype), torch.stack(final)


def kda(impl: str):
    def run(batch: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        return chunk_kda(
            **batch.tokens,
            **batch.states,
            cu_seqlens=batch.cu_seqlens,
            gate_lower_bound=BOUND,
            impl=impl,
        )

    return run


def fused(impl: str):
    def run(batch: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        return chunk_kda_fused(
            **batch.tokens,
            **batch.states,
            **batch.weights,
            cu_seqlens=batch.cu_seqlens,
            gate_lower_bound=BOUND,
            impl=impl,
        )

    return run


def rounded_fused(batch: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    t, w = {name: x.float() for name, x in batch.tokens.items()}, batch.weights
    tokens = {
        "q": l2_normalize(t["q"], scale=t["q"].shape[-1] ** -0.5),
        "k": l2_normalize(t["k"]),
        "v": t["v"],
        "g": bounded_gate(t["decay_logits"], w["A_log"], w["dt_bias"], lower_bound=BOUND),
        "beta": torch.sigmoid(t["beta_logits"]),
    }
    plain = Packed(tokens=tokens, states=batch.states, weights={}, cu_seqlens=batch.cu_seqlens)
    o, final_state = rounded_chunks(plain)
    return o.to(batch.tokens["v"].dtype), final_state


def raw_inputs(lengths: list[int], dtype: torch.dtype, shift: float, dim: int = 128) -> Packed:
    """Inputs of the fused form; `shift` moves the decay logits: 0 forgets fast, -4 slowly."""
    draw = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    T, H = sum(lengths), 2
    return Packed(
        tokens={
            "q": normal(T, H, dim).to(dtype),
            "k": normal(T, H, dim).to(dtype),
            "v": normal(T, H, dim).to(dtype),
            "decay_logits": (normal(T, H, dim) + shift).to(dtype),
            "beta_logits": normal(T, H).to(dtype),
        },
        states={"initial_state": normal(len(lengths), H, dim, dim)},
        weights={"A_log": normal(H) * 0.3, "dt_bias": normal(H * dim) * 0.3},
        cu_seqlens=boundaries(lengths),
    )


def bf16_inputs(**kwargs) -> Packed:
    return kda_inputs(
        LENGTHS, **{"key_dim": 128, "value_dim": 128, "dtype": torch.bfloat16, **kwargs}
    )


@gpu
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("gate", GATES)
def test_bf16_is_as_exact_as_plain_code_that_rounds(gate, keys):
    batch = bf16_inputs(gate=gate, keys=keys)
    assert_within_budget(
        kda("triton"), kda("reference"), batch, plain=rounded_chunks, device="cuda"
    )


@gpu
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (64, 128), (128, 64)])
def test_other_head_dims(key_dim, value_dim):
    batch = bf16_inputs(key_dim=key_dim, value_dim=value_dim)
    assert_within_budget(
        kda("triton"), kda("reference"), batch, plain=rounded_chunks, device="cuda"
    )


@gpu
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (16, 128)])
def test_fp32_is_nearly_exact(key_dim, value_dim, gate):
    batch = bf16_inputs(key_dim=key_dim, value_dim=value_dim, gate=gate, dtype=torch.float32)
    # two factors 2^x with x up to 223 held in fp32 are each good to 9e-6
    assert_within_budget(kda("triton"), kda("reference"), batch, device="cuda", rounding_steps=600)


@gpu
@pytest.mark.parametrize("shift", [0.0, -4.0])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_fused_form_is_as_exact_as_its_parts(dim, shift):
    batch = raw_inputs(LENGTHS, torch.bfloat16, shift, dim)
    assert_within_budget(
        fused("triton"), fused("reference"), batch, plain=rounded_fused, device="cuda"
    )


@gpu
def test_packing_does_not_change_a_bit():
    batch = bf16_inputs().to("cuda")
    packed, single = outcome(kda("triton"), batch), outcome(one_by_one(kda("triton")), batch)
    for name, x in packed.items():
        assert torch.equal(x, single[name]), name


@gpu
def test_a_sequence_cut_in_two_goes_on_from_its_state():
    assert_within_budget(
        in_two_parts(kda("triton")),
        kda("reference"),
        bf16_inputs(),
        plain=in_two_parts(rounded_chunks),
        device="cuda",
    )


@gpu
def test_runs_repeat_to_the_bit_and_read_no_fresh_memory():
    batch = raw_inputs(LENGTHS, torch.bfloat16, 0.0).to("cuda")
    first = outcome(fused("triton"), batch)
    with poisoned_memory():
        second = outcome(fused("triton"), batch)
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


@gpu
def test_the_future_does_not_touch_the_past():
    batch = raw_inputs([200], torch.bfloat16, 0.0).to("cuda")
    other = raw_inputs([200], torch.bfloat16, -4.0).to("cuda")
    for name, x in other.tokens.items():
        x[:70] = batch.tokens[name][:70]
    a, _ = fused("triton")(batch)
    changed = Packed(
        tokens=other.tokens,
        states=batch.states,
        weights=batch.weights,
        cu_seqlens=batch.cu_seqlens,
    )
    b, _ = fused("triton")(changed)
    assert torch.equal(a[:70], b[:70])
    assert not torch.equal(a[70:], b[70:])


@gpu
def test_inference_keeps_nothing_and_gives_the_same_bits():
    batch = raw_inputs(LENGTHS, torch.bfloat16, -4.0).to("cuda")
    with torch.no_grad():
        o, final_state = fused("triton")(batch)
    kept_o, kept_state = fused("triton")(batch.map(lambda x: x.requires_grad_()))
    assert torch.equal(o, kept_o) and torch.equal(final_state, kept_state)


@gpu
def test_a_cuda_graph_replays_on_another_packing():
    batch = raw_inputs([100, 28], torch.bfloat16, 0.0).to("cuda")
    other = boundaries([3, 125]).to("cuda")
    expected, _ = fused("triton")(
        Packed(tokens=batch.tokens, states=batch.states, weights=batch.weights, cu_seqlens=other)
    )
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fused("triton")(batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = fused("triton")(batch)
    batch.cu_seqlens.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(o, expected)


@gpu
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch 2.11
def test_it_compiles_into_one_graph_with_its_backward():
    batch = raw_inputs([100, 28], torch.bfloat16, 0.0).to("cuda")
    names = ("q", "k", "v", "decay_logits", "beta_logits")
    leaves = [batch.tokens[name].requires_grad_() for name in names]
    leaves += [batch.weights[name].requires_grad_() for name in ("A_log", "dt_bias")]

    def loss(*x: torch.Tensor) -> torch.Tensor:
        out = chunk_kda_fused(
            *x, cu_seqlens=batch.cu_seqlens, gate_lower_bound=BOUND, impl="triton"
        )
        return out.o.float().square().sum()

    eager = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for a, b in zip(eager, torch.autograd.grad(compiled(*leaves), leaves), strict=True):
        assert torch.equal(a, b)


@gpu
def test_no_tokens_pass_the_state_through():
    batch = raw_inputs([0, 0], torch.bfloat16, 0.0).to("cuda")
    o, final_state = fused("triton")(batch)
    assert o.shape[0] == 0
    assert torch.equal(final_state, batch.states["initial_state"])


def test_a_cpu_tensor_is_refused_with_the_reason():
    with pytest.raises(ImplError, match="needs tensors on a CUDA device"):
        kda("triton")(bf16_inputs())


def test_what_no_kernel_serves_is_refused_with_the_reason():
    with pytest.raises(ImplError, match=r"serves head dims .* not K=24"):
        kda("triton")(bf16_inputs(key_dim=24))
    with pytest.raises(ImplError, match=r"serves bfloat16 with head dims \(64, 128\), not K=32"):
        kda("triton")(bf16_inputs(key_dim=32))
    with pytest.raises(ImplError, match="serves bfloat16 and float32"):
        kda("triton")(bf16_inputs(dtype=torch.float64))
    batch = bf16_inputs()
    arguments = {**batch.tokens, **batch.states, "cu_seqlens": batch.cu_seqlens, "impl": "triton"}
    with pytest.raises(ImplError, match="needs a gate_lower_bound"):
        chunk_kda(**arguments, gate_lower_bound=None)
    with pytest.raises(ImplError, match="has chunk_size=64, not 32"):
        chunk_kda(**arguments, gate_lower_bound=BOUND, chunk_size=32)
