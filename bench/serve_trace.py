"""The agent trace of `serve_gpu`: turns of several conversations, each with all said before it."""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from serve_shapes import Sizes, random_ids, request_of

from baltoro.serve.engine import Engine

Json = dict[str, Any]


def trace(engine: Engine, sizes: Sizes, limit_s: float, synchronize: Callable[[], None]) -> Json:
    """Turns in rotation until all are done or the time is up: what each waited for its first token.

    All conversations begin with the same tokens; a turn adds some and is answered greedily.
    """
    draws = random.Random(2)
    vocab_size = engine.model.config.vocab_size
    shared = random_ids(draws, sizes.shared_tokens, vocab_size)
    said = [shared] * sizes.conversations
    waits: list[float] = []
    steps: list[int] = []  # until the first token
    begun = time.perf_counter()
    for turn in range(sizes.turns * sizes.conversations):
        if time.perf_counter() - begun > limit_s:
            break
        who = turn % sizes.conversations
        said[who] += random_ids(draws, sizes.turn_tokens, vocab_size)
        synchronize()
        start = time.perf_counter()
        sequence = engine.submit(request_of(str(turn), said[who], sizes.reply_tokens))
        count = engine.stats.num_steps
        while not sequence.new_tokens:
            engine.step()
        waits.append(time.perf_counter() - start)
        steps.append(engine.stats.num_steps - count)
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
        "steps_to_first_token": sum(steps) / len(steps),
        "seconds": time.perf_counter() - begun,
        "prompt_tokens": engine.stats.prompt_tokens,
        "cached_tokens": engine.stats.cached_tokens,
        "hits": dataclasses.asdict(engine.cache.stats),
    }
