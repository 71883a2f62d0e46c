"""Settings of the optimiser."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """Muon for matrices, AdamW for the rest, one learning rate for both (arXiv 2502.16982)."""

    momentum: float = 0.95
    newton_schulz_steps: int = 5
    update_rms: float = 0.2  # of a Muon update of full rank, before the learning rate
    weight_decay: float = 0.1  # decoupled, times the learning rate
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    newton_schulz_dtype: Literal["float32", "bfloat16"] = "float32"  # of its matrix products
    muon_impl: str = "torch"  # of what surrounds the products; "triton" makes bf16 directions
    newton_schulz_impl: str = "torch"
    newton_schulz_wide_impl: str = "torch"  # of short, wide matrices; bounds in optim/muon.py
    max_stack_elements: int = (
        1 << 28
    )  # most entries orthogonalised at once; bounds the extra memory

    def __post_init__(self) -> None:
        for field in ("momentum", "beta1", "beta2"):
            if not 0.0 <= getattr(self, field) < 1.0:
                raise ValueError(f"{field}={getattr(self, field)}: must be in [0, 1)")
        for field in ("update_rms", "eps"):
            if not getattr(self, field) > 0.0:
                raise ValueError(f"{field}={getattr(self, field)}: must be positive")
        if not self.weight_decay >= 0.0:
            raise ValueError(f"weight_decay={self.weight_decay}: must not be negative")
        for field in ("newton_schulz_steps", "max_stack_elements"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)}: must be at least 1")
        if self.newton_schulz_dtype not in ("float32", "bfloat16"):
            raise ValueError(
                f"newton_schulz_dtype={self.newton_schulz_dtype!r}: 'float32' or 'bfloat16'"
            )
        if self.muon_impl not in ("torch", "triton"):
            raise ValueError(f"muon_impl={self.muon_impl!r}: 'torch' or 'triton'")
        if self.muon_impl == "triton" and "gram" in (
            self.newton_schulz_impl,
            self.newton_schulz_wide_impl,
        ):
            raise ValueError(
                "muon_impl='triton' rounds directions to bf16, which 'gram' refuses; set "
                "newton_schulz_impl and newton_schulz_wide_impl to 'torch' or 'triton'"
            )
        if self.muon_impl == "triton" and self.newton_schulz_dtype != "bfloat16":
            raise ValueError(
                "muon_impl='triton' rounds directions to bf16, and newton_schulz_dtype is "
                f"{self.newton_schulz_dtype!r}; set it to 'bfloat16' or muon_impl to 'torch'"
            )
