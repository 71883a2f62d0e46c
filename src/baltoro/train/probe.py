"""A look inside the model on one held-out microbatch, for the report.

    kda/half_life     by layer and head: tokens after which a key channel has decayed to a half,
                      ln 2 / -mean(g); quantiles 0.1, 0.5 and 0.9 over the channels of a head
    attn_res/weights  by read: the softmax over its sources, averaged over tokens
    rms/partial_sum   by layer: root mean square of the sum it hands on
    situ/saturated    by gated MLP: share of gate values beyond the soft cap

Values come from hooks on one forward pass in evaluation mode; the residual weights are computed
again from the sources a layer was given.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from baltoro.data.pack import PackedBatch
from baltoro.model.kda import Kda
from baltoro.model.layer import Layer
from baltoro.model.mlp import Mlp
from baltoro.model.model import Model
from baltoro.model.norm import RmsNorm
from baltoro.ops.kda import log_decay
from baltoro.train.metrics import Value
from baltoro.train.step import run_model

_QUANTILES = (0.1, 0.5, 0.9)


@torch.no_grad()
def probe_model(model: Model, batch: PackedBatch) -> dict[str, Value]:
    """The four tables of the module's docstring, each a mapping by module name."""
    half_lives: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    saturated: dict[str, Any] = {}
    handles: list[Any] = []
    for name, module in model.named_modules():
        if isinstance(module, Kda):
            handles.append(module.f_b_proj.register_forward_hook(_decay(name, module, half_lives)))
        elif isinstance(module, Layer):
            handles += _residual(name, module, weights, sizes)
        elif isinstance(module, Mlp) and model.config.activation == "situ":
            hook = _saturation(name, model.config.situ_beta, saturated)
            handles.append(module.gate_proj.register_forward_hook(hook))
    was_training = model.training
    model.eval()
    try:
        run_model(model, batch)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return {
        "kda/half_life": half_lives,
        "attn_res/weights": weights,
        "rms/partial_sum": sizes,
        "situ/saturated": saturated,
    }


def _decay(name: str, kda: Kda, found: dict[str, Any]) -> Any:
    config = kda.config.kda

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        logits_THK = output.view(-1, config.num_heads, config.head_dim)
        bound = config.gate_lower_bound
        g_THK = log_decay(logits_THK, kda.A_log, kda.dt_bias, lower_bound=bound)
        half_HK = math.log(2) / -g_THK.mean(0).clamp(max=-1e-9)
        quantiles = torch.tensor(_QUANTILES, device=half_HK.device, dtype=half_HK.dtype)
        found[name] = torch.quantile(half_HK, quantiles, dim=1).T.tolist()

    return hook


def _residual(name: str, layer: Layer, weights: dict[str, Any], sizes: dict[str, Any]) -> list[Any]:
    mixed: list[Tensor] = []

    def catch(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        mixed.append(output)

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        partial_sum, blocks = inputs[0], inputs[1]
        y_TD = mixed.pop()
        sizes[name] = float(output.partial_sum.float().square().mean().sqrt())
        if not layer.use_attn_res:
            return
        norm, proj = layer.self_attention_res_norm, layer.self_attention_res_proj
        weights[f"{name}.self_attention"] = mean_weights((*blocks, partial_sum), norm, proj)
        partial_sum = y_TD if layer.starts_block else partial_sum + y_TD
        sources = (*output.blocks, partial_sum)
        weights[f"{name}.mlp"] = mean_weights(sources, layer.mlp_res_norm, layer.mlp_res_proj)

    return [
        layer.self_attn.register_forward_hook(catch),
        layer.register_forward_hook(hook),
    ]


def mean_weights(sources: Sequence[Tensor], norm: RmsNorm, proj: nn.Linear) -> list[float]:
    """The softmax over `sources` (each `[T, D]`) of an attention residual, averaged over tokens."""
    query_D = norm.weight.float() * proj.weight.squeeze(0).float()
    stacked_STD = torch.stack([source.float() for source in sources])
    rms_ST = (stacked_STD.square().mean(-1) + norm.eps).sqrt()
    scores_ST = (stacked_STD @ query_D) / rms_ST
    return scores_ST.softmax(0).mean(1).tolist()


def _saturation(name: str, limit: float, found: dict[str, Any]) -> Any:
    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        found[name] = float((output.abs() > limit).float().mean())

    return hook
