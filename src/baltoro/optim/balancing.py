"""Router balancing without gradients: the bias of every MoE layer after a step.

Quantile Balancing jumps to the bias under which the step's tokens would have been spread evenly
(report section 2.3.3, app. D; mathematics in `ops.quantile`). The sign rule of DeepSeek-V3 moves
every bias by a fixed size and is here to compare with. Both use the new bias from the next step on,
and count a token once.

A balancer works on the model's own bias buffers, in place: build it after the model is on its
device. It serves routers with one expert group; with more, the cutoffs it takes would not be the
router's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from baltoro.ops.quantile import expert_loads, histogram_bias, margin_counts

Phase = Literal["train", "recompute", "eval"]
AllReduce = Callable[[Tensor], Tensor]


def identity(counts: Tensor) -> Tensor:
    """The all-reduce of a single process."""
    return counts


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBalance:
    """What one layer's router did in the step that an update closed."""

    loads: Tensor  # [E] int64 on the CPU, tokens per expert
    num_tokens: int
    bias_drift: float  # largest change of a bias by this update

    @property
    def max_vio(self) -> float:
        """(largest load - mean) / mean; 0 is even, and without tokens."""
        return max_vio(self.loads)

    @property
    def num_dead(self) -> int:
        """Experts without a single token."""
        return int((self.loads == 0).sum())


def max_vio(loads: Tensor) -> float:
    """MaxVio of `loads` `[E]`: (max - mean) / mean, 0 when all are zero."""
    mean = float(loads.double().mean())
    return float(loads.max()) / mean - 1.0 if mean > 0.0 else 0.0


class StepCounts:
    """The counts of a step for all layers, in one int32 buffer: one all-reduce serves them all."""

    def __init__(self, biases: Mapping[str, Tensor], *, num_bins: int, top_k: int) -> None:
        """Room for `num_bins` margin bins (0: loads only) of each layer of `biases`."""
        if not biases:
            raise ValueError("biases is empty: a model without MoE layers needs no balancer")
        sizes = []
        for layer, bias in biases.items():
            if bias.dtype != torch.float32 or bias.ndim != 1:
                raise ValueError(f"{layer}: bias is {bias.dtype} {list(bias.shape)}, not fp32 [E]")
            if not 1 <= top_k < bias.shape[0]:
                raise ValueError(
                    f"num_experts_per_token={top_k}: must be between 1 and {bias.shape[0] - 1} "
                    f"for {layer} with {bias.shape[0]} experts"
                )
            sizes.append(bias.shape[0] * (num_bins + 1) + 1)
        device = next(iter(biases.values())).device
        self.flat = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.histograms: dict[str, Tensor] = {}  # [E, B]
        self.loads: dict[str, Tensor] = {}  # [E]
        self.num_tokens: dict[str, Tensor] = {}  # []
        for (layer, bias), part in zip(biases.items(), self.flat.split(sizes), strict=True):
            num_experts = bias.shape[0]
            histogram, loads, tokens = part.split([num_experts * num_bins, num_experts, 1])
            self.histograms[layer] = histogram.view(num_experts, num_bins)
            self.loads[layer] = loads
            self.num_tokens[layer] = tokens[0]

    def reduce(self, all_reduce: AllReduce) -> None:
        """Sum over ranks; every rank calls it, with or without tokens of its own."""
        self.flat.copy_(all_reduce(self.flat))

    def report(
        self, drifts: Mapping[str, Tensor], missing: Mapping[str, Tensor] | None = None
    ) -> dict[str, LayerBalance]:
        """Counts and the largest bias changes as plain numbers, in one transfer.

        `missing` counts the margins of each layer that fell into no bin; raises `ValueError` if
        there are any.
        """
        layers = list(self.loads)
        per_layer = [self.num_tokens, drifts] + ([] if missing is None else [missing])
        columns = [torch.stack([values[layer] for layer in layers]) for values in per_layer]
        # fp64 holds the counts, which are int32, and the changes, which are fp32
        flat = torch.cat([part.double() for part in (*self.loads.values(), *columns)]).cpu()
        sizes = [len(part) for part in self.loads.values()]
        *loads, numbers = flat.split([*sizes, len(layers) * len(columns)])
        tokens, changes, *rest = numbers.view(len(columns), -1).tolist()
        bad = {
            layer: int(count)
            for column in rest
            for layer, count in zip(layers, column, strict=True)
            if count
        }
        if bad:
            raise ValueError(
                f"router scores were NaN or outside [0, 1], by layer: {bad}; "
                "give scores before the bias, and stop on NaN"
            )
        return {
            layer: LayerBalance(loads=part.long(), num_tokens=int(count), bias_drift=change)
            for layer, part, count, change in zip(layers, loads, tokens, changes, strict=True)
        }


class QuantileBalancer:
    """Quantile Balancing over the micro-batches and ranks of a step."""

    def __init__(
        self,
        biases: Mapping[str, Tensor],
        *,
        num_experts_per_token: int,
        num_bins: int = 1000,
        ema: float = 0.0,
        all_reduce: AllReduce = identity,
        impl: str = "torch",
        counts_impl: str = "torch",
    ) -> None:
        """`biases` maps a layer's name to its fp32 bias buffer `[E]`, which updates write.

        `ema` is the weight of the old bias in the new one (0: the report's form). `all_reduce` sums
        an int32 vector over the ranks that hold other tokens of the step. `counts_impl` is that of
        `margin_counts`, `impl` that of `histogram_bias`.
        """
        if num_bins < 1:
            raise ValueError(f"num_bins={num_bins}: must be at least 1")
        if not 0.0 <= ema < 1.0:
            raise ValueError(f"ema={ema}: must be in [0, 1)")
        self.biases = dict(biases)
        self.top_k = num_experts_per_token
        self.ema = ema
        self.all_reduce = all_reduce
        self.impl = impl
        self.counts_impl = counts_impl
        self.counts = StepCounts(biases, num_bins=num_bins, top_k=num_experts_per_token)

    @torch.no_grad()
    def observe(
        self, layer: str, scores: Tensor, *, phase: Phase, mask: Tensor | None = None
    ) -> None:
        """Count the router scores `[T, E]` of one micro-batch; `mask` `[T]` is False on padding.

        Only `phase="train"` counts: a recomputed forward and an evaluation pass say so and change
        nothing.
        """
        if not _is_counted(phase):
            return
        found = margin_counts(
            scores,
            _bias(self.biases, layer),
            num_experts_per_token=self.top_k,
            num_bins=self.counts.histograms[layer].shape[1],
            mask=mask,
            impl=self.counts_impl,
        )
        self.counts.histograms[layer] += found.histogram
        self.counts.loads[layer] += found.loads
        self.counts.num_tokens[layer] += found.num_tokens

    @torch.no_grad()
    def update(self) -> dict[str, LayerBalance]:
        """Set the next step's biases, forget the counts, and say what the step's loads were.

        A layer that saw no token keeps its bias. Raises `ValueError` naming the layers whose scores
        were NaN or outside [0, 1]; no bias is changed then.
        """
        counts = self.counts
        counts.reduce(self.all_reduce)
        try:
            new, report = self._new_biases()
        finally:
            self.discard()
        for layer, bias in self.biases.items():
            bias.copy_(new[layer])
        return report

    def _new_biases(self) -> tuple[dict[str, Tensor], dict[str, LayerBalance]]:
        counts = self.counts
        new: dict[str, Tensor] = {}
        drifts: dict[str, Tensor] = {}
        missing: dict[str, Tensor] = {}
        for layers in _of_one_size(self.biases):
            biases = torch.stack([self.biases[layer] for layer in layers])
            histograms = torch.stack([counts.histograms[layer] for layer in layers])
            tokens = torch.stack([counts.num_tokens[layer] for layer in layers])
            found = self._next_biases(histograms, tokens, biases).lerp(biases, self.ema)
            changes = (found - biases).abs().amax(1)
            gaps = (tokens[:, None] - histograms.sum(2)).sum(1)
            new |= dict(zip(layers, found, strict=True))
            drifts |= dict(zip(layers, changes, strict=True))
            missing |= dict(zip(layers, gaps, strict=True))
        return new, counts.report(drifts, missing)

    def _next_biases(self, histograms: Tensor, num_tokens: Tensor, biases: Tensor) -> Tensor:
        """Of all layers `[L, E]` at once, but with the reference, which reads values."""
        if self.impl == "torch":
            return torch.vmap(self._next_bias)(histograms, num_tokens, biases)
        layers = zip(histograms, num_tokens, biases, strict=True)
        return torch.stack([self._next_bias(*layer) for layer in layers])

    def _next_bias(self, histogram: Tensor, num_tokens: Tensor, bias: Tensor) -> Tensor:
        return histogram_bias(
            histogram, num_tokens, bias, num_experts_per_token=self.top_k, impl=self.impl
        )

    def discard(self) -> None:
        """Forget the open step's counts and keep the biases; for a step that is skipped."""
        self.counts.flat.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """`bias.LAYER` fp32 `[E]` and `counts`, the open step's int32 counts; live tensors, not
        copies.

        The range of the histogram follows from the biases.
        """
        return _state(self.biases, self.counts)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave, bit for bit; raises `ValueError` if it does not fit."""
        _load(self.state_dict(), state)


class SignBalancer:
    """The loss-free baseline (arXiv 2408.15664): b_j += u sign(mean load - load_j)."""

    def __init__(
        self,
        biases: Mapping[str, Tensor],
        *,
        num_experts_per_token: int,
        step_size: float = 1e-3,
        is_centred: bool = False,
        all_reduce: AllReduce = identity,
    ) -> None:
        """As `QuantileBalancer`; `is_centred` subtracts the mean sign (Moonlight's form).

        `step_size` 0 leaves the biases alone and only counts loads, for a run with
        `auxiliary_loss`.
        """
        if not step_size >= 0.0:
            raise ValueError(f"step_size={step_size}: must not be negative")
        self.biases = dict(biases)
        self.top_k = num_experts_per_token
        self.step_size = step_size
        self.is_centred = is_centred
        self.all_reduce = all_reduce
        self.counts = StepCounts(biases, num_bins=0, top_k=num_experts_per_token)

    @torch.no_grad()
    def observe(
        self, layer: str, scores: Tensor, *, phase: Phase, mask: Tensor | None = None
    ) -> None:
        """As `QuantileBalancer.observe`."""
        if not _is_counted(phase):
            return
        bias = _bias(self.biases, layer)
        loads = expert_loads(scores, bias, num_experts_per_token=self.top_k, mask=mask)
        self.counts.loads[layer] += loads.int()
        self.counts.num_tokens[layer] += len(scores) if mask is None else mask.sum().int()

    @torch.no_grad()
    def update(self) -> dict[str, LayerBalance]:
        """As `QuantileBalancer.update`."""
        self.counts.reduce(self.all_reduce)
        drifts = {}
        for layer, bias in self.biases.items():
            loads = self.counts.loads[layer].double()
            sign = (loads.mean() - loads).sign()
            if self.is_centred:
                sign = sign - sign.mean()
            change = (self.step_size * sign).to(bias.dtype)
            drifts[layer] = change.abs().max()
            bias.add_(change)
        report = self.counts.report(drifts)
        self.discard()
        return report

    def discard(self) -> None:
        """As `QuantileBalancer.discard`."""
        self.counts.flat.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """As `QuantileBalancer.state_dict`."""
        return _state(self.biases, self.counts)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """As `QuantileBalancer.load_state_dict`."""
        _load(self.state_dict(), state)


def auxiliary_loss(
    scores: Tensor, bias: Tensor, *, num_experts_per_token: int, mask: Tensor | None = None
) -> Tensor:
    """The load-balancing loss sum_j f_j P_j of one micro-batch, `[]`, at least about 1; the older
    alternative.

        f_j = E / (A T) sum_t [t chose j]        P_j = 1 / T sum_t s_tj / sum_i s_ti

    The form over all tokens together, not the one by sequence: that is what the loss-free paper
    measures against (arXiv 2408.15664, coefficient 1e-3; `k3-recipe` 5.2). Sigmoid scores do not
    sum to one, so they are divided by their sum, as DeepSeek-V3 does (arXiv 2412.19437, 2.1.2).
    `scores` `[T, E]` must carry gradient; f_j has none. The caller multiplies by its coefficient.
    Zero without tokens.
    """
    loads = expert_loads(
        scores.detach(), bias, num_experts_per_token=num_experts_per_token, mask=mask
    )
    kept = scores if mask is None else scores[mask]
    if kept.shape[0] == 0:
        return kept.sum()
    fractions = loads.to(kept.dtype) * (len(loads) / (len(kept) * num_experts_per_token))
    return (fractions * (kept / kept.sum(1, keepdim=True)).mean(0)).sum()


def _of_one_size(biases: Mapping[str, Tensor]) -> list[list[str]]:
    """Layers by their number of experts: those of one size are worked on together."""
    sizes: dict[int, list[str]] = {}
    for layer, bias in biases.items():
        sizes.setdefault(len(bias), []).append(layer)
    return list(sizes.values())


def _is_counted(phase: Phase) -> bool:
    if phase not in get_args(Phase):
        raise ValueError(f"phase={phase!r}: must be one of {', '.join(get_args(Phase))}")
    return phase == "train"


def _bias(biases: Mapping[str, Tensor], layer: str) -> Tensor:
    if layer not in biases:
        raise ValueError(f"layer={layer!r} is not balanced here; known are {', '.join(biases)}")
    return biases[layer]


def _state(biases: Mapping[str, Tensor], counts: StepCounts) -> dict[str, Tensor]:
    return {"counts": counts.flat} | {f"bias.{layer}": bias for layer, bias in biases.items()}


def _load(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    if own.keys() != state.keys():
        raise ValueError(f"balancer state has {sorted(state)}, expected {sorted(own)}")
    for key, value in state.items():
        if value.shape != own[key].shape or value.dtype != own[key].dtype:
            raise ValueError(
                f"balancer state {key}: {value.dtype} {list(value.shape)}, expected "
                f"{own[key].dtype} {list(own[key].shape)}"
            )
    for key, value in state.items():
        own[key].copy_(value)
