"""What a run will need, before its first step: memory by part, and time from one timed microbatch.

Memory of weights, masters, gradients and optimiser state is counted on the real shapes. That of
activations is measured: one KDA and one MLA layer of the model's widths, with few experts, run
forward on the CPU while autograd's saved tensors are counted, and the layers of the model are that
many times as much.
"""

import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from baltoro.model.config import ImplConfig, Mixer, ModelConfig
from baltoro.model.counts import flop_counts, meta_model
from baltoro.model.model import Model
from baltoro.train.config import PretrainConfig
from baltoro.train.learner import assignment_of

_PROBE_TOKENS = 128
_GB = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryForecast:
    """Bytes on the device that trains."""

    state: int  # weights, masters, gradients, momenta and moments
    activations: int  # of one microbatch
    available: int

    @property
    def total(self) -> int:
        return self.state + self.activations

    def describe(self) -> str:
        """One line."""
        return (
            f"memory: {self.total / _GB:.2f} GB ({self.state / _GB:.2f} weights and optimiser, "
            f"{self.activations / _GB:.2f} activations) of {self.available / _GB:.2f} GB free"
        )


def memory_forecast(config: PretrainConfig, device: torch.device) -> MemoryForecast:
    """Prediction for `config` on `device`, and what is free there now."""
    positions = config.data.tokens_per_step // config.data.num_microbatches
    per_position = activation_bytes(config.model, recompute=config.step.recompute)
    # saved tensors of a bf16 run are about half: what stays fp32 in it is small
    scale = 0.5 if config.dtype == "bfloat16" else 1.0
    return MemoryForecast(
        state=state_bytes(
            config.model, config.dtype, num_microbatches=config.data.num_microbatches
        ),
        activations=round(scale * per_position * positions),
        available=available_bytes(device),
    )


def state_bytes(config: ModelConfig, dtype: str, *, num_microbatches: int = 1) -> int:
    """Bytes of weights, gradients, fp32 masters and optimiser state.

    Gradients of several microbatches are fp32 (`train.step`).
    """
    model = meta_model(config)
    if dtype == "bfloat16":
        model.cast(torch.bfloat16)
    groups = {row.name: row.group for row in assignment_of(model).rows}
    total = 0
    for name, parameter in model.named_parameters():
        master = 0 if parameter.dtype == torch.float32 else 4
        moments = 4 if groups[name] == "muon" else 8
        grad = 4 if num_microbatches > 1 else parameter.element_size()
        total += parameter.numel() * (parameter.element_size() + grad + master + moments)
    return total


def activation_bytes(config: ModelConfig, *, recompute: bool) -> float:
    """Bytes that autograd keeps per position of a microbatch, in fp32."""
    if recompute:
        # the inputs of every layer, and one layer at work
        kept = 4 * config.hidden_size * config.num_layers
        return kept + max(_layer_bytes(config, mixer) for mixer in set(config.mixers))
    layers = {mixer: _layer_bytes(config, mixer) for mixer in set(config.mixers)}
    mtp = config.num_mtp_layers * (layers.get("mla") or _layer_bytes(config, "mla"))
    return sum(layers[mixer] for mixer in config.mixers) + mtp + 4 * 2 * config.hidden_size


def saved_bytes(model: Model, num_tokens: int) -> int:
    """Bytes of the distinct tensors that a forward of one sequence keeps, without parameters."""
    parameters = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []  # alive until counted, so that no address comes twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    tokens_T = torch.zeros(num_tokens, dtype=torch.int64)
    cu_seqlens = torch.tensor([0, num_tokens], dtype=torch.int32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens_T, cu_seqlens)
    return sum(sizes.values())


def available_bytes(device: torch.device) -> int:
    """Free memory of a device: the GPU's, or the machine's within its control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    (free,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return max(0, free)


def flops_per_token(config: PretrainConfig) -> float:
    """Forward and backward, averaged over the stages; vision and MTP are not counted."""
    return math.fsum(
        3 * stage.fraction * flop_counts(config.model, stage.seq_len).total
        for stage in config.data.stages
    )


def matmul_rate(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.2) -> float:
    """FLOPs per second of large square products on `device`, measured now.

    What others do on the machine lowers it; a utilisation against it is of what could be had.
    """
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end or best == math.inf:
        start = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def _layer_bytes(config: ModelConfig, mixer: Mixer) -> float:
    """Of one layer, per position: two layers less one, so that the ends of the model fall out."""
    sizes = []
    for count in (1, 2):
        model = Model(_shrunk(config, (mixer,) * count)).train()
        sizes.append(saved_bytes(model, _PROBE_TOKENS))
    return (sizes[1] - sizes[0]) / _PROBE_TOKENS


def _shrunk(config: ModelConfig, mixers: tuple[Mixer, ...]) -> ModelConfig:
    moe = config.moe
    if moe is not None:
        # experts that no token visits keep nothing
        num_experts = min(moe.num_experts, 2 * moe.num_experts_per_token)
        moe = dataclasses.replace(
            moe, num_experts=num_experts, num_expert_groups=1, topk_groups=1, first_moe_layer=0
        )
    return dataclasses.replace(
        config,
        mixers=mixers,
        moe=moe,
        vocab_size=2,
        pad_token_id=None,
        vision=None,
        num_mtp_layers=0,
        impl=ImplConfig(),  # the probe runs on the CPU
    )
