"""A finished data folder, opened for reading: any piece of any document, by number."""

from pathlib import Path
from typing import Literal

import numpy as np

from baltoro.data.files import file_sha256
from baltoro.data.manifest import read_manifest
from baltoro.data.shard import Shard
from baltoro.text.tiktoken_file import RANKS_FILE
from baltoro.text.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer

TOKENIZER_DIRECTORY = "tokenizer"
Split = Literal["train", "held_out"]


class Dataset:
    """The documents of one split, numbered `0 .. num_documents - 1`."""

    def __init__(self, directory: Path | str, split: Split, *, vocab_size: int) -> None:
        """Open a folder that `build` finished; `vocab_size` is that of the model that will read it.

        Raises `ValueError` for an unfinished or damaged folder, another vocabulary, or a split
        without documents.
        """
        self.directory = Path(directory)
        self.split: Split = split
        self.manifest = read_manifest(self.directory)
        if vocab_size != self.manifest.vocab_size:
            raise ValueError(
                f"vocab_size={vocab_size}: the data in {directory} has {self.manifest.vocab_size} "
                "ids; build it with the model's tokenizer, or change the model's vocab_size"
            )
        shards = [shard for shard in self.manifest.shards if shard.split == split]
        if not shards:
            raise ValueError(f"{directory}: has no {split} documents; add sources to the recipe")
        self._shards = [Shard(self.directory, shard, vocab_size) for shard in shards]
        sizes = [len(shard.documents) for shard in self._shards]
        self._first = np.cumsum([0, *sizes])  # number of a shard's first document
        self.domain = np.concatenate([shard.documents["domain"] for shard in self._shards])
        self.num_tokens = np.concatenate(
            [np.diff(shard.documents["stop"], prepend=0) for shard in self._shards]
        )
        self.num_pictures = np.concatenate(
            [np.diff(shard.documents["picture_stop"], prepend=0) for shard in self._shards]
        )
        self._tokenizer: Tokenizer | None = None

    @property
    def num_documents(self) -> int:
        return len(self.domain)

    @property
    def domains(self) -> tuple[str, ...]:
        """Names, of which `domain` holds the places."""
        return self.manifest.domains

    @property
    def tokenizer(self) -> Tokenizer:
        """The one that made the tokens. Raises `ValueError` if its files were changed since."""
        if self._tokenizer is None:
            directory = self.directory / TOKENIZER_DIRECTORY
            if tokenizer_sha256(directory) != self.manifest.tokenizer_sha256:
                raise ValueError(
                    f"{directory}: is not the tokenizer that made these tokens; build again"
                )
            self._tokenizer = load_tokenizer(directory)
        return self._tokenizer

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens `start .. stop` of a document, int64."""
        shard, index = self._place(document)
        begin = shard.start(index)
        end = int(shard.documents["stop"][index])
        piece = shard.tokens[begin + start : end if stop is None else min(begin + stop, end)]
        return piece.astype(np.int64)

    def pictures(self, document: int) -> list[bytes]:
        """Encoded pictures of a document, in order."""
        shard, index = self._place(document)
        return shard.pictures(index)

    def source(self, document: int) -> str:
        """Name of the source a document came from."""
        shard, index = self._place(document)
        return self.manifest.sources[int(shard.documents["source"][index])].name

    def bytes_per_token(self) -> np.ndarray:
        """UTF-8 bytes of each id, int64 [vocab_size], for bits per byte; 0 for special tokens."""
        special_ids = set(self.tokenizer.special_ids.values())
        return np.array(
            [
                0 if token_id in special_ids else len(self.tokenizer.token_bytes(token_id))
                for token_id in range(self.tokenizer.vocab_size)
            ],
            dtype=np.int64,
        )

    def _place(self, document: int) -> tuple[Shard, int]:
        number = int(np.searchsorted(self._first, document, side="right")) - 1
        return self._shards[number], document - int(self._first[number])


def tokenizer_sha256(directory: Path) -> str:
    """Hash of the file that a directory's tokenizer consists of."""
    ranks = directory / RANKS_FILE
    path = ranks if ranks.is_file() else directory / TOKENIZER_FILE
    if not path.is_file():
        raise ValueError(f"{directory}: has neither {RANKS_FILE} nor {TOKENIZER_FILE}")
    return file_sha256(path)


def verify(directory: Path) -> None:
    """Hash every file of a data folder; raises `ValueError` naming one that differs or is gone."""
    manifest = read_manifest(directory)
    for entry in manifest.shards:
        shard = Shard(directory, entry, manifest.vocab_size)
        for name, expected in entry.sha256.items():
            path = (directory / entry.stem).parent / name
            if file_sha256(path) != expected:
                raise ValueError(f"{path}: its bytes are not those that were built; build again")
        if int(shard.tokens.max()) >= manifest.vocab_size:
            raise ValueError(f"{directory / entry.stem}: holds ids beyond the vocabulary")
