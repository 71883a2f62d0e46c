"""Initial values of every tensor, and the check that none was forgotten.

Report section 2.1.1: A_log 0, dt_bias so that softplus(dt_bias) is log-uniform in [1e-3, 1e-1]
(Mamba); section 2.2: pseudo-queries 0, so every read starts as the plain mean; matrices and
embedding normal with std 0.02; vision as the released code builds it.
"""

import math

import torch
from torch import Tensor, nn

DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 1e-1, 1e-4


def init_weights(model: nn.Module, *, generator: torch.Generator | None = None) -> None:
    """Fill every parameter and buffer of a `Model` in place.

    `model.config` gives the standard deviation. Raises `ValueError` naming a tensor without a rule.
    """
    config = model.config
    std = config.initializer_range  # type: ignore[union-attr]
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            _init(name, tensor, std, generator)  # type: ignore[arg-type]
        if config.pad_token_id is not None:  # type: ignore[union-attr]
            model.embed_tokens.weight[config.pad_token_id] = 0.0  # type: ignore


def _init(name: str, tensor: Tensor, std: float, generator: torch.Generator | None) -> None:
    module, _, leaf = name.rpartition(".")
    owner = module.rpartition(".")[2]
    if "norm" in owner:
        tensor.fill_(1.0)
    elif leaf in ("A_log", "expert_bias") or owner.endswith("_res_proj"):
        tensor.zero_()
    elif leaf == "dt_bias":
        _init_dt_bias(tensor, generator)
    elif owner.endswith("conv1d"):
        bound = tensor.shape[-1] ** -0.5  # torch's rule for a depthwise convolution
        tensor.uniform_(-bound, bound, generator=generator)
    elif owner == "gate":
        bound = tensor.shape[-1] ** -0.5  # kaiming_uniform(a=sqrt 5), as the released router
        tensor.uniform_(-bound, bound, generator=generator)
    elif name.startswith(("vision_tower.", "mm_projector.")):
        _init_vision(name, tensor, generator)
    elif leaf.endswith(("_packed", "_scale")):
        tensor.zero_()
    elif leaf == "weight" or owner == "experts":
        tensor.normal_(0.0, std, generator=generator)
    else:
        raise ValueError(f"{name}: no initial value is defined for this tensor")


def _init_dt_bias(tensor: Tensor, generator: torch.Generator | None) -> None:
    tensor.uniform_(math.log(DT_MIN), math.log(DT_MAX), generator=generator).exp_()
    tensor.clamp_(min=DT_FLOOR)
    tensor.add_(torch.log(-torch.expm1(-tensor)))  # inverse of softplus


def _init_vision(name: str, tensor: Tensor, generator: torch.Generator | None) -> None:
    fan_in = tensor[0].numel()
    if "pos_emb" in name:
        tensor.normal_(0.0, 1.0, generator=generator)
    elif ".mlp." in name or name.startswith("mm_projector."):
        nn.init.trunc_normal_(tensor, std=math.sqrt(2 / fan_in), generator=generator)
    else:
        bound = fan_in**-0.5  # torch's own rule for linear and convolution weights
        tensor.uniform_(-bound, bound, generator=generator)
