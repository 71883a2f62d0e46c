"""A conversation with pictures to what the model takes: token ids, patches, grids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from baltoro.text.arguments import Revision
from baltoro.text.images import CONFIG_FILE, ImageProcessor
from baltoro.text.messages import MessageError, PromptTooLong, image_parts
from baltoro.text.pictures import open_picture
from baltoro.text.tokenizer import Tokenizer, load_tokenizer
from baltoro.text.xtml import render


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model takes."""

    ids: list[int]
    pixel_values: np.ndarray | None = None  # float32 [I, 3, 14, 14]; None without pictures
    grid_thws: np.ndarray | None = None  # int64 [number of pictures, 3]


class Processor:
    """A tokenizer and, for models that see, an image processor; one of them may be absent."""

    def __init__(self, tokenizer: Tokenizer | None, images: ImageProcessor | None = None) -> None:
        self._tokenizer = tokenizer
        self.images = images

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; `ValueError` if the checkpoint came without one."""
        if self._tokenizer is None:
            raise ValueError("tokenizer: this checkpoint has none; only pictures can be processed")
        return self._tokenizer

    @classmethod
    def load(cls, directory: Path | str) -> "Processor":
        """From a checkpoint directory; without `preprocessor_config.json` it takes no pictures.

        Raises `ValueError` naming the file that is missing or wrong.
        """
        has_images = (Path(directory) / CONFIG_FILE).is_file()
        images = ImageProcessor.load(directory) if has_images else None
        return cls(load_tokenizer(directory), images)

    def prompt(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        *,
        revision: Revision = "B",
        thinking: bool = True,
        thinking_effort: str | None = "max",
        add_generation_prompt: bool = True,
        tool_choice: Any = None,
        response_format: Any = None,
        response_schema: Any = None,
        expands_pads: bool = True,
        max_tokens: int | None = None,
    ) -> Prompt:
        """The prompt of a conversation; options as for `xtml.render`, the effort as the release.

        Pictures stand in content parts of any role, `{"type": "image", "image": …}` or
        `{"type": "image_url", "image_url": {"url": …}}`, with whatever `open_picture` reads. A
        placeholder spelled out in a text stays text.

        expands_pads: one pad per token of the picture, as the model takes it; else a single pad,
            as the release's own processor writes.
        max_tokens: longest prompt; a longer one is refused before its pictures are unpacked.

        Raises `ValueError` for messages, options or pictures that cannot be used.
        """
        images = self.images
        num_seen = 0

        def check(width: int, height: int) -> None:
            nonlocal num_seen
            num_seen += 0 if images is None else images.num_tokens(width, height)
            _check_length(num_seen, max_tokens)

        pictures = [open_picture(_picture_in(part), check) for part in image_parts(messages)]
        prompts: list[str] = []
        if images is not None:
            for width, height in (picture.size for picture in pictures):
                num_pads = images.num_tokens(width, height) if expands_pads else 1
                prompts.append(images.image_prompt(width, height, num_pads))
        elif pictures:
            raise MessageError(
                f"{len(pictures)} images in the messages: this model takes only text"
            )
        segments = render(
            messages,
            tools,
            revision=revision,
            thinking=thinking,
            thinking_effort=thinking_effort,
            add_generation_prompt=add_generation_prompt,
            tool_choice=tool_choice,
            response_format=response_format,
            response_schema=response_schema,
            image_prompts=prompts,
            literal_placeholders=False,
        )
        ids = self.tokenizer.encode_segments(segments)
        _check_length(len(ids), max_tokens)
        if images is None or not pictures:
            return Prompt(ids)
        return Prompt(ids, *images.process(pictures))


def _check_length(num_tokens: int, max_tokens: int | None) -> None:
    if max_tokens is not None and num_tokens > max_tokens:
        raise PromptTooLong(
            f"the prompt has {num_tokens} tokens or more, pictures included, and at most "
            f"{max_tokens} fit; shorten it or send smaller pictures"
        )


def _picture_in(part: Mapping[str, Any]) -> Any:
    kind = part["type"]
    value = part.get(kind)
    if isinstance(value, Mapping):
        value = value.get("url")
    if value is None:
        raise MessageError(f"image part with {sorted(part)}: lacks its {kind!r}")
    return value
