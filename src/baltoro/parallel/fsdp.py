"""Weights sharded over the ranks of a mesh (FSDP), and our optimiser on them.

`shard` leaves each rank 1/R of every weight; a layer's are gathered around its forward and its
backward pass, and gradients are added up over ranks into shards. Adding, not averaging: a rank's
loss is divided by the weight of all positions of all ranks, so that the sum is the gradient of one
process with the whole batch.

Muon needs whole matrices. Each parameter has one owner, the rank that holds its fp32 master and
its momenta and updates it as a single process would; masters and momenta are thus divided by whole
tensors, over R.

Costs of a step beyond those of FSDP, for P parameters:
    traffic   every gradient is gathered by all ranks though its owner alone keeps it, about P
              received by each; updated shards are scattered by their owners, P in all
    memory    whole fp32 gradients of the owned parameters, about P / R, and one more whole tensor
The largest tensor is the unit of the division: the experts of one layer are one tensor and have
one owner. To gather at the owner only, and to divide a stack of experts, is left until many ranks
make it worth the code.

Not covered: checkpoints of a sharded run, meshes with a second axis, pictures, weights of mixed
dtypes, balancing of routers by counts over all ranks.
"""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from baltoro.model.model import Model
from baltoro.optim.assignment import Assignment
from baltoro.optim.config import OptimConfig
from baltoro.optim.optimizer import Optimizer


def shard(model: Model, mesh: DeviceMesh) -> None:
    """Divide the weights of `model`, layer by layer, over the one axis of `mesh`.

    Every rank must bring the same weights. Afterwards each rank runs the model on its own batch,
    as often as the others do; parameters are shards except between the model's forward and its
    backward pass, where the loss reads the head. torch warns that layers return views, which must
    not be written: none of ours writes to what a layer returned. Raises `ValueError` for a model or
    a mesh that is not served.
    """
    if model.config.vision is not None:
        raise ValueError(
            "vision: a batch without pictures would leave its rank out of collectives that the "
            "others wait in; shard a model without vision tower"
        )
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) != 1:
        names = sorted(map(str, dtypes))
        raise ValueError(f"weights are {names}; gradients of one layer must have one dtype")
    if mesh.ndim != 1:
        raise ValueError(f"mesh has {mesh.ndim} axes; weights are sharded over one")
    layers: list[nn.Module] = list(model.layers)
    if model.config.num_mtp_layers:
        layers += model.mtp_layers
    for module in (*layers, model):
        # the root stays whole after its forward pass: the loss reads the head from outside
        unit = fully_shard(module, mesh=mesh, reshard_after_forward=module is not model)
        unit.set_gradient_divide_factor(1.0)
        # a plain sum; the scaled one of NCCL is unknown to gloo
        unit.set_force_sum_reduction_for_comms(True)


def owners_of(sizes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """The rank that updates each parameter: the largest first, to the rank with the least so far.

    The same on every rank, being a function of names and numbers of elements alone.
    """
    loads = [0] * num_ranks
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


class ShardedOptimizer:
    """`Optimizer` over the shards that `shard` made; all ranks make the same calls together."""

    def __init__(
        self, model: Model, assignment: Assignment, config: OptimConfig, mesh: DeviceMesh
    ) -> None:
        """`assignment` is the table of whole parameters, as for `Optimizer`, and `mesh` the one of
        `shard`. Raises `ValueError` for a parameter that is not sharded."""
        self.mesh = mesh
        self.parameters: dict[str, DTensor] = {}
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor):
                raise ValueError(f"{name} is not sharded; call `shard` on the model first")
            self.parameters[name] = parameter
        sizes = {name: math.prod(parameter.shape) for name, parameter in self.parameters.items()}
        self.owners = owners_of(sizes, mesh.size())
        owned = {}
        for name, shards in self.parameters.items():
            whole = shards.full_tensor().detach()
            if self.owners[name] == mesh.get_local_rank():
                dtype = torch.promote_types(whole.dtype, torch.float32)
                owned[name] = whole.to(dtype, memory_format=torch.contiguous_format, copy=True)
        rows = tuple(
            row for row in assignment.rows if row.name in owned or row.name not in self.parameters
        )
        # whole fp32 copies: each is its own master
        self.owned = Optimizer(owned.items(), Assignment(rows=rows), config)

    @torch.no_grad()
    def clip_grad_norm_(self, *, max_norm: float) -> Tensor:
        """`optim.grad_clip.clip_grad_norm_` of the whole gradients, from their shards."""
        if not max_norm > 0.0:
            raise ValueError(f"max_norm={max_norm}: must be positive; use inf to measure only")
        shards = [grad.to_local() for grad in self._grads().values()]
        norm = torch.zeros((), device=self.mesh.device_type)
        if shards:
            norm += torch.stack(torch._foreach_norm(shards, 2, dtype=torch.float32)).square().sum()
        dist.all_reduce(norm, group=self.mesh.get_group())
        norm.sqrt_()
        factor = torch.where(norm.isfinite(), (max_norm / norm).clamp(max=1.0), 1.0)
        torch._foreach_mul_(shards, factor)
        return norm

    @torch.no_grad()
    def step(self, lr: float) -> tuple[str, ...]:
        """As `Optimizer.step`: update what has a gradient, return the names of what has none."""
        grads = self._grads()
        for name, shards in grads.items():
            grad = shards.full_tensor()
            if name in self.owned.parameters:
                self.owned.parameters[name].grad = grad.to(self.owned.masters[name].dtype)
        self.owned.step(lr)
        self.owned.zero_grad()
        self.publish()
        return tuple(name for name in self.parameters if name not in grads)

    @torch.no_grad()
    def publish(self) -> None:
        """Send every rank its shard of every master; needed after one was changed by hand."""
        for name, parameter in self.parameters.items():
            owner = self.owners[name]
            if name in self.owned.masters:
                whole = self.owned.masters[name].to(parameter.dtype)
            else:
                whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            shards = distribute_tensor(whole, self.mesh, parameter.placements, src_data_rank=owner)
            parameter.copy_(shards)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def _grads(self) -> dict[str, DTensor]:
        found = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                assert isinstance(parameter.grad, DTensor)
                found[name] = parameter.grad
        return found
