"""A document between source and tokens: text and pictures in reading order, or a conversation."""

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from baltoro.text.messages import image_parts
from baltoro.text.pictures import open_picture


@dataclass(frozen=True)
class Document:
    """Either `parts` or `messages`."""

    name: str  # where it came from, for people
    parts: tuple[str | bytes, ...] = ()  # text and encoded pictures
    messages: tuple[dict[str, Any], ...] = ()  # pictures in them as data URLs

    @cached_property
    def text(self) -> str:
        """All of its text, as filters and deduplication see it."""
        if self.messages:
            return "\n".join(_spoken(self.messages))
        return "\n".join(part for part in self.parts if isinstance(part, str))

    @cached_property
    def pictures(self) -> tuple[bytes, ...]:
        """Encoded pictures in reading order."""
        urls = [part["image"] for part in image_parts(self.messages)]
        inner = [base64.b64decode(url.partition(",")[2]) for url in urls]
        return (*(part for part in self.parts if isinstance(part, bytes)), *inner)

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 of its content: blanks and case of the text do not count, pictures do."""
        digest = hashlib.sha256(" ".join(self.text.lower().split()).encode(errors="replace"))
        for picture in self.pictures:
            digest.update(hashlib.sha256(picture).digest())
        return digest.digest()

    def to_json(self) -> str:
        """One line."""
        parts = [
            part if isinstance(part, str) else {"picture": base64.b64encode(part).decode()}
            for part in self.parts
        ]
        return json.dumps({"name": self.name, "parts": parts, "messages": list(self.messages)})

    @classmethod
    def from_json(cls, line: str) -> "Document":
        """The inverse of `to_json`."""
        content = json.loads(line)
        parts = tuple(
            part if isinstance(part, str) else base64.b64decode(part["picture"])
            for part in content["parts"]
        )
        return cls(content["name"], parts, tuple(content["messages"]))


def data_url(picture: bytes) -> str:
    """An encoded picture as messages hold it."""
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def conversation(name: str, messages: list[Any]) -> Document:
    """A document of messages. Raises `ValueError` for messages or pictures that cannot be read."""
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{name}: messages must be a list of dicts with role and content")
    for part in image_parts(messages):
        url = part.get("image")
        if not isinstance(url, str):
            raise ValueError(f"{name}: a picture in messages must be an `image` with a data URL")
        open_picture(url)
    return Document(name, messages=tuple(messages))


def _spoken(messages: tuple[dict[str, Any], ...]) -> Iterator[str]:
    for message in messages:
        content = message.get("content") or ""
        for part in [content] if isinstance(content, str) else content:
            if isinstance(part, str):
                yield part
            elif part.get("type") == "text":
                yield part["text"]
