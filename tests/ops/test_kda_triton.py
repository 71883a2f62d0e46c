"""The Triton kernels of KDA on a GPU, held to fp64 by twice the error of plain code that rounds."""

import itertools
from dataclasses import replace

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
from baltoro.ops.kda import chunk_kda, l2_normalize, log_decay
from baltoro.ops.kda.fused import chunk_kda_fused

LENGTHS = [130, 0, 33, 1, 64]
BOUND = -5.0
FP32_STEPS = 60.0
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


def kda(impl: str, bound: float | None = BOUND):
    def run(batch: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        return chunk_kda(
            **batch.tokens,
            **batch.states,
            cu_seqlens=batch.cu_seqlens,
            gate_lower_bound=bound,
            impl=impl,
        )

    return run


def fused(impl: str, bound: float | None = BOUND):
    def run(batch: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        return chunk_kda_fused(
            **batch.tokens,
            **batch.states,
            **batch.weights,
            cu_seqlens=batch.cu_seqlens,
            gate_lower_bound=bound,
            impl=impl,
        )

    return run


def rounded_fused(bound: float | None = BOUND):
    def run(batch: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        t, w = {name: x.float() for name, x in batch.tokens.items()}, batch.weights
        tokens = {
            "q": l2_normalize(t["q"], scale=t["q"].shape[-1] ** -0.5),
            "k": l2_normalize(t["k"]),
            "v": t["v"],
            "g": log_decay(t["decay_logits"], w["A_log"], w["dt_bias"], lower_bound=bound),
            "beta": torch.sigmoid(t["beta_logits"]),
        }
        plain = Packed(tokens=tokens, states=batch.states, weights={}, cu_seqlens=batch.cu_seqlens)
        o, final_state = rounded_chunks(plain)
        return o.to(batch.tokens["v"].dtype), final_state

    return run


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
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (16, 128), (128, 128)])
def test_fp32_is_nearly_exact(key_dim, value_dim, gate):
    batch = bf16_inputs(key_dim=key_dim, value_dim=value_dim, gate=gate, dtype=torch.float32)
    for bound in (BOUND, None):
        assert_within_budget(
            kda("triton", bound),
            kda("reference"),
            batch,
            device="cuda",
            rounding_steps=FP32_STEPS,
        )


@gpu
@pytest.mark.parametrize("shift", [0.0, -4.0])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_fused_form_is_as_exact_as_its_parts(dim, shift):
    batch = raw_inputs(LENGTHS, torch.bfloat16, shift, dim)
    assert_within_budget(
        fused("triton"), fused("reference"), batch, plain=rounded_fused(), device="cuda"
    )


@gpu
@pytest.mark.parametrize("bound", [None, BOUND])
def test_the_fused_form_is_nearly_exact_in_fp32(bound):
    batch = raw_inputs(LENGTHS, torch.float32, 0.0, 64)
    assert_within_budget(
        fused("triton", bound),
        fused("reference", bound),
        batch,
        device="cuda",
        rounding_steps=FP32_STEPS,
    )


@gpu
@pytest.mark.parametrize("bound", [None, BOUND])
def test_packing_does_not_change_a_bit(bound):
    batch = bf16_inputs().to("cuda")
    op = kda("triton", bound)
    packed, single = outcome(op, batch), outcome(one_by_one(op), batch)
    for name, x in packed.items():
        assert torch.equal(x, single[name]), name


@gpu
@pytest.mark.parametrize("bound", [None, BOUND])
def test_a_sequence_cut_in_two_goes_on_from_its_state(bound):
    assert_within_budget(
        in_two_parts(kda("triton", bound)),
        kda("reference"),
        bf16_inputs(),
        plain=in_two_parts(rounded_chunks),
        device="cuda",
    )


@gpu
@pytest.mark.parametrize("bound", [None, BOUND])
def test_runs_repeat_to_the_bit_and_read_no_fresh_memory(bound):
    batch = raw_inputs(LENGTHS, torch.bfloat16, 0.0).to("cuda")
    first = outcome(fused("triton", bound), batch)
    with poisoned_memory():
        second = outcome(fused("triton", bound), batch)
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


@gpu
@pytest.mark.parametrize("bound", [None, BOUND])
def test_the_future_does_not_touch_the_past(bound):
    batch = raw_inputs([200], torch.bfloat16, 0.0).to("cuda")
    other = raw_inputs([200], torch.bfloat16, -4.0).to("cuda")
    for name, x in other.tokens.items():
        x[:70] = batch.tokens[name][:70]
    a, _ = fused("triton", bound)(batch)
    b, _ = fused("triton", bound)(replace(batch, tokens=other.tokens))
    assert torch.equal(a[:70], b[:70])
    assert not torch.equal(a[70:], b[70:])


@gpu
@pytest.mark.parametrize("bound", [None, BOUND])
def test_inference_keeps_nothing_and_gives_the_same_bits(bound):
    batch = raw_inputs(LENGTHS, torch.bfloat16, -4.0).to("cuda")
    with torch.no_grad():
        o, final_state = fused("triton", bound)(batch)
    kept_o, kept_state = fused("triton", bound)(batch.map(lambda x: x.requires_grad_()))
    assert torch.equal(o, kept_o) and torch.equal(final_state, kept_state)


@gpu
@pytest.mark.parametrize("bound", [None, BOUND])
def test_a_cuda_graph_replays_on_another_packing(bound):
    batch = raw_inputs([100, 28], torch.bfloat16, 0.0).to("cuda")
    other = boundaries([3, 125]).to("cuda")
    expected, _ = fused("triton", bound)(replace(batch, cu_seqlens=other))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fused("triton", bound)(batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = fused("triton", bound)(batch)
    batch.cu_seqlens.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(o, expected)


@gpu
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch 2.11
@pytest.mark.parametrize("bound", [None, BOUND])
def test_it_compiles_into_one_graph_with_its_backward(bound):
    batch = raw_inputs([100, 28], torch.bfloat16, 0.0).to("cuda")
    names = ("q", "k", "v", "decay_logits", "beta_logits")
    leaves = [batch.tokens[name].requires_grad_() for name in names]
    leaves += [batch.weights[name].requires_grad_() for name in ("A_log", "dt_bias")]

    def loss(*x: torch.Tensor) -> torch.Tensor:
        out = chunk_kda_fused(
            *x, cu_seqlens=batch.cu_seqlens, gate_lower_bound=bound, impl="triton"
        )
        return out.o.float().square().sum()

    eager = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for a, b in zip(eager, torch.autograd.grad(compiled(*leaves), leaves), strict=True):
        assert torch.equal(a, b)


@gpu
@pytest.mark.parametrize("bound", [None, BOUND])
def test_no_tokens_pass_the_state_through(bound):
    batch = raw_inputs([0, 0], torch.bfloat16, 0.0).to("cuda")
    o, final_state = fused("triton", bound)(batch)
    assert o.shape[0] == 0
    assert torch.equal(final_state, batch.states["initial_state"])


def test_a_cpu_tensor_is_refused_with_the_reason():
    with pytest.raises(ImplError, match="needs tensors on a CUDA device"):
        kda("triton")(bf16_inputs())


def test_what_no_kernel_serves_is_refused_with_the_reason():
    with pytest.raises(ImplError, match=r"serves head dims .* not K=24"):
        kda("triton")(bf16_inputs(key_dim=24))
    with pytest.raises(ImplError, match="serves bfloat16 and float32"):
        kda("triton")(bf16_inputs(dtype=torch.float64))
    batch = bf16_inputs()
    arguments = {**batch.tokens, **batch.states, "cu_seqlens": batch.cu_seqlens, "impl": "triton"}
    with pytest.raises(ImplError, match="has chunk_size=64, not 32"):
        chunk_kda(**arguments, gate_lower_bound=BOUND, chunk_size=32)
