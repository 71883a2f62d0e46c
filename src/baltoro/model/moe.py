"""Stable LatentMoE (report section 2.3, eq. 11-13).

The router reads the full width, the routed experts work in a latent of width Z, their weighted sum
is normalised before it is projected up; the shared experts read the full width. Without a latent
it is Kimi Linear's plain mixture.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from baltoro.model.beside import Fork, at_once
from baltoro.model.config import ModelConfig, MoeConfig
from baltoro.model.joined import Groups, Joined, projected, rejoined
from baltoro.model.mlp import Mlp
from baltoro.model.norm import backbone_norm
from baltoro.ops.moe import Routing, moe_experts, moe_experts_mxfp4, route, router_logits
from baltoro.ops.mxfp4 import GROUP_SIZE, Mxfp4Tensor


class MoeOutput(NamedTuple):
    """What the mixture returns."""

    y: Tensor  # [T, D]
    routing: Routing


class Router(nn.Module):
    """Scores of all experts in fp32 and the choice of A of them per token."""

    expert_bias: Tensor

    def __init__(self, config: MoeConfig, hidden_size: int, impl: str) -> None:
        super().__init__()
        self.config = config
        self.impl = impl
        # set by a trainer whose loss reads the scores (an auxiliary loss); nothing else needs it
        self.has_score_gradient = False
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=torch.float32))

    def forward(self, x_TD: Tensor, replay_ids: Tensor | None = None) -> Routing:
        """`[T, D]` to scores, expert ids and weights; `replay_ids` are choices made elsewhere."""
        config = self.config
        return route(
            router_logits(x_TD, self.weight),
            self.expert_bias,
            num_experts_per_token=config.num_experts_per_token,
            activation=config.router_activation,
            renormalize=config.renormalize,
            scaling_factor=config.routed_scaling_factor,
            num_groups=config.num_expert_groups,
            topk_groups=config.topk_groups,
            has_score_gradient=self.has_score_gradient,
            replay_ids=replay_ids,
            impl=self.impl if replay_ids is None else "torch",
        )


class Experts(nn.Module):
    """The routed experts, stacked: gate rows above up rows."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, width: int) -> None:
        super().__init__()
        inner = moe.expert_intermediate_size
        self.config = config
        self.gate_up_proj = nn.Parameter(torch.empty(moe.num_experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(moe.num_experts, width, inner))

    def forward(self, x_TZ: Tensor, routing: Routing) -> Tensor:
        """`[T, Z]` to the weighted sum of the chosen experts, `[T, Z]`."""
        return moe_experts(
            x_TZ,
            routing.expert_ids,
            routing.weights,
            self.gate_up_proj,
            self.down_proj,
            activation=self.config.activation,
            situ_beta=self.config.situ_beta,
            situ_linear_beta=self.config.situ_linear_beta,
            impl=self.config.impl.moe,
        )


class Mxfp4Experts(nn.Module):
    """The routed experts as the release packs them; for inference only."""

    gate_up_packed: Tensor
    gate_up_scale: Tensor
    down_packed: Tensor
    down_scale: Tensor

    def __init__(self, config: ModelConfig, moe: MoeConfig, width: int) -> None:
        super().__init__()
        experts, inner = moe.num_experts, moe.expert_intermediate_size
        self.config = config
        for name, rows, columns in (("gate_up", 2 * inner, width), ("down", width, inner)):
            codes = torch.zeros(experts, rows, columns // 2, dtype=torch.uint8)
            scales = torch.zeros(experts, rows, columns // GROUP_SIZE, dtype=torch.uint8)
            self.register_buffer(f"{name}_packed", codes)
            self.register_buffer(f"{name}_scale", scales)

    def forward(self, x_TZ: Tensor, routing: Routing) -> Tensor:
        """As `Experts.forward`, decoding the chosen experts only."""
        return moe_experts_mxfp4(
            x_TZ,
            routing.expert_ids,
            routing.weights,
            Mxfp4Tensor(self.gate_up_packed, self.gate_up_scale),
            Mxfp4Tensor(self.down_packed, self.down_scale),
            activation=self.config.activation,
            situ_beta=self.config.situ_beta,
            situ_linear_beta=self.config.situ_linear_beta,
            impl=self.config.impl.moe,
        )


class Moe(nn.Module):
    """The channel mixer of an MoE layer."""

    def __init__(self, config: ModelConfig, moe: MoeConfig) -> None:
        super().__init__()
        size = config.hidden_size
        latent = moe.latent_size
        self.gate = Router(moe, size, config.impl.route)
        experts = Experts if moe.expert_format == "dense" else Mxfp4Experts
        self.experts = experts(config, moe, latent or size)
        self.joined: Joined | None = None
        self.fork: Fork = at_once
        self.has_latent = latent is not None
        self.has_latent_norm = moe.use_latent_norm
        self.has_shared_experts = moe.num_shared_experts > 0
        if latent is not None:
            self.routed_expert_down_proj = nn.Linear(size, latent, bias=False)
            self.routed_expert_up_proj = nn.Linear(latent, size, bias=False)
            if moe.use_latent_norm:
                self.routed_expert_norm = backbone_norm(config, latent)
        if self.has_shared_experts:
            # the shared experts are one MLP of their summed width
            width = moe.num_shared_experts * moe.expert_intermediate_size
            self.shared_experts = Mlp(config, width)

    def forward(self, x_TD: Tensor, replay_ids: Tensor | None = None) -> MoeOutput:
        """`[T, D]` to `[T, D]` and the routing; `replay_ids` are choices made elsewhere."""
        routed = self.fork(lambda: self.gate(x_TD, replay_ids))
        inputs = projected(x_TD, self._groups(), self.joined)
        latent_TZ = inputs.pop(0) if self.has_latent else x_TD
        shared = None
        if self.has_shared_experts:
            shared = self.fork(lambda: self.shared_experts(x_TD, inputs))
        routing = routed()
        mixed_TZ = self.experts(latent_TZ, routing)
        if self.has_latent and self.has_latent_norm:
            # after the sum over experts: a partial sum of ranks must be reduced before
            mixed_TZ = self.routed_expert_norm(mixed_TZ)
        if self.has_latent and shared is not None and self.joined and not torch.is_grad_enabled():
            y_TD = shared().addmm_(mixed_TZ, self.routed_expert_up_proj.weight.mT)
            return MoeOutput(y_TD, routing)
        y_TD = self.routed_expert_up_proj(mixed_TZ) if self.has_latent else mixed_TZ
        return MoeOutput(y_TD if shared is None else y_TD + shared(), routing)

    def join(self) -> None:
        """Make one product of the input's projections where no gradient is wanted."""
        if self._groups():
            self.joined = rejoined(self._groups(), self.joined)

    def _groups(self) -> Groups:
        """All projections of the input but the router's, which is computed in fp32."""
        latent = [(self.routed_expert_down_proj,)] if self.has_latent else []
        return (*latent, *(self.shared_experts.groups() if self.has_shared_experts else ()))
