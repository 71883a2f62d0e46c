"""fla's operators in the place of ours. How their launch shapes are found is in `fla_tuning.py`."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor

from baltoro.ops.kda import KdaOutput
from baltoro.ops.short_conv import ShortConvOutput

try:
    import fla
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.modules.norm.layernorm import rms_norm as fla_rms_norm
    from fla.ops.attnres import fused_attnres
    from fla.ops.kda import chunk_kda
except ImportError as error:
    fla, chunk_kda = None, None
    WHY_ABSENT = str(error)


class BudgetSpentError(Exception):
    """The seconds that were given are over."""


@contextmanager
def seconds(budget: float) -> Iterator[None]:
    """Raise `BudgetSpentError` in the block once `budget` seconds are over."""

    def stop(*_: object) -> None:
        raise BudgetSpentError(f"{budget:.0f} s were not enough")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(budget, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class _Bounds:
    """The bounds of a pack as int64, converted once for all layers of a step."""

    def __init__(self) -> None:
        self.given: Tensor | None = None
        self.wide: Tensor | None = None

    def __call__(self, cu_seqlens: Tensor) -> Tensor | None:
        if self.given is not cu_seqlens:
            self.given = cu_seqlens
            self.wide = cu_seqlens.long() if len(cu_seqlens) > 2 else None
        return self.wide


_bounds = _Bounds()


def kda(
    q: Tensor, k: Tensor, v: Tensor, decay_logits: Tensor, beta_logits: Tensor, A_log: Tensor,
    dt_bias: Tensor, *, cu_seqlens: Tensor, initial_state: Tensor | None = None,
    gate_lower_bound: float | None, impl: str = "fla",
) -> KdaOutput:  # fmt: skip
    """`baltoro.ops.kda.fused.chunk_kda_fused`, which has no state behind it here."""
    assert initial_state is None and gate_lower_bound is not None, "what the bench runs"
    o, _ = chunk_kda(
        q[None], k[None], v[None], decay_logits[None], beta_logits[None],
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        safe_gate=True, lower_bound=gate_lower_bound, A_log=A_log.float(),
        dt_bias=dt_bias.float(), cu_seqlens=_bounds(cu_seqlens),
    )  # fmt: skip
    return KdaOutput(o[0], None)


def attn_res(
    sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, *, eps: float, impl: str
) -> Tensor:
    return fused_attnres(proj_weight, sources, norm_weight, rms_eps=eps)


def short_conv(
    x: Tensor, weight: Tensor, *, cu_seqlens: Tensor, initial_state: Tensor | None = None,
    impl: str,
) -> ShortConvOutput:  # fmt: skip
    y, _ = causal_conv1d(x[None], weight, activation="silu", cu_seqlens=_bounds(cu_seqlens))
    return ShortConvOutput(y[0], None)


def gated_norm(x: Tensor, weight: Tensor, gate_logits: Tensor, *, eps: float, impl: str) -> Tensor:
    return rms_norm_gated(x, gate_logits, weight, None, activation="sigmoid", eps=eps)


def norm(x: Tensor, weight: Tensor, *, eps: float, impl: str) -> Tensor:
    return fla_rms_norm(x, weight, None, eps=eps)


REPLACED: dict[str, tuple[tuple[str, Callable[..., object]], ...]] = {
    "kda": (("baltoro.model.kda.chunk_kda_fused", kda),),
    "attn_res": (("baltoro.ops.residual.attn_res_mix", attn_res),),
    "short_conv": (("baltoro.model.kda.short_conv", short_conv),),
    "rms_norm": (
        ("baltoro.model.kda.gated_rms_norm", gated_norm),
        ("baltoro.model.norm.rms_norm", norm),
        ("baltoro.ops.residual.rms_norm", norm),
    ),
}


@contextmanager
def replaced(names: Sequence[str]) -> Iterator[None]:
    """Have the model call fla's operators where it calls ours, while the block runs."""
    if names and chunk_kda is None:
        raise SystemExit(f"bench: fla cannot be imported: {WHY_ABSENT}")
    with ExitStack() as stack:
        for name in names:
            for place, function in REPLACED[name]:
                stack.enter_context(mock.patch(place, function))
        yield


def version() -> str:
    """What is measured."""
    return f"fla {fla.__version__}, torch {torch.__version__}"
