"""A model and what learns with it: optimiser, router balancing, the heads that QK-Clip may scale.

Everything here works on the model's own tensors, so the model must be on its device and in its
dtype before a learner is built.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from baltoro.model.config import ModelConfig
from baltoro.model.mla import Mla
from baltoro.model.model import Model
from baltoro.model.moe import Router
from baltoro.optim.assignment import Assignment, assign
from baltoro.optim.balancing import QuantileBalancer, SignBalancer
from baltoro.optim.config import OptimConfig
from baltoro.optim.optimizer import Optimizer
from baltoro.optim.qk_clip import QkWeights
from baltoro.optim.router_health import warn_if_router_cannot_learn
from baltoro.optim.rules import KdaHeads, Mixer, MlaHeads, k3_structure
from baltoro.train.config import StepConfig
from baltoro.train.graph import StepGraphs

Balancer = QuantileBalancer | SignBalancer


@dataclass(kw_only=True, slots=True)
class Learner:
    """What a step changes."""

    model: Model
    optimizer: Optimizer
    balancer: Balancer | None  # None: the model has no MoE layer
    config: StepConfig
    graphs: StepGraphs | None = None  # None: every step launches its kernels one by one
    num_steps: int = 0  # steps taken, skipped ones included
    num_tokens: int = 0  # positions with loss that were trained on


def build_learner(model: Model, optim: OptimConfig, config: StepConfig) -> Learner:
    """A learner around `model`, which it puts into training mode.

    Raises `ValueError` for a parameter that no rule assigns, and for a router that a balancer
    cannot serve (expert groups), or CUDA graphs without a GPU. Warns of a router that cannot learn.
    """
    parameters = list(model.named_parameters())
    moe = model.config.moe
    balancer = None
    if moe is not None:
        warn_if_router_cannot_learn(
            num_experts_per_token=moe.num_experts_per_token, renormalize=moe.renormalize
        )
        balancer = _balancer(model, config)
        for module in model.modules():
            if isinstance(module, Router):
                module.has_score_gradient = config.balancing == "aux"
    optimizer = Optimizer(parameters, assignment_of(model), optim)
    graphs = None
    if config.use_cuda_graph:
        device = device_of(model)
        if device.type != "cuda":
            raise ValueError(
                f"step.use_cuda_graph=True: the model is on {device}, and CUDA graphs need an "
                "NVIDIA GPU; set it to False"
            )
        graphs = StepGraphs(optimizer.parameters)
    return Learner(
        model=model.train(),
        optimizer=optimizer,
        balancer=balancer,
        config=config,
        graphs=graphs,
    )


def assignment_of(model: Model) -> Assignment:
    """Which optimiser updates which parameter of `model`, also of one on the meta device."""
    parameters = list(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
    return assign(parameters, k3_structure(shapes, mixers_of(model.config)))


def mixers_of(config: ModelConfig) -> dict[str, Mixer]:
    """The head layout of every token mixer by its name in the model."""
    kda, mla = config.kda, config.mla
    layouts: dict[str, Mixer] = {
        "kda": KdaHeads(num_heads=kda.num_heads, head_dim=kda.head_dim),
        "mla": MlaHeads(
            num_heads=mla.num_heads,
            kv_lora_rank=mla.kv_lora_rank,
            qk_nope_head_dim=mla.qk_nope_head_dim,
            qk_rope_head_dim=mla.qk_rope_head_dim,
            v_head_dim=mla.v_head_dim,
        ),
    }
    found = {f"layers.{i}.self_attn": layouts[mixer] for i, mixer in enumerate(config.mixers)}
    for index in range(config.num_mtp_layers):
        found[f"mtp_layers.{index}.self_attn"] = layouts["mla"]
    return found


def router_layers(config: ModelConfig) -> list[str]:
    """Names of the MoE layers, in the order in which a forward pass returns router scores."""
    if config.moe is None:
        return []
    names = [f"layers.{i}" for i in range(config.num_layers) if config.is_moe(i)]
    return names + [f"mtp_layers.{i}" for i in range(config.num_mtp_layers)]


def router_parameter(layer: str) -> str:
    """Name of the router's weight in an MoE layer."""
    return f"{layer}.block_sparse_moe.gate.weight"


def qk_weights(model: Model, masters: dict[str, Tensor], mixer: str) -> QkWeights:
    """The masters of the MLA mixer called `mixer` that QK-Clip scales."""
    mla = model.get_submodule(mixer)
    assert isinstance(mla, Mla)
    config = mla.config.mla
    query = "q_proj" if config.q_lora_rank is None else "q_b_proj"
    return QkWeights(
        query=masters[f"{mixer}.{query}.weight"],
        key_value=masters[f"{mixer}.kv_b_proj.weight"],
        num_heads=config.num_heads,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
    )


def _balancer(model: Model, config: StepConfig) -> Balancer:
    moe = model.config.moe
    assert moe is not None
    if moe.num_expert_groups != 1:
        raise ValueError(
            f"moe.num_expert_groups={moe.num_expert_groups}: balancing serves routers with one "
            "group; train with num_expert_groups=1"
        )
    biases: dict[str, Tensor] = {}
    for layer in router_layers(model.config):
        biases[layer] = model.get_buffer(f"{layer}.block_sparse_moe.gate.expert_bias")
    top_k = moe.num_experts_per_token
    if config.balancing == "quantile":
        return QuantileBalancer(
            biases,
            num_experts_per_token=top_k,
            ema=config.balance_ema,
            # a router in Triton gives its scores where these counts are taken in Triton too
            counts_impl="triton" if model.config.impl.route == "triton" else "torch",
        )
    if config.balancing == "aux":
        # counts loads and leaves the biases at zero: the loss alone balances
        return SignBalancer(biases, num_experts_per_token=top_k, step_size=0.0)
    return SignBalancer(
        biases, num_experts_per_token=top_k, step_size=config.sign_step_size, is_centred=True
    )


def device_of(model: Model) -> torch.device:
    """Where the model is."""
    return model.lm_head.weight.device
