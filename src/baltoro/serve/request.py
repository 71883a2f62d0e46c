"""What a user asked for, and the sequence that it becomes in the engine. No torch."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from baltoro.model.config import ModelConfig
from baltoro.serve.pages import Table
from baltoro.serve.prefix import MediaSpan, extend_chain
from baltoro.serve.sampling import Penalties, Sampling

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort", "error"]


class Constraint(Protocol):
    """Which tokens may come next in one reply. It has seen the reply's tokens in their order."""

    def mask(self, logits_W: "Tensor") -> bool:
        """Set to -inf, in place, what may not come next; False if nothing may, or it is at fault.

        `logits_W` is `[W]` floating point, on any device.
        """

    def accept(self, token_id: int) -> bool:
        """Go on by one token; False, and nothing changes, if it may not come next."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""

    def is_free(self, count: int) -> bool:
        """Whether the next `count` tokens may be any, whatever they turn out to be."""


class Grammar(Protocol):
    """What replies must look like; shared by all that must look alike."""

    def start(self) -> Constraint:
        """The constraint of a new reply."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """One completion of a prompt. Raises `ValueError` for a prompt or a length that cannot be."""

    request_id: str  # by which logs name it
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    penalties: Penalties = field(default_factory=Penalties)
    seed: int = 0  # equal seeds give equal text, whatever else runs beside it
    stop_ids: frozenset[int] = frozenset()  # end the reply, and belong to it
    num_logprobs: int = 0  # likeliest tokens to report beside the drawn one
    priority: int = 0  # lower goes first
    expected_new_tokens: int | None = None  # for admission; None: `max_new_tokens`
    cache_salt: str = ""  # prefixes are shared only under an equal salt
    media: tuple[MediaSpan, ...] = ()  # where the pictures are and what they show
    image_features: "Tensor | None" = None  # [rows, D], one per placeholder token
    grammar: Grammar | None = None  # None: any token may come

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("prompt: it has no tokens; give at least one character")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: must be at least 1")
        if self.num_logprobs < 0:
            raise ValueError(f"num_logprobs={self.num_logprobs}: must not be negative")

    def check(self, config: ModelConfig) -> None:
        """Raise `ValueError` for ids or pictures that a model cannot take."""
        ids, features = self.prompt_ids, self.image_features
        wrong = min(ids) if min(ids) < 0 else max(ids)
        if not 0 <= wrong < config.vocab_size:
            raise ValueError(
                f"prompt: token id {wrong} is outside the vocabulary of {config.vocab_size}"
            )
        if features is None:
            return
        if config.vision is None:
            raise ValueError("image_features: this model takes only text")
        num_pads = ids.count(config.vision.placeholder_token_id)
        if features.shape != (num_pads, config.hidden_size):
            raise ValueError(
                f"image_features: {list(features.shape)} for {num_pads} placeholder tokens and "
                f"hidden_size {config.hidden_size}; expected one row each"
            )
        if sum(span.stop - span.start for span in self.media) != num_pads:
            raise ValueError("media: the spans must cover every placeholder, else replies mix up")

    @property
    def budget(self) -> int:
        """Tokens that it will probably take."""
        expected = self.expected_new_tokens
        new = self.max_new_tokens if expected is None else min(expected, self.max_new_tokens)
        return len(self.prompt_ids) + new


@dataclass(frozen=True, slots=True)
class NewToken:
    """One token that the model wrote."""

    id: int
    logprob: float  # under the distribution that it was drawn from
    weights_version: str  # of the weights that drew it
    top: tuple[tuple[int, float], ...] = ()  # likeliest ids and their log-probabilities


@dataclass(eq=False, slots=True)
class Sequence:
    """A request's tokens and state in the engine."""

    request: Request
    root: bytes  # start of its hash chain
    arrival: float  # seconds, of the engine's clock
    tokens: list[int] = field(default_factory=list)  # prompt, then reply
    new_tokens: list[NewToken] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)  # one hash per complete hash block
    table: Table | None = None  # its pages; None while it waits
    num_computed: int = 0  # tokens whose state is in the pages
    num_cached: int = 0  # tokens that the first admission took from the cache
    num_preemptions: int = 0
    num_skips: int = 0  # sequences that were let in past it
    began_at: float | None = None  # when it was first computed, of the same clock
    first_token_at: float | None = None  # of the same clock
    finish_reason: FinishReason | None = None
    constraint: Constraint | None = None  # of the request's grammar

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)
        if self.request.grammar is not None:
            self.constraint = self.request.grammar.start()

    @property
    def is_decoding(self) -> bool:
        """Whether only the last token is left to compute."""
        return self.num_computed > 0 and self.num_computed == len(self.tokens) - 1

    @property
    def num_left(self) -> int:
        """Tokens that its reply may still have."""
        return self.request.max_new_tokens - len(self.new_tokens)

    def extend_chain(self, hash_block: int) -> None:
        """Hash the blocks that its tokens completed since."""
        extend_chain(self.chain, self.root, self.tokens, hash_block, self.request.media)
