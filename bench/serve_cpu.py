"""Eight streams at once on a CPU: seconds to each one's first token, and between tokens.

    python bench/serve_cpu.py [--threads 2] [--streams 8] [--repeats 12] [--out FILE]

The server is a process of its own on a `nano` checkpoint of random weights (2.2 M parameters, a
vocabulary of bytes). All streams of a repetition are sent at the same moment; each has a prompt of
its own and a cache salt of its own, so nothing is reused. The first repetition of each length is
not counted. Times are the client's: from sending to the chunk with the first token, which a stream
with log-probabilities has whether the token makes text or not.
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
from typing import Any

import httpx
from provenance import commit_of
from serve_load import CHAT, user, words
from serve_process import ServerProcess, served

from baltoro.checkpoint.fixture import fixture
from baltoro.doctor import machine

LENGTHS = (100, 345)  # tokens of a prompt, template included
NEW_TOKENS = 24


def message_of(server: ServerProcess, num_tokens: int, seed: int) -> str:
    """A text that makes a prompt of so many tokens."""
    text = words(random.Random(seed), num_tokens)

    def count(length: int) -> int:
        body = {"messages": user(text[:length])}
        return int(httpx.post(f"{server.address}/tokenize", json=body).json()["count"])

    length = num_tokens - count(0)  # a token a byte
    assert count(length) == num_tokens, "the vocabulary is not of bytes"
    return text[:length]


async def stream(client: httpx.AsyncClient, message: str, salt: str) -> list[float]:
    """Seconds from sending to every token."""
    body = {"messages": user(message), "max_tokens": NEW_TOKENS, "cache_salt": salt}
    body |= {"stream": True, "logprobs": True, "seed": 1}
    start, times = time.perf_counter(), []
    async with client.stream("POST", CHAT, json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                if choice.get("logprobs"):
                    times.append(time.perf_counter() - start)
    return times


async def measured(server: ServerProcess, length: int, streams: int, repeats: int) -> list[Any]:
    """The times of all streams, repetition by repetition."""
    texts = [message_of(server, length, number) for number in range(streams)]
    rounds = []
    async with httpx.AsyncClient(base_url=server.address, timeout=60) as client:
        for number in range(repeats + 1):
            salts = [f"{length} {number} {place}" for place in range(streams)]
            pairs = zip(texts, salts, strict=True)
            rounds.append(await asyncio.gather(*(stream(client, *pair) for pair in pairs)))
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
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "nano"
        fixture(str(checkpoint), preset="nano")
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # of the server that is started
        with served(checkpoint, log=Path(folder) / "log") as server:
            for length in LENGTHS:
                run = measured(server, length, arguments.streams, arguments.repeats)
                results[f"{length} tokens"] = summary(asyncio.run(run))
    result = {
        "commit": commit_of(arguments.commit),
        "device": machine(),
        "server_threads": arguments.threads,
        "streams": arguments.streams,
        "repeats": arguments.repeats,
        "load_average": os.getloadavg(),
        "results": results,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for length, numbers in results.items():
        print(length, {k: v for k, v in numbers["last_first_token_s"].items() if k != "all"})
        print(" ", numbers["first_token_s"], numbers["per_token_s"], numbers["tokens_per_s"])


if __name__ == "__main__":
    main()
