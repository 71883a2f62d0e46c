"""Token shards: what documents become on disk, and how they are read back.

A shard is two to four `.npy` files of one stem: `tokens` of all documents end to end, `documents`
(a record per document, below), and where there are pictures their encoded bytes end to end with
`picture_stops`. Arrays are mapped, so opening costs nothing and any document is a slice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from baltoro.data.files import OpenFile, npy_bytes, read_npy, sha256, write_atomically

DOCUMENT = np.dtype(
    [
        ("stop", "<i8"),  # end of the document in the tokens; it starts where the last one ended
        ("picture_stop", "<i8"),  # the same, in pictures
        ("hash", "<u8"),  # of its content, the one by which train and held-out are split
        ("quality", "<f4"),  # score of the build, 0 to 1
        ("domain", "<u2"),  # place in the manifest's domains
        ("source", "<u2"),  # place in the manifest's sources
    ]
)
_STOPS = np.dtype("<i8")
_BYTES = np.dtype("u1")


@dataclass(frozen=True, slots=True)
class EncodedDocument:
    """A document as tokens, the end-of-document token last."""

    tokens: np.ndarray  # integers [n], places of pictures already at their full number
    pictures: tuple[bytes, ...]  # encoded files, in the order of their places
    hash: int
    quality: float
    domain: int
    source: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """A shard as the manifest lists it."""

    stem: str  # path of its files in the data folder, without `.tokens.npy` and so on
    split: str  # "train" or "held_out"
    num_documents: int
    num_tokens: int
    num_pictures: int
    num_bytes: dict[str, int]  # file name to size
    sha256: dict[str, str]  # file name to hash


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Two bytes a token where the vocabulary allows it, else four."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class ShardWriter:
    """Collects documents and writes a shard whenever `max_tokens` are reached."""

    def __init__(
        self,
        directory: Path,
        stem: str,
        split: str,
        *,
        vocab_size: int,
        max_tokens: int,
        open_file: OpenFile,
    ) -> None:
        self._directory = directory
        self._stem = stem
        self._split = split
        self._dtype = token_dtype(vocab_size)
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._open_file = open_file
        self._entries: list[ShardEntry] = []
        self._documents: list[EncodedDocument] = []
        self._num_tokens = 0

    def add(self, document: EncodedDocument) -> None:
        """Take a document. Raises `ValueError` for an empty one or ids beyond the vocabulary."""
        tokens = document.tokens
        if len(tokens) < 2 or tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise ValueError(
                f"document of {len(tokens)} tokens for {self._stem}: must have at least two, all "
                f"below vocab_size={self._vocab_size}"
            )
        self._documents.append(document)
        self._num_tokens += len(tokens)
        if self._num_tokens >= self._max_tokens:
            self._write()

    def close(self) -> list[ShardEntry]:
        """Write what is left; the entries of all shards."""
        if self._documents:
            self._write()
        return self._entries

    def _write(self) -> None:
        stem = f"{self._stem}-{len(self._entries):05d}"
        documents = self._documents
        pictures = [picture for document in documents for picture in document.pictures]
        records = np.zeros(len(documents), dtype=DOCUMENT)
        records["stop"] = np.cumsum([len(document.tokens) for document in documents])
        records["picture_stop"] = np.cumsum([len(document.pictures) for document in documents])
        for name in ("hash", "quality", "domain", "source"):
            records[name] = [getattr(document, name) for document in documents]
        tokens = np.concatenate([document.tokens for document in documents]).astype(self._dtype)
        arrays = {"tokens": tokens, "documents": records}
        if pictures:
            arrays["pictures"] = np.frombuffer(b"".join(pictures), dtype=_BYTES)
            arrays["picture_stops"] = np.cumsum([len(picture) for picture in pictures], dtype="i8")
        sizes, hashes = {}, {}
        for name, array in arrays.items():
            path = self._directory / f"{stem}.{name}.npy"
            data = npy_bytes(array)
            write_atomically(path, [data], self._open_file)
            sizes[path.name], hashes[path.name] = data.nbytes, sha256([data])
        self._entries.append(
            ShardEntry(
                stem=stem,
                split=self._split,
                num_documents=len(documents),
                num_tokens=self._num_tokens,
                num_pictures=len(pictures),
                num_bytes=sizes,
                sha256=hashes,
            )
        )
        self._documents, self._num_tokens = [], 0


class Shard:
    """An open shard."""

    def __init__(self, directory: Path, entry: ShardEntry, vocab_size: int) -> None:
        """Raises `ValueError` naming the file that is missing, cut short or of another type."""
        _check_sizes((directory / entry.stem).parent, entry.num_bytes)
        stem = str(directory / entry.stem)
        self.tokens = read_npy(Path(f"{stem}.tokens.npy"), token_dtype(vocab_size))
        self.documents = np.asarray(read_npy(Path(f"{stem}.documents.npy"), DOCUMENT))
        stops = self.documents["stop"]
        if len(stops) != entry.num_documents or stops[-1] != len(self.tokens):
            raise ValueError(f"{stem}: its index and its tokens disagree; build the data again")
        self._pictures = np.zeros(0, dtype=_BYTES)
        self._picture_stops = np.zeros(0, dtype=_STOPS)
        if entry.num_pictures:
            self._pictures = read_npy(Path(f"{stem}.pictures.npy"), _BYTES)
            self._picture_stops = read_npy(Path(f"{stem}.picture_stops.npy"), _STOPS)

    def start(self, index: int) -> int:
        """Where a document's tokens begin."""
        return int(self.documents["stop"][index - 1]) if index else 0

    def pictures(self, index: int) -> list[bytes]:
        """Encoded pictures of a document."""
        first = int(self.documents["picture_stop"][index - 1]) if index else 0
        last = int(self.documents["picture_stop"][index])
        stops: Sequence[int] = [0, *self._picture_stops[:last]][first:]
        return [
            self._pictures[begin:end].tobytes()
            for begin, end in zip(stops, self._picture_stops[first:last], strict=False)
        ]


def _check_sizes(directory: Path, num_bytes: Mapping[str, int]) -> None:
    for name, size in num_bytes.items():
        path = directory / name
        if not path.is_file():
            raise ValueError(f"{path}: is missing; build the data again")
        found = path.stat().st_size
        if found != size:
            raise ValueError(
                f"{path}: has {found} bytes, the manifest says {size}; it was cut short or "
                "changed, build the data again"
            )
