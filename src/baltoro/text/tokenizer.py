"""Tokenizers: the release's when its file is there, else our own; both are a `Tokenizer`."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from baltoro.text.bpe import TOKENIZER_FILE, BpeTokenizer
from baltoro.text.files import read_json
from baltoro.text.markers import CLOSE, OPEN, SEP
from baltoro.text.specials import NUM_SPECIALS
from baltoro.text.tiktoken_file import RANKS_FILE, TiktokenTokenizer
from baltoro.text.vocabulary import TextStream, Tokenizer

__all__ = [
    "BpeTokenizer",
    "TextStream",
    "TiktokenTokenizer",
    "Tokenizer",
    "check_decoder",
    "load_tokenizer",
    "train",
]


def train(texts: Iterable[str], vocab_size: int, num_specials: int = NUM_SPECIALS) -> BpeTokenizer:
    """Our own BPE; see `BpeTokenizer.train`."""
    return BpeTokenizer.train(texts, vocab_size, num_specials)


def load_tokenizer(directory: Path | str) -> Tokenizer:
    """The tokenizer of a checkpoint directory.

    `tiktoken.model` is the release's and wins over `tokenizer.json`, which is one of ours; either
    needs `tokenizer_config.json`. If there is a `config.json`, its `vocab_size` must be the
    tokenizer's.

    Raises `ValueError`, naming the file and the fault: neither file, a broken one, the special
    tokens of another model, another vocabulary size.
    """
    directory = Path(directory)
    has_ranks = (directory / RANKS_FILE).is_file()
    if not has_ranks and not (directory / TOKENIZER_FILE).is_file():
        raise ValueError(f"{directory}: has neither {RANKS_FILE} nor {TOKENIZER_FILE}")
    loaded: Tokenizer = (TiktokenTokenizer if has_ranks else BpeTokenizer).load(directory)
    _check_size(directory / "config.json", loaded.vocab_size)
    return loaded


def check_decoder(tokenizer: Tokenizer, decode: Callable[[Sequence[int]], str]) -> None:
    """Refuse, at start, a decoder whose text the XTML parser could not read.

    Engines drop special tokens by default, or put spaces around them; then calls and reasoning run
    into the answer. Raises `ValueError` saying which switch to set.
    """
    markers = OPEN + "think" + SEP + "a" + CLOSE + "think" + SEP
    decoded = decode(tokenizer.encode(markers, allow_special=True))
    if decoded == markers:
        return
    switch = "skip_special_tokens"
    if decoded.replace(" ", "") == markers:
        switch = "spaces_between_special_tokens"
    raise ValueError(
        f"decoder: gives {decoded!r} for the tokens of {markers!r}, so markers are lost to the "
        f"parser; set {switch}=False, or parse token ids"
    )


def _check_size(path: Path, vocab_size: int) -> None:
    if not path.is_file():
        return
    config = read_json(path)
    text_config = config.get("text_config", config)
    expected = text_config.get("vocab_size") if isinstance(text_config, dict) else None
    if expected is not None and expected != vocab_size:
        raise ValueError(
            f"{path}: vocab_size={expected}, the tokenizer beside it has {vocab_size} ids; they "
            "belong to different models"
        )
