"""First derivatives of every operator under `create_graph`, and second ones: right, or refused."""

import ast
import importlib.util
from pathlib import Path

import pytest
import torch
from ops.earned import randn
from ops.harness import kda_inputs
from ops.interpreted import assert_runs_interpreted, needs_interpreter
from torch import Tensor
from torch.autograd import gradgradcheck
from torch.utils.checkpoint import checkpoint

from baltoro.ops.attn_res import attn_res_mix
from baltoro.ops.cross_entropy import linear_cross_entropy
from baltoro.ops.derivatives import no_second_derivatives
from baltoro.ops.impl import ImplError
from baltoro.ops.kda import chunk_kda
from baltoro.ops.kda.fused import chunk_kda_fused
from baltoro.ops.mla import varlen_attention
from baltoro.ops.moe import moe_experts, route, router_logits
from baltoro.ops.rms_norm import gated_rms_norm, rms_norm
from baltoro.ops.short_conv import short_conv
from baltoro.ops.situ import situ_glu, swiglu

BOUNDS = torch.tensor([0, 2, 5], dtype=torch.int32)


def bounds_of(like: Tensor) -> Tensor:
    return BOUNDS.to(like.device)


def mix(impl, norm_weight, proj_weight, *sources):
    return [attn_res_mix(sources, norm_weight, proj_weight, eps=1e-5, impl=impl)]


def norm(impl, x, weight):
    return [rms_norm(x, weight, eps=1e-5, impl=impl)]


def gated(impl, x, weight, gate_logits):
    return [gated_rms_norm(x, weight, gate_logits, eps=1e-5, impl=impl)]


def situ(impl, gate, up):
    return [situ_glu(gate, up, beta=4.0, linear_beta=25.0, impl=impl)]


def silu(impl, gate, up):
    return [swiglu(gate, up, impl=impl)]


def loss(impl, hidden, weight):
    targets = torch.arange(len(hidden), device=hidden.device) % len(weight)
    return [linear_cross_entropy(hidden, weight, targets, impl=impl)]


def conv(impl, x, weight, state):
    return short_conv(x, weight, cu_seqlens=bounds_of(x), initial_state=state, impl=impl)


def kda(impl, q, k, v, g, beta, state):
    bounds = bounds_of(q)
    return chunk_kda(
        q, k, v, g, beta, cu_seqlens=bounds, initial_state=state, gate_lower_bound=-5.0, impl=impl
    )


def fused(impl, q, k, v, decay_logits, beta_logits, A_log, dt_bias, state):
    return chunk_kda_fused(
        q, k, v, decay_logits, beta_logits, A_log, dt_bias,
        cu_seqlens=bounds_of(q), initial_state=state, gate_lower_bound=-5.0, impl=impl,
    )  # fmt: skip


def experts(impl, x, weights, gate_up, down, activation="situ"):
    ids = torch.tensor([[0, 2], [2, 1], [1, 0]], device=x.device)
    weights = weights.to(torch.promote_types(x.dtype, torch.float32))
    return [
        moe_experts(
            x, ids, weights.mT.contiguous().mT, gate_up, down,
            activation=activation, situ_beta=4.0, situ_linear_beta=25.0, impl=impl,
        )
    ]  # fmt: skip


def silu_experts(impl, *tensors):
    return experts(impl, *tensors, activation="silu")


def choice(impl, logits, has_score_gradient=False):
    scores, _, weights, _ = route(
        logits, None, num_experts_per_token=2, activation="sigmoid", renormalize=True,
        scaling_factor=2.0, has_score_gradient=has_score_gradient, impl=impl,
    )  # fmt: skip
    return [scores, weights] if has_score_gradient else [weights]


def scored_choice(impl, logits):
    return choice(impl, logits, has_score_gradient=True)


KDA = kda_inputs([2, 3], num_heads=1, value_dim=16)
RAW = [randn(5, 1, 16, seed=seed) for seed in range(4)]
EXPERTS = [randn(3, 8), randn(3, 2, seed=1), randn(4, 16, 8), randn(4, 8, 8, seed=1)]
# the name that a refusal gives, how to call it with an `impl`, and its tensors
OPS = {
    "attn_res": ("attn_res", mix, [randn(8), randn(8, seed=1), randn(5, 8), randn(5, 8, seed=1)]),
    "rms_norm": ("rms_norm", norm, [randn(5, 8), randn(8)]),
    "gated_rms_norm": ("gated_rms_norm", gated, [randn(5, 3, 8), randn(8), randn(5, 3, 8, seed=1)]),
    "situ_glu": ("situ_glu", situ, [randn(5, 8), randn(5, 8, seed=1)]),
    "swiglu": ("swiglu", silu, [randn(5, 8), randn(5, 8, seed=1)]),
    "cross_entropy": ("cross_entropy", loss, [randn(5, 8), randn(7, 8)]),
    "short_conv": ("short_conv", conv, [randn(5, 8), randn(8, 4), randn(2, 8, 3)]),
    "chunk_kda": ("chunk_kda", kda, [*KDA.tokens.values(), *KDA.states.values()]),
    "chunk_kda_fused": (
        "chunk_kda",
        fused,
        [*RAW, randn(5, 1), randn(1), randn(16), randn(2, 1, 16, 16)],
    ),
    "moe_experts": ("moe_experts", experts, EXPERTS),
    "silu_experts": ("moe_experts", silu_experts, EXPERTS),
    "route": ("route", choice, [randn(3, 8)]),
    "scored_route": ("route", scored_choice, [randn(3, 8)]),
}
WRITTEN_OUT = [name for name in OPS if "route" not in name]  # in PyTorch
KERNELS = [name for name in OPS if name != "swiglu"]
BF16 = ("moe_experts", "silu_experts")  # all that the grouped and the Triton form serve


def assert_second_derivatives_are_refused(
    name: str, impl: str, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """By each tensor, if no other has a gradient, and by the outputs'; the first are as ever."""
    named, op, tensors = OPS[name]
    for index in range(len(tensors)):
        leaves = [x.to(device, dtype) for x in tensors]
        leaf = leaves[index].requires_grad_()
        outs = op(impl, *leaves)
        d_outs = [torch.ones_like(out) for out in outs]
        (plain,) = torch.autograd.grad(outs, leaf, d_outs, retain_graph=True)
        (first,) = torch.autograd.grad(outs, leaf, d_outs, create_graph=True)
        assert torch.equal(plain, first)
        assert_refused(f"{named}: impl='{impl}'", first, leaf)
        for d_out in d_outs:
            d_out.requires_grad_()
        (first,) = torch.autograd.grad(outs, leaf, d_outs, create_graph=True)
        assert torch.equal(plain, first)
        assert_refused(f"{named}: impl='{impl}'", first, d_outs[-1])


def assert_refused(form: str, gradient: Tensor, x: Tensor) -> None:
    # it would be silent where something else depends on the same tensor
    total = gradient.square().sum() + x.square().sum()
    with pytest.raises(ImplError, match=f"{form} has no second derivatives; impl='reference' has"):
        torch.autograd.grad(total, x)


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_second_derivatives_of_dense_forms_are_refused(name):
    assert_second_derivatives_are_refused(name, "torch", torch.float64)


@pytest.mark.parametrize("name", BF16)
def test_second_derivatives_of_grouped_experts_are_refused(name):
    assert_second_derivatives_are_refused(name, "grouped", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch 2.11
@pytest.mark.parametrize("name", KERNELS)
def test_second_derivatives_of_kernels_are_refused(name):
    dtype = torch.bfloat16 if name in BF16 else torch.float32
    assert_second_derivatives_are_refused(name, "triton", dtype, "cuda")


INTERPRETED = """
import warnings

warnings.simplefilter("ignore")
import torch
from ops.test_derivatives import BF16, KERNELS, assert_second_derivatives_are_refused
from baltoro.ops import launch_table

launch_table.pinned()["portable"]["cross_entropy_gradient"]["fp32 w32768"] = {
    "block": 32, "num_warps": 4
}
for name in KERNELS:
    dtype = torch.bfloat16 if name in BF16 else torch.float32
    assert_second_derivatives_are_refused(name, "triton", dtype)
"""


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
@needs_interpreter
def test_second_derivatives_of_kernels_are_refused_in_the_interpreter():
    assert_runs_interpreted(INTERPRETED)


@pytest.mark.gpu
def test_second_derivatives_of_router_logits_in_bf16_on_a_gpu_are_refused():
    x = randn(5, 8).to("cuda", torch.bfloat16).requires_grad_()
    weight = randn(7, 8).to("cuda", torch.bfloat16).requires_grad_()
    logits = router_logits(x, weight)
    d_logits = torch.ones_like(logits)
    (d_x,) = torch.autograd.grad(logits, x, d_logits, create_graph=True)
    with pytest.raises(ImplError, match="bf16 on a GPU has no second derivatives; fp32 has them"):
        torch.autograd.grad(d_x.sum() + weight.sum(), weight)


@pytest.mark.parametrize("name", OPS)
def test_the_reference_has_second_derivatives(name):
    _, op, tensors = OPS[name]
    leaves = [x.clone().requires_grad_() for x in tensors]
    assert gradgradcheck(lambda *x: tuple(op("reference", *x)), leaves, fast_mode=True)


def test_attention_through_torch_has_no_silent_second_derivative():
    q, k, v = (randn(5, 1, 8, seed=seed).requires_grad_() for seed in range(3))
    out = varlen_attention(
        q, k, v, cu_seqlens_q=BOUNDS, cu_seqlens_k=BOUNDS, causal=True, scale=1.0, impl="torch"
    )
    (d_q,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(d_q.sum() + q.sum(), q)


def test_every_written_out_backward_refuses_its_derivative():
    root = Path(__file__).parents[2] / "src/baltoro"
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.args.args[:1]:
                is_backward = node.name == "backward" and node.args.args[0].arg == "ctx"
                names = [ast.unparse(x).partition("(")[0] for x in node.decorator_list]
                if is_backward and "no_second_derivatives" not in names:
                    found.add(str(path.relative_to(root)))
    # what refuses, an exchange, whose backward is another, a product, whose backward is products
    assert found == {"ops/derivatives.py", "parallel/experts.py", "model/joined.py"}


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x)
        return x * x + y

    @staticmethod
    @no_second_derivatives(lambda ctx: f"square of {len(ctx.needs_input_grad)}", instead="cube has")
    def backward(ctx, saved, d_out):
        (x,) = saved
        return (2 * x).mul_(d_out), None


@pytest.mark.parametrize("name", ["x", "d_out"])
def test_a_second_derivative_by_any_input_is_refused_and_the_first_is_not(name):
    leaves = {"x": torch.arange(3.0), "d_out": torch.ones(3)}
    for leaf in leaves.values():
        leaf.requires_grad_()
    x, d_out = leaves.values()
    (d_x,) = torch.autograd.grad(Square.apply(x, torch.ones(3)), x, d_out, create_graph=True)
    assert torch.equal(d_x, 2 * x)
    with pytest.raises(ImplError, match="square of 2 has no second derivatives; cube has"):
        torch.autograd.grad(d_x.sum() + leaves[name].square().sum(), leaves[name])


def test_a_backward_pass_that_nobody_records_returns_plain_gradients():
    x = torch.arange(3.0, requires_grad=True)
    Square.apply(x, torch.ones(3)).sum().backward()
    assert x.grad is not None and not x.grad.requires_grad and torch.equal(x.grad, 2 * x)


def test_a_recomputed_layer_is_refused_too():
    x = torch.arange(3.0, requires_grad=True)
    out = checkpoint(Square.apply, x, torch.ones(3), use_reentrant=False)
    (d_x,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert torch.equal(d_x, 2 * x)
    with pytest.raises(ImplError, match="has no second derivatives"):
        torch.autograd.grad(d_x.sum() + x.sum(), x)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_it_compiles_into_one_graph():
    x = torch.arange(3.0, requires_grad=True)
    compiled = torch.compile(Square.apply, backend="aot_eager", fullgraph=True)
    (d_x,) = torch.autograd.grad(compiled(x, torch.ones(3)).sum(), x)
    assert torch.equal(d_x, 2 * x)
