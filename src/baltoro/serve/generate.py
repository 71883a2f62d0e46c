"""One sequence at a time: chunked prefill, then cached recurrent decoding.

The plain loop beside the engine to come; `baltoro generate` and `baltoro chat` run it.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baltoro.model.cache import DenseCache
from baltoro.model.model import Model
from baltoro.serve.sampler import Sampling, sample


class GeneratedToken(NamedTuple):
    """One token the model wrote."""

    id: int
    logprob: float  # under the distribution it was drawn from


def generate_tokens(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
    image_features: Tensor | None = None,
    max_prefill_tokens: int = 2048,
) -> Iterator[GeneratedToken]:
    """Yield tokens as they are drawn, a stop token included, until one of `stop_ids` or the budget.

    `image_features` `[rows, D]` stand in for the prompt's placeholder tokens. Raises `ValueError`
    on an empty prompt, an id outside the vocabulary, or more tokens than the model's context.
    """
    check_prompt(model, prompt_ids, max_new_tokens)
    return _generate(
        model,
        list(prompt_ids),
        max_new_tokens,
        sampling,
        stop_ids,
        generator,
        image_features,
        max_prefill_tokens,
    )


def check_prompt(model: Model, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
    """Raise `ValueError` if the model cannot continue this prompt by that many tokens."""
    config = model.config
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: must be at least 1")
    if not prompt_ids:
        raise ValueError("prompt: it has no tokens; give at least one character")
    if len(prompt_ids) + max_new_tokens > config.max_seq_len:
        raise ValueError(
            f"prompt: {len(prompt_ids)} tokens and {max_new_tokens} new ones exceed the context of "
            f"{config.max_seq_len}; shorten the prompt or lower max_new_tokens"
        )
    wrong = next((i for i in prompt_ids if not 0 <= i < config.vocab_size), None)
    if wrong is not None:
        raise ValueError(
            f"prompt: token id {wrong} is outside the vocabulary of {config.vocab_size}; "
            "is this the checkpoint's own tokenizer?"
        )


@torch.inference_mode()
def prefill(
    model: Model,
    prompt_ids: Sequence[int],
    cache: DenseCache,
    *,
    image_features: Tensor | None = None,
    max_prefill_tokens: int = 2048,
) -> Tensor:
    """Run the prompt of one sequence in slices; logits `[1, W]` of its last token."""
    device = model.lm_head.weight.device
    tokens_T = torch.tensor(prompt_ids, dtype=torch.int64, device=device)
    cache.form = "prefill"
    used_rows = 0
    hidden_D = None
    for slice_T in tokens_T.split(max_prefill_tokens):
        features = None
        if image_features is not None and model.config.vision is not None:
            rows = int((slice_T == model.config.vision.placeholder_token_id).sum())
            features = image_features[used_rows : used_rows + rows]
            used_rows += rows
        bounds = torch.tensor([0, len(slice_T)], dtype=torch.int32, device=device)
        hidden_D = model(slice_T, bounds, cache, features).hidden[-1:]
    if image_features is not None and used_rows != image_features.shape[0]:
        raise ValueError(
            f"image_features: {image_features.shape[0]} rows, but the prompt has {used_rows} "
            "placeholders"
        )
    return model.lm_head(hidden_D)


@torch.inference_mode()
def decode(model: Model, ids_N: Tensor, cache: DenseCache) -> Tensor:
    """One more token `[N]` for each sequence of the cache; logits `[N, W]`."""
    cache.form = "decode"
    bounds = torch.arange(len(ids_N) + 1, dtype=torch.int32, device=ids_N.device)
    return model.lm_head(model(ids_N, bounds, cache).hidden)


def _generate(
    model: Model,
    prompt_ids: list[int],
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Collection[int],
    generator: torch.Generator | None,
    image_features: Tensor | None,
    max_prefill_tokens: int,
) -> Iterator[GeneratedToken]:
    weight = model.lm_head.weight
    cache = DenseCache(model.config, 1, dtype=weight.dtype, device=weight.device)
    logits_NW = prefill(
        model,
        prompt_ids,
        cache,
        image_features=image_features,
        max_prefill_tokens=max_prefill_tokens,
    )
    for step in range(max_new_tokens):
        ids_N, logprobs_N = sample(logits_NW, sampling, generator)
        token = GeneratedToken(int(ids_N), float(logprobs_N))
        yield token
        if token.id in stop_ids or step + 1 == max_new_tokens:
            return
        logits_NW = decode(model, ids_N, cache)
