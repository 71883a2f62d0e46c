"""Tokenizers that the tests of this room share."""

import base64
from pathlib import Path

import pytest

from baltoro.text.specials import NUM_SPECIALS, block, write_specials
from baltoro.text.tiktoken_file import RANKS_FILE
from baltoro.text.tokenizer import BpeTokenizer, Tokenizer, load_tokenizer, train

HERE = Path(__file__).parent
NUM_RANKS = 163_584

TEXTS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on the mat in the sun",
    "call the tool, read the file, write the file, then think about what the tool said",
    'message role="user" response think tools argument key="path" type="string" index="1"',
    "naïve café, 你好世界, 日本語, мир, 🌍🎉, 12345 67890",
]


@pytest.fixture(scope="session")
def k3_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the release's size, with the release's own ids for the tokens that we know.

    `official_ranks.txt` holds tokens whose ids are published; bytes have the ids of byte-level BPE.
    The rest is filler that no text yields, and the stepping stones by which BPE reaches a token.
    """
    directory = tmp_path_factory.mktemp("k3")
    lines = (HERE / "official_ranks.txt").read_text().split()
    known = {
        base64.b64decode(token): int(rank)
        for token, rank in zip(lines[::2], lines[1::2], strict=True)
    }
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    order = printing + [byte for byte in range(256) if byte not in printing]
    ranks = {bytes([byte]): rank for rank, byte in enumerate(order)} | known
    steps = {token[:length] for token in known for length in range(2, len(token))} - set(ranks)
    filler = [*sorted(steps), *(b"\xff\xff%d" % number for number in range(NUM_RANKS))]
    token_of = {rank: token for token, rank in ranks.items()}
    free = iter(filler)
    tokens = [token_of.get(rank) or next(free) for rank in range(NUM_RANKS)]
    content = b"".join(
        base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)
    )
    (directory / RANKS_FILE).write_bytes(content)
    write_specials(directory, block(NUM_RANKS, NUM_SPECIALS))
    return directory


@pytest.fixture(scope="session")
def k3_tokenizer(k3_directory: Path) -> Tokenizer:
    return load_tokenizer(k3_directory)


@pytest.fixture(scope="session")
def small_bpe() -> BpeTokenizer:
    """Trained here: 256 bytes, 48 merges and the 16 named special tokens."""
    return train(TEXTS, vocab_size=320, num_specials=16)
