"""One of each: exact by hash, fuzzy by MinHash (datasketch), pictures by perceptual hash.

A text is the set of its word n-grams; two texts count as one if their estimated Jaccard similarity
passes the threshold; of long ones, only their beginnings. Of two that count as one, the first
stays. Pictures are compared only with
one another, and only where a document is a single picture with its caption.
"""

import re
import zlib
from typing import Any

import numpy as np

from baltoro.data.config import DedupConfig
from baltoro.data.document import Document
from baltoro.text.pictures import open_picture

_SAMPLE = 100_000  # characters of a text that are compared
_WORD = re.compile(r"\w+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class Deduplicator:
    """Remembers what it has seen."""

    def __init__(self, config: DedupConfig | None) -> None:
        """Exact only with None. Raises `ValueError` if the packages of the extra are missing."""
        self._config = config
        self._hashes: set[bytes] = set()
        self._picture_hashes: list[np.uint64] = []
        if config is not None:
            self._empty, self._lsh, self._phash = _packages(config)
            self._word_hashes = _WordHashes()

    def fault(self, document: Document, is_made: bool) -> str | None:
        """Why a document is left out, or None, and then it is remembered.

        is_made: made by the build; such documents resemble each other by intent, so only exact
            copies are left out.
        """
        if document.hash in self._hashes:
            return "duplicate"
        self._hashes.add(document.hash)
        if self._config is None or is_made:
            return None
        is_captioned_picture = len(document.pictures) == 1 and not document.messages
        if is_captioned_picture and self._is_known_picture(document.pictures[0]):
            return "similar picture"
        if not document.pictures and self._is_known_text(document):
            return "near duplicate"
        return None

    def _is_known_text(self, document: Document) -> bool:
        assert self._config is not None
        words = _WORD.findall(document.text[:_SAMPLE].lower())
        hashes = np.array([self._word_hashes[word] for word in words], dtype=np.uint64)
        ngrams = _ngrams(hashes, self._config.ngram)
        if not len(ngrams):
            return False
        minhash = self._empty.copy()
        minhash.update_batch(ngrams.tolist())
        if self._lsh.query(minhash):
            return True
        self._lsh.insert(document.hash, minhash)
        return False

    def _is_known_picture(self, data: bytes) -> bool:
        assert self._config is not None
        bits = np.packbits(self._phash(open_picture(data).convert("RGB")).hash.ravel())
        value = bits.view(np.uint64)[0]
        distances = np.bitwise_count(np.array(self._picture_hashes, dtype=np.uint64) ^ value)
        if (distances <= self._config.max_picture_distance).any():
            return True
        self._picture_hashes.append(value)
        return False


def _packages(config: DedupConfig) -> tuple[Any, Any, Any]:
    try:
        import datasketch
        import imagehash
    except ImportError as error:
        raise ValueError(
            f"dedup: needs the package {error.name}; install with `pip install baltoro[data]`, or "
            "set dedup=None for exact deduplication alone"
        ) from error
    lsh = datasketch.MinHashLSH(threshold=config.threshold, num_perm=config.num_hashes)
    empty = datasketch.MinHash(num_perm=config.num_hashes, hashfunc=int)
    return empty, lsh, imagehash.phash


class _WordHashes(dict[str, int]):
    """32-bit hashes of words, each computed once."""

    def __missing__(self, word: str) -> int:
        self[word] = value = zlib.crc32(word.encode())
        return value


def _ngrams(words: np.ndarray, size: int) -> np.ndarray:
    """Distinct 32-bit hashes of the words in runs of `size`, uint64; empty for a shorter text."""
    if len(words) < size:
        return words[:0]
    total = np.zeros(len(words) - size + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for offset in range(size):
            total = total * _MULTIPLIER + words[offset : offset + len(total)]
    return np.unique(total >> np.uint64(32))
