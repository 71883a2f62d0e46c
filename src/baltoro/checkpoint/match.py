"""What a checkpoint directory holds against what its configuration calls for.

Finds how the checkpoint spells things (`Layout`) from the names and shapes on disk, and refuses, in
one list, every tensor that is missing, unused or of another shape or dtype.
"""

import dataclasses
import re

from baltoro.checkpoint.directory import CheckpointDirectory, Stored
from baltoro.checkpoint.names import FLOAT_DTYPES, Layout, ReleaseTensor, is_fp32, release_tensors
from baltoro.model.config import ModelConfig

LISTED = 20  # tensors named in an error

# Prefixes of the language tensors in use; the head stands under the prefix or one level up.
PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.", "")


def match(
    directory: CheckpointDirectory, config: ModelConfig
) -> tuple[Layout, list[ReleaseTensor]]:
    """The spelling of a checkpoint, and its tensors as `release_tensors` lists them.

    Dtypes are those on disk. Raises `ValueError` naming the tensors that do not fit `config`.
    """
    stored = directory.stored
    layout = _spelling(directory, config)
    expected = list(release_tensors(config, layout))
    rule = {tensor.name: tensor.dtype for tensor in expected}
    odd = {
        name: stored[name].dtype
        for name, dtype in rule.items()
        if name in stored and stored[name].dtype != dtype and _is_legal(dtype, stored[name])
    }
    if odd:
        layout = dataclasses.replace(layout, stored=odd)
        expected = [
            tensor._replace(dtype=odd.get(tensor.name, tensor.dtype)) for tensor in expected
        ]
    problems = _problems(stored, expected)
    if problems:
        listed = "\n  ".join(problems[:LISTED])
        more = f"\n  and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
        raise ValueError(
            f"{directory.path}: {len(problems)} tensors do not match config.json:\n  {listed}{more}"
        )
    return layout, expected


def _is_legal(rule: str, stored: Stored) -> bool:
    return rule in FLOAT_DTYPES and stored.dtype in FLOAT_DTYPES


def _spelling(directory: CheckpointDirectory, config: ModelConfig) -> Layout:
    stored = directory.stored
    prefixes = [prefix for prefix in PREFIXES if f"{prefix}embed_tokens.weight" in stored]
    if not prefixes:
        raise ValueError(
            f"{directory.path}: no embed_tokens.weight under any of "
            f"{', '.join(repr(prefix) for prefix in PREFIXES)}; "
            "these are not the tensors of K3 or Kimi Linear"
        )
    prefix = prefixes[0]
    parent = re.sub(r"[^.]+\.$", "", prefix)
    heads = [f"{prefix}lm_head.weight", f"{parent}lm_head.weight", "lm_head.weight"]
    head = next((name for name in heads if name in stored), heads[1])
    experts = re.compile(r"\.experts\.\d+\.w[123]\.weight(_packed|_scale)?$")
    routed = [name for name in stored if experts.search(name)]
    ordinary = stored.keys() - set(routed)
    dtype = _widest({stored[name].dtype for name in ordinary if not is_fp32(name)})
    is_packed = any(name.endswith("_packed") for name in routed)
    return Layout(
        wrapped=directory.raw_config.get("model_type") == "kimi_k3",
        prefix=prefix,
        head=head,
        dtype=dtype,
        experts="mxfp4" if is_packed else _widest({stored[name].dtype for name in routed}, dtype),
        a_log=_a_log_forms(stored, prefix, config.kda.num_heads),
    )


def _a_log_forms(
    stored: dict[str, Stored], prefix: str, num_heads: int
) -> dict[str, tuple[int, ...]]:
    """Shapes on disk that are a legal form of `[H]`, by name in the model."""
    return {
        name.removeprefix(prefix): found.shape
        for name, found in stored.items()
        if name.startswith(f"{prefix}layers.")
        and name.endswith(".self_attn.A_log")
        and (
            found.shape == (1, 1, num_heads, 1)
            or (len(found.shape) == 1 and found.shape[0] >= num_heads)
        )
    }


def _widest(dtypes: set[str], default: str = "BF16") -> str:
    """The narrowest float dtype that holds all of them; dtypes that are not floats are left out."""
    floats = dtypes & set(FLOAT_DTYPES)
    if not floats:
        return default
    return floats.pop() if len(floats) == 1 else "F32"


def _problems(stored: dict[str, Stored], expected: list[ReleaseTensor]) -> list[str]:
    problems = [f"missing {tensor.name}" for tensor in expected if tensor.name not in stored]
    known = {tensor.name for tensor in expected}
    problems += [f"unused {name}" for name in sorted(stored.keys() - known)]
    for tensor in expected:
        found = stored.get(tensor.name)
        if found is not None and (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            problems.append(
                f"misshapen {tensor.name}: {found.dtype} {list(found.shape)}, "
                f"expected {tensor.dtype} {list(tensor.shape)}"
            )
    return problems
