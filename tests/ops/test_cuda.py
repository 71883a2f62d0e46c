"""The dense operators on a CUDA device, held to the CPU's budget."""

import pytest
import torch
from ops.earned import assert_earned, randn

from baltoro.ops.attn_res import attn_res_mix
from baltoro.ops.cross_entropy import linear_cross_entropy
from baltoro.ops.mla import varlen_attention
from baltoro.ops.mla.paged import paged_latent_attention
from baltoro.ops.moe import moe_experts, moe_experts_mxfp4, route
from baltoro.ops.mxfp4 import Mxfp4Tensor, decode_mxfp4, encode_mxfp4
from baltoro.ops.rms_norm import gated_rms_norm, rms_norm
from baltoro.ops.situ import situ_glu, swiglu

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16]
GLU = {"activation": "situ", "situ_beta": 4.0, "situ_linear_beta": 25.0}


@pytest.fixture(autouse=True)
def full_fp32_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def experts_of(num_tokens):
    return randn(num_tokens, 6, seed=4).argsort(-1)[:, :2]


OPS = {
    "rms_norm": (
        lambda impl, x, w: rms_norm(x, w, eps=1e-5, impl=impl),
        [randn(70, 96), randn(96)],
    ),
    "gated_rms_norm": (
        lambda impl, x, w, gate: gated_rms_norm(x, w, gate, eps=1e-5, impl=impl),
        [randn(70, 3, 32), randn(32), randn(70, 3, 32, seed=1)],
    ),
    "situ_glu": (
        lambda impl, gate, up: situ_glu(gate, up, beta=4.0, linear_beta=25.0, impl=impl),
        [4 * randn(70, 48), 20 * randn(70, 48, seed=1)],
    ),
    "swiglu": (
        lambda impl, gate, up: swiglu(gate, up, impl=impl),
        [randn(70, 48), randn(70, 48, seed=1)],
    ),
    "attn_res_mix": (
        lambda impl, norm, proj, *v: attn_res_mix(v, norm, proj, eps=1e-5, impl=impl),
        [1 + randn(64) / 4, randn(64, seed=50) / 4, *(randn(70, 64, seed=j) for j in range(4))],
    ),
    "moe_experts": (
        lambda impl, x, weights, gate_up, down: moe_experts(
            x,
            experts_of(x.shape[0]).to(x.device),
            weights.to(torch.promote_types(x.dtype, torch.float32)),
            gate_up,
            down,
            **GLU,
            impl=impl,
        ),
        [randn(70, 32), randn(70, 2), randn(6, 48, 32) / 6, randn(6, 32, 24) / 5],
    ),
    "varlen_attention": (
        lambda impl, q, k, v: varlen_attention(
            q,
            k,
            v,
            cu_seqlens_q=torch.tensor([0, 17, 18, 50], device=q.device),
            cu_seqlens_k=torch.tensor([0, 40, 41, 73], device=q.device),
            causal=True,
            scale=0.3,
            impl=impl,
        ),
        [randn(50, 2, 24), randn(73, 2, 24, seed=1), randn(73, 2, 16, seed=2)],
    ),
    "linear_cross_entropy": (
        lambda impl, hidden, weight: linear_cross_entropy(
            hidden, weight, (torch.arange(70) * 7 % 101).to(hidden.device), impl=impl
        ),
        [randn(70, 48), randn(101, 48)],
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_outputs_and_gradients_earn_their_tolerance(name, dtype):
    op, inputs = OPS[name]
    assert_earned(op, inputs, dtype, device="cuda")


@pytest.mark.parametrize("causal", [True, False])
def test_flash_attention_earns_its_tolerance(causal):
    op, inputs = OPS["varlen_attention"]
    assert_earned(op, inputs, torch.bfloat16, device="cuda", impl="flash")
    lengths = torch.tensor([1, 63, 64, 129, 300, 0, 77])
    bounds = torch.cat([torch.zeros(1, dtype=lengths.dtype), lengths.cumsum(0)]).int()
    num_tokens = int(lengths.sum())

    def pack(impl, q, k, v):
        return varlen_attention(
            q,
            k,
            v,
            cu_seqlens_q=bounds.to(q.device),
            cu_seqlens_k=bounds.to(q.device),
            causal=causal,
            scale=192**-0.5,
            impl=impl,
        )

    tensors = [randn(num_tokens, 2, dim, seed=dim + i) for i, dim in enumerate((192, 192, 128))]
    assert_earned(pack, tensors, torch.bfloat16, device="cuda", impl="flash")


@pytest.mark.parametrize("lengths", [(2048,), (2112,), (5, 2100, 3, 0, 70), (3000, 2048, 1)])
def test_long_sequences_in_a_pack_earn_their_tolerance(lengths):
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()

    def pack(impl, q, k, v):
        places = {"cu_seqlens_q": bounds.to(q.device), "cu_seqlens_k": bounds.to(q.device)}
        return varlen_attention(q, k, v, **places, causal=True, scale=192**-0.5, impl=impl)

    tensors = [randn(sum(lengths), 1, dim, seed=dim + i) for i, dim in enumerate((192, 192, 128))]
    assert_earned(pack, tensors, torch.bfloat16, device="cuda", impl="flash")


@pytest.mark.parametrize("length", [2048, 2112, 2240, 4095])
def test_long_sequences_of_very_negative_logits_have_finite_gradients(length):
    q, k, v = (0.1 * randn(length, 2, dim, seed=dim) for dim in (192, 192, 128))
    q[..., 0], k[..., 0] = 1.0, -120.0
    q, k, v = (x.to("cuda", torch.bfloat16).requires_grad_() for x in (q, k, v))
    bounds = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    places = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    out = varlen_attention(q, k, v, **places, causal=True, scale=1.0, impl="flash")
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", ["grouped", "triton"])
@pytest.mark.parametrize("activation", ["situ", "silu"])
@pytest.mark.parametrize("num_tokens", [1, 70, 1000])
def test_grouped_experts_earn_their_tolerance(num_tokens, activation, kind):
    def op(impl, x, weights, gate_up, down):
        return moe_experts(
            x,
            experts_of(x.shape[0]).to(x.device),
            weights.to(torch.promote_types(x.dtype, torch.float32)),
            gate_up,
            down,
            **GLU | {"activation": activation},
            impl=impl,
        )

    tensors = [
        randn(num_tokens, 64),
        randn(num_tokens, 2),
        randn(6, 96, 64) / 8,
        randn(6, 64, 48) / 7,
    ]
    assert_earned(op, tensors, torch.bfloat16, device="cuda", impl=kind)


@pytest.mark.parametrize("num_experts", [8, 896])
def test_among_equal_scores_the_lowest_id_wins(num_experts):
    logits = torch.zeros(300, num_experts, device="cuda")
    logits[:, 6] = 1.0
    options = {"activation": "sigmoid", "renormalize": True, "scaling_factor": 1.0}
    routing = route(logits, None, num_experts_per_token=5, **options)
    assert (routing.expert_ids.cpu() == torch.tensor([6, 0, 1, 2, 3])).all()


def test_a_replay_may_lie_on_the_host_or_the_device():
    logits = randn(300, 8).float()
    replay = randn(300, 8, seed=1).argsort(-1)[:, :2]
    replay[::3] = -1
    options = {"activation": "sigmoid", "renormalize": True, "scaling_factor": 1.0}
    options["num_experts_per_token"] = 2
    expected = route(logits, None, replay_ids=replay, **options)
    for ids in (replay, replay.pin_memory(), replay.cuda()):
        routing = route(logits.cuda(), None, replay_ids=ids, **options)
        assert torch.equal(routing.expert_ids.cpu(), expected.expert_ids)
        assert routing.num_rerouted == expected.num_rerouted == 100
        torch.testing.assert_close(routing.weights.cpu(), expected.weights)


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_attention_ignores_rows_beyond_the_length(dtype):
    q, kv = randn(3, 4, 40).to(dtype).cuda(), randn(3, 29, 40).to(dtype).cuda()
    page_table, lengths = torch.tensor(
        [[[0], [1], [2]], [[29], [11], [1]]], dtype=torch.int32
    ).cuda()
    places = {"page_table": page_table, "lengths": lengths[:, 0]}
    options = {**places, "kv_lora_rank": 32, "scale": 0.3}
    expected = paged_latent_attention(q.double(), kv.double(), **options, impl="reference")
    for n, length in enumerate(lengths[:, 0].tolist()):
        kv[n, length:] = torch.nan
    out = paged_latent_attention(q, kv, **options, impl="torch")
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_gives_the_bytes_and_values_of_the_cpu(dtype):
    weight = randn(4, 64, 96).to(dtype)
    encoded, on_device = encode_mxfp4(weight), encode_mxfp4(weight.cuda())
    for ours, theirs in zip(on_device, encoded, strict=True):
        assert torch.equal(ours.cpu(), theirs)
    assert torch.equal(decode_mxfp4(on_device, dtype).cpu(), decode_mxfp4(encoded, dtype))
    draw = torch.Generator().manual_seed(0)
    packed = torch.randint(256, (40, 16), dtype=torch.uint8, generator=draw)
    scale = torch.randint(254, (40, 1), dtype=torch.uint8, generator=draw)
    every = Mxfp4Tensor(packed.cuda(), scale.cuda())
    assert torch.equal(
        decode_mxfp4(every, dtype).cpu(), decode_mxfp4(Mxfp4Tensor(packed, scale), dtype)
    )
    again = encode_mxfp4(decode_mxfp4(every, dtype), every.scale)
    assert torch.equal(again.packed.cpu(), packed) and torch.equal(again.scale.cpu(), scale)


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_packed_experts_equal_decoded_ones(num_tokens):
    gate_up, down = encode_mxfp4(randn(6, 64, 64).cuda() / 8), encode_mxfp4(randn(6, 64, 32).cuda())
    x, weights = randn(num_tokens, 64).float().cuda(), randn(num_tokens, 2).float().cuda()
    ids = experts_of(num_tokens).cuda()
    decoded = [decode_mxfp4(weight, torch.float32) for weight in (gate_up, down)]
    with torch.no_grad():
        expected = moe_experts(x, ids, weights, *decoded, **GLU, impl="torch")
    assert torch.equal(
        moe_experts_mxfp4(x, ids, weights, gate_up, down, **GLU, impl="torch"), expected
    )


@pytest.mark.parametrize("length", [64, 65, 192, 320, 703, 704])
def test_gradients_of_very_negative_logits_are_finite_in_bf16(length):
    # every logit near -120: where cuDNN's backward multiplies an overflow by a padded zero
    q, k, v = (0.1 * randn(length, 2, 64, seed=seed) for seed in range(3))
    q[..., 0], k[..., 0] = 1.0, -120.0
    q, k, v = (x.to("cuda", torch.bfloat16).requires_grad_() for x in (q, k, v))
    bounds = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    for causal in (False, True):
        out = varlen_attention(
            q,
            k,
            v,
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            causal=causal,
            scale=1.0,
            impl="torch",
        )
        for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
            assert gradient.isfinite().all()
