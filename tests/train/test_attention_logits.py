"""The largest attention logit of every head, measured on a forward pass."""

import torch
from model.tiny import tiny_k3, tiny_kimi_linear
from ops.test_largest import plain
from train.batch import tiny_batch

from baltoro.model.model import Model
from baltoro.train.attention_logits import record_max_logits


def test_the_queries_and_keys_are_those_the_layer_attends_with(monkeypatch):
    """Against what the attention operator itself receives, with and without a query latent."""
    for config in (tiny_k3(num_mtp_layers=1), tiny_kimi_linear()):
        model, batch = Model(config), tiny_batch()
        expected = {}
        for name, module in model.named_modules():
            if hasattr(module, "_expanded"):
                spy(monkeypatch, module, name, batch, expected)
        with record_max_logits(model, impl="torch") as found:
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
    with record_max_logits(model, impl="torch") as found:
        pass
    model(batch.tokens, batch.cu_seqlens)
    assert found == {}
