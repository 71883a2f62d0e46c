"""A KDA layer on states in their slots: what it means, and the form in plain PyTorch."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from ops.harness import boundaries, relative_error
from torch import Tensor

from baltoro.ops.impl import ImplError
from baltoro.ops.kda import l2_normalize, log_decay, recurrent_kda
from baltoro.ops.kda.decode import DecodeInputs, DecodeWeights, StatePool, decode_kda
from baltoro.ops.rms_norm import gated_rms_norm
from baltoro.ops.short_conv import short_conv

IMPLS = ["reference", "torch"]
BOUND = -5.0
NORM_EPS, EPS = 0.25, 0.5  # large enough to show


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Arguments of `decode_kda`; slot 0 and all that no sequence holds are NaN."""

    inputs: DecodeInputs
    weights: DecodeWeights
    pool: StatePool
    slots: Tensor
    cu_seqlens: Tensor | None
    num_kept: Tensor | None
    bound: float | None

    def wide(self) -> "Batch":
        inputs, weights, pool = (
            type(group)(*(x.double() for x in group))
            for group in (self.inputs, self.weights, self.pool)
        )
        return replace(self, inputs=inputs, weights=weights, pool=pool)

    @property
    def live(self) -> Tensor:
        return self.slots[self.slots != 0].long()


def decode_batch(
    lengths: list[int],
    *,
    dims: tuple[int, int, int] = (2, 16, 24),
    width: int = 4,
    dtype: torch.dtype = torch.float64,
    state_dtype: torch.dtype | None = None,
    bound: float | None = BOUND,
    kept: list[int] | None = None,
    padding: tuple[int, ...] = (),
    is_packed: bool = True,
) -> Batch:
    """Sequences of these lengths; those at `padding` have slot 0."""
    H, K, V = dims
    T, N, C = sum(lengths), len(lengths), H * (2 * K + V)
    wide = torch.promote_types(dtype, torch.float32)
    draw = torch.Generator().manual_seed(T + 7 * N)

    def normal(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(to)

    num_slots = N + 3
    slots = 1 + torch.randperm(num_slots - 1, generator=draw)[:N].to(torch.int32)
    slots[list(padding)] = 0
    pool = StatePool(
        normal(num_slots, C, width - 1), normal(num_slots, H, K, V, to=state_dtype or wide)
    )
    idle = torch.ones(num_slots, dtype=torch.bool)
    idle[slots[slots != 0].long()] = False
    for x in pool:
        x[idle] = torch.nan
    return Batch(
        inputs=DecodeInputs(normal(T, C), normal(T, H, K), normal(T, H), normal(T, H, V)),
        weights=DecodeWeights(
            normal(C, width, to=wide),
            normal(H, to=wide) / 2,
            normal(H * K, to=wide) - 1,
            1 + normal(V, to=wide) / 4,
        ),
        pool=pool,
        slots=slots,
        cu_seqlens=boundaries(lengths) if is_packed else None,
        num_kept=None if kept is None else torch.tensor(kept, dtype=torch.int32),
        bound=bound,
    )


def run(batch: Batch, impl: str, device: str = "cpu") -> tuple[Tensor, StatePool]:
    """Outputs and the pool behind them, on the CPU; the batch's own pool stays."""

    def moved(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(device)

    pool = StatePool(*(x.to(device, copy=True) for x in batch.pool))
    y = decode_kda(
        DecodeInputs(*(x.to(device) for x in batch.inputs)),
        DecodeWeights(*(x.to(device) for x in batch.weights)),
        pool,
        batch.slots.to(device),
        cu_seqlens=moved(batch.cu_seqlens),
        num_kept=moved(batch.num_kept),
        gate_lower_bound=batch.bound,
        norm_eps=NORM_EPS,
        eps=EPS,
        impl=impl,
    )
    return y.cpu(), StatePool(*(x.cpu() for x in pool))


def assert_decode_earned(
    batch: Batch, impl: str, device: str = "cpu", rounding_steps: float = 6.0
) -> None:
    """Outputs and states within twice the error of the reference in the batch's own precision.

    Windows are copies and padding is left alone, both to the bit.
    """
    exact_y, exact_pool = run(batch.wide(), "reference")
    plain_y, plain_pool = run(batch, "reference")
    y, pool = run(batch, impl, device)
    live = batch.live
    for name, got, plain, exact in (
        ("outputs", y, plain_y, exact_y),
        ("states", pool.states[live], plain_pool.states[live], exact_pool.states[live]),
    ):
        usual, error = relative_error(plain, exact), relative_error(got, exact)
        allowed = 2 * usual + rounding_steps * torch.finfo(got.dtype).eps / 2
        assert got.dtype == plain.dtype
        assert error <= allowed, f"{name}: error {error:.3g}, earned {allowed:.3g}"
    assert torch.equal(pool.windows[live], plain_pool.windows[live])
    idle = torch.ones(len(pool.states), dtype=torch.bool)
    idle[live] = False
    for x in pool:
        assert x[idle].isnan().all()
    bounds = range(len(y) + 1) if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    for slot, (start, stop) in zip(batch.slots.tolist(), pairwise(bounds), strict=True):
        assert slot != 0 or not y[start:stop].any()


@pytest.mark.parametrize("bound", [None, BOUND])
@pytest.mark.parametrize("impl", IMPLS)
def test_it_is_the_operators_of_a_layer_one_after_another(impl, bound):
    batch = decode_batch([3, 1, 2], bound=bound)
    y, pool = run(batch, impl)
    inputs, weights, starts = batch.inputs, batch.weights, batch.cu_seqlens
    windows, states = (x[batch.slots.long()] for x in batch.pool)
    H, K, V = 2, 16, 24
    mixed, new_windows = short_conv(
        inputs.projected, weights.conv, cu_seqlens=starts, initial_state=windows, impl="reference"
    )
    q, k, v = mixed[:, : H * K], mixed[:, H * K : 2 * H * K], mixed[:, 2 * H * K :]
    g = log_decay(inputs.decay_logits, weights.A_log, weights.dt_bias, lower_bound=bound)
    o, new_states = recurrent_kda(
        l2_normalize(q.view(-1, H, K), eps=EPS) / 4,
        l2_normalize(k.view(-1, H, K), eps=EPS),
        v.view(-1, H, V),
        g,
        torch.sigmoid(inputs.beta_logits),
        cu_seqlens=starts,
        initial_state=states,
        impl="reference",
    )
    out = gated_rms_norm(o, weights.norm, inputs.gate_logits, eps=NORM_EPS, impl="reference")
    torch.testing.assert_close(y, out)
    torch.testing.assert_close(pool.windows[batch.slots.long()], new_windows)
    torch.testing.assert_close(pool.states[batch.slots.long()], new_states)


@pytest.mark.parametrize("bound", [None, BOUND])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lengths", "kept", "padding"),
    [([1], None, ()), ([1, 1, 1], [1, 0, 1], (2,)), ([3, 0, 8, 1, 2], [1, 0, 8, 0, 1], (4,))],
)
def test_the_plain_form_earns_its_tolerance(lengths, kept, padding, dtype, bound):
    batch = decode_batch(lengths, kept=kept, padding=padding, dtype=dtype, bound=bound)
    assert_decode_earned(batch, "torch")


def test_a_state_in_bf16_is_rounded_when_it_is_stored():
    batch = decode_batch([2, 1], dtype=torch.float32, state_dtype=torch.bfloat16)
    assert_decode_earned(batch, "torch")
    _, pool = run(batch, "torch")
    wide = replace(batch, pool=StatePool(batch.pool.windows, batch.pool.states.float()))
    _, exact = run(wide, "torch")
    assert torch.equal(pool.states[batch.live], exact.states[batch.live].bfloat16())


@pytest.mark.parametrize("impl", IMPLS)
def test_without_boundaries_every_sequence_has_one_token(impl):
    batch = decode_batch([1, 1, 1], padding=(1,))
    y, pool = run(batch, impl)
    other_y, other_pool = run(replace(batch, cu_seqlens=None), impl)
    assert torch.equal(y, other_y)
    assert torch.equal(pool.states[batch.live], other_pool.states[batch.live])


@pytest.mark.parametrize("impl", IMPLS)
def test_all_padding_is_no_work(impl):
    batch = decode_batch([1, 2], padding=(0, 1))
    y, pool = run(batch, impl)
    assert not y.any() and pool.states.isnan().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_accepted_tokens_in_front_of_the_next_ones_make_up_for_a_verification(impl):
    whole = decode_batch([5])
    y, pool = run(whole, impl)

    def part(tokens: slice, kept: int) -> Batch:
        inputs = DecodeInputs(*(x[tokens] for x in whole.inputs))
        return replace(
            whole,
            inputs=inputs,
            cu_seqlens=boundaries([len(inputs.projected)]),
            num_kept=torch.tensor([kept], dtype=torch.int32),
        )

    verified, untouched = run(part(slice(0, 3), 0), impl)
    torch.testing.assert_close(verified, y[:3])
    for before, after in zip(whole.pool, untouched, strict=True):
        assert torch.equal(before[whole.live], after[whole.live])
    # two of three were accepted: they come again, with the tokens that follow them
    second = part(slice(0, 5), 2)
    again, moved = run(second, impl)
    torch.testing.assert_close(again, y)
    rest, last = run(replace(part(slice(2, 5), 3), pool=moved), impl)
    torch.testing.assert_close(rest, y[2:])
    torch.testing.assert_close(last.states[whole.live], pool.states[whole.live])
    assert torch.equal(last.windows[whole.live], pool.windows[whole.live])


def test_wrong_arguments_name_the_field():
    batch = decode_batch([1, 2])
    for change, message in (
        ({"cu_seqlens": None}, "cu_seqlens=None: 2 slots need as many tokens, not 3"),
        ({"cu_seqlens": torch.tensor([0, 3])}, r"cu_seqlens: expected int32 \[3\]"),
        ({"num_kept": torch.tensor([1])}, r"num_kept: expected int32 \[2\]"),
        ({"num_kept": torch.tensor([2, 0], dtype=torch.int32)}, r"num_kept\[0\]=2: must be from 0"),
        ({"slots": torch.tensor([1.0, 2.0])}, "slots: expected int32 or int64"),
        ({"bound": -6.0}, r"gate_lower_bound=-6\.0"),
        ({"inputs": batch.inputs._replace(beta_logits=torch.ones(3, 1))}, "beta_logits"),
        ({"weights": batch.weights._replace(norm=torch.ones(24))}, "norm: expected torch.float64"),
        ({"pool": batch.pool._replace(states=batch.pool.states.float())}, "states: expected"),
        ({"pool": batch.pool._replace(windows=batch.pool.windows[:2])}, "windows: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            run(replace(batch, **change), "reference")
    with pytest.raises(ImplError, match="impl='cuda' is unknown"):
        run(batch, "cuda")
