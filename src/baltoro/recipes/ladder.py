"""The one dial: a size fixes shape, horizon, batch, learning rate and context.

From the active parameters N and the tokens D of the horizon follow, with C = 6 N D,

    learning rate = 0.01273 C^-0.0575        tokens per step = 0.00652 C^0.4138

Moonlight's laws (arXiv 2502.16982; `k3-recipe` 6.1), found with AdamW and used unchanged for Muon,
whose update has the same size. They were fitted to dense models of 4e8 to 1.5e9 parameters and
K3 publishes no rates of its own; where a size was swept, a factor corrects the law. Tokens per step
are rounded to a power of two, and are at least one longest sequence.

The context grows in four stages as K3's does, 8K to 64K to 256K to 1M, ratio 1 : 8 : 32 : 128, none
below `SHORTEST`, so that a picture with its words fits the first stage. Their shares of the run are
ours: K3's are not published.
"""

import math
from dataclasses import dataclass

from baltoro.config import nearest
from baltoro.train.config import ContextStage

RATIOS = (1, 8, 32, 128)
FRACTIONS = (0.6, 0.2, 0.12, 0.08)
SHORTEST = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """What a size fixes by hand; the rest follows."""

    preset: str  # of `model.presets`
    num_tokens: int  # horizon
    seq_len: int  # of the last stage
    max_microbatch: int  # positions in memory at once
    num_mtp_layers: int
    why: str
    recompute: bool = False  # of activations, so that a microbatch fits
    rate_factor: float = 1.0  # measured best learning rate over the law's; 1 where none was swept


LADDER: dict[str, Rung] = {
    "nano": Rung(
        preset="nano",
        num_tokens=614_400,
        seq_len=2048,
        max_microbatch=2048,
        num_mtp_layers=0,
        why="minutes on two cores: 300 steps, two epochs of the shipped corpus, no MTP layer",
        rate_factor=4.23,  # .01, of .0025 to .02 (anchor A14)
    ),
    "mini": Rung(
        preset="mini",
        num_tokens=300_000_000,
        seq_len=8192,
        max_microbatch=8192,
        num_mtp_layers=1,
        why="twenty tokens per active parameter",
    ),
    "small": Rung(
        preset="small",
        num_tokens=3_000_000_000,
        seq_len=65536,
        max_microbatch=65536,
        num_mtp_layers=1,
        why="twenty tokens per active parameter",
        rate_factor=2.1,  # .003 at 40 M tokens; at 10 M the best of .0015 to .02
    ),
    "base": Rung(
        preset="base",
        num_tokens=12_000_000_000,
        seq_len=65536,
        max_microbatch=65536,
        num_mtp_layers=1,
        why="twenty tokens per active parameter; not run to its end here",
        recompute=True,
    ),
}


def rung(size: str) -> Rung:
    """The rung called `size`; raises `ValueError` with the nearest name otherwise."""
    if size not in LADDER:
        raise ValueError(f"size {size!r} is unknown; {nearest(size, LADDER)}")
    return LADDER[size]


def peak_learning_rate(num_active: int, num_tokens: int, factor: float = 1.0) -> float:
    """`factor` times that of the law, to three digits."""
    return float(f"{factor * 0.01273 * _compute(num_active, num_tokens) ** -0.0575:.3g}")


def tokens_per_step(num_active: int, num_tokens: int, seq_len: int) -> int:
    """Of the law, the nearest power of two, and at least `seq_len`."""
    wished = 0.00652 * _compute(num_active, num_tokens) ** 0.4138
    return max(seq_len, 2 ** round(math.log2(wished)))


def context_stages(seq_len: int) -> tuple[ContextStage, ...]:
    """Four stages that end at `seq_len`, equal neighbours joined."""
    stages: list[ContextStage] = []
    for ratio, fraction in zip(RATIOS, FRACTIONS, strict=True):
        length = min(seq_len, max(SHORTEST, seq_len * ratio // RATIOS[-1]))
        if stages and stages[-1].seq_len == length:
            fraction += stages.pop().fraction
        stages.append(ContextStage(seq_len=length, fraction=fraction))
    return tuple(stages)


def _compute(num_active: int, num_tokens: int) -> float:
    return 6.0 * num_active * num_tokens
