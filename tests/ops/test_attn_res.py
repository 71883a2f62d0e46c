import pytest
import torch
from ops.earned import assert_earned, randn
from torch.autograd import gradcheck

from baltoro.ops import blocks
from baltoro.ops.attn_res import attn_res_mix

EPS = 1e-5


def mix(impl, norm_weight, proj_weight, *sources):
    return attn_res_mix(sources, norm_weight, proj_weight, eps=EPS, impl=impl)


def inputs(num_sources, num_tokens, width):
    sources = [randn(num_tokens, width, seed=j) for j in range(num_sources)]
    return [1 + randn(width) / 4, randn(width, seed=50) / 4, *sources]


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_gradients_equal_finite_differences(impl):
    leaves = [t.requires_grad_() for t in inputs(3, 4, 5)]
    assert gradcheck(lambda *t: mix(impl, *t), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_sources", "num_tokens"), [(1, 3), (2, 0), (5, 1), (9, 37)])
def test_the_dense_form_earns_its_tolerance(num_sources, num_tokens, dtype):
    assert_earned(mix, inputs(num_sources, num_tokens, 48), dtype)


def test_blocks_do_not_change_the_result(monkeypatch):
    monkeypatch.setattr(blocks, "_CPU_BYTES", 7 * 3 * 16 * 4)
    assert_earned(mix, inputs(3, 61, 16), torch.float32)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_a_zero_query_gives_the_plain_mean_of_raw_sources(impl):
    norm_weight, _, *sources = inputs(4, 6, 8)
    out = mix(impl, norm_weight, torch.zeros(8, dtype=torch.float64), *sources)
    torch.testing.assert_close(out, torch.stack(sources).mean(0))


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_scores_see_normalised_sources_without_temperature(impl):
    norm_weight, proj_weight, *sources = inputs(3, 5, 8)
    scores = []
    for source in sources:
        rms = (source.square().mean(-1, keepdim=True) + EPS).sqrt()
        scores.append((source / rms * norm_weight * proj_weight).sum(-1))
    probs = torch.stack(scores).softmax(0).unsqueeze(-1)
    expected = (probs * torch.stack(sources)).sum(0)
    torch.testing.assert_close(mix(impl, norm_weight, proj_weight, *sources), expected)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_the_two_weights_are_multiplied_above_bf16(impl):
    norm_weight, proj_weight, *sources = (t.bfloat16() for t in inputs(2, 64, 32))
    high = [t.double() for t in (norm_weight, proj_weight, *sources)]
    expected = mix("reference", *high)
    rounded_product = (norm_weight * proj_weight).double()
    coarse = mix("reference", torch.ones(32).double(), rounded_product, *high[2:])
    error = (mix(impl, norm_weight, proj_weight, *sources).double() - expected).abs().mean()
    assert error < (coarse.bfloat16().double() - expected).abs().mean()


def test_one_source_comes_back_as_it_is():
    norm_weight, proj_weight, source = (t.float() for t in inputs(1, 5, 8))
    assert torch.equal(mix("torch", norm_weight, proj_weight, source), source)


def test_the_backward_keeps_only_small_tensors_beside_the_sources():
    leaves = [t.requires_grad_() for t in inputs(5, 64, 128)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        mix("torch", *leaves)
    sources = {t.data_ptr() for t in leaves[2:]}
    beside = [t.numel() for t in saved if t.data_ptr() not in sources]
    assert sum(beside) <= 3 * 5 * 64 + 3 * 128


def test_inference_gives_the_bits_of_training():
    tensors = [t.float() for t in inputs(4, 9, 16)]
    with torch.no_grad():
        out = mix("torch", *tensors)
    assert torch.equal(out, mix("torch", *tensors))


def test_wrong_inputs_name_the_field():
    weight = randn(4)
    with pytest.raises(ValueError, match="sources is empty"):
        mix("torch", weight, weight)
    with pytest.raises(ValueError, match=r"sources\[1\] is torch.float64 \[2, 4\]"):
        mix("torch", weight, weight, randn(3, 4), randn(2, 4))
    with pytest.raises(ValueError, match=r"proj_weight has shape \[1, 4\]"):
        mix("torch", weight, weight.unsqueeze(0), randn(3, 4))
    with pytest.raises(ValueError, match=r"sources\[0\] has shape \[4\]"):
        mix("torch", weight, weight, randn(4))
