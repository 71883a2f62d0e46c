"""The largest attention logit of every MLA head, measured on the queries and keys of a forward.

Queries and keys are those the layer itself computes, caught on their way; the products are taken
again without gradient (`ops.mla.largest`). That costs what the scores of attention cost, so a run
measures every few steps.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from baltoro.model.mla import Mla
from baltoro.model.model import Model
from baltoro.ops.mla.largest import largest_logits


@contextmanager
def record_max_logits(model: Model, *, impl: str) -> Iterator[dict[str, Tensor]]:
    """Yields a mapping from MLA mixer to its largest logits `[H]` fp32 of all forwards inside.

    Names are those of the modules, for example `layers.3.self_attn`. Cached forwards are not
    measured. A recomputed forward counts again and changes nothing.
    """
    found: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, Mla):
            handles += _watch(name, module, found, impl)
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _watch(name: str, mla: Mla, found: dict[str, Tensor], impl: str) -> list[Any]:
    """Hooks that catch query, keys and shared key, and take the maximum when the mixer is done."""
    caught: dict[str, Tensor] = {}

    def catch(part: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            caught[part] = output.detach()

        return hook

    def finish(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        parts = dict(caught)
        caught.clear()
        is_cached = len(inputs) > 2 and inputs[2] is not None
        if not is_cached:
            largest_H = _of_mixer(mla, parts, inputs[1], impl)
            found[name] = torch.maximum(found[name], largest_H) if name in found else largest_H

    query = mla.q_proj if mla.config.mla.q_lora_rank is None else mla.q_b_proj
    return [
        query.register_forward_hook(catch("query")),
        mla.kv_a_proj_with_mqa.register_forward_hook(catch("latent")),
        mla.kv_b_proj.register_forward_hook(catch("key_value")),
        mla.register_forward_hook(finish),
    ]


def _of_mixer(mla: Mla, parts: Mapping[str, Tensor], cu_seqlens: Tensor, impl: str) -> Tensor:
    config = mla.config.mla
    heads, nope = config.num_heads, config.qk_nope_head_dim
    q_THK = parts["query"].view(-1, heads, config.qk_head_dim)
    nope_THK = parts["key_value"].view(-1, heads, nope + config.v_head_dim)[..., :nope]
    shared_TK = parts["latent"][:, config.kv_lora_rank :]
    k_THK = torch.cat([nope_THK, shared_TK[:, None].expand(-1, heads, -1)], -1)
    return largest_logits(q_THK, k_THK, cu_seqlens, scale=config.qk_head_dim**-0.5, impl=impl)
