"""The optimiser of a run: fp32 masters, their momenta, one step for Muon and AdamW together.

A parameter in fp32 or wider is its own master. Any other gets an fp32 copy that is updated in its
place and rounded into it after the step. Parameters have to stay where they are: build the
optimiser after the model is on its device.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from baltoro.ops.muon import LINE_BYTES, MuonBlocks, Stack
from baltoro.optim.adamw import AdamwState, adamw_step
from baltoro.optim.assignment import Assignment
from baltoro.optim.config import OptimConfig
from baltoro.optim.muon import split, stacks_of, step_stacks


@dataclass(kw_only=True, slots=True)
class _Placed:
    """Stacks of the last step that serve as long as tensors stay where they are."""

    kind: list[tuple[object, ...]]  # names, addresses, and gradients' dtypes
    grads: list[int]  # addresses
    stacks: list[Stack]


class Plan(NamedTuple):
    """Parameters by what a step does with them."""

    stacks: list[Stack]  # Muon
    decayed: list[str]  # AdamW
    undecayed: list[str]
    skipped: tuple[str, ...]  # no gradient


class Optimizer:
    """Per-Head Muon and AdamW over named parameters (report section 2.5)."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        assignment: Assignment,
        config: OptimConfig,
    ) -> None:
        """`assignment` must be the table of `parameters`; raises `ValueError` if it is not."""
        self.config = config
        self.parameters = dict(parameters)
        self.rows = {row.name: row for row in assignment.rows}
        if self.rows.keys() != self.parameters.keys():
            different = sorted(self.rows.keys() ^ self.parameters.keys())
            raise ValueError(f"assignment and parameters differ in {different}; build it from them")
        self.masters: dict[str, Tensor] = {}
        self.momenta: dict[str, Tensor] = {}
        self.moments: dict[str, AdamwState] = {}
        self._placed: _Placed | None = None
        for name, parameter in self.parameters.items():
            if not parameter.is_floating_point() or not parameter.is_contiguous():
                raise ValueError(
                    f"{name}: {parameter.dtype}, strides {parameter.stride()}: a trained parameter "
                    "must be floating and contiguous"
                )
            data = parameter.detach()
            master = data.to(torch.promote_types(data.dtype, torch.float32))
            self.masters[name] = master
            if self.rows[name].blocks is not None:
                self.momenta[name] = torch.zeros_like(master)
            else:
                self.moments[name] = AdamwState(
                    mean=torch.zeros_like(master), square=torch.zeros_like(master)
                )

    @torch.no_grad()
    def plan(self) -> Plan:
        """What `step` will update, from the gradients that are there now."""
        matrices: list[str] = []
        decayed: list[str] = []
        undecayed: list[str] = []
        skipped: list[str] = []
        for name, parameter in self.parameters.items():
            grad, row = parameter.grad, self.rows[name]
            if grad is None:
                skipped.append(name)
                continue
            # kernels take it to lie as its parameter does, and where it is, it must stay for them
            parameter.grad = grad.contiguous()
            if row.blocks is not None:
                matrices.append(name)
            else:
                (decayed if row.use_decay else undecayed).append(name)
        return Plan(self._stacks(matrices), decayed, undecayed, tuple(skipped))

    @torch.no_grad()
    def step(self, lr: float, plan: Plan | None = None) -> tuple[str, ...]:
        """Update every parameter that has a gradient; gradients are read and kept.

        A `plan` made of the same gradients while the device was busy spares it waiting for the
        host. Returns the names without a gradient: neither they nor their state change, and they do
        not decay. Gradients that are not finite spoil weights and state, so check the norm first.
        Raises `ValueError` for a rate that is negative or not finite.
        """
        if not 0.0 <= lr < math.inf:
            raise ValueError(f"lr={lr}: must be finite and not negative")
        stacks, decayed, undecayed, skipped = self.plan() if plan is None else plan
        step_stacks(stacks, lr=lr, config=self.config)
        for names, decay in ((decayed, self.config.weight_decay), (undecayed, 0.0)):
            adamw_step(
                [self.masters[name] for name in names],
                [self._grad(name) for name in names],
                [self.moments[name] for name in names],
                lr=lr,
                weight_decay=decay,
                config=self.config,
            )
        self._publish([*decayed, *undecayed])
        return skipped

    def publish(self) -> None:
        """Round every master into its parameter; needed after a master was changed by hand."""
        self._publish(self.masters)

    def _stacks(self, names: Sequence[str]) -> list[Stack]:
        """The matrices of these parameters; those of the last step if they can be used again."""
        tensors = {
            name: (self.masters[name], self.momenta[name], self._grad(name)) for name in names
        }
        grads = [own[2].data_ptr() for own in tensors.values()]
        kind = [
            (name, *(x.data_ptr() for x in (self.parameters[name], *own[:2])), own[2].dtype)
            for name, own in tensors.items()
        ]
        placed = self._placed
        if (
            placed is not None
            and placed.kind == kind
            and (placed.grads == grads or _moved(placed, grads))
        ):
            return placed.stacks
        entries: list[MuonBlocks] = []
        for name, own in tensors.items():
            blocks, low = self.rows[name].blocks, None
            assert blocks is not None
            if own[0].dtype != self._dtype(name):
                low = self.parameters[name].detach()
            entries += split(*own, blocks, low)
        stacks = stacks_of(entries, self.config)
        self._placed = None
        if all(stack.is_placed for stack in stacks):
            self._placed = _Placed(kind=kind, grads=grads, stacks=stacks)
        return stacks

    @torch.no_grad()
    def _publish(self, names: Iterable[str]) -> None:
        copied = [name for name in names if self.masters[name].dtype != self._dtype(name)]
        if copied:
            torch._foreach_copy_(
                [self.parameters[name].detach() for name in copied],
                [self.masters[name] for name in copied],
            )

    def zero_grad(self) -> None:
        """Drop all gradients: what the next backward does not reach is seen by `step`."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """All state but the fp32 parameters, in one flat mapping; live tensors, not copies.

        Keys are `momentum.NAME` for Muon, `mean.NAME`, `square.NAME` and `num_steps.NAME` (int64
        `[]`) for AdamW, and `master.NAME` for parameters of lower precision.
        """
        state = {f"momentum.{name}": momentum for name, momentum in self.momenta.items()}
        for name, moments in self.moments.items():
            state[f"mean.{name}"] = moments.mean
            state[f"square.{name}"] = moments.square
            state[f"num_steps.{name}"] = torch.tensor(moments.num_steps)
        for name, master in self.masters.items():
            if master.dtype != self._dtype(name):
                state[f"master.{name}"] = master
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave, bit for bit; masters are rounded into their parameters.

        The fp32 parameters are the model's to load. Raises `ValueError` before anything is changed
        if a key is missing or unknown, or a tensor has another shape or dtype.
        """
        own = self.state_dict()
        if own.keys() != state.keys():
            missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
            raise ValueError(
                f"optimiser state: missing {missing}, unknown {unknown}; it was saved by another "
                "model, assignment or precision"
            )
        for key, value in state.items():
            if value.shape != own[key].shape or value.dtype != own[key].dtype:
                raise ValueError(
                    f"optimiser state {key}: {value.dtype} {list(value.shape)}, expected "
                    f"{own[key].dtype} {list(own[key].shape)}"
                )
        for key, value in state.items():
            kind, name = key.split(".", 1)
            if kind == "num_steps":
                self.moments[name].num_steps = int(value)
            else:
                own[key].copy_(value)
        self.publish()

    def _grad(self, name: str) -> Tensor:
        grad = self.parameters[name].grad
        assert grad is not None
        return grad

    def _dtype(self, name: str) -> torch.dtype:
        return self.parameters[name].dtype


def _moved(placed: _Placed, grads: list[int]) -> bool:
    """Tell the stacks where gradients lie now; False if they lie otherwise in lines of memory."""
    old = torch.tensor(placed.grads)
    steps = torch.tensor(grads) - old
    if bool((steps % LINE_BYTES).any()):
        return False
    starts, order = old.sort()
    for stack in placed.stacks:
        stack.move_gradients(starts, steps[order])
    placed.grads = grads
    return True
