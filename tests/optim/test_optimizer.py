"""The optimiser as a whole: masters, missing gradients, saved state."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baltoro.optim.assignment import Group, assign
from baltoro.optim.config import OptimConfig
from baltoro.optim.optimizer import Optimizer
from baltoro.optim.structure import Elementwise, MatrixBlocks, Structure

STRUCTURE: dict[str, Structure] = {
    "q": MatrixBlocks(row_parts=(4,), col_parts=(12,), num_groups=3, why="rows by head"),
    "kv": MatrixBlocks(row_parts=(3, 5), col_parts=(6,), num_groups=2, why="[key | value]"),
    "experts": MatrixBlocks(row_parts=(5, 5), col_parts=(12,), why="gate and up of each expert"),
    "square": MatrixBlocks(row_parts=(6,), col_parts=(6,), why="whole"),
    "embedding": Elementwise(kind="embedding", why="looked up"),
    "norm": Elementwise(kind="norm", why="gain"),
    "A_log": Elementwise(kind="decay", use_decay=False, why="decay"),
}
SHAPES = {
    "q": (12, 12),
    "kv": (16, 6),
    "experts": (4, 10, 12),
    "square": (6, 6),
    "embedding": (10, 12),
    "norm": (12,),
    "A_log": (3,),
}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        for name, shape in SHAPES.items()
    }


def optimizer(
    named: dict[str, Tensor],
    config: OptimConfig = OptimConfig(),  # noqa: B008
    matrices: Group = "muon",
) -> Optimizer:
    structure = {name: STRUCTURE[name] for name in named}
    return Optimizer(named.items(), assign(named.items(), structure, matrices=matrices), config)


def set_grads(named: dict[str, Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for name, shape in SHAPES.items():
        grad = torch.randn(shape, generator=generator)
        if name in named:
            named[name].grad = grad.to(named[name].dtype)


def train(optim: Optimizer, steps: range) -> None:
    for step in steps:
        set_grads(optim.parameters, step)
        optim.step(lr=0.01 * (1 + step % 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twenty_steps_equal_ten_saved_loaded_and_ten_more(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    straight = optimizer(parameters(dtype))
    train(straight, range(20))
    first = optimizer(parameters(dtype))
    train(first, range(10))
    save_file(first.state_dict(), tmp_path / "optimizer.safetensors")
    save_file({n: p.detach() for n, p in first.parameters.items()}, tmp_path / "model.safetensors")
    loaded = {
        name: tensor.requires_grad_()
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    second = optimizer({name: loaded[name] for name in SHAPES})
    second.load_state_dict(load_file(tmp_path / "optimizer.safetensors"))
    train(second, range(10, 20))
    for name in SHAPES:
        assert torch.equal(second.parameters[name], straight.parameters[name]), name
    want = straight.state_dict()
    for key, value in second.state_dict().items():
        assert torch.equal(value, want[key]), key


def test_the_saved_state_covers_every_parameter() -> None:
    wide, narrow = optimizer(parameters()).state_dict(), optimizer(parameters(torch.bfloat16))
    assert {key.split(".", 1)[1] for key in wide} == set(SHAPES)
    assert not any(key.startswith("master.") for key in wide)
    masters = [key for key in narrow.state_dict() if key.startswith("master.")]
    assert masters == [f"master.{name}" for name in SHAPES]
    assert all(narrow.state_dict()[key].dtype == torch.float32 for key in masters)


def test_small_steps_add_up_in_the_master_of_a_bf16_parameter() -> None:
    named = {"norm": torch.ones(12, dtype=torch.bfloat16).requires_grad_()}
    optim = optimizer(named, OptimConfig(weight_decay=0.0))
    for _ in range(100):
        named["norm"].grad = torch.ones(12, dtype=torch.bfloat16)
        optim.step(lr=1e-4)  # a fortieth of the distance between bf16 numbers below one
    torch.testing.assert_close(optim.masters["norm"], torch.full((12,), 0.99))
    assert torch.equal(named["norm"].detach(), optim.masters["norm"].bfloat16())
    assert named["norm"].max() < 1


def test_a_parameter_without_gradient_is_named_and_left_alone() -> None:
    named = parameters()
    optim = optimizer(named)
    train(optim, range(2))
    set_grads(named, 2)
    named["q"].grad = named["norm"].grad = None
    before = {key: value.clone() for key, value in optim.state_dict().items()}
    weights = {name: parameter.detach().clone() for name, parameter in named.items()}
    assert optim.step(lr=0.1) == ("q", "norm")
    for name in SHAPES:
        assert torch.equal(named[name], weights[name]) == (name in ("q", "norm"))
    assert torch.equal(optim.state_dict()["momentum.q"], before["momentum.q"])
    assert int(optim.state_dict()["num_steps.norm"]) == 2
    assert int(optim.state_dict()["num_steps.A_log"]) == 3


def test_two_owners_of_half_the_parameters_do_what_one_does() -> None:
    # what sharding whole matrices over ranks relies on (case M02)
    one = optimizer(parameters())
    train(one, range(5))
    names = list(SHAPES)
    for half in (names[::2], names[1::2]):
        named = {name: parameters()[name] for name in half}
        train(optimizer(named), range(5))
        for name in half:
            torch.testing.assert_close(
                named[name], one.parameters[name], rtol=0, atol=1e-5, msg=name
            )


def test_gradients_of_other_layouts_give_the_same_step() -> None:
    results = []
    for make in (torch.clone, lambda grad: grad.mT.contiguous().mT):
        named = {name: parameters()[name] for name in ("q", "embedding")}
        for parameter in named.values():
            draw = torch.Generator().manual_seed(2)
            parameter.grad = make(torch.randn(parameter.shape, generator=draw))
        optimizer(named).step(lr=0.1)
        results.append([parameter.detach() for parameter in named.values()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_gradients_are_kept_until_they_are_dropped() -> None:
    named = parameters()
    optim = optimizer(named)
    set_grads(named, 0)
    want = {name: parameter.grad.clone() for name, parameter in named.items()}
    optim.step(lr=0.1)
    assert all(torch.equal(named[name].grad, want[name]) for name in named)
    optim.zero_grad()
    assert all(parameter.grad is None for parameter in named.values())


def test_a_master_changed_by_hand_is_published() -> None:
    named = parameters(torch.bfloat16)
    optim = optimizer(named)
    optim.masters["q"].mul_(0.5)
    want = optim.masters["q"].bfloat16()
    assert not torch.equal(named["q"], want)
    optim.publish()
    assert torch.equal(named["q"], want)


def test_loaded_masters_reach_their_parameters() -> None:
    trained, fresh = optimizer(parameters(torch.bfloat16)), optimizer(parameters(torch.bfloat16))
    train(trained, range(3))
    fresh.load_state_dict(trained.state_dict())
    for name in SHAPES:
        assert torch.equal(fresh.parameters[name], trained.parameters[name]), name


def test_what_has_no_decay_stays_where_its_gradient_is_zero() -> None:
    named = parameters()
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer(named).step(lr=0.5)
    for name, parameter in named.items():
        shrink = 1.0 if name == "A_log" else 1.0 - 0.5 * 0.1
        torch.testing.assert_close(parameter.detach(), before[name] * shrink, msg=name)


def test_fp32_parameters_are_their_own_masters() -> None:
    named = parameters()
    optim = optimizer(named)
    assert all(optim.masters[name].data_ptr() == named[name].data_ptr() for name in named)


@pytest.mark.parametrize("change", ["missing", "unknown", "shape", "dtype"])
def test_state_that_does_not_fit_is_refused_before_anything_changes(change: str) -> None:
    optim = optimizer(parameters())
    train(optim, range(2))
    state = {key: value.clone() + 1 for key, value in optim.state_dict().items()}
    match change:
        case "missing":
            del state["momentum.q"]
        case "unknown":
            state["momentum.w13"] = torch.zeros(2, 2)
        case "shape":
            state["mean.norm"] = torch.zeros(11)
        case "dtype":
            state["mean.norm"] = torch.zeros(12, dtype=torch.bfloat16)
    before = {key: value.clone() for key, value in optim.state_dict().items()}
    with pytest.raises(ValueError, match=r"momentum\.q|momentum\.w13|mean\.norm"):
        optim.load_state_dict(state)
    assert all(torch.equal(value, before[key]) for key, value in optim.state_dict().items())


def test_state_of_another_optimiser_is_refused() -> None:
    adamw = optimizer(parameters(), matrices="adamw")
    with pytest.raises(ValueError, match=r"missing \['mean\.experts'"):
        adamw.load_state_dict(optimizer(parameters()).state_dict())


def test_bad_input_is_named() -> None:
    named = parameters()
    table = assign(named.items(), STRUCTURE)
    with pytest.raises(ValueError, match=r"differ in \['norm'\]"):
        Optimizer([item for item in named.items() if item[0] != "norm"], table, OptimConfig())
    with pytest.raises(ValueError, match=r"square: torch\.float32, strides \(1, 6\)"):
        Optimizer([*(named | {"square": torch.zeros(6, 6).T}).items()], table, OptimConfig())
    for lr in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"lr={lr}"):
            optimizer(named).step(lr=lr)
