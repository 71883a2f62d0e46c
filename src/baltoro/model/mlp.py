"""The dense gated MLP: layer 0 of the release, and the shared experts of every MoE layer."""

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

    def forward(self, x_TD: Tensor) -> Tensor:
        """`[T, D]` to `[T, D]`."""
        gate_TF, up_TF = projected(x_TD, self._groups(), self.joined)
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
        self.joined = rejoined(self._groups(), self.joined)

    def _groups(self) -> Groups:
        return (self.gate_proj,), (self.up_proj,)
