"""Small sources and recipes, and a disk that fills."""

import errno
import os
from pathlib import Path
from typing import BinaryIO

from baltoro.data.config import (
    BuildConfig,
    FilesConfig,
    FilterConfig,
    LongConfig,
    MadeConfig,
    TokenizerConfig,
)

WORDS = [
    *("stone", "river", "lamp", "window", "garden", "silver", "letter", "bridge", "candle"),
    *("winter", "basket", "thunder", "meadow", "copper", "harbour", "ladder", "pepper", "saddle"),
]


def prose(number: int, num_sentences: int = 12) -> str:
    """Text that passes the filters, another one for each number."""
    sentences = []
    for index in range(num_sentences):
        x = number * 31 + index * 7
        a, b, c = (WORDS[(x * step + number) % len(WORDS)] for step in (1, 5, 11))
        sentences.append(f"The {a} of the {b} was {x} steps from a {c} in the year {1000 + x}.")
    return " ".join(sentences[:6]) + "\n\n" + " ".join(sentences[6:]) + "\n"


def write_sources(folder: Path) -> None:
    """Forty documents of prose of unequal lengths."""
    folder.mkdir(parents=True)
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text(prose(number, 8 + number % 9))


def small_config(folder: Path, **changes: object) -> BuildConfig:
    """A recipe over `folder` with pictures, exercises and long windows."""
    fields: dict[str, object] = {
        "name": "test",
        "seed": 3,
        "files": (
            FilesConfig(
                name="prose", domain="prose", licence="none", roots=(folder,), suffixes=(".txt",)
            ),
        ),
        "made": (
            MadeConfig(name="sums", domain="maths", kind="exercises", num_documents=18),
            MadeConfig(name="signs", domain="pictures", kind="rendered_text", num_documents=12),
        ),
        "tokenizer": TokenizerConfig(vocab_size=300, num_specials=16),
        "filters": FilterConfig(),
        "dedup": None,
        "long": LongConfig(num_windows=2, num_characters=3000, num_entries=3),
        "rephrase": None,
        "held_out_share": 0.1,
        "max_picture_tokens": 40,
        "shard_tokens": 5000,
    }
    return BuildConfig(**{**fields, **changes})  # type: ignore[arg-type]


class FullDisk:
    """Opens files that together take `max_bytes`, and then raise as a full disk does."""

    def __init__(self, max_bytes: int) -> None:
        self.left = max_bytes

    def open(self, path: Path) -> BinaryIO:
        return _Limited(path, self)


class _Limited:
    def __init__(self, path: Path, disk: FullDisk) -> None:
        self._file = path.open("wb")
        self._disk = disk

    def write(self, data: bytes | memoryview) -> int:
        size = memoryview(data).nbytes
        self._file.write(memoryview(data).cast("B")[: self._disk.left])
        self._disk.left -= size
        if self._disk.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return size

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def __enter__(self) -> "_Limited":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
