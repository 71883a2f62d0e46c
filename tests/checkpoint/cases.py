"""Golden checkpoints to copy and spoil, and a configuration with everything in it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from model.tiny import VISION, tiny_k3
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from baltoro.model.config import ModelConfig
from baltoro.model.model import Model

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = ("k3-mini", "k3-mini-long", "kimi-linear-mini", "k3-vision-mini", "k3-mxfp4-mini")


def copy(case: str, target: Path) -> Path:
    """A copy of a golden checkpoint without its golden outputs."""
    shutil.copytree(GOLDEN / case, target, ignore=shutil.ignore_patterns("golden.*", "codes.*"))
    return target


def tensors(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def edit_tensors(directory: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    """Applies `edit` to the tensors of a one-file checkpoint in place."""
    held = tensors(directory)
    edit(held)
    save_file(held, directory / "model.safetensors")


def edit_config(directory: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Applies `edit` to the parsed config.json in place."""
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))


def shard(directory: Path, num_shards: int = 3) -> None:
    """Cuts a one-file checkpoint into shards with an index, names dealt out in turn."""
    held = tensors(directory)
    names = sorted(held)
    weight_map = {}
    for number in range(num_shards):
        file = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        mine = names[number::num_shards]
        save_file({name: held[name] for name in mine}, directory / file)
        weight_map |= dict.fromkeys(mine, file)
    (directory / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def headers(directory: Path) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of every tensor, over all files."""
    found = {}
    for path in directory.glob("model*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                view = file.get_slice(name)
                found[name] = (view.get_dtype(), view.get_shape())
    return found


def everything() -> ModelConfig:
    """K3-shaped with vision and two MTP layers, its experts wide enough for MXFP4."""
    config = tiny_k3()
    assert config.moe is not None
    moe = replace(config.moe, latent_size=32, expert_intermediate_size=32)
    return replace(config, moe=moe, vision=VISION, num_mtp_layers=2)


def random_model(config: ModelConfig) -> Model:
    """A model whose tensors are all different from one another and from their initial values."""
    model = Model(config)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(torch.randn_like(tensor))
    return model


def state(model: Model) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])
