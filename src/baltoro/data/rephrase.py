"""Rephrasing as a pluggable step: any callable that rewrites a passage in a style.

As K2 did it and K3 kept it (report, section 3.1): style prompts, chunk by chunk with what has been
rewritten so far in view, and a check that the rewriting kept the facts. The model is the caller's.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from baltoro.data.config import RephraseConfig
from baltoro.data.document import Document

_FACT = re.compile(r"\d+(?:[.,]\d+)*|(?<=[^.!?\n] )[A-Z][\w-]+")


class Rephraser(Protocol):
    """Rewrites one passage."""

    def __call__(self, passage: str, *, style: str, context: str) -> str:
        """`passage` in `style`, to follow `context`, the end of what was rewritten before it."""
        ...


def rephrasings(
    document: Document, rephraser: Rephraser, config: RephraseConfig, dropped: Counter[str]
) -> Iterator[Document]:
    """One document per style; a rewriting that lost facts is counted in `dropped` and left out."""
    if document.messages or document.pictures:
        return
    for style in config.styles:
        rewritten = ""
        for passage in passages(document.text, config.chunk_characters):
            context = rewritten[-config.chunk_characters :]
            rewritten += rephraser(passage, style=style, context=context).strip() + "\n\n"
        if recall(document.text, rewritten) < config.min_recall:
            dropped["facts lost"] += 1
        else:
            yield Document(f"{document.name} ({style})", (rewritten.strip() + "\n",))


def passages(text: str, num_characters: int) -> Iterator[str]:
    """Whole paragraphs, about `num_characters` at a time; a longer paragraph is one passage."""
    passage = ""
    for paragraph in text.strip().split("\n\n"):
        if passage and len(passage) + len(paragraph) > num_characters:
            yield passage
            passage = ""
        passage += ("\n\n" if passage else "") + paragraph
    if passage:
        yield passage


def recall(source: str, rewritten: str) -> float:
    """The share of the source's numbers and names that the rewriting has; 1 if it has none."""
    facts = set(_FACT.findall(source))
    return sum(fact in rewritten for fact in facts) / len(facts) if facts else 1.0
