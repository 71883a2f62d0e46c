"""How fast the engine serves on one GPU, against transformers and against the bytes it must move.

    PYTHONPATH=src:FLA python3 bench/serve_gpu.py [--commit HASH] [--budget 150]
    .venv/bin/python bench/serve_gpu.py --device cpu --tiny --out /tmp/serve.json

The `small` shape with random weights, bf16. Sections: decode at batch 1, 32 and 256 and prefill;
the same for a Kimi-Linear model of these sizes, and transformers' `generate` on the same weights
(`serve_peer.py`); an agent trace. A section that fails leaves its error and costs no other one;
the result is written after each.

The floor of a decode step is its bytes (`serve_shapes.step_bytes`) over the rate of a large copy,
read and write counted, of the same run.
"""

import argparse
import dataclasses
import gc
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provenance import commit_of
from serve_beside import Peer
from serve_shapes import (
    FULL,
    TINY,
    even_share,
    kimi_linear,
    random_ids,
    request_of,
    step_bytes,
    visited_share,
)
from serve_trace import trace
from torch.profiler import ProfilerActivity, profile

from baltoro.model.config import ModelConfig, gpu_impl
from baltoro.model.model import Model
from baltoro.model.presets import preset
from baltoro.serve.engine import Engine, EngineConfig
from baltoro.serve.request import Sequence
from baltoro.serve.scheduler import SchedulerConfig

Json = dict[str, Any]
GROUP = 8  # prompts that are prefilled together before decoding is timed
SECTIONS = ("k3", "kimi-linear", "trace")
GOALS = {"batch 1 against transformers": 5.0, "batch 256 share of the byte floor": 0.6}


class Bench:
    """One run: its device, its sizes and what it found."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.is_gpu = self.device.type == "cuda"
        self.sizes = TINY if arguments.tiny else FULL
        self.decode = "resident"
        self.peer: Peer | None = None
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
        settings = {
            "scheduler": limits,
            "pool_tokens": sizes.pool_tokens,
            "num_kept_states": 64,
            "decode": self.decode,
        }
        return Engine(model, EngineConfig(**{**settings, **changes}))

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
    batch = engine.runner.batch
    share = even_share(model, rows)
    visited = share if batch is None else visited_share(model, batch, rows)
    moved = step_bytes(model, engine.layout, lengths, visited)
    floor_s = sum(moved.values()) / bench.result["copy_bytes_per_s"]
    found = {
        "tokens_per_s": written / (step_s * sizes.steps),
        "step_ms": step_s * 1e3,
        "median_step_ms": statistics.median(times) * 1e3,
        "mean_length": sum(lengths) / rows,
        "expert_share": {"visited": visited, "even": share},
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
    if batch is None:
        return {}
    bench.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        batch.run(rows)
    bench.synchronize()
    graph_s = (time.perf_counter() - start) / 20
    return {"device_step_ms": graph_s * 1e3, "device_share_of_floor": floor_s / graph_s}


def kernels_of(bench: Bench, run: Callable[[], object], count: int = 3) -> Json:
    """Where the device spends its time in `run`: launches and milliseconds of one, by kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            run()
        bench.synchronize()
    events = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    return {
        "launches": sum(event.count for event in events) / count,
        "ms": sum(event.self_device_time_total for event in events) / (1e3 * count),
        "kernels": [
            [e.key[:80], e.count / count, round(e.self_device_time_total / (1e3 * count), 4)]
            for e in events[:40]
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


def prefill_kernels(bench: Bench, engine: Engine, model: Model) -> Json:
    """The device's part of such a prompt."""
    ids = random_ids(random.Random(7), bench.sizes.prefill_tokens, model.config.vocab_size)
    return kernels_of(bench, lambda: engine.generate([request_of("0", ids, 1)]), 1)


def agreement(bench: Bench, model: Model) -> Json:
    """Greedy replies from rows on the device and from eager calls: where they first differ."""
    draws, found = random.Random(3), {}
    vocab_size = model.config.vocab_size
    prompts = [random_ids(draws, 40 + 30 * n, vocab_size) for n in range(4)]
    for decode in (bench.decode, "eager"):
        engine = bench.engine(model, pool_tokens=20_000, num_kept_states=8, decode=decode)
        wanted = [request_of(str(n), ids, 16) for n, ids in enumerate(prompts)]
        found[decode] = [sequence.new_tokens for sequence in engine.generate(wanted)]
    equal, apart = [], 0.0
    for ours, plain in zip(*found.values(), strict=True) if len(found) > 1 else ():
        same = [a.id == b.id for a, b in zip(ours, plain, strict=True)]
        equal.append(same.index(False) if False in same else len(same))
        pairs = zip(ours[: equal[-1]], plain, strict=False)
        apart = max([apart, *(abs(a.logprob - b.logprob) for a, b in pairs)])
    return {"equal_tokens_of_16": equal, "largest_logprob_difference": apart}


def serve_all(bench: Bench, name: str, model: Model, context: int) -> None:
    """Prefill, and decode at every batch size, each a section."""
    start = time.perf_counter()
    try:
        engine = bench.engine(model)
    except Exception:  # then eager calls are measured instead, and the reason is kept
        bench.result["errors"][f"{name}: graphs"] = traceback.format_exc()[-3000:]
        bench.decode = "eager"
        engine = bench.engine(model)
    bench.synchronize()
    # a collection that walks through all of torch's objects would fall on some of the timed steps
    gc.collect()
    gc.freeze()
    about = {
        "decode": bench.decode,
        "pages": engine.cache.config.num_pages,
        "page_tokens": engine.layout.page_size,
        "start_s": time.perf_counter() - start,
        "is_gc_frozen": True,
    }
    if bench.peer is not None:
        about["waited_for_peer_s"] = bench.peer.wait_ready(min(75.0, bench.left_s / 2))
    bench.section(f"{name}: engine", lambda: about)
    bench.section(f"{name}: prefill", lambda: prefill_of(bench, engine, model))
    if bench.is_gpu:
        bench.section(
            f"{name}: kernels of a prefill", lambda: prefill_kernels(bench, engine, model)
        )
    for rows in bench.sizes.batches:
        bench.section(
            f"{name}: batch {rows}",
            lambda n=rows: decode_at(bench, engine, model, n, context),  # type: ignore[misc]
        )
        batch = engine.runner.batch
        if bench.is_gpu and batch is not None:
            # its rows are those of the last step
            bench.section(
                f"{name}: kernels at batch {rows}",
                lambda n=rows, b=batch: kernels_of(bench, lambda: b.run(n)),  # type: ignore[misc]
            )
    gc.unfreeze()


def run_trace(bench: Bench, model: Model, *, is_caching: bool, limit_s: float) -> Json:
    """The agent trace, with or without a cache."""
    sizes = bench.sizes
    limits = SchedulerConfig(max_running=sizes.conversations, max_step_tokens=sizes.step_tokens)
    engine = bench.engine(
        model,
        is_caching=is_caching,
        num_kept_states=4 * sizes.conversations * GROUP,
        scheduler=limits,
    )
    return trace(engine, sizes, limit_s, bench.synchronize)


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
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    bench = Bench(parser.parse_args())
    sizes, wanted = bench.sizes, bench.arguments.sections
    models: dict[str, Model] = {}

    def start_peer() -> None:
        models["kimi-linear"] = bench.model(kimi_linear(sizes))
        bench.peer = Peer(models["kimi-linear"], sizes, bench.arguments.peer_python)

    def serve(name: str, config: ModelConfig, context: int) -> None:
        models[name] = models.get(name) or bench.model(config)
        serve_all(bench, name, models[name], context)

    def measure_peer() -> Json:
        assert bench.peer is not None
        return bench.peer.measure(min(40.0, bench.left_s - 3.0))

    bench.section("copy_bytes_per_s", bench.copy_rate)
    if "kimi-linear" in wanted:
        bench.section("peer", start_peer)
    if "k3" in wanted:
        bench.section("k3", lambda: serve("k3", preset(sizes.preset), sizes.context))
    if "kimi-linear" in wanted:
        bench.section(
            "kimi-linear", lambda: serve("kimi-linear", kimi_linear(sizes), sizes.peer_prompt)
        )
        bench.section("first_tokens", lambda: {"ours": first_tokens(bench, models["kimi-linear"])})
        bench.section("transformers", measure_peer)
        bench.section("times_as_fast", lambda: compare(bench.result, sizes.batches))
        models.pop("kimi-linear", None)
    if bench.peer is not None:
        bench.peer.end()
    if "trace" in wanted:
        models["k3"] = models.get("k3") or bench.model(preset(sizes.preset))
        for number, (name, is_caching) in enumerate((("cached", True), ("not cached", False))):
            bench.section(
                f"trace, {name}",
                lambda c=is_caching, n=number: run_trace(  # type: ignore[misc]
                    bench, models["k3"], is_caching=c, limit_s=bench.left_s / (3 - n)
                ),
            )
    if "k3" in wanted:
        bench.section("k3: agreement", lambda: agreement(bench, models["k3"]))


if __name__ == "__main__":
    main()
