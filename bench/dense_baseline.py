"""Train a dense transformer on the very tokens of a `baltoro train` run, to compare with it.

    PYTHONPATH=src python3 bench/dense_baseline.py --size small --tokens 40000000 --data DATA \
        --out OUT.json [--optimizer adamw muon] [--peak RATE ...]

Pre-norm, full causal attention with rotary positions, SwiGLU; as many active parameters as the K3
model of that size, the same loader, schedule, batch and held-out text, and its learning rate unless
`--peak` gives others to try. `adamw` runs AdamW for every parameter, `muon` the run's own
optimiser. Time is of training steps alone.
"""

import argparse
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from provenance import commit_of
from torch import Tensor, nn

from baltoro.data.dataset import Dataset
from baltoro.data.loader import Loader
from baltoro.model.config import ModelConfig
from baltoro.model.counts import parameter_counts
from baltoro.model.model import ModelOutput
from baltoro.ops.mla import varlen_attention
from baltoro.ops.rms_norm import rms_norm
from baltoro.optim.assignment import assign
from baltoro.optim.optimizer import Optimizer
from baltoro.optim.rules import KdaHeads, k3_structure
from baltoro.optim.schedule import learning_rate
from baltoro.recipes.pretrain import pretrain_config
from baltoro.train.config import PretrainConfig
from baltoro.train.evaluate import evaluate
from baltoro.train.forecast import matmul_rate
from baltoro.train.learner import Learner
from baltoro.train.pretrain import held_out_batches, image_processor, loader_config
from baltoro.train.step import train_step

ROTARY_BASE = 500_000.0
HEAD_DIM = 128


class Norm(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.config = config

    def forward(self, x_TD: Tensor) -> Tensor:
        config = self.config
        return rms_norm(x_TD, self.weight, eps=config.rms_norm_eps, impl=config.impl.rms_norm)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.impl = config.impl.attention
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(size, size, bias=False))

    def forward(self, x_TD: Tensor, cu_seqlens: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (
            proj(x_TD).view(len(x_TD), -1, HEAD_DIM)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = varlen_attention(
            rotate(q, *rotary),
            rotate(k, *rotary),
            v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            causal=True,
            scale=HEAD_DIM**-0.5,
            impl=self.impl,
        )
        return self.o_proj(mixed.flatten(1))


class Mlp(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x_TD), self.up_proj(x_TD)))


@torch.compile(dynamic=False)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return nn.functional.silu(gate) * up


@torch.compile(dynamic=False)
def rotate(x_THK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_THK.chunk(2, -1)
    return x_THK * cos + torch.cat([-second, first], -1) * sin


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config)
        self.mlp = Mlp(config)

    def forward(self, x_TD: Tensor, cu_seqlens: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), cu_seqlens, rotary)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class DenseTransformer(nn.Module):
    """Called as `model.Model` is; of its configuration it takes widths, depth and operators."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in config.mixers)
        self.norm = Norm(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=config.initializer_range)

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor,
        image_features: None = None,
        recompute: bool = False,
    ) -> ModelOutput:
        x_TD = self.embed_tokens(tokens)
        rotary = rotary_of(cu_seqlens, len(tokens), x_TD.dtype)
        for layer in self.layers:
            x_TD = layer(x_TD, cu_seqlens, rotary)
        return ModelOutput(hidden=self.norm(x_TD), mixture=x_TD, router_scores=())


def rotary_of(cu_seqlens: Tensor, num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[T, 1, HEAD_DIM]` of positions that begin anew in each sequence."""
    index = torch.arange(num_tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, index, right=True) - 1
    position = (index - cu_seqlens[sequence]).float()
    powers = torch.arange(0, HEAD_DIM, 2, device=cu_seqlens.device) / HEAD_DIM
    angle = position[:, None] * ROTARY_BASE**-powers
    angle = torch.cat([angle, angle], -1)[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def dense_config(config: ModelConfig) -> ModelConfig:
    """Of the same width, depth and number of active parameters."""
    size, layers = config.hidden_size, config.num_layers
    body = parameter_counts(config).active - config.vocab_size * size
    inner = (body / layers - 4 * size * size) / (3 * size)
    return ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=size,
        intermediate_size=16 * round(inner / 16),
        mixers=("mla",) * layers,
        kda=config.kda,
        mla=config.mla,
        moe=None,
        rms_norm_eps=config.rms_norm_eps,
        initializer_range=config.initializer_range,
        max_seq_len=config.max_seq_len,
        impl=config.impl,
    )


def learner_of(config: PretrainConfig, optimizer: str, device: torch.device) -> Learner:
    torch.manual_seed(config.seed)
    model_config = dense_config(config.model)
    model = DenseTransformer(model_config).to(device, getattr(torch, config.dtype)).train()
    named = list(model.named_parameters())
    heads = KdaHeads(num_heads=model_config.hidden_size // HEAD_DIM, head_dim=HEAD_DIM)
    mixers = {f"layers.{i}.self_attn": heads for i in range(model_config.num_layers)}
    structure = k3_structure({name: tuple(p.shape) for name, p in named}, mixers)
    table = assign(named, structure, matrices="muon" if optimizer == "muon" else "adamw")
    return Learner(
        model=model,  # type: ignore[arg-type]
        optimizer=Optimizer(named, table, config.optim),
        balancer=None,
        config=config.step,
    )


def run(config: PretrainConfig, optimizer: str, data: Path, device: torch.device) -> dict:
    model = config.model
    train_set = Dataset(data, "train", vocab_size=model.vocab_size)
    held_out = Dataset(data, "held_out", vocab_size=model.vocab_size)
    images = image_processor(model)
    loader = Loader(train_set, loader_config(config, train_set), images)
    batches = held_out_batches(config, held_out, images)
    bytes_per_token = torch.from_numpy(held_out.bytes_per_token())
    learner = learner_of(config, optimizer, device)
    num_parts, seconds, losses, scores = config.data.num_microbatches, 0.0, [], []
    for step in range(config.schedule.num_steps):
        start = time.perf_counter()
        parts = [loader.batch(step, part, num_parts) for part in range(num_parts)]
        result = train_step(learner, parts, lr=learning_rate(config.schedule, step))
        torch.cuda.synchronize() if device.type == "cuda" else None
        seconds += time.perf_counter() - start
        losses.append(result.numbers["train/loss"])
        if (step + 1) % config.run.eval_every == 0 or step + 1 == config.schedule.num_steps:
            score = evaluate(
                learner.model, batches, bytes_per_token=bytes_per_token, domains=held_out.domains
            )
            scores.append((step + 1, seconds, score.bits_per_byte, score.by_domain))
            print(f"{optimizer} step {step + 1} loss {losses[-1]:.4f} held out "
                  f"{score.bits_per_byte:.4f} {seconds:.1f} s", flush=True)  # fmt: skip
    tokens = config.num_tokens
    return {
        "optimizer": optimizer,
        "peak_rate": config.schedule.peak,
        "parameters": sum(p.numel() for p in learner.model.parameters()),
        "tokens_per_s": tokens / seconds,
        "seconds": seconds,
        "losses": losses,
        "scores": scores,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="small")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--optimizer", nargs="+", default=["adamw", "muon"])
    parser.add_argument("--peak", type=float, nargs="+", help="rates instead of the size's own")
    parser.add_argument("--out", type=Path, default=Path("bench/results/dense_baseline.json"))
    parser.add_argument("--commit", help="instead of asking git")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_gpu = device.type == "cuda"
    config = pretrain_config(arguments.size, num_tokens=arguments.tokens, is_gpu=is_gpu)
    commit = commit_of(arguments.commit)
    result = {
        "device": torch.cuda.get_device_name() if is_gpu else "cpu",
        "torch": torch.__version__,
        "commit": commit,
        "size": arguments.size,
        "tokens": config.num_tokens,
        "matmul_tflop_per_s": matmul_rate(device, getattr(torch, config.dtype)) / 1e12,
        "runs": [],
    }
    peaks = arguments.peak or [config.schedule.peak]
    for optimizer, peak in itertools.product(arguments.optimizer, peaks):
        schedule = replace(config.schedule, peak=peak, floor=peak / 10)
        config = replace(config, schedule=schedule)
        result["runs"].append(run(config, optimizer, arguments.data, device))
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
