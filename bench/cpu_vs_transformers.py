"""CPU speed of one Kimi-Linear model here and in transformers, in one process and one run.

    make bench
    .venv-interop/bin/python bench/cpu_vs_transformers.py [--rounds 5] [--profile]

Twelve layers, hidden 384, 16 experts top-2, about 40 M parameters, fp32, two threads. Both sides
hold the same weights, and nothing is timed before their logits, losses and gradients agree. Rounds
alternate between the sides; figures are medians. transformers runs as it comes (its own choice of
attention and of experts on a CPU). The result goes to bench/results/cpu_vs_transformers.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import KimiLinearForCausalLM

import baltoro
from baltoro.doctor import machine
from baltoro.model.cache import DenseCache
from baltoro.model.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig
from baltoro.model.model import Model
from baltoro.ops.cross_entropy import linear_cross_entropy
from baltoro.serve.generate import decode, prefill

RESULT = Path(__file__).parent / "results" / "cpu_vs_transformers.json"
NUM_THREADS = 2
PREFILL_TOKENS, PROMPT_TOKENS, DECODE_TOKENS, TRAIN_TOKENS = 2048, 128, 32, 512
TARGETS = {"prefill": 3.0, "decode": 2.0, "train": 3.0}


def shape() -> ModelConfig:
    """The Kimi-Linear shape that is measured."""
    return ModelConfig(
        vocab_size=8192,
        hidden_size=384,
        intermediate_size=1024,
        mixers=("kda", "kda", "kda", "mla") * 3,
        kda=KdaConfig(num_heads=6, head_dim=64),
        mla=MlaConfig(
            num_heads=6,
            q_lora_rank=None,
            kv_lora_rank=128,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            v_head_dim=64,
        ),
        moe=MoeConfig(
            num_experts=16,
            num_experts_per_token=2,
            num_shared_experts=1,
            expert_intermediate_size=128,
            routed_scaling_factor=2.446,
            first_moe_layer=1,
        ),
        pad_token_id=8191,
    )


def both() -> tuple[Model, KimiLinearForCausalLM]:
    """One random model on both sides, by way of a checkpoint."""
    torch.manual_seed(0)
    ours = Model(shape())
    with tempfile.TemporaryDirectory() as folder:
        baltoro.save(ours, Path(folder) / "model")
        theirs = KimiLinearForCausalLM.from_pretrained(Path(folder) / "model", dtype=torch.float32)
    return ours, theirs


def our_prefill(model: Model, ids_T: Tensor) -> tuple[Tensor, DenseCache]:
    cache = DenseCache(model.config, 1, dtype=torch.float32, device=ids_T.device)
    return prefill(model, ids_T.tolist(), cache, max_prefill_tokens=len(ids_T)), cache


def our_decode(model: Model, logits_NW: Tensor, cache: DenseCache) -> list[int]:
    ids = []
    for _ in range(DECODE_TOKENS):
        ids_N = logits_NW.argmax(-1)
        ids.append(int(ids_N))
        logits_NW = decode(model, ids_N, cache)
    return ids


def our_step(model: Model, ids_T: Tensor) -> Tensor:
    model.zero_grad(set_to_none=True)
    cu_seqlens = torch.tensor([0, len(ids_T)], dtype=torch.int32)
    hidden_TD = model(ids_T, cu_seqlens).hidden
    loss_T = linear_cross_entropy(
        hidden_TD[:-1], model.lm_head.weight, ids_T[1:], impl=model.config.impl.cross_entropy
    )
    loss = loss_T.mean()
    loss.backward()
    return loss.detach()


@torch.inference_mode()
def their_prefill(model: KimiLinearForCausalLM, ids_T: Tensor) -> tuple[Tensor, object]:
    out = model(ids_T[None], use_cache=True, logits_to_keep=1)
    return out.logits[0, -1:], out.past_key_values


@torch.inference_mode()
def their_decode(model: KimiLinearForCausalLM, logits_NW: Tensor, cache: object) -> list[int]:
    ids = []
    for _ in range(DECODE_TOKENS):
        ids_N = logits_NW.argmax(-1)
        ids.append(int(ids_N))
        out = model(ids_N[None], past_key_values=cache, use_cache=True)
        cache, logits_NW = out.past_key_values, out.logits[0, -1:]
    return ids


def their_step(model: KimiLinearForCausalLM, ids_T: Tensor) -> Tensor:
    model.zero_grad(set_to_none=True)
    loss = model(ids_T[None], labels=ids_T[None], use_cache=False).loss
    loss.backward()
    return loss.detach()


def check_agreement(ours: Model, theirs: KimiLinearForCausalLM, ids_T: Tensor) -> dict[str, float]:
    """Largest differences of logits, loss and embedding gradient; raises if the sides disagree."""
    prompt_T = ids_T[:PROMPT_TOKENS]
    our_logits, our_cache = our_prefill(ours.eval(), prompt_T)
    their_logits, their_cache = their_prefill(theirs.eval(), prompt_T)
    our_ids = our_decode(ours, our_logits, our_cache)
    their_ids = their_decode(theirs, their_logits, their_cache)
    losses = (
        our_step(ours.train(), ids_T[:TRAIN_TOKENS]),
        their_step(theirs.train(), ids_T[:TRAIN_TOKENS]),
    )
    gradients = (
        ours.embed_tokens.weight.grad,
        theirs.get_input_embeddings().weight.grad,
    )
    found = {
        "logits": (our_logits - their_logits).abs().max().item(),
        "loss": (losses[0] - losses[1]).abs().item(),
        "gradient": (gradients[0] - gradients[1]).abs().max().item(),
        "gradient_scale": gradients[1].abs().max().item(),
    }
    agrees = found["logits"] < 1e-4 and found["loss"] < 1e-4
    agrees = agrees and found["gradient"] < 1e-3 * found["gradient_scale"]
    if not agrees or our_ids != their_ids:
        raise SystemExit(f"the two sides disagree, so nothing is timed: {found}")
    return found


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(
    ours: Model, theirs: KimiLinearForCausalLM, ids_T: Tensor, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of every round: `times[task][side]`; one round of each side is thrown away."""
    long_T, prompt_T, train_T = ids_T, ids_T[:PROMPT_TOKENS], ids_T[:TRAIN_TOKENS]
    times: dict[str, dict[str, list[float]]] = {
        task: {"ours": [], "transformers": []} for task in TARGETS
    }
    for index in range(rounds + 1):
        our_start = our_prefill(ours.eval(), prompt_T)
        their_start = their_prefill(theirs.eval(), prompt_T)
        found = {
            ("prefill", "ours"): seconds(lambda: our_prefill(ours, long_T)),
            ("prefill", "transformers"): seconds(lambda: their_prefill(theirs, long_T)),
            ("decode", "ours"): seconds(lambda start=our_start: our_decode(ours, *start)),
            ("decode", "transformers"): seconds(
                lambda start=their_start: their_decode(theirs, *start)
            ),
            ("train", "ours"): seconds(lambda: our_step(ours.train(), train_T)),
            ("train", "transformers"): seconds(lambda: their_step(theirs.train(), train_T)),
        }
        for (task, side), value in found.items():
            if index:
                times[task][side].append(value)
    return times


def profile(ours: Model, ids_T: Tensor) -> None:
    """Print where our side spends its time in each task."""
    prompt_T = ids_T[:PROMPT_TOKENS]
    start = our_prefill(ours.eval(), prompt_T)
    tasks = {
        "prefill": lambda: our_prefill(ours.eval(), ids_T),
        "decode": lambda: our_decode(ours.eval(), *start),
        "train": lambda: our_step(ours.train(), ids_T[:TRAIN_TOKENS]),
    }
    for task, run in tasks.items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            run()
        print(f"== {task}")
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=18))


def commit() -> str:
    """Short hash of the checkout, with a plus where files differ from it."""
    git = ["git", "-C", str(RESULT.parent), "describe", "--always", "--dirty=+"]
    done = subprocess.run(git, capture_output=True, text=True)
    return done.stdout.strip() or "a copy without its history"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="where our side spends its time")
    arguments = parser.parse_args()
    torch.set_num_threads(NUM_THREADS)
    ours, theirs = both()
    ids_T = torch.randint(0, ours.config.vocab_size - 1, (PREFILL_TOKENS,))
    agreement = check_agreement(ours, theirs, ids_T)
    if arguments.profile:
        profile(ours, ids_T)
        return
    times = measure(ours, theirs, ids_T, arguments.rounds)
    medians = {
        task: {side: statistics.median(values) for side, values in sides.items()}
        for task, sides in times.items()
    }
    result = {
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": machine() | {"transformers": transformers.__version__},
        "load_average": os.getloadavg(),
        "parameters": sum(tensor.numel() for tensor in ours.parameters()),
        "threads": NUM_THREADS,
        "tokens": {"prefill": PREFILL_TOKENS, "decode": DECODE_TOKENS, "train": TRAIN_TOKENS},
        "agreement": agreement,
        "seconds": times,
        "median_seconds": medians,
        "decode_tokens_per_second": {
            side: DECODE_TOKENS / value for side, value in medians["decode"].items()
        },
        "times_as_fast": {
            task: sides["transformers"] / sides["ours"] for task, sides in medians.items()
        },
        "targets": TARGETS,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    for task, sides in medians.items():
        ratio = result["times_as_fast"][task]
        verdict = "met" if ratio >= TARGETS[task] else "MISSED"
        print(
            f"{task}: ours {sides['ours']:.3f} s, transformers {sides['transformers']:.3f} s, "
            f"{ratio:.1f} times as fast (target {TARGETS[task]:.0f}, {verdict})"
        )


if __name__ == "__main__":
    main()
