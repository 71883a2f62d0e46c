"""Kimi Delta Attention as a token mixer (report section 2.1.1, eq. 1-7).

    S_t = (I - beta k k') diag(exp g) S_{t-1} + beta k v'
    o_t = S_t' q_t,   y = W_o [norm(o) * sigmoid(W_g x)]

C = 3 * H * K, the channels of q, k and v side by side.
"""

import torch
from torch import Tensor, nn

from baltoro.model.cache import Cache, ScanInputs, ScanOutput
from baltoro.model.config import ModelConfig
from baltoro.model.joined import Groups, Joined, Stack, projected, rejoined, stacked
from baltoro.ops.kda.decode import DecodeInputs, DecodeWeights, StatePool, decode_kda
from baltoro.ops.kda.fused import chunk_kda_fused
from baltoro.ops.rms_norm import gated_rms_norm
from baltoro.ops.short_conv import short_conv


class ConvWeight(nn.Module):
    """Taps of a depthwise causal convolution, `[C, 1, W]`, the last on the current token; fp32."""

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size))


class HeadNorm(nn.Module):
    """The weight `[V]` of the output norm, shared by all heads; fp32."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim))


class Kda(nn.Module):
    """The KDA mixer of one layer."""

    def __init__(self, config: ModelConfig, layer_idx: int) -> None:
        super().__init__()
        kda, size = config.kda, config.hidden_size
        width = kda.num_heads * kda.head_dim
        self.config = config
        self.layer_idx = layer_idx
        self.q_proj = nn.Linear(size, width, bias=False)
        self.k_proj = nn.Linear(size, width, bias=False)
        self.v_proj = nn.Linear(size, width, bias=False)
        self.q_conv1d = ConvWeight(width, kda.conv_kernel_size)
        self.k_conv1d = ConvWeight(width, kda.conv_kernel_size)
        self.v_conv1d = ConvWeight(width, kda.conv_kernel_size)
        self.f_a_proj = nn.Linear(size, kda.head_dim, bias=False)
        self.f_b_proj = nn.Linear(kda.head_dim, width, bias=False)
        self.b_proj = nn.Linear(size, kda.num_heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(kda.num_heads))
        self.dt_bias = nn.Parameter(torch.zeros(width))
        if kda.use_full_rank_gate:
            self.g_proj = nn.Linear(size, width, bias=False)
        else:
            self.g_a_proj = nn.Linear(size, kda.head_dim, bias=False)
            self.g_b_proj = nn.Linear(kda.head_dim, width, bias=False)
        self.joined: Joined | None = None
        self._stacked_taps: Stack | None = None
        self.o_norm = HeadNorm(kda.head_dim)
        self.o_proj = nn.Linear(width, size, bias=False)

    def forward(self, x_TD: Tensor, cu_seqlens: Tensor, cache: Cache | None = None) -> Tensor:
        """`[T, D]` to `[T, D]`; with a cache its window and state are read and replaced."""
        kda = self.config.kda
        projected_TC, gate_TC, decay_TK, beta_logits_TH = projected(
            x_TD, self._groups(), self.joined
        )
        logits_THK = self.f_b_proj(decay_TK).unflatten(-1, (kda.num_heads, kda.head_dim))
        if not kda.use_full_rank_gate:
            gate_TC = self.g_b_proj(gate_TC)
        gate_THV = gate_TC.unflatten(-1, (kda.num_heads, kda.head_dim))
        if cache is not None and cache.form == "decode":
            inputs = DecodeInputs(projected_TC, logits_THK, beta_logits_TH, gate_THV)
            return self.o_proj(cache.decode_kda(self.layer_idx, self._step, inputs).flatten(1))
        given = ScanInputs(projected_TC, logits_THK, beta_logits_TH)
        if cache is None:
            o_THV = self._scan(given, cu_seqlens, None, None).o
        else:
            o_THV = cache.prefill_kda(self.layer_idx, self._scan, given, cu_seqlens)
        y_THV = gated_rms_norm(
            o_THV,
            self.o_norm.weight,
            gate_THV,
            eps=self.config.rms_norm_eps,
            impl=self.config.impl.rms_norm,
        )
        return self.o_proj(y_THV.flatten(1))

    def _step(
        self,
        inputs: DecodeInputs,
        pool: StatePool,
        slots: Tensor,
        cu_seqlens: Tensor | None,
        num_kept: Tensor | None,
    ) -> Tensor:
        """All between the projections, `[T, H, V]`; the states of `slots` move on."""
        return decode_kda(
            inputs,
            DecodeWeights(self._taps(), self.A_log, self.dt_bias, self.o_norm.weight),
            pool,
            slots,
            cu_seqlens=cu_seqlens,
            num_kept=num_kept,
            gate_lower_bound=self.config.kda.gate_lower_bound,
            norm_eps=self.config.rms_norm_eps,
            impl=self.config.impl.kda_decode,
        )

    def _taps(self) -> Tensor:
        """`[C, W]`, one behind the other."""
        stack = self._stacked_taps
        if stack is not None and not torch.is_grad_enabled() and stack.is_intact:
            return stack.whole.squeeze(1)
        return torch.cat(self._conv_weights()).squeeze(1)

    def _conv_weights(self) -> tuple[nn.Parameter, ...]:
        return (self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight)

    def _scan(
        self,
        inputs: ScanInputs,
        cu_seqlens: Tensor,
        conv_state: Tensor | None,
        state: Tensor | None,
    ) -> ScanOutput:
        """Convolution and delta rule over many tokens of each sequence."""
        kda = self.config.kda
        mixed = short_conv(
            inputs.projected,
            self._taps(),
            cu_seqlens=cu_seqlens,
            initial_state=conv_state,
            impl=self.config.impl.short_conv,
        )
        q_THK, k_THK, v_THV = mixed.y.view(-1, 3, kda.num_heads, kda.head_dim).unbind(1)
        out = chunk_kda_fused(
            q_THK,
            k_THK,
            v_THV,
            inputs.decay_logits,
            inputs.beta_logits,
            self.A_log,
            self.dt_bias,
            cu_seqlens=cu_seqlens,
            initial_state=state,
            gate_lower_bound=kda.gate_lower_bound,
            impl=self.config.impl.kda,
        )
        return ScanOutput(out.o, mixed.final_state, out.final_state)

    def join(self) -> None:
        """Make one product of the input's projections where no gradient is wanted."""
        self.joined = rejoined(self._groups(), self.joined)
        self._stacked_taps = stacked(self._conv_weights(), self._stacked_taps)

    def _groups(self) -> Groups:
        gate = self.g_proj if self.config.kda.use_full_rank_gate else self.g_a_proj
        return (self.q_proj, self.k_proj, self.v_proj), (gate,), (self.f_a_proj,), (self.b_proj,)
