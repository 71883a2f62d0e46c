"""Muon on true matrices: the update rule, its scale, and heads of unequal gradients."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from baltoro.ops.newton_schulz import newton_schulz
from baltoro.optim.assignment import assign
from baltoro.optim.config import OptimConfig
from baltoro.optim.muon import muon_flops, muon_step, split
from baltoro.optim.structure import Elementwise, MatrixBlocks

CONFIG = OptimConfig()
BY_HEAD = MatrixBlocks(row_parts=(8,), col_parts=(32,), num_groups=2, why="rows by head")
WHOLE = MatrixBlocks(row_parts=(16,), col_parts=(32,), why="whole")


def update(
    grads: list[Tensor],
    blocks: MatrixBlocks,
    *,
    lr: float = 1.0,
    config: OptimConfig = CONFIG,
) -> Tensor:
    """The sum of the updates that `grads` make, one step each, from zero weights."""
    weight, momentum = torch.zeros_like(grads[0]), torch.zeros_like(grads[0])
    for grad in grads:
        muon_step(split(weight, momentum, grad, blocks), lr=lr, config=config)
    return weight


def uneven_heads(ratio: float) -> Tensor:
    grad = torch.randn(16, 32)
    grad[8:] *= ratio
    return grad


def head_norms(ratio: float, *, per_head: bool) -> list[float]:
    """Update norms of two heads of 24 rows over 32 columns, gradients `ratio` apart."""
    grad = torch.randn(48, 32)
    grad[24:] *= ratio
    parts, groups = ((24,), 2) if per_head else ((48,), 1)
    blocks = MatrixBlocks(row_parts=parts, col_parts=(32,), num_groups=groups, why="")
    return update([grad], blocks).view(2, -1).norm(dim=1).tolist()


@pytest.mark.parametrize("ratio", [1.0, 8.0, 1 / 8, 1e3])
def test_heads_of_unequal_gradients_get_equal_updates(ratio: float) -> None:
    # case M01
    first, second = head_norms(ratio, per_head=True)
    assert second / first == pytest.approx(1.0, abs=0.05)


def test_the_whole_matrix_keeps_heads_apart() -> None:
    # only where all heads together have more rows than columns, as in K3 (12288 over 7168): a wide
    # matrix of full rank gets orthonormal rows, equal for every head
    first, second = head_norms(8.0, per_head=False)
    assert second / first > 1.4


@pytest.mark.parametrize("ratio", [1e-3, 1.0, 1e3])
def test_a_head_s_update_does_not_see_the_other_heads(ratio: float) -> None:
    torch.manual_seed(1)
    got = update([uneven_heads(ratio)], BY_HEAD)
    torch.manual_seed(1)
    torch.testing.assert_close(got[:8], update([uneven_heads(8.0)], BY_HEAD)[:8])


def test_each_block_follows_the_written_rule() -> None:
    lr, decay, scale = 0.02, 0.1, 0.2 * math.sqrt(32)
    weight, momentum = torch.randn(16, 32), torch.randn(16, 32)
    want_weight, want_momentum = weight.clone(), momentum.clone()
    grad = torch.randn(16, 32)
    for rows in (slice(0, 8), slice(8, 16)):
        want_momentum[rows] = 0.95 * want_momentum[rows] + grad[rows]
        nesterov = grad[rows] + 0.95 * want_momentum[rows]
        orthogonal = newton_schulz(nesterov, steps=5, impl="reference")
        want_weight[rows] -= lr * (scale * orthogonal + decay * want_weight[rows])
    muon_step(split(weight, momentum, grad, BY_HEAD), lr=lr, config=CONFIG)
    torch.testing.assert_close(momentum, want_momentum)
    torch.testing.assert_close(weight, want_weight)


@pytest.mark.parametrize("shape", [(64, 64), (16, 512), (512, 16), (128, 48)])
def test_an_update_of_full_rank_has_the_size_of_adamw_s(shape: tuple[int, int]) -> None:
    blocks = MatrixBlocks(row_parts=shape[:1], col_parts=shape[1:], why="whole")
    rms = float(update([torch.randn(shape)], blocks).square().mean().sqrt())
    short, long = sorted(shape)
    # min(shape) singular values of about 0.7 to 1.2, and sqrt(short) not sqrt(long) of them
    assert 0.6 * 0.2 < rms < 1.3 * 0.2, (short, long)


def test_the_scale_belongs_to_the_block_and_not_to_the_stored_tensor() -> None:
    # kv_b_proj of a small latent: 64 heads of 8 rows stored in 512 rows over 16 columns
    blocks = MatrixBlocks(row_parts=(8,), col_parts=(16,), num_groups=64, why="rows by head")
    rms = float(update([torch.randn(512, 16)], blocks).square().mean().sqrt())
    assert 0.6 * 0.2 < rms < 1.3 * 0.2


def test_momentum_carries_a_gradient_on() -> None:
    grads = [torch.randn(16, 32), torch.zeros(16, 32)]
    assert not torch.equal(update(grads, WHOLE), update(grads[:1], WHOLE))


def test_without_gradient_a_weight_only_decays() -> None:
    weight = torch.randn(16, 32)
    want = weight * (1 - 0.02 * 0.1)
    zero = torch.zeros(16, 32)
    muon_step(split(weight, zero.clone(), zero, WHOLE), lr=0.02, config=CONFIG)
    assert torch.equal(weight, want)


@pytest.mark.parametrize("max_elements", [1, 100, 700, 1 << 20])
def test_stacks_of_any_size_give_the_same_updates(max_elements: int) -> None:
    shapes = [(12, 20), (20, 12), (12, 20), (7, 3), (5, 20, 12)]
    tensors = [[torch.randn(shape) for shape in shapes] for _ in range(3)]
    results = []
    for limit in (1 << 30, max_elements):
        weights, momenta, grads = ([tensor.clone() for tensor in part] for part in tensors)
        entries = []
        for weight, momentum, grad in zip(weights, momenta, grads, strict=True):
            rows, cols = weight.shape[-2:]
            blocks = MatrixBlocks(row_parts=(rows,), col_parts=(cols,), why="whole")
            entries += split(weight, momentum, grad, blocks)
        config = OptimConfig(max_stack_elements=limit)
        muon_step(entries, lr=0.1, config=config)
        results.append(weights + momenta)
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_equal_shapes_of_all_parameters_share_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = []

    def counted(x: Tensor, **options: Any) -> Tensor:
        stacks.append(list(x.shape))
        return newton_schulz(x, **options)

    monkeypatch.setattr("baltoro.optim.muon.newton_schulz", counted)
    entries = []
    for shape in [(12, 20), (6, 6), (20, 12), (4, 12, 20)]:
        blocks = MatrixBlocks(row_parts=shape[-2:-1], col_parts=shape[-1:], why="whole")
        weight, momentum, grad = (torch.randn(shape) for _ in range(3))
        entries += split(weight, momentum, grad, blocks)
    muon_step(entries, lr=0.1, config=CONFIG)
    assert sorted(stacks) == [[1, 6, 6], [6, 12, 20]]


@pytest.mark.parametrize(
    ("shape", "is_wide"), [((4, 24), True), ((24, 4), True), ((8, 15), False), ((129, 1000), False)]
)
def test_short_wide_matrices_take_the_implementation_named_for_them(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], is_wide: bool
) -> None:
    impls = []

    def recorded(x: Tensor, *, impl: str, **options: Any) -> Tensor:
        impls.append(impl)
        return newton_schulz(x, impl=impl, **options)

    monkeypatch.setattr("baltoro.optim.muon.newton_schulz", recorded)
    blocks = MatrixBlocks(row_parts=shape[:1], col_parts=shape[1:], why="whole")
    grad = torch.randn(shape)
    got = update([grad], blocks, config=OptimConfig(newton_schulz_wide_impl="gram"))
    assert impls == ["gram" if is_wide else "torch"]
    torch.testing.assert_close(got, update([grad], blocks), rtol=0, atol=1e-5)


def test_the_work_of_a_step_is_counted_from_the_table() -> None:
    structure = {
        "q": BY_HEAD,
        "experts": MatrixBlocks(row_parts=(4, 4), col_parts=(3,), why="gate and up"),
        "norm": Elementwise(kind="norm", why="gain"),
    }
    shapes = {"q": (16, 32), "experts": (5, 8, 3), "norm": (7,)}
    named = [(name, torch.zeros(shape)) for name, shape in shapes.items()]
    heads = 2 * (4 * 8 * 8 * 32 + 2 * 8**3)
    experts = 5 * 2 * (4 * 3 * 3 * 4 + 2 * 3**3)
    assert muon_flops(assign(named, structure), CONFIG) == 5 * (heads + experts)


@pytest.mark.parametrize(
    ("impl", "flops"),
    [
        ("torch", 5 * (4 * 8 * 8 * 32 + 2 * 8**3)),
        ("gram", 4 * 8 * 8 * 32 + 34 * 8**3),
        ("triton", 6 * 8 * 8 * 32 + 120 * 8**3),
    ],
)
def test_the_work_is_that_of_the_form_that_runs(impl: str, flops: int) -> None:
    assignment = assign([("q", torch.zeros(16, 32))], {"q": BY_HEAD})
    assert muon_flops(assignment, OptimConfig(newton_schulz_wide_impl=impl)) == 2 * flops


def test_products_in_bf16_stay_near_those_in_fp32() -> None:
    grad = torch.randn(16, 32)
    config = OptimConfig(newton_schulz_dtype="bfloat16")
    got, want = update([grad], BY_HEAD, config=config), update([grad], BY_HEAD)
    assert not torch.equal(got, want)
    assert (got - want).norm() / want.norm() < 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"momentum": 1.0}, "momentum=1.0: must be in"),
        ({"beta2": -0.1}, "beta2=-0.1"),
        ({"eps": 0.0}, "eps=0.0: must be positive"),
        ({"update_rms": math.nan}, "update_rms=nan"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"newton_schulz_steps": 0}, "newton_schulz_steps=0"),
        ({"newton_schulz_dtype": "float16"}, "newton_schulz_dtype='float16'"),
    ],
)
def test_settings_outside_their_range_are_named(
    changes: dict[str, float | str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        OptimConfig(**changes)  # type: ignore[arg-type]
