import pytest
import torch
from model.tiny import VISION, tiny_k3, tiny_kimi_linear
from torch import Tensor

from baltoro.model.cache import DenseCache
from baltoro.model.config import ImplConfig, ModelConfig
from baltoro.model.model import Model

CONFIGS = {"k3": tiny_k3, "kimi_linear": tiny_kimi_linear}


def build(config: ModelConfig, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    model = Model(config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # away from the special points of the initial values
            if "norm" in name or name.endswith(("A_log", "_res_proj.weight")):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def bounds(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 60, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", CONFIGS)
def test_decoding_token_by_token_equals_one_prefill(kind: str) -> None:
    model = build(CONFIGS[kind]())
    lengths, total = (37, 1, 20), 58
    ids_T = tokens(total)
    whole = model(ids_T, bounds(*lengths)).hidden
    for n, part_T in enumerate(ids_T.split(lengths)):
        cache = DenseCache(model.config, 1, dtype=torch.float64, capacity=4)
        cache.form = "decode"
        rows = [model(part_T[i : i + 1], bounds(1), cache).hidden for i in range(len(part_T))]
        torch.testing.assert_close(torch.cat(rows), whole.split(lengths)[n], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_prefill_in_slices_equals_one_prefill(kind: str) -> None:
    model = build(CONFIGS[kind]())
    ids_T = tokens(90)
    whole = model(ids_T, bounds(50, 40)).hidden
    cache = DenseCache(model.config, 2, dtype=torch.float64, capacity=8)
    first, second = ids_T[:50], ids_T[50:]
    out_a = model(torch.cat([first[:33], second[:3]]), bounds(33, 3), cache).hidden
    out_b = model(torch.cat([first[33:], second[3:]]), bounds(17, 37), cache).hidden
    joined = torch.cat([out_a[:33], out_b[:17], out_a[33:], out_b[17:]])
    torch.testing.assert_close(joined, whole, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", CONFIGS)
def test_sequences_of_a_pack_do_not_see_each_other(kind: str) -> None:
    model = build(CONFIGS[kind]())
    lengths = (37, 1, 90)
    ids_T = tokens(sum(lengths))
    packed = model(ids_T, bounds(*lengths)).hidden
    alone = [model(part, bounds(len(part))).hidden for part in ids_T.split(lengths)]
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", CONFIGS)
def test_changing_the_future_leaves_the_past_bit_equal(kind: str) -> None:
    model = build(CONFIGS[kind]()).float()
    ids_T = tokens(128)
    changed_T = ids_T.clone()
    changed_T[64:] = tokens(64, seed=9)
    before, after = (model(x, bounds(128)).hidden for x in (ids_T, changed_T))
    assert torch.equal(before[:64], after[:64])
    assert not torch.equal(before[64:], after[64:])


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_torch_operators_equal_the_reference_operators(kind: str) -> None:
    fast, plain = (build(CONFIGS[kind](impl=ImplConfig.all(i))) for i in ("torch", "reference"))
    ids_T = tokens(70)
    losses = [m(ids_T, bounds(41, 29)).hidden.square().mean() for m in (fast, plain)]
    torch.testing.assert_close(losses[0], losses[1])
    for loss in losses:
        loss.backward()
    for (name, a), b in zip(fast.named_parameters(), plain.parameters(), strict=True):
        if a.grad is None:
            assert b.grad is None, name
        else:
            assert b.grad is not None
            torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_parameter_gets_a_finite_gradient(kind: str) -> None:
    torch.manual_seed(0)
    model = Model(CONFIGS[kind]()).train()
    ids_T = tokens(96)
    model.lm_head(model(ids_T, bounds(60, 36)).hidden).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("kind", CONFIGS)
def test_gradients_are_bit_equal_with_and_without_recompute(kind: str) -> None:
    gradients = []
    for recompute in (False, True):
        model = build(CONFIGS[kind]()).float().train()
        out = model(tokens(70), bounds(41, 29), recompute=recompute)
        model.lm_head(out.hidden).logsumexp(-1).sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
        assert len(out.router_scores) == 4
    for name, gradient in gradients[0].items():
        other = gradients[1][name]
        assert gradient is not None and other is not None, name
        assert torch.equal(gradient, other), name


def test_router_scores_are_kept_while_training_only() -> None:
    model = build(tiny_k3()).float()
    scores = model.train()(tokens(10), bounds(10)).router_scores
    assert [s.shape for s in scores] == [(10, 6)] * 4
    assert all(s.dtype == torch.float32 and not s.requires_grad for s in scores)
    assert model.eval()(tokens(10), bounds(10)).router_scores == ()


def test_with_zero_queries_a_read_is_the_plain_mean_of_its_sources() -> None:
    torch.manual_seed(0)
    model = Model(tiny_k3()).double()
    blocks: list[tuple[Tensor, ...]] = []
    for layer in model.layers:
        layer.register_forward_hook(
            lambda _, __, out: blocks.append((*out.blocks, out.partial_sum))
        )
    mixture_TD = model(tokens(9), bounds(9)).mixture
    assert [len(sources) for sources in blocks] == [2, 2, 3, 3, 4]
    torch.testing.assert_close(mixture_TD, torch.stack(blocks[-1]).mean(0))


def test_the_embedding_is_a_source_and_in_no_later_sum() -> None:
    model = build(tiny_k3())
    outs: list[tuple[Tensor, ...]] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, __, out: outs.append(out.blocks))
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        channel = layer.block_sparse_moe if layer.is_moe else layer.mlp
        for name, weight in channel.named_parameters():
            if name.endswith(("routed_expert_up_proj.weight", "down_proj.weight")):
                torch.nn.init.zeros_(weight)
    model(tokens(5), bounds(5))
    embedding, *sums = outs[-1]
    torch.testing.assert_close(embedding, model.embed_tokens(tokens(5)))
    assert all(not block.any() for block in sums)


def test_a_constant_added_to_the_expert_bias_changes_nothing() -> None:
    model = build(tiny_k3())
    before = model(tokens(40), bounds(40)).hidden
    for layer in model.layers:
        if layer.is_moe:
            layer.block_sparse_moe.gate.expert_bias += 0.25
    assert torch.equal(before, model(tokens(40), bounds(40)).hidden)


def test_the_pad_row_of_the_embedding_is_zero_and_stays_without_gradient() -> None:
    torch.manual_seed(0)
    model = Model(tiny_k3())
    assert not model.embed_tokens.weight[63].any()
    model(torch.tensor([63, 5, 63]), bounds(3)).hidden.sum().backward()
    assert not model.embed_tokens.weight.grad[63].any()  # type: ignore[index]


def test_mtp_predicts_from_hidden_state_and_next_token_and_decodes_the_same() -> None:
    model = build(tiny_k3(num_mtp_layers=1))
    ids_T = tokens(31)
    out = model(ids_T[:-1], bounds(30))
    whole = model.predict_next(ids_T[1:], out.mixture, bounds(30))
    cache = DenseCache(model.config, 1, dtype=torch.float64, capacity=4)
    cache.form = "decode"
    rows = []
    for i in range(30):
        step = model(ids_T[i : i + 1], bounds(1), cache)
        rows.append(model.predict_next(ids_T[i + 1 : i + 2], step.mixture, bounds(1), cache).hidden)
    torch.testing.assert_close(torch.cat(rows), whole.hidden, atol=1e-9, rtol=1e-9)


def test_mtp_ignores_the_embedding_at_the_start_of_each_sequence() -> None:
    model = build(tiny_k3(num_mtp_layers=1))
    mixture_TD = torch.randn(7, 32, dtype=torch.float64)
    ids_T = tokens(7)
    other_T = ids_T.clone()
    other_T[[0, 4]] = (other_T[[0, 4]] + 1) % 60
    same = [model.predict_next(x, mixture_TD, bounds(4, 3)).hidden for x in (ids_T, other_T)]
    assert torch.equal(same[0], same[1])
    other_T[1] = (other_T[1] + 1) % 60
    assert not torch.equal(same[0], model.predict_next(other_T, mixture_TD, bounds(4, 3)).hidden)


def test_a_missing_mtp_layer_is_named() -> None:
    model = build(tiny_k3())
    with pytest.raises(ValueError, match="mtp_idx=0: the model has 0 MTP layers"):
        model.predict_next(tokens(3), torch.zeros(3, 32), bounds(3))


def test_image_rows_replace_the_placeholders_in_order() -> None:
    model = build(tiny_k3(vision=VISION))
    features = torch.randn(3, 32, dtype=torch.float64)
    x_TD = model.embed(torch.tensor([1, 60, 2, 60, 60]), features)
    assert torch.equal(x_TD[[1, 3, 4]], features)
    assert torch.equal(x_TD[[0, 2]], model.embed_tokens(torch.tensor([1, 2])))


def test_placeholders_and_image_rows_must_agree_in_number() -> None:
    model = build(tiny_k3(vision=VISION))
    with pytest.raises(ValueError, match="3 rows for 2 placeholder tokens"):
        model.embed(torch.tensor([60, 60]), torch.zeros(3, 32))


def test_a_text_model_refuses_images() -> None:
    model = build(tiny_k3())
    with pytest.raises(ValueError, match="no vision tower"):
        model.encode_images(torch.zeros(4, 3, 14, 14), torch.tensor([[1, 2, 2]]))
    with pytest.raises(ValueError, match="no vision tower"):
        model.embed(torch.tensor([1]), torch.zeros(1, 32))


def test_cast_leaves_the_release_s_fp32_tensors() -> None:
    model = Model(tiny_k3()).cast(torch.bfloat16)
    dtypes = {name: t.dtype for name, t in model.state_dict().items()}
    kept = {
        name.split("self_attn.")[-1].split("moe.")[-1]
        for name in dtypes
        if dtypes[name] == torch.float32
    }
    assert kept == {
        "q_conv1d.weight",
        "k_conv1d.weight",
        "v_conv1d.weight",
        "A_log",
        "dt_bias",
        "o_norm.weight",
        "gate.expert_bias",
    }
    hidden = model(tokens(40), bounds(40)).hidden
    assert hidden.dtype == torch.bfloat16 and torch.isfinite(hidden).all()
