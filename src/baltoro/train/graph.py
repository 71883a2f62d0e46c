"""Forward and backward of a micro-batch as one CUDA graph, for steps that wait for launches.

A graph is made of one shape: the number of tokens, a bound on the number of sequences, and whether
attention logits are measured. The first
micro-batch of a shape runs as it always does, which also compiles every kernel; the second is
captured, and from then on its inputs are copied into place and the launches replayed. Gradients add
up in the buffers that the first run left, so the optimizer finds them where it always does.

Graphs share one memory pool, apart from that of eager steps: whatever runs eagerly beside them
(batches with pictures, and measurements of logits by an operator that waits for the device) needs
its activations once more.
"""

import gc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baltoro.data.pack import PackedBatch
from baltoro.optim.grad_clip import by_dtype


class DeviceBatch(NamedTuple):
    """A micro-batch without pictures, on the device."""

    tokens: Tensor  # int64 [T]
    targets: Tensor  # int64 [T], -100 where the weight is zero
    weights: Tensor  # fp32 [T]
    cu_seqlens: Tensor  # int32 [N + 1]
    total_weight: Tensor  # fp32 [], of the whole step


Losses = tuple[Tensor, ...]
Result = tuple[Losses, Mapping[str, Tensor]]  # and the largest attention logits, if measured
Run = Callable[[DeviceBatch], Result]
Kind = tuple[int, bool]  # positions of the step, and whether logits are measured
Key = tuple[int, int, Kind]


def device_batch(
    batch: PackedBatch, total_weight: float, device: torch.device, *, is_padded: bool = False
) -> DeviceBatch:
    """`batch` on `device`; `is_padded` adds empty sequences up to a power of two of them.

    Copies do not wait for the device.
    """
    weights_T, targets_T, cu_seqlens = batch.weights, batch.targets, batch.cu_seqlens
    if is_padded:
        num_sequences = len(cu_seqlens) - 1
        missing = (1 << (num_sequences - 1).bit_length()) - num_sequences
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:].expand(missing)])
    # a position without weight needs no target, and no logits
    targets_T = torch.where(weights_T > 0, targets_T, -100)
    parts = [batch.tokens, targets_T, weights_T, cu_seqlens, torch.tensor(total_weight)]
    if device.type == "cuda":
        parts = [part.pin_memory() for part in parts]
    return DeviceBatch(*(part.to(device, non_blocking=True) for part in parts))


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: DeviceBatch
    result: Result


class StepGraphs:
    """The graphs of one learner."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """`parameters` are those whose gradients the captured run writes."""
        self._parameters = parameters
        self._gradients: dict[torch.dtype, dict[str, Tensor]] = {}  # by `grad_dtype` of the run
        self._seen: set[tuple[torch.dtype, Key]] = set()
        self._captured: dict[tuple[torch.dtype, Key], _Captured] = {}
        self._pool: Any = None  # of the first graph, shared by all

    def begin(self) -> None:
        """Zero gradients for a step, in the buffers of earlier ones if there are any."""
        kept = self._gradients.get(self._dtype(), {})
        for name, parameter in self._parameters.items():
            parameter.grad = kept.get(name)
        for same in by_dtype(kept.values()):
            torch._foreach_zero_(same)

    def run(self, run: Run, inputs: DeviceBatch, kind: Kind) -> Result:
        """`run(inputs)`, from the second time that a shape is seen as a graph.

        `run` may not read from the device, and depends on nothing but its inputs, what the model
        holds and `kind`. Raises `RuntimeError` naming the setting if it does.
        """
        dtype = self._dtype()
        key = (dtype, (len(inputs.tokens), len(inputs.cu_seqlens), kind))
        if key in self._captured:
            captured = self._captured[key]
            for place, value in zip(captured.inputs, inputs, strict=True):
                place.copy_(value)
        elif key not in self._seen or dtype not in self._gradients:
            self._seen.add(key)
            result = run(inputs)
            self._gradients.setdefault(
                dtype,
                {n: p.grad for n, p in self._parameters.items() if p.grad is not None},
            )
            return result
        else:
            captured = self._captured[key] = self._capture(run, inputs)
        captured.graph.replay()
        return captured.result

    def _capture(self, run: Run, inputs: DeviceBatch) -> _Captured:
        gc.collect()  # a graph of another learner, freed in the middle, would spoil the capture
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                result = run(inputs)
        except RuntimeError as error:
            raise RuntimeError(
                "step.use_cuda_graph=True: an operator of the model waits for the device, so the "
                f"step cannot be captured ({error}); use the operators of a GPU "
                "(`recipes.pretrain` with is_gpu) or set it to False"
            ) from error
        self._pool = self._pool or graph.pool()
        return _Captured(graph, inputs, result)

    def _dtype(self) -> torch.dtype:
        dtype = next(iter(self._parameters.values())).grad_dtype
        assert dtype is not None, "set by the step"
        return dtype
