"""What `baltoro serve` can be told, and the server's own settings. Loads without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from baltoro.serve.protocol import EFFORTS

Effort = Literal["none", "low", "high", "max"]
ThinkingEffort = Literal["low", "high", "max"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """What the server adds to the engine."""

    model_name: str
    max_body_bytes: int = 32 << 20
    max_new_tokens: int = 4096  # of a request that does not say
    default_effort: str = "max"  # of a request that does not say
    max_thinking: Mapping[str, int] = field(default_factory=dict)  # tokens by effort; absent: any
    api_keys: tuple[str, ...] = ()  # empty: anybody
    drain_s: float = 30.0  # for running replies at shutdown

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: must be at least 1")
        if self.default_effort not in EFFORTS:
            raise ValueError(
                f"default_effort={self.default_effort!r}: use one of {', '.join(EFFORTS)}"
            )
        for effort, limit in self.max_thinking.items():
            if effort not in EFFORTS or effort == "none":
                levels = ", ".join(level for level in EFFORTS if level != "none")
                raise ValueError(f"max_thinking: {effort!r} does not think; use {levels}")
            if limit < 1:
                raise ValueError(f"max_thinking: {effort} {limit} must be at least 1 token")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """Options of `baltoro serve`; the comment beside a field is its help."""

    port: int = 8000  # where to listen
    host: str = "127.0.0.1"  # address to listen on; other than the loopback only behind a proxy
    model_name: str | None = None  # name that clients see; absent, the directory's
    api_key_file: Path | None = None  # keys of clients, one per line; absent, no key is needed
    pool_tokens: int = 65536  # tokens of context that all conversations together have room for
    host_bytes: int = 0  # CPU memory for prefixes that the pool has no room for
    # states there; int8 takes a quarter of the bytes, and what follows is no longer token for token
    # what it is without a cache
    cold_states: Literal["exact", "int8"] = "exact"
    max_running: int = 16  # replies written at once
    max_step_tokens: int = 2048  # tokens computed in one step
    # and in one in which nobody waits for a next token; absent, twice as many on a CPU
    max_prefill_tokens: int | None = None
    max_queued: int = 4096  # requests that may wait; one more is answered with 503
    max_queued_tokens: int = 4_000_000  # prompts and expected replies that may wait, likewise
    max_new_tokens: int = 4096  # longest reply of a request that does not say
    effort: Effort = "max"  # of reasoning, of a request that does not say
    # tokens of thinking by effort, as in `low 512 high 4096`; then the response is begun for it
    max_thinking: dict[ThinkingEffort, int] = field(default_factory=dict)
    dtype: Literal["float32", "bfloat16"] | None = None  # absent: bfloat16 on a GPU, else as stored
    device: str = "cpu"  # cpu, cuda, cuda:1
    experts: Literal["decoded", "packed"] = "decoded"  # packed: MXFP4 experts take less memory
    # guess tokens ahead, from the text so far or by the checkpoint's MTP layer
    draft: Literal["ngram", "mtp"] | None = None

    def server_config(self, checkpoint: str) -> ServerConfig:
        """The server's settings.

        Raises `ValueError` for a key file without keys and a port that is none.
        """
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port}: must be 0, for any that is free, to 65535")
        file = self.api_key_file
        keys = () if file is None else tuple(file.read_text().split())
        if file is not None and not keys:
            raise ValueError(f"api_key_file={str(file)!r}: holds no key")
        return ServerConfig(
            model_name=self.model_name or Path(checkpoint).resolve().name,
            max_new_tokens=self.max_new_tokens,
            default_effort=self.effort,
            max_thinking={str(k): v for k, v in self.max_thinking.items()},
            api_keys=keys,
        )


DEFAULTS = ServeOptions()
