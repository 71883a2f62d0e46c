"""One sequence at a time: chunked prefill, then cached recurrent decoding.

The plain loop beside the engine; `baltoro generate` and `baltoro chat` run it.
"""

import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from baltoro.checkpoint.load import load
from baltoro.model.cache import DenseCache
from baltoro.model.config import gpu_impl, gpu_refusals
from baltoro.model.model import Model
from baltoro.serve.sampler import Sampling, sample
from baltoro.text.pictures import open_picture
from baltoro.text.processor import Processor, Prompt

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Dtype = Literal["float32", "bfloat16"]


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


def generate(
    checkpoint: str,
    *,
    prompt: str,
    image: tuple[Path, ...] = (),
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float = 0.0,
    seed: int | None = None,
    dtype: Dtype | None = None,
    device: str = "cpu",
    experts: Literal["decoded", "packed"] = "decoded",
) -> None:
    """Continue a prompt with the model in CHECKPOINT, printing the text as it comes.

    The prompt is plain text, not a conversation (that is `baltoro chat`).

    Args:
        checkpoint: directory in the official layout, with its tokenizer.
        prompt: text to continue.
        image: pictures that stand before the text, in order.
        max_new_tokens: stop after this many tokens if the model does not end before.
        temperature: 0 always takes the likeliest token.
        top_p: draw from the smallest set of tokens with this probability.
        top_k: draw from this many tokens.
        min_p: drop tokens below this share of the likeliest one's probability.
        seed: equal seeds give equal text on one machine.
        dtype: of the weights; absent, bfloat16 on a GPU and as they are stored on a CPU.
        device: cpu, cuda, cuda:1.
        experts: keep MXFP4 experts packed to save memory.
    """
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    model = load_for_text(checkpoint, dtype=dtype, device=device, experts=experts)
    processor: Processor = model.processor
    request = completion_prompt(processor, prompt, image)
    tokens = generate_tokens(
        model,
        request.ids,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_ids=processor.tokenizer.stop_ids,
        generator=seeded(seed, device),
        image_features=image_features(model, request),
    )
    print(f"[{described(model)}]", file=sys.stderr)
    stream = processor.tokenizer.text_stream(skip_special=True)
    start, count = time.perf_counter(), 0
    first = 0.0
    for token in tokens:
        count += 1
        first = first or time.perf_counter() - start
        print(stream.feed(token.id), end="", flush=True)
    print(stream.end())
    print(speed_line(len(request.ids), count, first, time.perf_counter() - start), file=sys.stderr)


def load_for_text(
    checkpoint: str,
    *,
    dtype: Dtype | None,
    device: str,
    experts: Literal["decoded", "packed"],
) -> Model:
    """The model of a directory, which must hold a tokenizer; `ValueError` if it does not.

    Without a `dtype` it is bfloat16 on a GPU and as stored on a CPU. In bfloat16 on a GPU it runs
    on kernels (`gpu_impl`), else on torch's operators. A GPU named by its index becomes this
    thread's current one, where kernels, streams and graphs go.
    """
    where = checked_device(device)
    if where.type == "cuda" and where.index is not None:
        torch.cuda.set_device(where)
    if dtype is None and where.type == "cuda":
        dtype = "bfloat16"
    model = load(
        checkpoint,
        dtype=None if dtype is None else DTYPES[dtype],
        device=where,
        experts=experts,
        impl="gpu" if where.type == "cuda" and dtype == "bfloat16" else "torch",
    )
    if model.tokenizer is None:
        raise ValueError(
            f"{checkpoint}: no K3 tokenizer beside the weights (tokenizer.json or tiktoken.model); "
            "copy the tokenizer files into the directory"
        )
    return model


def described(model: Model) -> str:
    """How a model runs, in one line."""
    weight, impl = model.lm_head.weight, model.config.impl
    dtype = str(weight.dtype).removeprefix("torch.")
    operators = "torch's operators"
    if impl == gpu_impl(model.config):
        refused = [f"{name} ({why})" for name, why in gpu_refusals(model.config).items()]
        operators = f"kernels, torch for {', '.join(refused)}" if refused else "kernels"
    elif weight.is_cuda:
        operators += ", since kernels take bfloat16"
    return f"{dtype} weights on {weight.device}, {operators}"


def checked_device(device: str) -> torch.device:
    """The device by its name; `ValueError` if torch knows no such device or cannot reach it."""
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device={device!r}: use cpu, cuda or cuda:N") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={device!r}: {torch.cuda.device_count()} CUDA devices are here")
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: use cpu, cuda or cuda:N")
    return found


def completion_prompt(processor: Processor, text: str, pictures: Sequence[Path]) -> Prompt:
    """Pictures, then the text, as ids; no message around them."""
    tokenizer, images = processor.tokenizer, processor.images
    if pictures and images is None:
        raise ValueError("image: this model takes only text (no preprocessor_config.json)")
    if not pictures or images is None:
        return Prompt(tokenizer.encode(text))
    opened = [open_picture(path) for path in pictures]
    ids: list[int] = []
    for picture in opened:
        num_pads = images.num_tokens(*picture.size)
        ids += tokenizer.encode(images.image_prompt(*picture.size, num_pads), allow_special=True)
    return Prompt([*ids, *tokenizer.encode(text)], *images.process(opened))


@torch.inference_mode()
def image_features(model: Model, prompt: Prompt) -> Tensor | None:
    """Rows `[rows, D]` of a prompt's pictures; None without any."""
    if prompt.pixel_values is None or prompt.grid_thws is None:
        return None
    device = model.lm_head.weight.device
    pixels = torch.from_numpy(prompt.pixel_values).to(device)
    return model.encode_images(pixels, torch.from_numpy(prompt.grid_thws))


def seeded(seed: int | None, device: str) -> torch.Generator | None:
    """A generator of its own for a seed; None leaves torch's global one."""
    return None if seed is None else torch.Generator(device).manual_seed(seed)


def speed_line(num_prompt: int, num_new: int, first: float, total: float) -> str:
    """One line on how long it took; seconds to the first token and in all."""
    rate = (num_new - 1) / (total - first) if num_new > 1 and total > first else 0.0
    decode = f", then {rate:.1f} tokens/s" if rate else ""
    return f"[{num_prompt} prompt tokens, {num_new} new; first after {first:.2f} s{decode}]"
