"""A tiny random checkpoint in the official layout with golden logits: for other projects' CI.

Weights are drawn so that every part matters to the logits (no zero pseudo-query, no equal experts,
no norm of ones), and the logits are those of our reference operators.
"""

import dataclasses
import json
import math
from pathlib import Path

import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

import baltoro
from baltoro.checkpoint.logits import logits
from baltoro.checkpoint.names import fresh_layout, release_tensors
from baltoro.checkpoint.save import (
    EXPERT_FORMATS,
    ExpertFormat,
    fresh_companions,
    write_checkpoint,
)
from baltoro.checkpoint.shards import TORCH_DTYPES
from baltoro.checkpoint.tensors import ModelSource
from baltoro.model.config import ImplConfig, ModelConfig
from baltoro.model.model import Model
from baltoro.model.presets import preset as preset_config
from baltoro.ops.mxfp4 import decode_mxfp4, encode_mxfp4
from baltoro.text.tokenizer import train

GOLDEN_FILE = "golden.safetensors"
MAX_ELEMENTS = 100_000_000
NUM_SPECIALS = 256

README = """\
# {title}

A checkpoint of random weights in the official layout ({family}), written by baltoro {version}:
{elements:,} parameters, experts as {experts}, everything else in fp32.

`{golden}` holds inputs and what the model computes from them on a CPU with baltoro's reference
operators (plain loops, no kernels; logits in fp64 arithmetic, rounded once to fp32):

{contents}

To compare: load the checkpoint in fp32 and run `input_ids` without any cache, every row a sequence
of its own. Of the preset nano (seeds 0 to 3, 80 tokens) baltoro's own fp32 runs stay within 5e-5.

Made by `baltoro fixture {out} {options}`.
"""


def fixture(
    out: str,
    *,
    preset: str = "nano",
    experts: ExpertFormat = "fp32",
    seed: int = 0,
    tokens: int = 80,
    overwrite: bool = False,
) -> None:
    """Write a random checkpoint in the official layout with golden logits of the reference.

    Args:
        out: directory to write; an existing checkpoint there is replaced
        preset: name of a small preset
        experts: format of the routed experts on disk
        seed: of weights and inputs
        tokens: length of each of the two golden sequences
        overwrite: replace OUT even if it holds something else than a checkpoint
    """
    config = preset_config(preset)
    if experts not in EXPERT_FORMATS:
        raise ValueError(f"experts={experts!r}: choose one of {', '.join(EXPERT_FORMATS)}")
    if not 1 <= tokens <= config.max_seq_len:
        raise ValueError(f"tokens={tokens}: must be between 1 and {config.max_seq_len}")
    layout = fresh_layout(config, dtype="F32", experts=EXPERT_FORMATS[experts])
    tensors = list(release_tensors(config, layout))
    elements = sum(tensor.num_elements for tensor in tensors)
    if elements > MAX_ELEMENTS:
        raise ValueError(
            f"preset={preset!r}: has {elements:,} parameters; a fixture is for presets of at most "
            f"{MAX_ELEMENTS:,}, such as 'nano'"
        )
    model = random_model(config, experts, seed=seed)
    inputs = golden_inputs(config, seed=seed, length=tokens)
    golden = golden_outputs(model, inputs)
    contents = "\n".join(f"- `{key}` {list(value.shape)}" for key, value in golden.items())
    readme = README.format(
        title=Path(out).absolute().name,
        family="Kimi K3" if layout.wrapped else "Kimi Linear",
        version=baltoro.__version__,
        elements=elements,
        golden=GOLDEN_FILE,
        contents=contents,
        experts=experts,
        out=Path(out).name,
        options=f"--preset {preset} --experts {experts} --seed {seed} --tokens {tokens}",
    )
    generation = {"do_sample": True, "temperature": 1.0, "top_p": 1.0}
    if model.tokenizer is not None:
        generation["eos_token_id"] = model.tokenizer.stop_ids[0]
    write_checkpoint(
        Path(out),
        config,
        layout,
        tensors,
        ModelSource(dict([*model.named_parameters(), *model.named_buffers()])),
        companions={
            **fresh_companions(model),
            "generation_config.json": (json.dumps(generation, indent=2) + "\n").encode(),
            "README.md": readme.encode(),
            GOLDEN_FILE: safetensors_bytes(golden),
        },
        release=None,
        overwrite=overwrite,
    )


def random_model(config: ModelConfig, experts: ExpertFormat, *, seed: int) -> Model:
    """A model with reference operators and weights that survive the expert format unchanged.

    Its tokenizer has bytes and special tokens only, if the vocabulary has the size of that.
    """
    model = Model(dataclasses.replace(config, impl=ImplConfig.all("reference"))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            _randomize(name, tensor, generator)
            if ".experts." in name:
                tensor.copy_(_through(tensor, experts))
    if config.vocab_size == 256 + NUM_SPECIALS:
        model.tokenizer = train([], config.vocab_size, NUM_SPECIALS)
    return model


def golden_inputs(config: ModelConfig, *, seed: int, length: int) -> dict[str, Tensor]:
    """Ids `[2, length]`; for a model that sees, a picture in the first row, if there is room."""
    generator = torch.Generator().manual_seed(seed + 1)
    # special tokens stay out: a placeholder would ask for a picture
    ids = torch.randint(config.vocab_size - NUM_SPECIALS, (2, length), generator=generator)
    inputs = {"input_ids": ids}
    vision = config.vision
    if vision is None or length < 6:
        return inputs
    height, width = 2 * vision.merge_height, 3 * vision.merge_width
    size = vision.patch_size
    pixels = torch.rand(height * width, 3, size, size, generator=generator) * 2 - 1
    ids[0, -6:] = vision.placeholder_token_id
    return inputs | {
        "pixel_values": pixels,
        "grid_thws": torch.tensor([[1, height, width]]),
    }


def golden_outputs(model: Model, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """`inputs` with the logits `[2, T, W]` and, with a picture, its features `[rows, D]`."""
    with torch.no_grad():
        outputs = {"logits": logits(model, **inputs)}
        if "pixel_values" in inputs:
            outputs["features"] = model.encode_images(inputs["pixel_values"], inputs["grid_thws"])
    return inputs | outputs


def _randomize(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Unit-variance activations throughout, so that no part is small against the others."""
    if "norm" in name:
        tensor.normal_(1.0, 0.1, generator=generator)
    elif name.endswith("A_log"):
        tensor.uniform_(-0.5, 1.0, generator=generator)
    elif name.endswith(("dt_bias", "conv1d.weight")):
        tensor.normal_(0.0, 0.5, generator=generator)
    elif name.endswith("expert_bias"):
        tensor.normal_(0.0, 0.05, generator=generator)
    elif name == "embed_tokens.weight" or name.endswith("pos_emb.weight"):
        tensor.normal_(0.0, 1.0, generator=generator)
    else:
        fan_in = tensor[0].numel() if "experts" not in name else tensor.shape[-1]
        tensor.normal_(0.0, 1.0 / math.sqrt(fan_in), generator=generator)


def _through(weight: Tensor, experts: ExpertFormat) -> Tensor:
    """What is left of a weight after the disk."""
    if experts == "mxfp4":
        return decode_mxfp4(encode_mxfp4(weight), torch.float32)
    return weight.to(TORCH_DTYPES[EXPERT_FORMATS[experts]])
