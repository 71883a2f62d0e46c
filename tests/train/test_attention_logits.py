"""The largest attention logit of every head, measured on a forward pass."""

import itertools

import torch
from model.tiny import tiny_k3, tiny_kimi_linear
from train.batch import tiny_batch

from baltoro.model.model import Model
from baltoro.train import attention_logits
from baltoro.train.attention_logits import largest_logits, record_max_logits


def plain(q, k, bounds, scale):
    best = torch.full((q.shape[1],), -torch.inf)
    for start, end in itertools.pairwise(bounds):
        for i in range(start, end):
            for j in range(start, i + 1):
                best = torch.maximum(best, scale * (q[i] * k[j]).sum(-1))
    return best


def test_the_maximum_runs_over_earlier_tokens_of_the_same_sequence(monkeypatch):
    q, k = torch.randn(19, 3, 4), torch.randn(19, 3, 4)
    bounds = [0, 7, 7, 19]
    expected = plain(q, k, bounds, 0.5)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    torch.testing.assert_close(largest_logits(q, k, cu_seqlens, scale=0.5), expected)
    monkeypatch.setattr(attention_logits, "_BLOCK_ELEMENTS", {"cpu": 40})
    torch.testing.assert_close(largest_logits(q, k, cu_seqlens, scale=0.5), expected)


def test_the_next_token_s_key_does_not_count():
    q = torch.tensor([10.0, 1.0, 1.0, 10.0, 1.0]).view(5, 1, 1)
    k = torch.tensor([1.0, 10.0, 1.0, 1.0, 10.0]).view(5, 1, 1)
    cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    assert largest_logits(q, k, cu_seqlens, scale=1.0).tolist() == [10.0]


def test_a_head_without_tokens_has_minus_infinity():
    empty = torch.zeros(0, 2, 4)
    cu_seqlens = torch.zeros(1, dtype=torch.int32)
    assert largest_logits(empty, empty, cu_seqlens, scale=1.0).tolist() == [-torch.inf] * 2


def test_the_queries_and_keys_are_those_the_layer_attends_with(monkeypatch):
    """Against what the attention operator itself receives, with and without a query latent."""
    for config in (tiny_k3(num_mtp_layers=1), tiny_kimi_linear()):
        model, batch = Model(config), tiny_batch()
        expected = {}
        for name, module in model.named_modules():
            if hasattr(module, "_expanded"):
                spy(monkeypatch, module, name, batch, expected)
        with record_max_logits(model) as found:
            out = model(batch.tokens, batch.cu_seqlens)
            if config.num_mtp_layers:
                model.predict_next(batch.targets, out.mixture, batch.cu_seqlens)
        assert found.keys() == expected.keys() and len(found) >= 2
        for name, logits in found.items():
            torch.testing.assert_close(logits, expected[name])


def spy(monkeypatch, module, name, batch, expected):
    original = module._expanded

    def expanded(q_THK, kv_SR, cu_seqlens_q, cu_seqlens_k):
        mla = module.config.mla
        latent, shared = kv_SR.split([mla.kv_lora_rank, mla.qk_rope_head_dim], -1)
        weight = module.kv_b_proj.weight.detach().view(mla.num_heads, -1, mla.kv_lora_rank)
        keys = torch.einsum("hkr,tr->thk", weight[:, : mla.qk_nope_head_dim], latent.detach())
        shared = shared.detach()[:, None].expand(-1, mla.num_heads, -1)
        k_THK = torch.cat([keys, shared], -1)
        bounds = batch.cu_seqlens.tolist()
        expected[name] = plain(q_THK.detach(), k_THK, bounds, mla.qk_head_dim**-0.5)
        return original(q_THK, kv_SR, cu_seqlens_q, cu_seqlens_k)

    monkeypatch.setattr(module, "_expanded", expanded)


def test_nothing_is_left_on_the_model_afterwards():
    model, batch = Model(tiny_k3()), tiny_batch()
    with record_max_logits(model) as found:
        pass
    model(batch.tokens, batch.cu_seqlens)
    assert found == {}
