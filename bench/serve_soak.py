"""A soak: a real server under mixed load for a while, and what it has left of itself after it.

    python bench/serve_soak.py [--minutes 30] [--clients 10] [--checkpoint DIR] [--out FILE]

The server runs in a process of its own on a `nano` checkpoint of random weights. Clients send what
`serve_load.Mix` draws: conversations, plain texts, tools, schemas, pictures, shared prefixes,
streamed and whole, and a quarter of it bad; one in six hangs up at a random moment. At the end,
with nothing running: no page held, no file more than at the start, no thread more than asyncio's
workers, memory without a trend, every sequence that the engine took in ended, every answer that a
client got counted by the server, and a greedy reply still the one from before the load. Anything
else is a fault; faults are in the result, and the exit code is 1.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fastapi
import httpx
import uvicorn
from provenance import commit_of
from serve_load import CHAT, LEAVE_WITHIN_S, TIMEOUT_S, Client, Mix, Span, Tally, user
from serve_process import ServerProcess, Usage, served

from baltoro.checkpoint.fixture import fixture
from baltoro.doctor import machine

QUIET_S = 30.0  # in which a server without clients has to come to rest
TICK_S, HALT_S = 0.5, 4.0
LEAVE_SHARE, HALF_SHARE = 0.13, 0.03
RSS_GROWTH, RSS_SLACK_MB = 0.05, 24.0  # of the last third over the one before
CANARY = {"messages": user("Hi"), "max_tokens": 24, "temperature": 0}
RUNNING = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def canary(server: ServerProcess, salt: str) -> Any:
    """What the server answers to a greedy request on its own, under a salt without its cache."""
    body = {**CANARY, "cache_salt": salt}
    answer = httpx.post(server.address + CHAT, json=body, timeout=TIMEOUT_S).raise_for_status()
    return answer.json()["choices"]


async def load(server: ServerProcess, seconds: float, clients: int, seed: int) -> Tally:
    """Have so many clients send calls for so long; the calls under way at the end are answered."""
    tally, mix = Tally(), Mix()
    end = time.monotonic() + seconds

    async def talk(number: int) -> None:
        client = Client(server.address, random.Random(1000 * seed + number), tally)
        while time.monotonic() < end:
            call, kind = mix.draw(client), client.rng.random()
            if kind < HALF_SHARE and isinstance(call.body, dict):
                await client.send_half(call)
            elif kind < HALF_SHARE + LEAVE_SHARE:
                await client.send(call, client.rng.uniform(0.0, LEAVE_WITHIN_S))
            else:
                await client.send(call)
        await client.close()

    await asyncio.gather(*(talk(number) for number in range(clients)))
    return tally


async def watched(
    server: ServerProcess, seconds: float, clients: int, seed: int
) -> tuple[Tally, list[Usage], list[Span]]:
    """The load, what the process held meanwhile, about 100 times, and when all was at a halt.

    On a machine that others measure on, everything may be stopped for a while.
    """
    samples, halts = [server.usage()], list[Span]()

    async def watch() -> None:
        while server.is_running:
            await asyncio.sleep(max(0.2, seconds / 100))
            samples.append(server.usage())

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK_S)
            if time.perf_counter() - before > TICK_S + HALT_S:
                halts.append((before, time.perf_counter()))

    tasks = [asyncio.create_task(watch()), asyncio.create_task(tick())]
    tally = await load(server, seconds, clients, seed)
    for task in tasks:
        task.cancel()
    return tally, samples, halts


def at_rest(server: ServerProcess, before: Usage) -> tuple[dict[str, float], Usage]:
    """Metrics and holdings once nothing runs and connections are closed, or after `QUIET_S`."""
    deadline = time.monotonic() + QUIET_S
    while True:
        metrics, usage = server.metrics(), server.usage()
        is_idle = not any(metrics[name] for name in RUNNING)
        if (is_idle and usage.descriptors <= before.descriptors) or time.monotonic() > deadline:
            return metrics, usage
        time.sleep(0.5)


def labelled(metrics: dict[str, float], name: str) -> dict[str, float]:
    """A counter by the value of its label."""
    pairs = [(key.split('"')[1], n) for key, n in metrics.items() if key.startswith(name + "{")]
    return dict(pairs)


def faults_of(
    tally: Tally,
    metrics: dict[str, float],
    num_before: float,
    before: Usage,
    samples: Sequence[Usage],
    after: Usage,
) -> list[str]:
    """What must not be; `num_before` replies were counted before the load."""
    faults = list(tally.faults)
    faults += [f"{name} is {metrics[name]} at rest" for name in RUNNING if metrics[name]]
    submitted = metrics["baltoro:submitted_sequences_total"]
    ended = sum(labelled(metrics, "baltoro:ended_sequences_total").values())
    if submitted != ended:
        faults.append(f"{submitted:.0f} sequences were taken in and {ended:.0f} ended")
    if labelled(metrics, "baltoro:ended_sequences_total").get("error"):
        faults.append("sequences ended in an error")
    counted = sum(labelled(metrics, "vllm:request_success_total").values()) - num_before
    known = tally.choices_answered
    if not known <= counted <= known + tally.choices_left:
        faults.append(
            f"the server counts {counted:.0f} replies; clients got {known} and hung up on "
            f"{tally.choices_left}"
        )
    if after.descriptors > before.descriptors:
        faults.append(f"{after.descriptors} open files instead of {before.descriptors}")
    num_workers = min(32, (os.cpu_count() or 1) + 4)  # that asyncio starts as it needs them
    if max(usage.threads for usage in (*samples, after)) > before.threads + num_workers:
        faults.append(f"more threads than the {before.threads} at the start and {num_workers}")
    return faults + growth_of(samples)


def growth_of(samples: Sequence[Usage]) -> list[str]:
    """Memory that grows from the second third to the last; a short run has not had all by then."""
    third = len(samples) // 3
    if third < 10:
        return []
    early, late = samples[third : 2 * third], samples[2 * third :]
    was, now = (statistics.median(u.rss_mb for u in part) for part in (early, late))
    if now > was * (1.0 + RSS_GROWTH) + RSS_SLACK_MB:
        return [f"memory grows: {was:.0f} MB in the second third, {now:.0f} in the last"]
    return []


def quantiles(spans: Sequence[Span], halts: Sequence[Span]) -> dict[str, float]:
    """Milliseconds of the spans in which nothing was at a halt."""
    values = [
        end - start for start, end in spans if not any(a < end and start < b for a, b in halts)
    ]
    if len(values) < 2:
        return {"count": len(values)}
    parts = statistics.quantiles(values, n=1000, method="inclusive")
    places = {"p50_ms": 499, "p90_ms": 899, "p99_ms": 989}
    return {"count": len(values)} | {k: round(1e3 * parts[n], 1) for k, n in places.items()}


def soak(checkpoint: Path, arguments: argparse.Namespace, log: Path) -> dict[str, Any]:
    """Run it all; the result as it is written."""
    options = ["--max-running", "8", "--pool-tokens", "20000", "--host-bytes", str(64 << 20)]
    with served(checkpoint, *options, log=log) as server:
        first = canary(server, "before")
        metrics, before = at_rest(server, server.usage())
        num_before = sum(labelled(metrics, "vllm:request_success_total").values())
        seconds = 60.0 * arguments.minutes
        start = time.monotonic()
        tally, samples, halts = asyncio.run(
            watched(server, seconds, arguments.clients, arguments.seed)
        )
        loaded_s = time.monotonic() - start
        metrics, after = at_rest(server, before)
        faults = faults_of(tally, metrics, num_before, before, samples, after)
        if canary(server, "after") != first:
            faults.append("a greedy reply is not the one from before the load")
        if not server.is_running:
            faults.append("the server is gone")
    written = log.read_text(errors="replace")
    if "Traceback" in written:
        faults.append(
            f"the server wrote a traceback: {written[written.index('Traceback') :][:2000]}"
        )
    if server.process.returncode not in (0, -signal.SIGTERM):
        faults.append(f"the server ended with {server.process.returncode}")
    return {
        "minutes": arguments.minutes,
        "loaded_s": round(loaded_s, 1),
        "clients": arguments.clients,
        "seed": arguments.seed,
        "faults": faults,
        "outcomes": dict(sorted(tally.outcomes.items())),
        "calls": dict(sorted(tally.by_kind.items())),
        "replies_got": tally.choices_answered,
        "replies_left": tally.choices_left,
        "replies_counted": labelled(metrics, "vllm:request_success_total"),
        "sequences_ended": labelled(metrics, "baltoro:ended_sequences_total"),
        "halted_s": round(sum(end - start for start, end in halts), 1),
        "time_to_first_token": quantiles(tally.first, halts),
        "time_per_token": quantiles(tally.gaps, halts),
        "before": before._asdict(),
        "after": after._asdict(),
        "rss_mb": [round(usage.rss_mb, 1) for usage in samples],
        "threads": [usage.threads for usage in samples],
        "open_files": [usage.descriptors for usage in samples],
        "metrics": {k: v for k, v in metrics.items() if "{" not in k},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="instead of nano with random weights")
    parser.add_argument("--out", type=Path, default=Path("bench/results/serve_soak.json"))
    parser.add_argument("--commit", help="instead of asking git")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = arguments.checkpoint or Path(folder) / "nano"
        if arguments.checkpoint is None:
            fixture(str(checkpoint), preset="nano")
        result = soak(checkpoint, arguments, Path(folder) / "log")
    about = {
        "commit": commit_of(arguments.commit),
        "device": machine(),
        "versions": {module.__name__: module.__version__ for module in (fastapi, uvicorn, httpx)},
        "load_average": os.getloadavg(),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({**about, **result}, indent=1) + "\n")
    for name in ("outcomes", "time_to_first_token", "time_per_token", "before", "after"):
        print(f"{name}: {result[name]}")
    for fault in result["faults"]:
        print(f"FAULT {fault}")
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
