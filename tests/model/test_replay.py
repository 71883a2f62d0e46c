import pytest
import torch
from model.tiny import tiny_k3, tiny_kimi_linear
from torch import Tensor

from baltoro.model.config import ModelConfig
from baltoro.model.model import Model, ModelOutput
from baltoro.model.moe import Moe, Router
from baltoro.ops.moe import moe_experts

CONFIGS = {"k3": tiny_k3, "kimi_linear": tiny_kimi_linear}
NUM_MOE_LAYERS = 4
CU_SEQLENS = torch.tensor([0, 17, 30], dtype=torch.int32)
TOKENS = torch.randint(0, 60, (30,), generator=torch.Generator().manual_seed(1))


def build(config: ModelConfig) -> Model:
    torch.manual_seed(0)
    return Model(config).train()


def gradients(model: Model, output: ModelOutput) -> dict[str, Tensor]:
    model.zero_grad()
    model.lm_head(output.hidden).logsumexp(-1).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def others(expert_ids: tuple[Tensor, ...], num_experts: int = 6) -> tuple[Tensor, ...]:
    """Choices that share no expert with the given ones."""
    count = expert_ids[0].shape[1]
    assert 2 * count <= num_experts
    free = (torch.ones(len(ids), num_experts).scatter_(1, ids, 0.0) for ids in expert_ids)
    return tuple(is_free.topk(count).indices for is_free in free)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_replaying_the_own_choices_gives_equal_bits(kind: str, recompute: bool) -> None:
    model = build(CONFIGS[kind]())
    own = model(TOKENS, CU_SEQLENS, keep_expert_ids=True)
    again = model(
        TOKENS, CU_SEQLENS, recompute=recompute, replay=own.expert_ids, keep_expert_ids=True
    )
    assert torch.equal(again.hidden, own.hidden) and again.num_rerouted == 0
    assert len(again.expert_ids) == NUM_MOE_LAYERS
    for part in ("expert_ids", "router_scores"):
        assert all(map(torch.equal, getattr(again, part), getattr(own, part))), part
    replayed, plain = gradients(model, again), gradients(model, own)
    assert replayed.keys() == plain.keys()
    for name, gradient in plain.items():
        assert torch.equal(replayed[name], gradient), name


@pytest.mark.parametrize("kind", CONFIGS)
def test_foreign_choices_are_run_and_reach_router_and_experts(kind: str) -> None:
    model = build(CONFIGS[kind]())
    own = model(TOKENS, CU_SEQLENS, keep_expert_ids=True)
    replay = others(own.expert_ids)
    out = model(TOKENS, CU_SEQLENS, replay=replay, keep_expert_ids=True)
    assert all(map(torch.equal, out.expert_ids, replay))
    assert not torch.equal(out.hidden, own.hidden)
    grads = gradients(model, out)
    for index, ids_TA in enumerate(replay, start=1):
        room = f"layers.{index}.block_sparse_moe"
        assert grads[f"{room}.gate.weight"].any(), room
        for name in ("gate_up_proj", "down_proj"):
            is_reached = grads[f"{room}.experts.{name}"].flatten(1).any(1)
            assert is_reached.nonzero().flatten().tolist() == ids_TA.unique().tolist(), room


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_replayed_mixture_is_the_dense_formula_over_all_experts(kind: str) -> None:
    config = CONFIGS[kind]()
    assert config.moe is not None
    model = build(config).double()
    moe = model.layers[1].block_sparse_moe
    assert isinstance(moe, Moe)
    x_TD = torch.randn(12, 32, dtype=torch.float64)
    (replay_TA,) = others((moe.gate(x_TD).expert_ids,))
    out = moe(x_TD, replay_TA)
    assert out.routing.weights.min() > 0

    scores_TE = torch.sigmoid(x_TD @ moe.gate.weight.mT)
    dense_TE = scores_TE * torch.zeros_like(scores_TE).scatter(1, replay_TA, 1.0)
    dense_TE = dense_TE / dense_TE.sum(-1, keepdim=True) * config.moe.routed_scaling_factor
    every_TE = torch.arange(6).expand(12, 6)
    x_TZ = moe.routed_expert_down_proj(x_TD) if moe.has_latent else x_TD
    y_TD = moe_experts(
        x_TZ,
        every_TE,
        dense_TE,
        moe.experts.gate_up_proj,
        moe.experts.down_proj,
        activation=config.activation,
        situ_beta=config.situ_beta,
        situ_linear_beta=config.situ_linear_beta,
        impl="reference",
    )
    if moe.has_latent:
        y_TD = moe.routed_expert_up_proj(moe.routed_expert_norm(y_TD))
    y_TD = y_TD + moe.shared_experts(x_TD)
    torch.testing.assert_close(out.y, y_TD, rtol=1e-10, atol=1e-12)

    weights = (moe.gate.weight, moe.experts.gate_up_proj, moe.experts.down_proj)
    pull_TD = torch.randn(12, 32, dtype=torch.float64)
    found = torch.autograd.grad((out.y * pull_TD).sum(), weights)
    expected = torch.autograd.grad((y_TD * pull_TD).sum(), weights)
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.any()
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("kind", CONFIGS)
def test_missing_rows_give_what_no_replay_gives_and_are_counted(kind: str) -> None:
    model = build(CONFIGS[kind]())
    own = model(TOKENS, CU_SEQLENS, keep_expert_ids=True)
    missing = tuple(torch.full_like(ids, -1) for ids in own.expert_ids)
    out = model(TOKENS, CU_SEQLENS, replay=missing)
    assert torch.equal(out.hidden, own.hidden)
    assert out.num_rerouted == 30 * NUM_MOE_LAYERS and own.num_rerouted == 0
    # the first 11 tokens of the first sequence were a cached prefix, the rest was chosen otherwise
    replay = others(own.expert_ids)
    for ids_TA in replay:
        ids_TA[:11] = -1
    out = model(TOKENS, CU_SEQLENS, replay=replay)
    assert out.num_rerouted == 11 * NUM_MOE_LAYERS
    torch.testing.assert_close(out.hidden[:11], own.hidden[:11])
    assert not torch.isclose(out.hidden[11:], own.hidden[11:]).all(-1).any()


def test_expert_ids_are_kept_only_when_asked_for() -> None:
    model = build(tiny_k3()).eval()
    assert model(TOKENS, CU_SEQLENS).expert_ids == ()
    kept = model(TOKENS, CU_SEQLENS, keep_expert_ids=True).expert_ids
    assert [(ids.shape, ids.dtype) for ids in kept] == [((30, 2), torch.int64)] * NUM_MOE_LAYERS


def test_without_gradients_a_router_replays_whatever_kernel_it_is_set_to() -> None:
    moe = tiny_k3().moe
    assert moe is not None
    router = Router(moe, 32, "triton")
    torch.nn.init.normal_(router.weight)
    x_TD, replay_TA = torch.randn(3, 32), torch.tensor([[5, 0], [-1, -1], [1, 2]])
    with torch.no_grad():
        found = router(x_TD, replay_TA)
    expected = router(x_TD, replay_TA)
    assert torch.equal(found.weights, expected.weights) and found.num_rerouted == 1


def test_a_replay_for_other_layers_or_tokens_is_refused() -> None:
    model = build(tiny_k3())
    kept = model(TOKENS, CU_SEQLENS, keep_expert_ids=True).expert_ids
    with pytest.raises(ValueError, match="replay: 3 tensors for 4 MoE layers"):
        model(TOKENS, CU_SEQLENS, replay=kept[:3])
    with pytest.raises(ValueError, match=r"replay_ids is torch\.int64 \[29, 2\]; .*\[30, 2\]"):
        model(TOKENS, CU_SEQLENS, replay=(*kept[:3], kept[3][:29]))
