"""Documents to tokens, their pictures at a size that the recipe allows."""

import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from baltoro.data.document import Document, data_url
from baltoro.text.images import ImageProcessor
from baltoro.text.messages import IMAGE_TYPES
from baltoro.text.pictures import open_picture
from baltoro.text.processor import Processor


def encode(
    document: Document, processor: Processor, max_picture_tokens: int
) -> tuple[np.ndarray, tuple[bytes, ...]]:
    """Tokens of a document, int64 [n], the end-of-document token last, and its encoded pictures.

    Each picture stands as `<|media_pad|>`, one for each of its tokens, between the release's
    markers. A conversation is rendered as XTML, without an effort message; the turns have a think
    channel if one of them has reasoning.
    """
    tokenizer, images = processor.tokenizer, processor.images
    assert images is not None
    if document.messages:
        messages = [_shrunk(message, images, max_picture_tokens) for message in document.messages]
        has_reasoning = any(message.get("reasoning_content") for message in messages)
        ids = processor.prompt(
            messages, thinking=has_reasoning, thinking_effort=None, add_generation_prompt=False
        ).ids
        shrunk = Document(document.name, messages=tuple(messages))
        return np.array([*ids, tokenizer.eos_id], dtype=np.int64), shrunk.pictures
    ids, pictures = [], []
    for part in document.parts:
        if isinstance(part, str):
            ids += tokenizer.encode(part)
            continue
        picture = shrink(part, images, max_picture_tokens)
        width, height = open_picture(picture).size
        num_pads = images.num_tokens(width, height)
        ids += tokenizer.encode(images.image_prompt(width, height, num_pads), allow_special=True)
        pictures.append(picture)
    return np.array([*ids, tokenizer.eos_id], dtype=np.int64), tuple(pictures)


def shrink(picture: bytes, images: ImageProcessor, max_tokens: int) -> bytes:
    """An encoded picture, scaled down to `max_tokens` if it takes more; then it is a PNG."""
    opened = open_picture(picture)
    width, height = opened.size
    num_tokens = images.num_tokens(width, height)
    if num_tokens <= max_tokens:
        return picture
    scale = math.sqrt(max_tokens / num_tokens)
    while images.num_tokens(*_scaled(width, height, scale)) > max_tokens:
        if _scaled(width, height, scale) == (1, 1):
            break
        scale *= 0.95
    return png(opened.convert("RGBA").resize(_scaled(width, height, scale), Image.Resampling.BOX))


def png(picture: Image.Image) -> bytes:
    """A picture as the bytes of a PNG file."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=False)
    return buffer.getvalue()


def _scaled(width: int, height: int, scale: float) -> tuple[int, int]:
    return max(1, int(width * scale)), max(1, int(height * scale))


def _shrunk(message: Mapping[str, Any], images: ImageProcessor, max_tokens: int) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = []
    for part in content:
        if part["type"] in IMAGE_TYPES:
            (picture,) = Document("", messages=({"role": "user", "content": [part]},)).pictures
            part = {"type": "image", "image": data_url(shrink(picture, images, max_tokens))}
        parts.append(part)
    return {**message, "content": parts}
