"""How a token is drawn: settings alone, so that requests can carry them without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 1.0  # 0: the likeliest token, lowest id on a tie
    top_k: int | None = None  # keep this many tokens; None: all
    top_p: float = 1.0  # keep the smallest set of this probability
    min_p: float = 0.0  # drop tokens below this share of the likeliest one's probability

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature}: must be 0 or a positive number")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: must be at least 1, or absent")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p}: must be in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p={self.min_p}: must be in [0, 1]")

    @property
    def is_restricted(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return self.top_k is not None or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalties:
    """What a token's logit loses for having occurred."""

    presence: float = 0.0  # once, if the reply has the token
    frequency: float = 0.0  # for each time that the reply has it
    repetition: float = 1.0  # divides a positive logit, multiplies a negative; prompt or reply

    def __post_init__(self) -> None:
        for name in ("presence", "frequency"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise ValueError(f"{name}_penalty={getattr(self, name)}: must be in [-2, 2]")
        if not 0.0 < self.repetition < float("inf"):
            raise ValueError(f"repetition_penalty={self.repetition}: must be positive")

    @property
    def are_off(self) -> bool:
        return self.presence == self.frequency == 0.0 and self.repetition == 1.0
