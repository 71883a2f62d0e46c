"""What a run shows of its model at an evaluation: prompts, held-out pictures among them.

A picture's prompt is its document up to where words about it begin: behind the picture, or, in a
conversation, behind the opener of the answer to it.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baltoro.data.dataset import Dataset
from baltoro.text.images import ImageProcessor
from baltoro.text.markers import MEDIA_END, OPEN, SEP
from baltoro.text.pictures import open_picture
from baltoro.text.processor import Prompt

_SHOWN_SIDE = 512  # pixels, of a picture in the run's folder


class Sample(NamedTuple):
    """A prompt and how the model went on."""

    prompt: str
    text: str
    picture: bytes | None = None  # a PNG file, what stood before the prompt
    expected: str | None = None  # how the document goes on


@dataclass(frozen=True, kw_only=True, slots=True)
class PicturePrompt:
    """A held-out picture to be told about."""

    prompt: Prompt
    question: str  # words between the picture and its answer; often none
    expected: str
    picture: bytes  # a PNG file, at most 512 pixels a side


def picture_prompts(
    dataset: Dataset, images: ImageProcessor, *, count: int, max_tokens: int
) -> list[PicturePrompt]:
    """At most `count` prompts of at most `max_tokens`, the same for the same data.

    The first fitting document of every source, in the order of the documents; only those with one
    picture are considered.
    """
    found: dict[str, PicturePrompt] = {}
    for document in range(dataset.num_documents):
        if len(found) == count:
            break
        source = dataset.source(document)
        if source in found or dataset.num_pictures[document] != 1:
            continue
        prompt = _prompt(dataset, document, images)
        if len(prompt.prompt.ids) <= max_tokens:
            found[source] = prompt
    return list(found.values())


def _prompt(dataset: Dataset, document: int, images: ImageProcessor) -> PicturePrompt:
    tokenizer = dataset.tokenizer
    ids = dataset.tokens(document).tolist()
    (picture,) = dataset.pictures(document)
    behind = ids.index(tokenizer.special_ids[MEDIA_END]) + 1
    opener = tokenizer.encode(f"{OPEN}response{SEP}", allow_special=True)
    start = _end_of(opener, ids, behind) or behind
    question = _words(ids[behind:start], dataset)
    expected = _words(ids[start:], dataset)
    return PicturePrompt(
        prompt=Prompt(ids[:start], *images.process([picture])),
        question=question,
        expected=expected,
        picture=_shown(picture),
    )


def _end_of(wanted: Sequence[int], ids: Sequence[int], start: int) -> int | None:
    """Place behind the first `wanted` in `ids` at or after `start`."""
    for place in range(start, len(ids) - len(wanted) + 1):
        if list(ids[place : place + len(wanted)]) == list(wanted):
            return place + len(wanted)
    return None


def _words(ids: Sequence[int], dataset: Dataset) -> str:
    """Text up to the first special token."""
    special_ids = set(dataset.tokenizer.special_ids.values())
    end = next((place for place, token in enumerate(ids) if token in special_ids), len(ids))
    return dataset.tokenizer.decode(list(ids[:end])).strip()


def _shown(picture: bytes) -> bytes:
    shown = open_picture(picture).convert("RGBA")
    shown.thumbnail((_SHOWN_SIDE, _SHOWN_SIDE))
    buffer = io.BytesIO()
    shown.save(buffer, "PNG")
    return buffer.getvalue()
