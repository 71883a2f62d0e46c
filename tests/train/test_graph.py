"""Steps as CUDA graphs; most of it needs a GPU."""

import dataclasses

import pytest
import torch
from train.batch import tiny_batch

from baltoro.model.model import Model
from baltoro.recipes.pretrain import pretrain_config
from baltoro.train.config import StepConfig
from baltoro.train.graph import device_batch
from baltoro.train.learner import build_learner
from baltoro.train.step import train_step


def learner_of(**step):
    torch.manual_seed(0)
    config = pretrain_config("small", is_gpu=True)
    four_layers = dataclasses.replace(
        config.model, mixers=config.model.mixers[:4], vocab_size=512, pad_token_id=511
    )
    model = Model(four_layers).cast(torch.bfloat16).cuda()
    return build_learner(model, config.optim, dataclasses.replace(config.step, **step))


def losses_of(learner, steps, lr=1e-6):
    # at a rate that keeps differences of rounding from growing: an update of Muon has its size in
    # every direction, those that gradients of a few tokens lack included
    return [train_step(learner, batches, lr=lr).numbers for batches in steps]


STEPS = [
    [tiny_batch(seed, lengths=lengths) for seed in seeds]
    for seeds, lengths in (
        ((1,), (200, 56)),
        ((2,), (128, 64, 64)),  # padded to four sequences
        ((3,), (200, 56)),
        ((4,), (56, 200)),
        ((5,), (100, 100, 56)),
        ((6,), (300,)),  # another number of tokens
        ((7,), (300,)),
        ((8, 9), (200, 56)),  # gradients add up in fp32
        ((10, 11), (200, 56)),
        ((12, 13), (200, 56)),
    )
]


@pytest.mark.gpu
@pytest.mark.parametrize("every", [1000, 3])
def test_steps_as_graphs_learn_what_steps_without_them_learn(every):
    plain = losses_of(learner_of(qk_clip_every=every), STEPS)
    captured = losses_of(learner_of(qk_clip_every=every, use_cuda_graph=True), STEPS)
    for one, other in zip(plain, captured, strict=True):
        for name in ("train/loss", "train/mtp_loss", "train/grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=0.02), name
        # a few of some hundred tokens may go to another expert
        assert other["router/max_vio"] == pytest.approx(one["router/max_vio"], abs=0.3)


@pytest.mark.gpu
def test_a_replayed_step_leaves_the_gradients_of_its_own_batch():
    learners = [learner_of(use_cuda_graph=graph, qk_clip_every=1000) for graph in (False, True)]
    for batches in STEPS[:5]:
        for learner in learners:
            train_step(learner, batches, lr=0.0)
        plain, captured = (learner.optimizer.parameters for learner in learners)
        for name, parameter in plain.items():
            difference = (captured[name].grad - parameter.grad).float().norm()
            assert difference <= 0.02 * parameter.grad.float().norm() + 1e-6, name


@pytest.mark.gpu
def test_replayed_steps_measure_the_attention_logits_of_their_own_batch():
    steps = [
        [tiny_batch(seed, lengths=(200, 56)), tiny_batch(seed + 9, lengths=(56, 200))]
        for seed in range(5)
    ]
    plain = losses_of(learner_of(qk_clip_every=1, max_logits_impl="torch"), steps, lr=0.0)
    learner = learner_of(qk_clip_every=1, use_cuda_graph=True)
    captured = losses_of(learner, steps, lr=0.0)
    assert len(learner.graphs._captured) == 1
    for one, other in zip(plain, captured, strict=True):
        name = "attention/max_logit"
        assert other[name] == pytest.approx(one[name], rel=0.03)
    assert len({numbers["attention/max_logit"] for numbers in captured}) > 1


@pytest.mark.gpu
def test_an_operator_that_waits_for_the_device_is_named_as_the_cause():
    learner = learner_of(use_cuda_graph=True, qk_clip_every=1000)
    impl = dataclasses.replace(learner.model.config.impl, cross_entropy="torch")
    learner.model.config = dataclasses.replace(learner.model.config, impl=impl)
    train_step(learner, STEPS[0], lr=0.0)  # not captured
    train_step(learner, STEPS[2], lr=0.0)
    with pytest.raises(RuntimeError, match=r"use_cuda_graph=True: an operator .* waits"):
        train_step(learner, STEPS[3], lr=0.0)


def test_without_a_gpu_graphs_are_refused_by_name():
    torch.manual_seed(0)
    config = pretrain_config("nano", is_gpu=False)
    with pytest.raises(ValueError, match=r"step.use_cuda_graph=True: the model is on cpu"):
        build_learner(Model(config.model), config.optim, StepConfig(use_cuda_graph=True))


def test_recompute_cannot_be_captured():
    with pytest.raises(ValueError, match=r"step.use_cuda_graph=True: .*step.recompute"):
        StepConfig(use_cuda_graph=True, recompute=True)


@pytest.mark.parametrize(("lengths", "padded"), [((5,), 1), ((5, 2), 2), ((5, 2, 1), 4)])
def test_padding_adds_sequences_without_tokens(lengths, padded):
    batch = tiny_batch(0, lengths=lengths)
    found = device_batch(batch, 3.0, torch.device("cpu"), is_padded=True)
    assert len(found.cu_seqlens) == padded + 1
    assert found.cu_seqlens.diff().tolist() == [*lengths, *[0] * (padded - len(lengths))]
    plain = device_batch(batch, 3.0, torch.device("cpu"))
    assert torch.equal(plain.cu_seqlens, batch.cu_seqlens)
    assert torch.equal(plain.tokens, found.tokens) and float(found.total_weight) == 3.0


def test_positions_without_weight_have_no_target():
    batch = tiny_batch(0, lengths=(4,))
    batch.weights[1] = 0.0
    found = device_batch(batch, 3.0, torch.device("cpu"))
    assert found.targets.tolist()[1] == -100
    assert found.targets[[0, 2, 3]].equal(batch.targets[[0, 2, 3]])
