"""Everything a run needs to continue as if it had not stopped, in one checkpoint.

Weights as fp32 masters, momenta, moments, router biases, the data's cursor, the random generators,
the counts of the learner and the losses by which spikes are told. The weights stand once more
beside it in the official layout, to use.
"""

import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baltoro import config as plain
from baltoro.checkpoint.directory import whole_directory, write_file
from baltoro.checkpoint.save import save
from baltoro.train.batches import BatchSource
from baltoro.train.folder import MODEL, RunFolder
from baltoro.train.learner import Learner

VERSION = 2
TENSORS_FILE = "state.safetensors"
RECORD_FILE = "state.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRecord:
    """What of a checkpoint is no tensor; stored as JSON."""

    version: int
    digest: str  # of the configuration, without how often a run looks up
    num_steps: int
    num_tokens: int
    seconds: float  # spent training so far, in all processes
    recent_losses: tuple[float, ...]  # by which a spike is told


def save_state(
    folder: RunFolder,
    learner: Learner,
    source: BatchSource,
    *,
    digest: str,
    seconds: float,
    recent_losses: Sequence[float],
) -> Path:
    """Write the checkpoint of the learner's step and return its path.

    One that is already there is left alone: a step has one outcome. An error or a kill at any
    moment leaves earlier checkpoints as they are.
    """
    target = folder.checkpoint(learner.num_steps)
    if target.exists():
        return target
    record = StateRecord(
        version=VERSION,
        digest=digest,
        num_steps=learner.num_steps,
        num_tokens=learner.num_tokens,
        seconds=seconds,
        recent_losses=tuple(recent_losses),
    )
    content = plain.to_dict(record) | {
        "cursor": dict(source.state_dict()),
        "python_random": random.getstate(),
    }
    with whole_directory(target, overwrite=True) as directory:
        tensors = {name: tensor.detach().cpu() for name, tensor in _tensors(learner).items()}
        save_file(tensors | _generators(), directory / TENSORS_FILE)
        _sync(directory / TENSORS_FILE)
        write_file(directory / RECORD_FILE, (json.dumps(content, indent=1) + "\n").encode())
        save(learner.model, directory / MODEL)
    return target


def load_state(path: Path, learner: Learner, source: BatchSource, *, digest: str) -> StateRecord:
    """Bring learner, source and random generators to where `save_state` left them.

    Raises `ValueError` if the checkpoint was written by another version, configuration, model or
    data.
    """
    content = json.loads((path / RECORD_FILE).read_text())
    if content.get("version") != VERSION:
        raise ValueError(
            f"{path}: version={content.get('version')!r}, this program reads {VERSION}; "
            "start a new run"
        )
    cursor, python_random = content.pop("cursor"), content.pop("python_random")
    record = plain.from_dict(StateRecord, content)
    if record.digest != digest:
        raise ValueError(
            f"{path}: was trained with another configuration (RUN/config.json has it); continue "
            "with that one, or give another --out"
        )
    tensors = load_file(path / TENSORS_FILE)
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition("/")
        parts.setdefault(part, {})[rest] = tensor
    learner.model.load_state_dict(parts["model"])
    learner.optimizer.load_state_dict(parts["optim"])
    if learner.balancer is not None:
        learner.balancer.load_state_dict(parts["balance"])
    source.load_state_dict(cursor)
    learner.num_steps, learner.num_tokens = record.num_steps, record.num_tokens
    _restore_generators(parts["random"], python_random)
    return record


def seed_generators(seed: int) -> None:
    """Begin the random numbers of Python, NumPy and torch anew, as a function of `seed`."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _tensors(learner: Learner) -> dict[str, Tensor]:
    found = {f"model/{name}": tensor for name, tensor in learner.model.state_dict().items()}
    found |= {f"optim/{name}": value for name, value in learner.optimizer.state_dict().items()}
    if learner.balancer is not None:
        # the biases are the model's own buffers, but safetensors refuses one memory twice
        state = learner.balancer.state_dict()
        found |= {f"balance/{name}": tensor.clone() for name, tensor in state.items()}
    return found


def _generators() -> dict[str, Tensor]:
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    assert kind == "MT19937"
    found = {
        "random/torch": torch.get_rng_state(),
        "random/numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "random/numpy_place": torch.tensor([place, has_gauss], dtype=torch.int64),
        "random/numpy_gauss": torch.tensor([gauss], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        found["random/cuda"] = torch.cuda.get_rng_state()
    return found


def _restore_generators(states: Mapping[str, Tensor], python_random: list[Any]) -> None:
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    place, has_gauss = states["numpy_place"].tolist()
    keys = states["numpy"].numpy().astype(np.uint32)
    gauss = float(states["numpy_gauss"])
    np.random.set_state(("MT19937", keys, place, has_gauss, gauss))
    version, internal, gauss_next = python_random
    random.setstate((version, tuple(internal), gauss_next))


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
