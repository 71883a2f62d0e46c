"""What every tokenizer of ours does: text to ids and back, with special tokens said, not guessed.

A spelling of a special token in a text is ordinary text unless the caller allows it, so nobody can
forge structure by typing it. No token is ever added to an encoded text.
"""

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from baltoro.text.markers import END_OF_MSG, MEDIA_PAD, Segment
from baltoro.text.specials import KEPT

# Pre-tokeniser of the release (tokenization_kimi.py); `&&` is class intersection, which the engines
# of tiktoken and of tokenizers both have.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_AFTER_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_AFTER_WORD}",
        f"{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_AFTER_WORD}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

MAX_PIECE = 400_000  # characters that are encoded at once
MAX_RUN = 25_000  # characters of one run of blanks, or of anything else, in a piece


class Tokenizer(ABC):
    """Ids `0 .. vocab_size - 1`: ordinary tokens of bytes first, then the special ones."""

    def __init__(self, num_ordinary: int, special_ids: Mapping[str, int]) -> None:
        self.special_ids = dict(special_ids)  # name to id
        self._num_ordinary = num_ordinary
        self._name_of = {token_id: name for name, token_id in special_ids.items()}
        self._special = re.compile("(" + "|".join(map(re.escape, special_ids)) + ")")

    @property
    def vocab_size(self) -> int:
        """Ordinary and special tokens."""
        return self._num_ordinary + len(self.special_ids)

    @property
    def eos_id(self) -> int:
        """`[EOS]`, the end of a document."""
        return self.special_ids["[EOS]"]

    @property
    def media_pad_id(self) -> int:
        """The token whose places image features take."""
        return self.special_ids[MEDIA_PAD]

    @property
    def stop_ids(self) -> tuple[int, int]:
        """Ids at which generation ends: `<|end_of_msg|>`, then `[EOS]`."""
        return self.special_ids[END_OF_MSG], self.eos_id

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of `text`; with `allow_special`, spellings of special tokens become those tokens.

        A lone surrogate, which no text can hold, is encoded as U+FFFD.
        """
        text = _without_surrogates(text)
        if not allow_special:
            return self._encode_long(text)
        ids: list[int] = []
        for piece in self._special.split(text):
            special_id = self.special_ids.get(piece)
            ids += self._encode_long(piece) if special_id is None else [special_id]
        return ids

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of segments, each encoded on its own."""
        return [token_id for text, special in segments for token_id in self.encode(text, special)]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; of a special one, its name. Raises `ValueError` for no such id."""
        if 0 <= token_id < self._num_ordinary:
            return self._ordinary_bytes(token_id)
        if token_id not in self._name_of:
            raise ValueError(f"token id {token_id}: the vocabulary has {self.vocab_size} ids")
        return self._name_of[token_id].encode()

    def decode_bytes(self, ids: Iterable[int], skip_special: bool = False) -> bytes:
        """The bytes of ids; `skip_special` leaves special tokens out, but for open, close, sep."""
        return b"".join(
            self.token_bytes(token_id)
            for token_id in ids
            if not (skip_special and self._is_skipped(token_id))
        )

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of ids as `decode_bytes` has them; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids, skip_special).decode("utf-8", errors="replace")

    def text_stream(self, skip_special: bool = False) -> "TextStream":
        """Decodes ids one by one."""
        return TextStream(self, skip_special)

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write the files that `load_tokenizer` reads, each whole or not at all."""

    @abstractmethod
    def _encode_ordinary(self, text: str) -> list[int]: ...

    @abstractmethod
    def _ordinary_bytes(self, token_id: int) -> bytes: ...

    def _encode_long(self, text: str) -> list[int]:
        return [token_id for piece in pieces(text) for token_id in self._encode_ordinary(piece)]

    def _is_skipped(self, token_id: int) -> bool:
        return self._name_of.get(token_id, KEPT[0]) not in KEPT


class TextStream:
    """Incremental decoding: text comes out as soon as its characters are whole."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """Text that the next id completes, often empty for a part of a character."""
        return self._decoder.decode(self._tokenizer.decode_bytes([token_id], self._skip_special))

    def end(self) -> str:
        """U+FFFD if a character was left unfinished; the stream then starts afresh."""
        return self._decoder.decode(b"", final=True)


def pieces(text: str) -> Iterator[str]:
    """Long text in the pieces that the release encodes on their own."""
    for start in range(0, len(text), MAX_PIECE):
        yield from _short_runs(text[start : start + MAX_PIECE])


_RUN = re.compile(r"\s+|\S+")
_SURROGATE = re.compile("[\ud800-\udfff]")


def _short_runs(text: str) -> Iterator[str]:
    start = 0
    for run in _RUN.finditer(text) if len(text) > MAX_RUN else ():
        for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
            yield text[start:cut]
            start = cut
    yield text[start:]


def _without_surrogates(text: str) -> str:
    if not _SURROGATE.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
