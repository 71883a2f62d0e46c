"""The dense gated MLP: layer 0 of the release, and the shared experts of every MoE layer."""

from collections.abc import Sequence

from torch import Tensor, nn

from baltoro.model.config import ModelConfig
from baltoro.model.joined import Groups, Joined, projected, rejoined
from baltoro.ops.situ import situ_glu, swiglu


class Mlp(nn.Module):
    """down(SiTU-GLU(gate x, up x)), or SwiGLU for Kimi Linear (report eq. 12)."""

    def __init__(self, config: ModelConfig, intermediate_size: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.joined: Joined | None = None
        self.gate_proj = nn.Linear(size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, size, bias=False)

    def forward(self, x_TD: Tensor, gate_up: Sequence[Tensor] | None = None) -> Tensor:
        """`[T, D]` to `[T, D]`; `gate_up` is what the first two gave, if computed elsewhere."""
        if gate_up is None:
            gate_up = projected(x_TD, self.groups(), self.joined)
        gate_TF, up_TF = gate_up
        config = self.config
        if config.activation == "silu":
            return self.down_proj(swiglu(gate_TF, up_TF, impl=config.impl.situ))
        return self.down_proj(
            situ_glu(
                gate_TF,
                up_TF,
                beta=config.situ_beta,
                linear_beta=config.situ_linear_beta,
                impl=config.impl.situ,
            )
        )

    def join(self) -> None:
        """Make one product of the input's projections where no gradient is wanted."""
        self.joined = rejoined(self.groups(), self.joined)

    def groups(self) -> Groups:
        """The projections of the input."""
        return (self.gate_proj,), (self.up_proj,)
