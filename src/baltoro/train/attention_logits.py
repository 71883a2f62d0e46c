"""The largest attention logit of every MLA head, measured on the queries and keys of a forward.

S_h = max over tokens i >= j of one sequence of  scale q_ih . k_jh  (K2, arXiv 2507.20534).

Queries and keys are those the layer itself computes, caught on their way; the products are taken
again, in blocks of queries, without gradient. That costs what the scores of attention cost, so a
run measures every few steps.
"""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from baltoro.model.mla import Mla
from baltoro.model.model import Model

_BLOCK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}  # logits held at once, 10 bytes each


@contextmanager
def record_max_logits(model: Model) -> Iterator[dict[str, Tensor]]:
    """Yields a mapping from MLA mixer to its largest logits `[H]` fp32 of all forwards inside.

    Names are those of the modules, for example `layers.3.self_attn`. Cached forwards are not
    measured. A recomputed forward counts again and changes nothing.
    """
    found: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, Mla):
            handles += _watch(name, module, found)
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def largest_logits(q_THK: Tensor, k_THK: Tensor, cu_seqlens: Tensor, *, scale: float) -> Tensor:
    """`[H]` fp32: the largest causal logit of each head; -inf without tokens.

    Products are taken in the dtype of `q_THK`, as attention takes them.
    """
    largest_H = q_THK.new_full(q_THK.shape[1:2], -torch.inf, dtype=torch.float32)
    block = _BLOCK_ELEMENTS["cuda" if q_THK.is_cuda else "cpu"]
    bounds = cu_seqlens.tolist()
    for start, end in itertools.pairwise(bounds):
        rows = max(1, block // max(1, (end - start) * q_THK.shape[1]))
        for top in range(start, end, rows):
            bottom = min(top + rows, end)
            q_HQK = q_THK[top:bottom].transpose(0, 1)
            k_HLK = k_THK[start:bottom].transpose(0, 1)
            logits_HQL = (q_HQK @ k_HLK.mT).float() * scale
            is_later_QL = torch.ones(
                bottom - top, bottom - start, dtype=torch.bool, device=q_THK.device
            ).triu(top - start + 1)
            logits_HQL.masked_fill_(is_later_QL, -torch.inf)
            largest_H = torch.maximum(largest_H, logits_HQL.amax((1, 2)))
    return largest_H


def _watch(name: str, mla: Mla, found: dict[str, Tensor]) -> list[Any]:
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
            largest_H = _of_mixer(mla, parts, cu_seqlens=inputs[1])
            found[name] = torch.maximum(found[name], largest_H) if name in found else largest_H

    query = mla.q_proj if mla.config.mla.q_lora_rank is None else mla.q_b_proj
    return [
        query.register_forward_hook(catch("query")),
        mla.kv_a_proj_with_mqa.register_forward_hook(catch("latent")),
        mla.kv_b_proj.register_forward_hook(catch("key_value")),
        mla.register_forward_hook(finish),
    ]


def _of_mixer(mla: Mla, parts: Mapping[str, Tensor], *, cu_seqlens: Tensor) -> Tensor:
    config = mla.config.mla
    heads, nope = config.num_heads, config.qk_nope_head_dim
    q_THK = parts["query"].view(-1, heads, config.qk_head_dim)
    nope_THK = parts["key_value"].view(-1, heads, nope + config.v_head_dim)[..., :nope]
    shared_TK = parts["latent"][:, config.kv_lora_rank :]
    k_THK = torch.cat([nope_THK, shared_TK[:, None].expand(-1, heads, -1)], -1)
    return largest_logits(q_THK, k_THK, cu_seqlens, scale=config.qk_head_dim**-0.5)
