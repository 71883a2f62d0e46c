"""K3: embedding, layers, last mixture, norm and head, on packed tokens.

Written for one device. Tokens of N sequences stand one after another in `[T]`; `cu_seqlens` says
where each begins. There is no batch axis, no padding and no position anywhere below.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from baltoro.model.cache import Cache
from baltoro.model.config import FP32_SUFFIXES, ModelConfig
from baltoro.model.init import init_weights
from baltoro.model.layer import Layer, LayerOutput, query_of
from baltoro.model.mtp import MtpLayer, MtpOutput
from baltoro.model.norm import backbone_norm
from baltoro.model.vision import Projector, VisionTower, check_grids
from baltoro.ops.residual import normed_read


class ModelOutput(NamedTuple):
    """What a forward pass returns."""

    hidden: Tensor  # [T, D], normed, for the head
    mixture: Tensor  # [T, D], before the final norm, for the MTP layer
    router_scores: tuple[Tensor, ...]  # [T, E] fp32 per MoE layer, while training; else empty
    expert_ids: tuple[Tensor, ...] = ()  # int64 [T, A] per MoE layer, if asked for; else empty
    num_rerouted: int = 0  # rows that the replay lacked, over all MoE layers


class Model(nn.Module):
    """A K3- or Kimi-Linear-shaped model; parameter names are the release's.

    `tokenizer`, `processor` and `release` are set by `baltoro.load` when the checkpoint has them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tokenizer: Any = None
        self.processor: Any = None
        self.release: Any = None
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size, padding_idx=config.pad_token_id)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        if config.attn_res_block_size is not None:
            self.output_attn_res_norm = backbone_norm(config, size)
            self.output_attn_res_proj = nn.Linear(size, 1, bias=False)
        self.norm = backbone_norm(config, size)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        if config.num_mtp_layers:
            self.mtp_layers = nn.ModuleList(
                MtpLayer(config, i) for i in range(config.num_mtp_layers)
            )
        if config.vision is not None:
            self.vision_tower = VisionTower(config.vision, config.impl.attention)
            self.mm_projector = Projector(config.vision, size)
        if not self.embed_tokens.weight.is_meta:
            init_weights(self)

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor,
        cache: Cache | None = None,
        image_features: Tensor | None = None,
        recompute: bool = False,
        replay: tuple[Tensor, ...] | None = None,
        keep_expert_ids: bool = False,
    ) -> ModelOutput:
        """Tokens `[T]` int64 of sequences `cu_seqlens` `[N + 1]` int32 to hidden states.

        `image_features` `[rows, D]` replace the placeholder tokens in order. With a cache the
        tokens continue its sequences. `recompute` keeps only each layer's input and runs the layer
        again in the backward pass.

        `replay` are the `expert_ids` (kept if `keep_expert_ids`) of another pass over these tokens,
        that of the engine which drew them: one tensor per MoE layer, else `ValueError`. Rows of -1
        are missing and routed anew (`baltoro.ops.moe.route`). MTP layers choose for themselves.
        """
        replays = self._replay_by_layer(replay)
        partial_sum = self.embed(tokens, image_features)
        blocks: tuple[Tensor, ...] = ()
        scores: list[Tensor] = []
        expert_ids: list[Tensor] = []
        num_rerouted = 0
        pending: Tensor | None = None
        for layer, replay_ids in zip(self.layers, replays, strict=True):
            args = (partial_sum, blocks, cu_seqlens, cache, replay_ids, pending)
            out: LayerOutput = (
                checkpoint(layer, *args, use_reentrant=False) if recompute else layer(*args)
            )
            partial_sum, blocks, pending = out.partial_sum, out.blocks, out.pending
            if out.routing is not None:
                num_rerouted += out.routing.num_rerouted
                if self.training:
                    scores.append(out.routing.scores)
                if keep_expert_ids:
                    expert_ids.append(out.routing.expert_ids)
        query = None
        if self.config.attn_res_block_size is not None:
            norm, proj = self.output_attn_res_norm, self.output_attn_res_proj
            query = query_of(norm, proj, self.config.impl.attn_res)
        read = normed_read(
            blocks,
            partial_sum,
            pending,
            query,
            self.norm.weight,
            eps=self.norm.eps,
            impl=self.norm.impl,
        )
        return ModelOutput(
            read.normed, read.mixture, tuple(scores), tuple(expert_ids), num_rerouted
        )

    def _replay_by_layer(self, replay: tuple[Tensor, ...] | None) -> list[Tensor | None]:
        is_moe = [self.config.is_moe(i) for i in range(self.config.num_layers)]
        if replay is None:
            return [None] * len(is_moe)
        if len(replay) != sum(is_moe):
            raise ValueError(
                f"replay: {len(replay)} tensors for {sum(is_moe)} MoE layers; give each layer its "
                "own, as ModelOutput.expert_ids does"
            )
        given = iter(replay)
        return [next(given) if is_given else None for is_given in is_moe]

    def embed(self, tokens: Tensor, image_features: Tensor | None = None) -> Tensor:
        """Token embeddings `[T, D]`, image rows in place of the placeholders.

        Raises `ValueError` when the number of placeholders and of rows differ.
        """
        x_TD = self.embed_tokens(tokens)
        vision = self.config.vision
        if vision is None:
            if image_features is not None:
                raise ValueError(
                    "image_features: this model has no vision tower (config.vision is None)"
                )
            return x_TD
        if image_features is None:
            return x_TD
        (places,) = torch.where(tokens == vision.placeholder_token_id)
        if len(places) != image_features.shape[0]:
            raise ValueError(
                f"image_features: {image_features.shape[0]} rows for {len(places)} placeholder "
                f"tokens (id {vision.placeholder_token_id}); expand each image to its rows first"
            )
        return x_TD.index_put((places,), image_features.to(x_TD.dtype))

    def encode_images(self, pixel_values: Tensor, grid_thws: Tensor) -> Tensor:
        """Patches `[I, 3, P, P]` of media grids `[G, 3]` to rows `[rows, D]`.

        Raises `ValueError` if the model has no vision tower or the grids do not fit the patches.
        """
        vision = self.config.vision
        if vision is None:
            raise ValueError("pixel_values: this model has no vision tower (vision is None)")
        grids = check_grids(pixel_values, grid_thws, vision)
        return self.mm_projector(self.vision_tower(pixel_values, grids))

    def predict_next(
        self,
        next_tokens: Tensor,
        mixture: Tensor,
        cu_seqlens: Tensor,
        cache: Cache | None = None,
        mtp_idx: int = 0,
    ) -> MtpOutput:
        """Run MTP layer `mtp_idx`: `next_tokens[t]` follows the token behind `mixture[t]`.

        Raises `ValueError` when the model has no such layer.
        """
        if mtp_idx >= self.config.num_mtp_layers:
            raise ValueError(
                f"mtp_idx={mtp_idx}: the model has {self.config.num_mtp_layers} MTP layers"
            )
        layer = self.mtp_layers[mtp_idx]
        return layer(self.embed(next_tokens), mixture, cu_seqlens, cache)

    def join_projections(self) -> None:
        """Lay weights that read the same input side by side (`baltoro.model.joined`).

        For serving: the parameters stay, as views, and products without gradients become fewer.
        """
        # ordinary tensors even where the caller is in inference mode: they may be trained again
        with torch.inference_mode(False), torch.no_grad():
            for layer in self.layers:
                assert isinstance(layer, Layer)
                layer.join()

    def cast(self, dtype: torch.dtype) -> "Model":
        """Cast in place to `dtype`, leaving the tensors that the release keeps in fp32."""
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            if tensor.is_floating_point() and not name.endswith(FP32_SUFFIXES):
                tensor.data = tensor.data.to(dtype)
        return self
