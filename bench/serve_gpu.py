"""How fast the engine serves on one GPU, against transformers and against the bytes it must move.

    PYTHONPATH=src:FLA python3 bench/serve_gpu.py [--commit HASH] [--budget 150]
    .venv/bin/python bench/serve_gpu.py --device cpu --tiny --out /tmp/serve.json

The `small` shape with random weights, bf16. Sections: decode at batch 1, 32 and 256 and prefill;
the same for a Kimi-Linear model of these sizes, and transformers' `generate` on the same weights
(`serve_peer.py`); an agent trace. A section that fails leaves its error and costs no other one;
the result is written after each.

Floor of a decode step: bytes that it must read or write once, over the rate of a large copy (read
and write counted) in the same run:

    every weight but embedding and routed experts
    + experts touched: E (1 - (1 - A / E)^B) of each MoE layer, the mean under even routing
    + B x KDA layers x (state read and written + window read and written)
    + MLA layers x (sum of lengths read + B rows written) x bytes of a latent
"""

import argparse
import dataclasses
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provenance import commit_of
from torch.profiler import ProfilerActivity, profile

import baltoro
from baltoro.model.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig, gpu_impl
from baltoro.model.model import Model
from baltoro.model.presets import preset
from baltoro.serve.engine import Engine, EngineConfig
from baltoro.serve.request import Request, Sequence
from baltoro.serve.sampling import Sampling
from baltoro.serve.scheduler import SchedulerConfig

Json = dict[str, Any]
GREEDY = Sampling(temperature=0.0)
GROUP = 8  # prompts that are prefilled together before decoding is timed
GOALS = {"batch 1 against transformers": 5.0, "batch 256 share of the byte floor": 0.6}


@dataclasses.dataclass(frozen=True, kw_only=True)
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
    reply_tokens=16,
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


class Bench:
    """One run: its device, its sizes and what it found."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.is_gpu = self.device.type == "cuda"
        self.sizes = TINY if arguments.tiny else FULL
        self.begun = time.perf_counter()
        self.result: Json = {
            "device": torch.cuda.get_device_name() if self.is_gpu else "cpu",
            "torch": torch.__version__,
            "commit": commit_of(arguments.commit),
            "sizes": dataclasses.asdict(self.sizes),
            "goals": GOALS,
            "sections_s": {},
            "errors": {},
        }

    @property
    def left_s(self) -> float:
        return self.arguments.budget - (time.perf_counter() - self.begun)

    def section(self, name: str, run: Callable[[], Any]) -> None:
        """Run a part, store what it returns or why it failed, and write the file."""
        if self.left_s < 5.0:
            self.result["errors"][name] = "not begun: the time was up"
        else:
            start = time.perf_counter()
            try:
                found = run()
                if found is not None:
                    self.result[name] = found
                    print(name, json.dumps(found), flush=True)
            except Exception:  # one part must not cost the others
                self.result["errors"][name] = traceback.format_exc()[-3000:]
                print(name, "FAILED", self.result["errors"][name], flush=True)
            self.result["sections_s"][name] = round(time.perf_counter() - start, 1)
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()
        self.arguments.out.parent.mkdir(parents=True, exist_ok=True)
        self.arguments.out.write_text(json.dumps(self.result, indent=1) + "\n")

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def model(self, config: ModelConfig) -> Model:
        torch.manual_seed(0)
        if self.is_gpu:
            config = dataclasses.replace(config, impl=gpu_impl(config))
        with self.device:
            model = Model(config).eval()
        return model.cast(torch.bfloat16) if self.is_gpu else model

    def engine(self, model: Model, **changes: Any) -> Engine:
        sizes = self.sizes
        limits = SchedulerConfig(
            max_running=sizes.batches[-1],
            max_step_tokens=sizes.step_tokens,
            max_queued=4 * sizes.batches[-1],
        )
        settings = {"pool_tokens": sizes.pool_tokens, "num_kept_states": 64, "decode": "resident"}
        return Engine(model, EngineConfig(scheduler=limits, **{**settings, **changes}))

    def copy_rate(self) -> float:
        """Bytes per second of a copy, read and write counted."""
        a = torch.empty(self.sizes.copy_bytes, dtype=torch.uint8, device=self.device)
        b = torch.empty_like(a)
        times = []
        for _ in range(6):
            self.synchronize()
            start = time.perf_counter()
            b.copy_(a)
            self.synchronize()
            times.append(time.perf_counter() - start)
        return 2 * a.nbytes / min(times)


def step_bytes(model: Model, engine: Engine, lengths: list[int]) -> dict[str, float]:
    """Bytes of one decode step of sequences of these lengths, as the module says."""
    config, layout, rows = model.config, engine.layout, len(lengths)
    experts = weights = 0
    for name, tensor in model.named_parameters():
        if ".experts." in name:
            experts += tensor.nbytes
        elif not name.startswith(("embed_tokens", "vision_tower", "mm_projector", "mtp_layers")):
            weights += tensor.nbytes
    touched = 0.0
    if config.moe is not None:
        touched = 1.0 - (1.0 - config.moe.num_experts_per_token / config.moe.num_experts) ** rows
    state = 2 * (layout.state_bytes + layout.window_bytes)
    return {
        "weights": float(weights),
        "experts": experts * touched,
        "states": float(rows * len(layout.kda_layers) * state),
        "latents": float(len(layout.mla_layers) * layout.latent_bytes * (sum(lengths) + rows)),
    }


def random_ids(generator: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(generator.choices(range(vocab_size - 1), k=count))


def request_of(name: str, ids: tuple[int, ...], max_new_tokens: int) -> Request:
    return Request(request_id=name, prompt_ids=ids, max_new_tokens=max_new_tokens, sampling=GREEDY)


def decode_at(bench: Bench, engine: Engine, model: Model, rows: int, context: int) -> Json:
    """Tokens per second of `rows` sequences through the whole engine; then of the device alone."""
    sizes, draws = bench.sizes, random.Random(rows)
    sequences: list[Sequence] = []
    for first in range(0, rows, GROUP):
        for n in range(first, min(rows, first + GROUP)):
            # lengths differ, so that boundaries at which states are kept do not fall on one step
            count = context - draws.randrange(min(64, context // 2))
            ids = random_ids(draws, count, model.config.vocab_size)
            sequences.append(engine.submit(request_of(str(n), ids, sizes.max_new)))
        while any(not sequence.new_tokens for sequence in sequences):
            engine.step()
    for _ in range(sizes.warm_steps):
        engine.step()
    bench.synchronize()
    times, written = [], sum(len(sequence.new_tokens) for sequence in sequences)
    start = time.perf_counter()
    for _ in range(sizes.steps):
        before = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - before)
    bench.synchronize()
    step_s = (time.perf_counter() - start) / sizes.steps
    written = sum(len(sequence.new_tokens) for sequence in sequences) - written
    lengths = [len(sequence.tokens) - sizes.steps // 2 for sequence in sequences]
    moved = step_bytes(model, engine, lengths)
    floor_s = sum(moved.values()) / bench.result["copy_bytes_per_s"]
    found = {
        "tokens_per_s": written / (step_s * sizes.steps),
        "step_ms": step_s * 1e3,
        "median_step_ms": statistics.median(times) * 1e3,
        "mean_length": sum(lengths) / rows,
        "moved_bytes": moved,
        "floor_ms": floor_s * 1e3,
        "share_of_floor": floor_s / step_s,
    }
    found |= device_alone(bench, engine, rows, floor_s)
    for sequence in sequences:
        engine.abort(sequence)
    return found


def device_alone(bench: Bench, engine: Engine, rows: int, floor_s: float) -> Json:
    """A step's graph replayed without the host's part: what the device could do.

    It moves the rows' positions on by steps that the engine knows nothing of: the last thing done
    with these sequences.
    """
    batch = engine.runner.batch
    assert batch is not None
    bench.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        batch.run(rows)
    bench.synchronize()
    graph_s = (time.perf_counter() - start) / 20
    return {"device_step_ms": graph_s * 1e3, "device_share_of_floor": floor_s / graph_s}


def kernels_of(bench: Bench, engine: Engine, rows: int) -> Json:
    """Where a step's graph spends its time; the batch's rows are those of the last step."""
    batch = engine.runner.batch
    assert batch is not None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            batch.run(rows)
        bench.synchronize()
    events = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    return {
        "launches": sum(event.count for event in events) / 3,
        "ms": sum(event.self_device_time_total for event in events) / 3e3,
        "kernels": [
            [e.key[:80], e.count // 3, round(e.self_device_time_total / 3e3, 4)]
            for e in events[:30]
        ],
    }


def prefill_of(bench: Bench, engine: Engine, model: Model) -> Json:
    """Tokens per second of prompts that come one after another, to the first token of a reply."""
    draws, count, times = random.Random(1), bench.sizes.prefill_tokens, []
    for n in range(4):
        ids = random_ids(draws, count, model.config.vocab_size)
        bench.synchronize()
        start = time.perf_counter()
        engine.generate([request_of(str(n), ids, 1)])
        times.append(time.perf_counter() - start)
    return {"tokens": count, "tokens_per_s": count / min(times[1:]), "first_s": times[0]}


def serve_all(bench: Bench, name: str, config: ModelConfig, context: int) -> Model:
    """Prefill, and decode at every batch size, each a section; the model that was served."""
    model = bench.model(config)
    start = time.perf_counter()
    engine = bench.engine(model)
    bench.synchronize()
    capture_s = time.perf_counter() - start
    pages = {"pages": engine.cache.config.num_pages, "tokens": engine.layout.page_size}
    bench.section(f"{name}: engine", lambda: {**pages, "capture_s": capture_s})
    bench.section(f"{name}: prefill", lambda: prefill_of(bench, engine, model))
    for rows in bench.sizes.batches:
        bench.section(
            f"{name}: batch {rows}", lambda n=rows: decode_at(bench, engine, model, n, context)
        )
    if bench.is_gpu:
        bench.section(f"{name}: kernels at batch {rows}", lambda: kernels_of(bench, engine, rows))
    return model


def trace(bench: Bench, model: Model, *, is_caching: bool, limit_s: float) -> Json:
    """Turns of several conversations in rotation, each with all that was said before it."""
    sizes, draws = bench.sizes, random.Random(2)
    engine = bench.engine(
        model, is_caching=is_caching, num_kept_states=4 * sizes.conversations * GROUP
    )
    vocab_size = model.config.vocab_size
    shared = random_ids(draws, sizes.shared_tokens, vocab_size)
    said = [shared] * sizes.conversations
    waits: list[float] = []
    begun = time.perf_counter()
    for turn in range(sizes.turns * sizes.conversations):
        if time.perf_counter() - begun > limit_s:
            break
        who = turn % sizes.conversations
        said[who] += random_ids(draws, sizes.turn_tokens, vocab_size)
        bench.synchronize()
        start = time.perf_counter()
        sequence = engine.submit(request_of(str(turn), said[who], sizes.reply_tokens))
        while not sequence.new_tokens:
            engine.step()
        waits.append(time.perf_counter() - start)
        while sequence.finish_reason is None:
            engine.step()
        said[who] += tuple(token.id for token in sequence.new_tokens)
    tail = waits[len(waits) // 2 :]
    return {
        "turns": len(waits),
        "longest_prompt": max(len(ids) for ids in said),
        "first_token_ms": statistics.median(waits) * 1e3,
        "first_token_ms_second_half": statistics.median(tail) * 1e3,
        "first_token_ms_p99": sorted(waits)[int(0.99 * (len(waits) - 1))] * 1e3,
        "seconds": time.perf_counter() - begun,
        "prompt_tokens": engine.stats.prompt_tokens,
        "cached_tokens": engine.stats.cached_tokens,
        "hits": dataclasses.asdict(engine.cache.stats),
    }


def peer(bench: Bench, model: Model) -> Json:
    """transformers on the weights of `model`, in another process, in the time that is left."""
    sizes = bench.sizes
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peer.json"
        baltoro.save(model, Path(folder) / "model")
        here = Path(__file__).parent / "serve_peer.py"
        words = [bench.arguments.peer_python, here, Path(folder) / "model", "--out", out]
        words += ["--device", bench.device.type, "--batches", *sizes.batches]
        words += ["--prompt-tokens", sizes.peer_prompt, "--new-tokens", sizes.peer_new]
        words += ["--prefill-tokens", sizes.prefill_tokens]
        log = ""
        try:
            done = subprocess.run(
                [str(word) for word in words],
                capture_output=True,
                text=True,
                timeout=max(5.0, bench.left_s - 5.0),
            )
            log = done.stderr[-1500:] if done.returncode else ""
        except subprocess.TimeoutExpired:
            log = "its time was up; what it had is here"
        found: Json = json.loads(out.read_text()) if out.exists() else {}
    return {**found, "log": log}


def first_tokens(bench: Bench, model: Model) -> list[int]:
    """What ours writes behind the peer's first prompt."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        0, model.config.vocab_size - 1, (1, bench.sizes.peer_prompt), generator=generator
    )
    engine = bench.engine(model, pool_tokens=bench.sizes.peer_prompt + 1024, decode="eager")
    (sequence,) = engine.generate([request_of("0", tuple(ids[0].tolist()), 3)])
    return [token.id for token in sequence.new_tokens]


def compare(result: Json, batches: tuple[int, ...]) -> Json:
    """Ours over the peer's, as far as both are there."""
    found = {}
    theirs = result["transformers"]
    for rows in batches:
        ours = result.get(f"kimi-linear: batch {rows}")
        if ours and str(rows) in theirs.get("decode", {}):
            rate = theirs["decode"][str(rows)]["tokens_per_s"]
            found[f"batch {rows}"] = ours["tokens_per_s"] / rate
    if "prefill" in theirs and "kimi-linear: prefill" in result:
        ours = result["kimi-linear: prefill"]["tokens_per_s"]
        found["prefill"] = ours / theirs["prefill"]["tokens_per_s"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a try on a CPU")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds for all of it")
    parser.add_argument("--out", type=Path, default=Path("bench/results/serve_gpu.json"))
    parser.add_argument("--peer-python", default=sys.executable, help="with transformers")
    parser.add_argument("--commit", help="instead of asking git")
    bench = Bench(parser.parse_args())
    sizes = bench.sizes
    bench.section("copy_bytes_per_s", bench.copy_rate)
    models: dict[str, Model] = {}

    def serve(name: str, config: ModelConfig, context: int) -> None:
        models[name] = serve_all(bench, name, config, context)

    bench.section("k3", lambda: serve("k3", preset(sizes.preset), sizes.context))
    for name, is_caching in (("cached", True), ("not cached", False)):
        bench.section(
            f"trace, {name}",
            lambda c=is_caching: trace(
                bench, models["k3"], is_caching=c, limit_s=min(25.0, bench.left_s / 4)
            ),
        )
    models.pop("k3", None)
    bench.section(
        "kimi-linear", lambda: serve("kimi-linear", kimi_linear(sizes), sizes.peer_prompt)
    )
    bench.section("first_tokens", lambda: {"ours": first_tokens(bench, models["kimi-linear"])})
    bench.section("transformers", lambda: peer(bench, models["kimi-linear"]))
    bench.section("times_as_fast", lambda: compare(bench.result, sizes.batches))


if __name__ == "__main__":
    main()
