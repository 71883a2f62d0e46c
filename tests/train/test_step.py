"""One step: loss, gradients, update, clip, next bias."""

import dataclasses
import math

import pytest
import torch
from model.tiny import VISION, tiny_k3
from train.batch import tiny_batch

from baltoro.model.model import Model
from baltoro.optim.config import OptimConfig
from baltoro.optim.optimizer import Optimizer
from baltoro.optim.router_health import RouterWarning
from baltoro.train.config import StepConfig
from baltoro.train.learner import build_learner
from baltoro.train.step import shift_left, token_losses, train_step


def learner_of(*, config=None, dtype=torch.float32, **step):
    torch.manual_seed(0)
    model = Model(config or tiny_k3()).cast(dtype)
    return build_learner(model, OptimConfig(), StepConfig(**step))


def weights_of(learner):
    return {name: tensor.detach().clone() for name, tensor in learner.model.state_dict().items()}


def test_the_loss_falls_on_tokens_that_can_be_learned():
    learner = learner_of()
    losses = [
        train_step(learner, [tiny_batch(seed)], lr=1e-2).numbers["train/loss"] for seed in range(25)
    ]
    assert losses[0] == pytest.approx(math.log(64), abs=0.3)
    assert losses[-1] < losses[0] - 1.0


def test_micro_batches_give_the_gradient_of_their_tokens_together():
    """Not the mean of means: the second micro-batch has fewer tokens."""
    first, second = tiny_batch(1, lengths=(20,)), tiny_batch(2, lengths=(6,))
    split, joint = learner_of(), learner_of()
    found = train_step(split, [first, second], lr=1e-3)
    both = dataclasses.replace(
        first,
        tokens=torch.cat([first.tokens, second.tokens]),
        targets=torch.cat([first.targets, second.targets]),
        weights=torch.cat([first.weights, second.weights]),
        cu_seqlens=torch.tensor([0, 20, 26], dtype=torch.int32),
    )
    expected = train_step(joint, [both], lr=1e-3)
    assert found.numbers["train/loss"] == pytest.approx(expected.numbers["train/loss"], rel=1e-6)
    assert found.numbers["train/grad_norm"] == pytest.approx(
        expected.numbers["train/grad_norm"], rel=1e-4
    )
    assert found.numbers["train/tokens"] == 26.0


def gradients_after(learner, batches, monkeypatch):
    """Gradients of a step as the optimiser sees them."""
    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "step", lambda self, lr, plan: None)
        train_step(learner, batches, lr=1e-3)
    return {name: tensor.grad for name, tensor in learner.optimizer.parameters.items()}


def one_by_one(learner, batches):
    """The gradient of each batch alone, by hand, in the weights' dtype."""
    found = []
    for batch in batches:
        learner.optimizer.zero_grad()
        for parameter in learner.optimizer.parameters.values():
            parameter.grad_dtype = parameter.dtype
        output = learner.model(batch.tokens, batch.cu_seqlens)
        losses_T = token_losses(learner.model, output, batch.targets)
        (losses_T.sum() / sum(len(each.tokens) for each in batches)).backward()
        gradients = {name: p.grad for name, p in learner.optimizer.parameters.items()}
        found.append({name: grad for name, grad in gradients.items() if grad is not None})
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_eight_micro_batches_add_up_in_fp32(dtype, monkeypatch):
    learner = learner_of(dtype=dtype, grad_clip=math.inf)
    batches = [tiny_batch(seed) for seed in range(8)]
    parts = one_by_one(learner, batches)
    found = gradients_after(learner, batches, monkeypatch)
    changed = 0
    for name, parameter in learner.optimizer.parameters.items():
        expected = parts[0][name].float()
        narrow = parts[0][name].clone()
        for part in parts[1:]:
            expected += part[name].float()
            narrow += part[name]
        assert found[name].dtype == torch.float32 and torch.equal(found[name], expected), name
        changed += not torch.equal(narrow.float(), expected)
        assert parameter.dtype != torch.bfloat16 or parts[0][name].dtype == torch.bfloat16
    assert (changed > 0) == (dtype == torch.bfloat16)


def test_one_micro_batch_has_a_gradient_of_its_weight_s_dtype(monkeypatch):
    learner = learner_of(dtype=torch.bfloat16)
    train_step(learner, [tiny_batch(), tiny_batch(1)], lr=1e-3)
    found = gradients_after(learner, [tiny_batch()], monkeypatch)
    for name, parameter in learner.optimizer.parameters.items():
        assert found[name].dtype == parameter.dtype, name


def test_positions_without_weight_may_hold_any_target():
    batch = tiny_batch()
    batch.weights[[3, 31]] = 0.0
    junk = batch.targets.masked_fill(batch.weights == 0, 10**6)
    clean = train_step(learner_of(), [batch], lr=1e-3)
    other = train_step(learner_of(), [dataclasses.replace(batch, targets=junk)], lr=1e-3)
    assert clean.numbers == other.numbers


def test_a_step_without_any_weight_is_refused():
    batch = tiny_batch()
    with pytest.raises(ValueError, match="weights"):
        train_step(learner_of(), [dataclasses.replace(batch, weights=batch.weights * 0)], lr=1e-3)


def test_the_next_bias_differs_and_is_used_only_afterwards():
    learner = learner_of()
    bias = learner.model.get_buffer("layers.1.block_sparse_moe.gate.expert_bias")
    assert bias.count_nonzero() == 0
    result = train_step(learner, [tiny_batch()], lr=1e-3)
    assert bias.count_nonzero() > 0
    assert result.balances["layers.1"].num_tokens == 32
    assert int(result.balances["layers.1"].loads.sum()) == 64


def test_recompute_changes_neither_counts_nor_numbers():
    plain, again = learner_of(), learner_of(recompute=True)
    first = train_step(plain, [tiny_batch(), tiny_batch(1)], lr=1e-3)
    second = train_step(again, [tiny_batch(), tiny_batch(1)], lr=1e-3)
    assert first.numbers == second.numbers
    for layer, balance in first.balances.items():
        assert torch.equal(balance.loads, second.balances[layer].loads)


def test_an_evaluation_pass_between_steps_changes_nothing():
    straight, visited = learner_of(), learner_of()
    for learner in (straight, visited):
        train_step(learner, [tiny_batch(0)], lr=1e-3)
    visited.model.eval()
    with torch.no_grad():
        batch = tiny_batch(9)
        visited.model(batch.tokens, batch.cu_seqlens)
    visited.model.train()
    for learner in (straight, visited):
        train_step(learner, [tiny_batch(1)], lr=1e-3)
    for name, tensor in weights_of(straight).items():
        assert torch.equal(tensor, weights_of(visited)[name]), name


def test_a_step_that_is_not_finite_changes_nothing_but_the_count():
    learner = learner_of()
    train_step(learner, [tiny_batch(0)], lr=1e-3)
    with torch.no_grad():
        learner.model.lm_head.weight[0, 0] = torch.nan
    before = weights_of(learner)
    momenta = {name: tensor.clone() for name, tensor in learner.optimizer.state_dict().items()}
    result = train_step(learner, [tiny_batch(1)], lr=1e-3)
    assert result.is_skipped and math.isnan(result.numbers["train/loss"])
    assert learner.num_steps == 2
    for name, tensor in weights_of(learner).items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)
    for name, tensor in learner.optimizer.state_dict().items():
        assert torch.equal(tensor, momenta[name]), name
    assert all(count == 0 for count in learner.balancer.counts.flat.tolist())


def test_a_loss_above_the_limit_is_not_applied():
    learner = learner_of()
    before = weights_of(learner)
    result = train_step(learner, [tiny_batch()], lr=1e-2, max_loss=1.0)
    assert result.is_skipped and result.is_spike and learner.num_steps == 1
    assert learner.num_tokens == 0
    for name, tensor in weights_of(learner).items():
        assert torch.equal(tensor, before[name]), name
    assert all(count == 0 for count in learner.balancer.counts.flat.tolist())
    result = train_step(learner, [tiny_batch()], lr=1e-2, max_loss=9.0)
    assert not result.is_skipped and not result.is_spike


def test_heads_beyond_the_limit_are_clipped_and_counted():
    learner = learner_of(qk_clip_tau=1e-3)
    result = train_step(learner, [tiny_batch()], lr=1e-9)
    num_heads = sum(len(logits) for logits in result.max_logits.values())
    assert result.max_logits.keys() == {"layers.2.self_attn", "layers.4.self_attn"}
    assert num_heads == 4
    assert result.numbers["attention/clipped_heads"] == 4.0
    largest = result.numbers["attention/max_logit"]
    assert largest > 1e-3
    after = train_step(learner, [tiny_batch()], lr=1e-9)
    assert after.numbers["attention/max_logit"] < largest


def test_logits_are_measured_every_so_many_steps():
    learner = learner_of(qk_clip_every=3)
    seen = [bool(train_step(learner, [tiny_batch()], lr=1e-3).max_logits) for _ in range(4)]
    assert seen == [True, False, False, True]


def test_the_mtp_layer_learns_the_token_after_next():
    learner = learner_of(config=tiny_k3(num_mtp_layers=1))
    results = [train_step(learner, [tiny_batch(seed)], lr=1e-2) for seed in range(25)]
    losses = [result.numbers["train/mtp_loss"] for result in results]
    assert losses[-1] < losses[0] - 1.0
    assert "mtp_layers.0" in results[0].balances


def test_the_mtp_loss_is_that_of_the_token_after_next_over_all_weights():
    learner, batch = learner_of(config=tiny_k3(num_mtp_layers=1)), tiny_batch(lengths=(7, 4))
    batch.weights[2] = 0.0
    model = learner.model
    with torch.no_grad():
        next_tokens = torch.cat(
            [batch.tokens[1:7], batch.tokens[:1], batch.tokens[8:], batch.tokens[:1]]
        )
        output = model(batch.tokens, batch.cu_seqlens)
        hidden = model.predict_next(next_tokens, output.mixture, batch.cu_seqlens).hidden
        logits = model.lm_head(hidden)
    inside = [0, 1, 2, 3, 4, 5, 7, 8, 9]  # the last position of a sequence has no token after next
    losses = torch.nn.functional.cross_entropy(
        logits[inside], batch.targets[[i + 1 for i in inside]], reduction="none"
    )
    weights = batch.weights[[i + 1 for i in inside]]
    expected = float((losses * weights).sum() / batch.weights.sum())
    result = train_step(learner, [batch], lr=1e-3)
    assert result.numbers["train/mtp_loss"] == pytest.approx(expected, rel=1e-5)


def test_the_mtp_layer_has_no_weight_when_the_recipe_says_so():
    learner = learner_of(config=tiny_k3(num_mtp_layers=1), mtp_loss_weight=0.0)
    result = train_step(learner, [tiny_batch()], lr=1e-2)
    assert result.numbers["train/mtp_loss"] == 0.0
    assert not [alarm for alarm in result.router_alarms if alarm.layer == "mtp_layers.0"]


def test_values_shift_within_their_sequence():
    cu_seqlens = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    assert shift_left(torch.tensor([1, 2, 3, 4, 5]), cu_seqlens, fill=-1).tolist() == [
        2, 3, -1, 5, -1,
    ]  # fmt: skip


def test_the_vision_tower_learns_from_the_next_token():
    config = tiny_k3(vision=VISION)
    learner = learner_of(config=config)
    batch = tiny_batch()
    tokens, weights = batch.tokens.clone(), batch.weights.clone()
    tokens[2:6], weights[2:6] = VISION.placeholder_token_id, 0.0
    batch = dataclasses.replace(
        batch,
        tokens=tokens,
        weights=weights,
        pixel_values=torch.randn(16, 3, 14, 14),
        grid_thws=torch.tensor([[1, 4, 4]]),
    )
    before = learner.model.vision_tower.patch_embed.proj.weight.detach().clone()
    train_step(learner, [batch], lr=1e-2)
    assert not torch.equal(learner.model.vision_tower.patch_embed.proj.weight, before)


def test_the_sign_rule_moves_biases_by_its_step():
    learner = learner_of(balancing="sign", sign_step_size=0.25)
    result = train_step(learner, [tiny_batch()], lr=1e-3)
    assert 0.0 < result.balances["layers.1"].bias_drift <= 0.5


def aux_learner(**changes):
    return learner_of(balancing="aux", aux_loss_weight=2.0, **changes)


def test_the_auxiliary_loss_is_part_of_the_gradient_and_leaves_the_biases_at_zero(monkeypatch):
    """Its gradient is that of its formula, written out, over both micro-batches by their tokens."""
    batches = [tiny_batch(1, lengths=(20,)), tiny_batch(2, lengths=(6,))]
    monkeypatch.setattr(Optimizer, "step", lambda self, lr, plan: None)
    plain = learner_of(balancing="sign", sign_step_size=0.0, grad_clip=math.inf)
    aux = aux_learner(grad_clip=math.inf)
    train_step(plain, batches, lr=1e-3)
    result = train_step(aux, batches, lr=1e-3)
    gates = [f"layers.{i}.block_sparse_moe.gate.weight" for i in range(1, 5)]
    found = [
        aux.optimizer.parameters[name].grad - plain.optimizer.parameters[name].grad
        for name in gates
    ]
    expected = learner_of()
    model, total = expected.model, 0.0
    inputs = []
    for i in range(1, 5):
        router = model.get_submodule(f"layers.{i}.block_sparse_moe.gate")
        router.register_forward_hook(lambda router, x, out: inputs.append((router, x[0])))
    for batch in batches:
        inputs.clear()
        model(batch.tokens, batch.cu_seqlens)
        for router, x_TD in inputs:
            scores = torch.sigmoid(x_TD @ router.weight.T)
            chosen = torch.zeros_like(scores).scatter(1, scores.topk(2).indices, 1.0)
            shares = chosen.mean(0) * 6 / 2
            means = (scores / scores.sum(1, keepdim=True)).mean(0)
            total = total + (shares * means).sum() * len(batch.tokens) / 26
    assert result.numbers["router/aux_loss"] == pytest.approx(total.item() / 4, rel=1e-5)
    (2.0 * total).backward()
    for name, grad in zip(gates, found, strict=True):
        torch.testing.assert_close(grad, expected.optimizer.parameters[name].grad)
    for bias in aux.balancer.biases.values():
        assert bias.count_nonzero() == 0
    assert result.balances["layers.1"].num_tokens == 26


def test_the_auxiliary_loss_evens_the_loads():
    """From a router that begins with nearly the same rows, so that chance decides the loads."""
    vios = []
    for step in ({"balancing": "aux", "aux_loss_weight": 2.0}, {"balancing": "sign"}):
        config = tiny_k3(mixers=("kda", "mla"))
        learner = learner_of(config=config, **{"sign_step_size": 0.0} | step)
        with torch.no_grad():
            weight = learner.optimizer.masters["layers.1.block_sparse_moe.gate.weight"]
            weight[1:] = weight[:1] + 0.1 * weight[1:]
        for seed in range(30):
            result = train_step(learner, [tiny_batch(seed, lengths=(64, 64))], lr=1e-2)
        vios.append(result.numbers["router/max_vio"])
    assert vios[0] < 0.5 * vios[1], vios


def test_recompute_changes_nothing_with_an_auxiliary_loss_either():
    first = train_step(aux_learner(), [tiny_batch()], lr=1e-3)
    second = train_step(aux_learner(recompute=True), [tiny_batch()], lr=1e-3)
    assert first.numbers == second.numbers


def test_router_scores_carry_no_gradient_but_for_the_auxiliary_loss():
    batch = tiny_batch()
    for learner, expected in ((learner_of(), False), (aux_learner(), True)):
        scores = learner.model(batch.tokens, batch.cu_seqlens).router_scores
        assert {each.requires_grad for each in scores} == {expected}


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf])
def test_an_auxiliary_weight_that_does_nothing_or_everything_is_refused(weight):
    with pytest.raises(ValueError, match=r"step\.aux_loss_weight"):
        StepConfig(balancing="aux", aux_loss_weight=weight)


def test_one_expert_per_token_with_renormalised_weights_is_warned_of():
    moe = dataclasses.replace(tiny_k3().moe, num_experts_per_token=1)
    with pytest.warns(RouterWarning, match="num_experts_per_token=1"):
        learner_of(config=tiny_k3(moe=moe))


def test_a_router_with_groups_is_refused():
    moe = dataclasses.replace(tiny_k3().moe, num_expert_groups=2, topk_groups=2)
    with pytest.raises(ValueError, match="num_expert_groups=2"):
        learner_of(config=tiny_k3(moe=moe))
