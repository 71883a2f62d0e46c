"""A local corpus: text files found by their words, named by their content.

The index is SQLite's full-text search. A document's name is the SHA-256 of its text, so a quote can
be checked long after; the fingerprint of the whole corpus goes with every task made from it.
"""

import hashlib
import re
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".md", ".txt", ".rst")
WORD = re.compile(r"\w+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text."""

    id: str  # SHA-256 of the text, 64 hex digits
    name: str  # path inside the corpus
    text: str


class Corpus:
    """Documents with an index, in memory."""

    def __init__(self, texts: Iterable[tuple[str, str]]):
        """`texts`: name and text of each document; equal texts count once.

        `ValueError` if there is none, or if two texts have one name.
        """
        self.documents: dict[str, Document] = {}
        names: set[str] = set()
        for name, text in texts:
            if name in names:
                raise ValueError(f"corpus: two texts are named {name!r}; rename one")
            names.add(name)
            document_id = hashlib.sha256(text.encode()).hexdigest()
            self.documents.setdefault(document_id, Document(id=document_id, name=name, text=text))
        if not self.documents:
            raise ValueError(f"corpus: holds no document with a suffix of {', '.join(SUFFIXES)}")
        self._index = sqlite3.connect(":memory:")
        self._index.execute("CREATE VIRTUAL TABLE texts USING fts5(id UNINDEXED, name, text)")
        rows = [(each.id, each.name, each.text) for each in self.documents.values()]
        self._index.executemany("INSERT INTO texts VALUES (?, ?, ?)", rows)

    @classmethod
    def of_folder(cls, root: Path) -> "Corpus":
        """All text files below a folder. `ValueError` for one that is not UTF-8."""
        texts = []
        for path in sorted(root.rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                try:
                    texts.append((path.relative_to(root).as_posix(), path.read_text()))
                except UnicodeDecodeError as error:
                    raise ValueError(f"{path}: is not UTF-8 text: {error.reason}") from error
        return cls(texts)

    def close(self) -> None:
        """Let go of the index."""
        self._index.close()

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the names of all documents: equal for equal contents."""
        return hashlib.sha256("\n".join(sorted(self.documents)).encode()).hexdigest()

    def search(self, query: str, max_results: int = 6) -> list[Document]:
        """Documents that hold words of the query, best first (bm25)."""
        words = WORD.findall(query)
        if not words:
            return []
        rows = self._index.execute(
            "SELECT id FROM texts WHERE texts MATCH ? ORDER BY rank, id LIMIT ?",
            (" OR ".join(f'"{word}"' for word in words), max_results),
        )
        return [self.documents[row[0]] for row in rows]

    def holds(self, document_id: str, quote: str) -> bool:
        """Whether a document holds a passage word for word; runs of blanks count as one."""
        document = self.documents.get(document_id)
        return document is not None and squeezed(quote) in squeezed(document.text)


def squeezed(text: str) -> str:
    """`text` with every run of blanks and line ends as one blank."""
    return " ".join(text.split())
