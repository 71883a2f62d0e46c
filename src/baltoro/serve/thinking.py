"""A cap on thinking: a reply that has thought enough has its response begun for it.

A grammar that lets anything come until the cap, then nothing but the tags that end the think
channel and open the response, then anything again; with another grammar inside it both hold. The
tags are tokens of the reply like any other. A tag of at most `MAX_TAG` tokens that the model has
begun is not broken off, since it may be the end of its thinking; a character is not cut. A think
channel that is opened again is not capped, nor one that ends in a tag without a separator.
"""

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from baltoro.serve.request import Constraint, Grammar
from baltoro.text.markers import CLOSE, OPEN, SEP
from baltoro.text.vocabulary import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

BRIDGE = f"{CLOSE}think{SEP}{OPEN}response{SEP}"
MAX_TAG = 48  # tokens after which a tag that does not end is text
LEAVING = {CLOSE: {"think", "response", "message"}, OPEN: {"response", "tools", "message", "call"}}


class ThinkingCap:
    """Grammar of replies that think at most `max_tokens` tokens; `inner` binds them further."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, inner: Grammar | None = None) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.bridge = tokenizer.encode(BRIDGE, allow_special=True)
        self.inner = inner

    def start(self) -> Constraint:
        """The constraint of a new reply, which begins in its think channel."""
        return CappedReply(self, None if self.inner is None else self.inner.start())


class Place(NamedTuple):
    """Where a reply is after one of its tokens."""

    num_bridged: int = 0  # tokens of the bridge that are written
    tag: tuple[int, ...] = ()  # the tag that is being written, from its marker on
    num_tagged: int = 0  # tokens of it and of tags before it that did not end
    has_left: bool = False  # whether the think channel has ended
    cut: bytes = b""  # the beginning of a character whose end has not come


class CappedReply:
    """The constraint of one reply."""

    def __init__(self, cap: ThinkingCap, inner: Constraint | None) -> None:
        self._cap = cap
        self._inner = inner
        self._places = [Place()]  # before the first token, and after each
        special = cap.tokenizer.special_ids
        self._names = {special[OPEN]: LEAVING[OPEN], special[CLOSE]: LEAVING[CLOSE]}
        self._sep = special[SEP]

    def mask(self, logits_W: "Tensor") -> bool:
        """Set to -inf, in place, what may not come next; False if nothing may."""
        if self._inner is not None and not self._inner.mask(logits_W):
            return False
        due = self._due()
        if due is not None:
            kept = logits_W[due].clone()
            logits_W.fill_(-float("inf"))
            logits_W[due] = kept
            return bool(kept > -float("inf"))
        return True

    def accept(self, token_id: int) -> bool:
        """Go on by one token; False, and nothing changes, if it may not come next."""
        due = self._due()
        if due is not None and token_id != due:
            return False
        if self._inner is not None and not self._inner.accept(token_id):
            return False
        self._places.append(self._after(self._places[-1], token_id, is_due=due is not None))
        return True

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""
        if count:
            del self._places[-count:]
        if self._inner is not None:
            self._inner.rollback(count)

    def is_free(self, count: int) -> bool:
        """Whether the next `count` tokens may be any, whatever they turn out to be."""
        if self._inner is not None:
            return False
        has_room = len(self._places) - 1 + count <= self._cap.max_tokens
        return self._places[-1].has_left or (has_room and self._due() is None)

    def _due(self) -> int | None:
        """The only token that may come next; None if any may."""
        place = self._places[-1]
        if place.has_left:
            return None
        is_within = bool(place.tag or place.cut)
        is_capped = len(self._places) - 1 >= self._cap.max_tokens and not is_within
        if place.num_bridged or is_capped:
            return self._cap.bridge[place.num_bridged]
        return None

    def _after(self, place: Place, token_id: int, *, is_due: bool) -> Place:
        if place.has_left:
            return place
        if is_due:
            num = place.num_bridged + 1
            return Place(num_bridged=num, has_left=num == len(self._cap.bridge))
        if place.num_tagged == MAX_TAG:
            return Place()
        if token_id in self._names:
            return Place(tag=(token_id,), num_tagged=place.num_tagged + 1)
        if not place.tag:
            text = place.cut + self._cap.tokenizer.token_bytes(token_id)
            return place._replace(cut=_cut_off(text))
        if token_id == self._sep:
            return Place(has_left=self._name(place.tag[1:]) in self._names[place.tag[0]])
        return Place(tag=(*place.tag, token_id), num_tagged=place.num_tagged + 1)

    def _name(self, ids: Sequence[int]) -> str:
        text = b"".join(map(self._cap.tokenizer.token_bytes, ids)).decode(errors="replace")
        return text.partition(" ")[0]


def _cut_off(text: bytes) -> bytes:
    """What `text` ends with of a character of UTF-8 that is not whole."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(text)
    return decoder.getstate()[0]
