"""Model output to a flat run of tags and text, from text or from tokens, in pieces of any size.

The model is not trusted to write well-formed XTML. A header without its `<|sep|>` ends at the next
marker, or where it stops looking like a tag; a tag of an unknown name falls apart into a stray
marker and text. What a tag means is the business of `baltoro.text.channels`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from baltoro.text.markers import CLOSE, END_OF_MSG, MARKERS, OPEN, SEP


@dataclass(frozen=True, slots=True)
class Event:
    """One step of the model's output."""

    kind: Literal["text", "open", "close", "stray", "end"]
    raw: str  # as the model spelled it
    name: str = ""  # of a tag
    attributes: Mapping[str, str] = field(default_factory=dict)  # of an opening tag, unescaped


class MarkerScanner:
    """Cuts text at the four markers, holding back an end that may be the start of one."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> list[str]:
        """Markers, and the stretches of text between them, as far as they are decided."""
        *pieces, rest = _AT_MARKERS.split(self._held + text)
        cut = len(rest) - _partial_marker(rest)
        self._held = rest[cut:]
        return [piece for piece in (*pieces, rest[:cut]) if piece]


class TagLexer:
    """Groups markers and text into events. A header that is never completed yields nothing."""

    def __init__(self) -> None:
        self._marker = ""  # OPEN or CLOSE inside a header
        self._header = ""

    def text(self, text: str) -> Iterator[Event]:
        """Ordinary text: markers spelled out in it are text."""
        if not self._marker:
            yield Event("text", text)
            return
        self._header += text
        if not _may_be_header(self._marker, self._header):
            yield from self._leave_header()

    def marker(self, marker: str) -> Iterator[Event]:
        """One of `MARKERS`."""
        if marker == SEP and self._marker:
            yield from self._leave_header(SEP)
            return
        if self._marker:
            yield from self._leave_header()
        if marker in (OPEN, CLOSE):
            self._marker = marker
        else:
            yield Event("end" if marker == END_OF_MSG else "stray", marker)

    def _leave_header(self, end: str = "") -> Iterator[Event]:
        marker, header = self._marker, self._header
        self._marker = self._header = ""
        tag = _NAME.match(header)
        if tag is None:
            yield Event("stray", marker)
            if header:
                yield Event("text", header)
            if end:
                yield Event("stray", end)
            return
        cut = tag.end()
        if end:
            cut = len(header)
        elif _has_attributes(marker, tag["name"]) and (found := _ATTRIBUTES.match(header, cut)):
            cut = found.end()
        attributes = {key: _unescape(value) for key, value in _ATTRIBUTE.findall(header[:cut])}
        kind: Literal["open", "close"] = "open" if marker == OPEN else "close"
        yield Event(kind, marker + header[:cut] + end, tag["name"], attributes)
        if header[cut:]:
            yield Event("text", header[cut:])


_BARE_NAMES = ("think", "response", "tools")
_ATTRIBUTED_NAMES = ("message", "call", "argument", "json")
_NAMES = (*_BARE_NAMES, *_ATTRIBUTED_NAMES)

_MAX_HEADER = 65_536  # characters; what runs on without a marker is no header

_AT_MARKERS = re.compile("(" + "|".join(re.escape(marker) for marker in MARKERS) + ")")
_MAX_PARTIAL = max(len(marker) for marker in MARKERS) - 1
# A name is whole where no longer word goes on: in `think.` and `thinkSo`, not in `thinking`.
_NAME = re.compile(rf"\s*(?P<name>{'|'.join(_NAMES)})(?![a-z0-9_-])")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_ATTRIBUTES = re.compile(rf"(?:\s+{_ATTRIBUTE.pattern})*")


def _partial_marker(text: str) -> int:
    """Length of the longest end of `text` that starts a marker; a marker has `<` only in front."""
    start = text.rfind("<", max(0, len(text) - _MAX_PARTIAL))
    if start >= 0 and any(marker.startswith(text[start:]) for marker in MARKERS):
        return len(text) - start
    return 0


def _may_be_header(marker: str, header: str) -> bool:
    """Whether more text may still make `header` that of a known tag, or belong to it."""
    if len(header) > _MAX_HEADER:
        return False
    header = header.lstrip()
    for name in _NAMES:
        if name.startswith(header):
            return True
        if header.startswith(name):
            rest = header[len(name) :]
            return (rest[:1] if _has_attributes(marker, name) else rest).isspace()
    return False


def _has_attributes(marker: str, name: str) -> bool:
    return marker == OPEN and name in _ATTRIBUTED_NAMES


def _unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")
