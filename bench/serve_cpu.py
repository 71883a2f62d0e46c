"""Eight streams at once on a CPU: seconds to each one's first token, and between tokens.

    python bench/serve_cpu.py [--threads 2] [--streams 8] [--repeats 12] [--out FILE]

The server is a process of its own on a `nano` checkpoint of random weights (2.2 M parameters, a
vocabulary of bytes). All streams of a repetition are sent at the same moment, each with a message
of its own. Without thinking a prompt is little more than the message; with it the text on thinking
efforts alone is 274 tokens of bytes. Where nothing is to be reused each prompt has a cache salt of
its own. The first repetition of each case is not counted. Times are the client's: from sending to
the chunk with the first token, which a stream with log-probabilities has whether the token makes
text or not. Beside them stands the floor: the FLOPs of the tokens that nothing holds yet, at the
rate of one matrix product on as many threads.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
import torch
from provenance import commit_of
from serve_load import CHAT, user, words
from serve_process import ServerProcess, served

from baltoro.checkpoint.fixture import fixture
from baltoro.doctor import machine
from baltoro.model.counts import flop_counts
from baltoro.model.presets import preset

NEW_TOKENS = 24


class Case(NamedTuple):
    """What all streams of a repetition have in common."""

    name: str
    num_tokens: int  # of a prompt, template included
    effort: str
    num_known: int = 0  # of them, which the server has seen

    @property
    def is_reused(self) -> bool:
        return self.num_known > 0


CASES = (
    Case("100 tokens, nothing reused", 100, "none"),
    Case("345 tokens, nothing reused", 345, "none"),
    Case("420 tokens, of which 272 are every prompt's", 420, "max", 272),
)


def matmul_rate(threads: int) -> float:
    """FLOPs a second of one product of nano's widths, fp32, median of 50."""
    torch.set_num_threads(threads)
    x, weight = torch.randn(2760, 256), torch.randn(768, 256)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        times.append(time.perf_counter() - start)
    return 2 * x.numel() * len(weight) / median(times)


def floor_s(case: Case, streams: int, rate: float) -> float:
    """Seconds that the products of all new tokens take at this rate."""
    flops = flop_counts(preset("nano"), case.num_tokens)
    per_token = flops.matmul + flops.attention + flops.kda
    return streams * (case.num_tokens - case.num_known) * per_token / rate


def message_length(server: ServerProcess, case: Case) -> int:
    """Characters, which are tokens, of a message that makes a prompt of the case's length."""
    body = {"messages": user(""), "max_tokens": 1, "reasoning_effort": case.effort}
    answer = httpx.post(server.address + CHAT, json=body).raise_for_status().json()
    return case.num_tokens - int(answer["usage"]["prompt_tokens"])


async def stream(client: httpx.AsyncClient, case: Case, message: str, salt: str) -> list[float]:
    """Seconds from sending to every token."""
    body = {"messages": user(message), "max_tokens": NEW_TOKENS, "reasoning_effort": case.effort}
    body |= {"stream": True, "logprobs": True, "seed": 1, "cache_salt": salt}
    start, times = time.perf_counter(), []
    async with client.stream("POST", CHAT, json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                if choice.get("logprobs"):
                    times.append(time.perf_counter() - start)
    return times


async def measured(server: ServerProcess, case: Case, streams: int, repeats: int) -> list[Any]:
    """The times of all streams, repetition by repetition."""
    rounds, length = [], message_length(server, case)
    async with httpx.AsyncClient(base_url=server.address, timeout=60) as client:
        for number in range(repeats + 1):
            seeds = [streams * number + place for place in range(streams)]
            texts = [words(random.Random(seed), 500)[:length] for seed in seeds]
            salts = ["" if case.is_reused else f"{case.name} {seed}" for seed in seeds]
            calls = (stream(client, case, *pair) for pair in zip(texts, salts, strict=True))
            rounds.append(await asyncio.gather(*calls))
    return rounds[1:]


def summary(rounds: list[Any]) -> dict[str, Any]:
    """Of the last stream's first token in each repetition, of all first tokens, of the gaps."""
    last = sorted(max(times[0] for times in streams) for streams in rounds)
    every = sorted(times[0] for streams in rounds for times in streams)
    pairs = (pair for streams in rounds for times in streams for pair in itertools.pairwise(times))
    gaps = sorted(late - early for early, late in pairs)
    tokens = [sum(map(len, streams)) / max(map(max, streams)) for streams in rounds]
    return {
        "last_first_token_s": {"p50": median(last), "max": last[-1], "all": last},
        "first_token_s": {"p50": median(every), "max": every[-1]},
        "per_token_s": {"p50": median(gaps), "p99": gaps[int(0.99 * len(gaps))], "max": gaps[-1]},
        "tokens_per_s": median(tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("bench/results/serve_cpu.json"))
    parser.add_argument("--commit", help="instead of asking git")
    arguments = parser.parse_args()
    results = {}
    rate = matmul_rate(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "nano"
        fixture(str(checkpoint), preset="nano")
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # of the server that is started
        with served(checkpoint, log=Path(folder) / "log") as server:
            for case in CASES:
                floor = {"floor_s": floor_s(case, arguments.streams, rate)}
                run = measured(server, case, arguments.streams, arguments.repeats)
                results[case.name] = summary(asyncio.run(run)) | floor
    result = {
        "commit": commit_of(arguments.commit),
        "device": machine(),
        "server_threads": arguments.threads,
        "matmul_gflops_per_s": rate / 1e9,
        "streams": arguments.streams,
        "repeats": arguments.repeats,
        "load_average": os.getloadavg(),
        "results": results,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, numbers in results.items():
        print(name, {k: v for k, v in numbers["last_first_token_s"].items() if k != "all"})
        print(" ", numbers["first_token_s"], numbers["per_token_s"], numbers["tokens_per_s"])
        print("  floor", numbers["floor_s"])


if __name__ == "__main__":
    main()
