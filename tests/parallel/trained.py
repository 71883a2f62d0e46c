"""A few steps of a small K3, in one process or as one of several: what `test_fsdp` compares."""

import torch
from model.tiny import tiny_k3
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from train.batch import tiny_batch

from baltoro.data.pack import PackedBatch
from baltoro.model.model import Model
from baltoro.optim.config import OptimConfig
from baltoro.optim.grad_clip import clip_grad_norm_
from baltoro.optim.optimizer import Optimizer
from baltoro.parallel.fsdp import ShardedOptimizer, shard
from baltoro.train.learner import assignment_of
from baltoro.train.step import token_losses

LENGTHS = (20, 12)  # of the sequences; rank r has sequence r
NUM_STEPS = 3
LR = 2e-3
MAX_NORM = 0.5  # below the norm of the first gradients
Found = tuple[dict[str, Tensor], list[float]]  # whole weights after the steps, gradient norms


def small_model() -> Model:
    torch.manual_seed(0)
    return Model(tiny_k3(num_mtp_layers=1)).train()


def backward(model: Model, batch: PackedBatch, span: slice, recompute: bool = False) -> None:
    """The part `span` of a batch; the loss is divided by the tokens of the whole batch."""
    tokens, targets = batch.tokens[span], batch.targets[span]
    bounds = batch.cu_seqlens.clamp(span.start, span.stop).unique() - span.start
    output = model(tokens, bounds.int(), recompute=recompute)
    loss = token_losses(model, output, targets).sum()
    further = model.predict_next(targets, output.mixture, bounds.int())
    loss = loss + 0.1 * further.hidden.square().sum()
    (loss / sum(LENGTHS)).backward()


def train_alone() -> Found:
    model, norms = small_model(), []
    optimizer = Optimizer(model.named_parameters(), assignment_of(model), OptimConfig())
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        backward(model, tiny_batch(step, LENGTHS), slice(0, sum(LENGTHS)))
        grads = [parameter.grad for parameter in model.parameters()]
        norms.append(float(clip_grad_norm_(grads, max_norm=MAX_NORM)))
        optimizer.step(LR)
    return {name: tensor.detach() for name, tensor in model.named_parameters()}, norms


def train_sharded(rank: int, recompute: bool) -> Found:
    model, norms = small_model(), []
    assignment = assignment_of(model)
    mesh = init_device_mesh("cpu", (len(LENGTHS),))
    shard(model, mesh)
    optimizer = ShardedOptimizer(model, assignment, OptimConfig(), mesh)
    span = slice(sum(LENGTHS[:rank]), sum(LENGTHS[: rank + 1]))
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        backward(model, tiny_batch(step, LENGTHS), span, recompute)
        norms.append(float(optimizer.clip_grad_norm_(max_norm=MAX_NORM)))
        assert optimizer.step(LR) == ()
    return {name: shards.detach().full_tensor() for name, shards in model.named_parameters()}, norms


def divide() -> tuple[int, int, int]:
    """Elements of this rank's shards, of its masters, and of all weights."""
    model = small_model()
    assignment = assignment_of(model)
    mesh = init_device_mesh("cpu", (len(LENGTHS),))
    shard(model, mesh)
    optimizer = ShardedOptimizer(model, assignment, OptimConfig(), mesh)
    shards = [parameter.to_local() for parameter in optimizer.parameters.values()]
    held = (shards, optimizer.owned.masters.values(), optimizer.parameters.values())
    num_shards, num_masters, num_whole = (sum(map(torch.numel, tensors)) for tensors in held)
    return num_shards, num_masters, num_whole


def work(rank: int) -> tuple[tuple[int, int, int], list[Found]]:
    """What is compared, from one start: the division, and runs without and with recomputation."""
    return divide(), [train_sharded(rank, recompute) for recompute in (False, True)]
