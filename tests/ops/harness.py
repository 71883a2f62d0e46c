"""How an operator over packed tokens is tested: inputs that hurt, and a tolerance that is earned.

An operator under test is a function from a `Packed` batch to per-token outputs and final states. It
is run forward and backward and compared with its plain reference in fp64. It may be wrong by twice
the error of the same reference in the working precision, plus a rounding band: nobody tunes a
number until a test passes. `one_by_one` and `in_two_parts` turn an operator into one that gets
there another way, and are held to the same budget.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

GATE_BOUND = -5.0
Gate = Literal["bound", "near_zero", "mixed", "unbounded"]
Keys = Literal["random", "repeated", "near_parallel"]

GATES: tuple[Gate, ...] = ("bound", "near_zero", "mixed")
KEYS: tuple[Keys, ...] = ("random", "repeated", "near_parallel")


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Inputs of an operator, by the name they have in its signature."""

    tokens: dict[str, torch.Tensor]  # [T, ...] each
    states: dict[str, torch.Tensor]  # [N, ...] each; the first is what the operator carries
    weights: dict[str, torch.Tensor]  # shared by all tokens
    cu_seqlens: torch.Tensor

    @property
    def floats(self) -> dict[str, torch.Tensor]:
        """Every tensor that gets a gradient."""
        return {**self.tokens, **self.states, **self.weights}

    @property
    def lengths(self) -> list[int]:
        return self.cu_seqlens.diff().tolist()

    def map(self, f: Callable[[torch.Tensor], torch.Tensor]) -> "Packed":
        """The same batch with `f` applied to every tensor of `floats`."""
        return replace(
            self,
            tokens={name: f(x) for name, x in self.tokens.items()},
            states={name: f(x) for name, x in self.states.items()},
            weights={name: f(x) for name, x in self.weights.items()},
        )

    def to(self, device: torch.device | str) -> "Packed":
        return replace(self.map(lambda x: x.to(device)), cu_seqlens=self.cu_seqlens.to(device))


Op = Callable[[Packed], tuple[torch.Tensor, torch.Tensor]]


def boundaries(lengths: list[int]) -> torch.Tensor:
    """`cu_seqlens` of sequences of these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def kda_inputs(
    lengths: list[int],
    *,
    gate: Gate = "mixed",
    keys: Keys = "random",
    num_heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 24,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Packed:
    """A KDA batch: `q`, `k`, `v` in `dtype`, the rest fp32 (fp64 for fp64).

    Gates: exactly at the bound of -5; within 1e-4 of 0; sigmoids of noise over the whole range; or
    without a bound, down to about -60. Keys: independent; one per head for all tokens; a cosine of
    about 0.99 between any two. With the last two `beta` is close to 1, where chunked forms cancel.
    """
    draw = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    shape = (num_tokens, num_heads, key_dim)
    noise = normal(*shape)
    g = {
        "bound": torch.full_like(noise, GATE_BOUND),
        "near_zero": -1e-4 * torch.sigmoid(noise),
        "mixed": GATE_BOUND * torch.sigmoid(2 * noise),
        "unbounded": -F.softplus(8 * noise) * torch.linspace(0.1, 3, num_heads)[:, None],
    }[gate]
    one_key, spread = normal(num_heads, key_dim), normal(*shape)
    k = {
        "random": spread,
        "repeated": one_key.expand(shape),
        "near_parallel": F.normalize(one_key, dim=-1) + 0.1 * F.normalize(spread, dim=-1),
    }[keys]
    beta_logits = normal(num_tokens, num_heads) + (0.0 if keys == "random" else 6.0)
    wide = torch.promote_types(dtype, torch.float32)
    return Packed(
        tokens={
            "q": (F.normalize(normal(*shape), dim=-1) * key_dim**-0.5).to(dtype),
            "k": F.normalize(k, dim=-1).to(dtype),
            "v": normal(num_tokens, num_heads, value_dim).to(dtype),
            "g": g.to(wide),
            "beta": torch.sigmoid(beta_logits).to(wide),
        },
        states={"initial_state": normal(len(lengths), num_heads, key_dim, value_dim).to(wide)},
        weights={},
        cu_seqlens=boundaries(lengths),
    )


def short_conv_inputs(
    lengths: list[int],
    *,
    num_channels: int = 5,
    width: int = 4,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Packed:
    """A short-convolution batch: `x` and the state in `dtype`, the weight fp32 (fp64 for fp64)."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    return Packed(
        tokens={"x": normal(sum(lengths), num_channels).to(dtype)},
        states={"initial_state": normal(len(lengths), num_channels, width - 1).to(dtype)},
        weights={
            "weight": normal(num_channels, width).to(torch.promote_types(dtype, torch.float32))
        },
        cu_seqlens=boundaries(lengths),
    )


def outcome(op: Op, batch: Packed) -> dict[str, torch.Tensor]:
    """Outputs, final states and the gradient of one fixed random sum of both, all on the CPU."""
    leaves = batch.map(lambda x: x.detach().clone().requires_grad_())
    outputs, final_state = op(leaves)
    draw = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for x in (outputs, final_state):
        probe = torch.randn(x.shape, generator=draw, dtype=torch.float64)
        total = total + (x.cpu().double() * probe).sum()
    total.backward()
    result = {"outputs": outputs.detach().cpu(), "final_state": final_state.detach().cpu()}
    for name, x in leaves.floats.items():
        assert x.grad is not None, f"no gradient reached {name}"
        result[f"d_{name}"] = x.grad.cpu()
    return result


def relative_error(x: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference over the norm of `exact`; nan if x holds a nan."""
    distance = torch.linalg.vector_norm(x.double() - exact)
    return float(distance / torch.linalg.vector_norm(exact).clamp(min=1e-30))


def assert_within_budget(
    op: Op,
    reference: Op,
    batch: Packed,
    *,
    plain: Op | None = None,
    device: torch.device | str = "cpu",
    rounding_steps: float = 6.0,
) -> None:
    """Every output and gradient of `op` is about as close to fp64 as plain code in its precision.

    The budget of each tensor is twice the error of `plain` (the reference itself by default) on the
    same batch, plus `rounding_steps` units of rounding of its dtype (of fp32 for a wider result).
    `reference` runs on the CPU in fp64; `op` on `device`.
    """
    exact = outcome(reference, batch.map(lambda x: x.double()))
    usual = outcome(plain or reference, batch)
    got = outcome(op, batch.to(device))
    for name, x in got.items():
        error, allowed = relative_error(x, exact[name]), relative_error(usual[name], exact[name])
        band = rounding_steps * torch.finfo(x.dtype).eps / 2
        assert x.dtype == usual[name].dtype, f"{name}: {x.dtype}, not {usual[name].dtype}"
        assert error <= 2 * allowed + band, (
            f"{name}: error {error:.2e} against fp64, allowed {2 * allowed + band:.2e} "
            f"(plain code has {allowed:.2e})"
        )


def one_by_one(op: Op) -> Op:
    """`op` on each sequence of the batch by itself."""

    def run(batch: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, final_states = [], []
        edges = batch.cu_seqlens.tolist()
        for n, length in enumerate(batch.lengths):
            single = Packed(
                tokens={name: x[edges[n] : edges[n + 1]] for name, x in batch.tokens.items()},
                states={name: x[n : n + 1] for name, x in batch.states.items()},
                weights=batch.weights,
                cu_seqlens=boundaries([length]).to(batch.cu_seqlens.device),
            )
            output, final_state = op(single)
            outputs.append(output)
            final_states.append(final_state)
        return torch.cat(outputs), torch.cat(final_states)

    return run


def in_two_parts(op: Op, second: Op | None = None, *, tail: int | None = None) -> Op:
    """`op` on the first part of each sequence, then `second` (or `op`) on the rest from its state.

    Sequences are cut in the middle, or `tail` tokens before their end.
    """

    def run(batch: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        starts = batch.cu_seqlens.tolist()[:-1]
        heads = [n // 2 if tail is None else max(n - tail, 0) for n in batch.lengths]
        first_rows = _ranges(starts, heads)
        rest = [n - head for n, head in zip(batch.lengths, heads, strict=True)]
        second_rows = _ranges([s + h for s, h in zip(starts, heads, strict=True)], rest)
        first_part = _rows(batch, first_rows, heads)
        first_output, state = op(first_part)
        name = next(iter(batch.states))
        second_part = replace(_rows(batch, second_rows, rest), states={name: state})
        second_output, final_state = (second or op)(second_part)
        rows = torch.cat([first_rows, second_rows]).argsort().to(first_output.device)
        return torch.cat([first_output, second_output])[rows], final_state

    return run


def _ranges(starts: list[int], lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])


def _rows(batch: Packed, rows: torch.Tensor, lengths: list[int]) -> Packed:
    device = batch.cu_seqlens.device
    return replace(
        batch,
        tokens={name: x[rows.to(x.device)] for name, x in batch.tokens.items()},
        cu_seqlens=boundaries(lengths).to(device),
    )


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors hold NaN while this is open, so that reading before writing shows."""
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
