"""The release's tokenizer: `tiktoken.model` (ranks) beside `tokenizer_config.json`."""

import base64
from collections.abc import Mapping
from pathlib import Path

import tiktoken

from baltoro.text.files import write_atomically
from baltoro.text.specials import NUM_SPECIALS, block, read_specials, write_specials
from baltoro.text.vocabulary import PATTERN, Tokenizer

RANKS_FILE = "tiktoken.model"


class TiktokenTokenizer(Tokenizer):
    """BPE by ranks 0, 1, 2, …; the block of 256 special tokens follows the last."""

    def __init__(self, ranks: Mapping[bytes, int]) -> None:
        super().__init__(len(ranks), block(len(ranks), NUM_SPECIALS))
        self._encoding = tiktoken.Encoding(
            "k3", pat_str=PATTERN, mergeable_ranks=dict(ranks), special_tokens={}
        )
        self._bytes_of = sorted(ranks, key=ranks.__getitem__)

    @classmethod
    def load(cls, directory: Path) -> "TiktokenTokenizer":
        """Read both files. Raises `ValueError` for a broken one or another model's."""
        ranks = read_ranks(directory / RANKS_FILE)
        read_specials(directory, len(ranks), NUM_SPECIALS)
        return cls(ranks)

    def save(self, directory: Path) -> None:
        lines = (
            base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(self._bytes_of)
        )
        write_atomically(directory / RANKS_FILE, b"".join(lines))
        write_specials(directory, self.special_ids)

    def _encode_ordinary(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def _ordinary_bytes(self, token_id: int) -> bytes:
        return self._bytes_of[token_id]


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token to rank, of lines `base64 rank`. Raises `ValueError` naming file, line and fault."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {line[:60]!r}: {error}") from error
    if not ranks or set(ranks.values()) != set(range(len(ranks))):
        raise ValueError(f"{path}: the {len(ranks)} tokens do not have the ranks 0, 1, 2, …")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"{path}: no token for byte {missing[0]}, so some text would have no ids")
    return ranks
