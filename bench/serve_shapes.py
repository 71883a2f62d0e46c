"""What `serve_gpu` measures: sizes, models, requests, and the bytes that a decode step moves."""

import random
from dataclasses import dataclass

from baltoro.model.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig
from baltoro.model.model import Model
from baltoro.model.moe import Router
from baltoro.model.presets import preset
from baltoro.ops.moe import Routing
from baltoro.serve.layout import PoolLayout
from baltoro.serve.request import Request
from baltoro.serve.resident import ResidentBatch
from baltoro.serve.sampling import Sampling

GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured."""

    preset: str
    batches: tuple[int, ...]
    context: int  # tokens of a prompt where decoding is timed
    steps: int  # timed
    max_new: int  # tokens of a reply where decoding is timed
    prefill_tokens: int  # of each prompt where prefill is timed
    warm_steps: int
    step_tokens: int  # of a prefill slice
    pool_tokens: int
    conversations: int
    turns: int  # of each conversation
    shared_tokens: int  # that all conversations begin with
    turn_tokens: int  # that a turn adds before its reply
    reply_tokens: int
    peer_prompt: int
    peer_new: int
    copy_bytes: int


FULL = Sizes(
    preset="small",
    batches=(1, 32, 256),
    context=2048,
    steps=96,
    max_new=1000,
    prefill_tokens=8192,
    warm_steps=16,
    step_tokens=16384,
    pool_tokens=700_000,
    conversations=8,
    turns=50,
    shared_tokens=1024,
    turn_tokens=256,
    reply_tokens=8,
    peer_prompt=128,
    peer_new=64,
    copy_bytes=1 << 32,
)
TINY = Sizes(
    preset="nano",
    batches=(1, 2, 4),
    context=70,
    steps=6,
    max_new=100,
    prefill_tokens=200,
    warm_steps=2,
    step_tokens=256,
    pool_tokens=8000,
    conversations=2,
    turns=4,
    shared_tokens=48,
    turn_tokens=32,
    reply_tokens=4,
    peer_prompt=16,
    peer_new=4,
    copy_bytes=1 << 24,
)


def kimi_linear(sizes: Sizes) -> ModelConfig:
    """A Kimi-Linear model of about the sizes of `sizes.preset`, which transformers can run."""
    k3 = preset(sizes.preset)
    assert k3.moe is not None
    return ModelConfig(
        vocab_size=k3.vocab_size,
        hidden_size=k3.hidden_size,
        intermediate_size=k3.intermediate_size,
        mixers=k3.mixers,
        kda=KdaConfig(num_heads=k3.kda.num_heads, head_dim=k3.kda.head_dim),
        mla=MlaConfig(
            num_heads=k3.mla.num_heads,
            q_lora_rank=None,
            kv_lora_rank=k3.mla.kv_lora_rank,
            qk_nope_head_dim=k3.mla.qk_nope_head_dim,
            qk_rope_head_dim=k3.mla.qk_rope_head_dim,
            v_head_dim=k3.mla.v_head_dim,
        ),
        moe=MoeConfig(
            num_experts=k3.moe.num_experts,
            num_experts_per_token=k3.moe.num_experts_per_token,
            num_shared_experts=1,
            expert_intermediate_size=k3.moe.expert_intermediate_size,
            routed_scaling_factor=2.446,
            first_moe_layer=1,
        ),
        max_seq_len=k3.max_seq_len,
        pad_token_id=k3.pad_token_id,
    )


def even_share(model: Model, rows: int) -> float:
    """Mean share of a layer's experts that `rows` tokens visit if routing is even."""
    moe = model.config.moe
    if moe is None:
        return 0.0
    return 1.0 - (1.0 - moe.num_experts_per_token / moe.num_experts) ** rows


def visited_share(model: Model, batch: ResidentBatch, rows: int) -> float:
    """That share as it is for the next tokens of a batch, which are computed for it."""
    shares: list[float] = []

    def note(module: Router, _: object, routing: Routing) -> None:
        visited = routing.expert_ids[:rows].unique()
        shares.append(len(visited) / module.config.num_experts)

    routers = [module for module in model.modules() if isinstance(module, Router)]
    handles = [router.register_forward_hook(note) for router in routers]
    batch.run(rows, is_eager=True)
    for handle in handles:
        handle.remove()
    return sum(shares) / max(1, len(shares))


def step_bytes(
    model: Model, layout: PoolLayout, lengths: list[int], expert_share: float
) -> dict[str, float]:
    """Bytes that one decode step of sequences of these lengths must read or write once.

    Every weight but embedding and routed experts; of these the `expert_share` that is visited; each
    KDA layer's state and window of B sequences, read and written; latents of all tokens read and of
    B written.
    """
    rows = len(lengths)
    experts = weights = 0
    for name, tensor in model.named_parameters():
        if ".experts." in name:
            experts += tensor.nbytes
        elif not name.startswith(("embed_tokens", "vision_tower", "mm_projector", "mtp_layers")):
            weights += tensor.nbytes
    state = 2 * (layout.state_bytes + layout.window_bytes)
    return {
        "weights": float(weights),
        "experts": experts * expert_share,
        "states": float(rows * len(layout.kda_layers) * state),
        "latents": float(len(layout.mla_layers) * layout.latent_bytes * (sum(lengths) + rows)),
    }


def random_ids(generator: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(generator.choices(range(vocab_size - 1), k=count))


def request_of(name: str, ids: tuple[int, ...], max_new_tokens: int) -> Request:
    return Request(request_id=name, prompt_ids=ids, max_new_tokens=max_new_tokens, sampling=GREEDY)
