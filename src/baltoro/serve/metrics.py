"""Counts in the text format of Prometheus, under vLLM's names where it has one.

Counters end in `_total` as vLLM's do, whose client library adds it.
"""

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterable

from baltoro.serve.answer import Answer
from baltoro.serve.engine import Engine
from baltoro.serve.request import Sequence

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKENS = (16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0)
FEW, MANY = 16, 256  # replies that a mean length needs, and is taken over
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": SECONDS,
    "vllm:inter_token_latency_seconds": SECONDS,
    "vllm:request_time_per_output_token_seconds": SECONDS,
    "vllm:e2e_request_latency_seconds": SECONDS,
    "vllm:request_queue_time_seconds": SECONDS,
    "vllm:request_prefill_time_seconds": SECONDS,
    "vllm:request_decode_time_seconds": SECONDS,
    "vllm:request_inference_time_seconds": SECONDS,
    "vllm:request_prompt_tokens": TOKENS,
    "vllm:request_generation_tokens": TOKENS,
}


class _Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def lines(self, name: str) -> Iterable[str]:
        yield f"# TYPE {name} histogram"
        running = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            running += count
            yield f'{name}_bucket{{le="{bound}"}} {running}'
        yield f"{name}_sum {self.total}"
        yield f"{name}_count {running}"


class Metrics:
    """What the server saw; the engine's own counts are read when asked for."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()  # replies by finish reason
        self.rejected: Counter[str] = Counter()  # requests by reason
        self.num_empty = 0  # replies without content and calls
        self.num_retried = 0  # replies thrown away and drawn again
        self.problems: Counter[str] = Counter()  # replies by departure from the format
        self._lengths: defaultdict[str, deque[int]] = defaultdict(lambda: deque(maxlen=MANY))
        self._histograms = {name: _Histogram(bounds) for name, bounds in HISTOGRAMS.items()}

    def expected_tokens(self, effort: str) -> int | None:
        """Mean length of the replies at a reasoning effort; None as long as too few have ended."""
        lengths = self._lengths[effort]
        return None if len(lengths) < FEW else -(-sum(lengths) // len(lengths))

    def finish(self, answer: Answer, num_tokens: int, seconds: float, effort: str) -> None:
        """Count a reply, written at a reasoning effort."""
        if answer.finish_reason != "abort":
            self._lengths[effort].append(num_tokens)
        self.finished[answer.finish_reason] += 1
        self.num_empty += answer.is_empty
        self.problems.update(answer.problems)
        self.observe("vllm:request_generation_tokens", num_tokens)
        self.observe("vllm:e2e_request_latency_seconds", seconds)

    def observe_times(self, sequence: Sequence, now: float) -> None:
        """Add how long a sequence waited and was computed; `now`, by the engine's clock, it ended.

        Of one that wrote nothing nothing is known.
        """
        began, first = sequence.began_at, sequence.first_token_at
        if began is None or first is None:
            return
        self.observe("vllm:request_queue_time_seconds", began - sequence.arrival)
        self.observe("vllm:request_prefill_time_seconds", first - began)
        self.observe("vllm:request_decode_time_seconds", now - first)
        self.observe("vllm:request_inference_time_seconds", now - began)
        if len(sequence.new_tokens) > 1:
            gap = (now - first) / (len(sequence.new_tokens) - 1)
            self.observe("vllm:request_time_per_output_token_seconds", gap)

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram of `HISTOGRAMS`."""
        histogram = self._histograms[name]
        histogram.counts[bisect_left(histogram.bounds, value)] += 1
        histogram.total += value

    def text(self, engine: Engine) -> str:
        """Everything, one metric after the other."""
        lines: list[str] = []
        for name, value in _gauges(engine).items():
            lines += [f"# TYPE {name} gauge", f"{name} {value}"]
        for name, value in self._counters(engine).items():
            lines += [f"# TYPE {name}_total counter", f"{name}_total {value}"]
        labelled = (
            ("vllm:request_success", "finished_reason", self.finished),
            ("vllm:admission_rejections", "reason", self.rejected),
            ("baltoro:malformed_replies", "problem", self.problems),
            ("baltoro:ended_sequences", "reason", engine.stats.finished),
            # prompts outside the packs of fixed rows, which on a GPU are graphs
            ("baltoro:unpacked_prefill_steps", "reason", engine.runner.missed_steps),
            ("baltoro:unpacked_prefill_tokens", "reason", engine.runner.missed_tokens),
            (
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "position",
                engine.stats.accepted_at,
            ),
        )
        for name, label, counts in labelled:
            lines.append(f"# TYPE {name}_total counter")
            lines += [f'{name}_total{{{label}="{key}"}} {n}' for key, n in sorted(counts.items())]
        for name, histogram in self._histograms.items():
            lines += histogram.lines(name)
        return "\n".join(lines) + "\n"

    def _counters(self, engine: Engine) -> dict[str, float]:
        stats, cache = engine.stats, engine.cache.stats
        return {
            "vllm:prompt_tokens": stats.prompt_tokens,
            "vllm:prompt_tokens_cached": stats.cached_tokens,
            "vllm:generation_tokens": stats.new_tokens,
            "vllm:prefix_cache_queries": cache.query_tokens,
            "vllm:prefix_cache_hits": cache.agreed_hit_tokens,
            "vllm:external_prefix_cache_hits": cache.host_hit_tokens,
            "vllm:num_preemptions": engine.scheduler.num_preemptions,
            "baltoro:submitted_sequences": engine.scheduler.num_submitted,
            "vllm:corrupted_requests": stats.num_corrupted,
            "vllm:spec_decode_num_drafts": stats.num_drafts,
            "vllm:spec_decode_num_draft_tokens": stats.draft_tokens,
            "vllm:spec_decode_num_accepted_tokens": stats.accepted_tokens,
            "baltoro:mla_hit_tokens": cache.kv_hit_tokens,
            # a checkpoint keeps its latents, so a state that is found is always usable
            "baltoro:state_hit_tokens": cache.agreed_hit_tokens,
            "baltoro:agreed_hit_tokens": cache.agreed_hit_tokens,
            "baltoro:pages_without_state": cache.num_pages_without_state,
            "baltoro:states_written": cache.num_states_written,
            "baltoro:states_hit": cache.num_states_hit,
            "baltoro:states_evicted_unread": cache.num_states_evicted_unread,
            "baltoro:states_skipped": cache.num_states_skipped,
            "baltoro:pages_copied": cache.num_copies,
            "baltoro:pages_written_back": cache.num_written_back,
            "baltoro:pages_prefetched": cache.num_prefetched,
            "baltoro:empty_replies": self.num_empty,
            "baltoro:retried_replies": self.num_retried,
        }


def _gauges(engine: Engine) -> dict[str, float]:
    scheduler, device = engine.scheduler, engine.cache.device
    return {
        "vllm:num_requests_running": len(scheduler.running),
        "vllm:num_requests_waiting": len(scheduler.waiting),
        "vllm:kv_cache_usage_perc": 1.0 - device.num_available / device.num_pages,
        "baltoro:queued_tokens": scheduler.queued_tokens,
        "baltoro:minimum_useful_prefix_tokens": engine.layout.hash_block,
    }
