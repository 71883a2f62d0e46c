"""Our own tokenizer: a byte-level BPE in `tokenizer.json`, with K3's pre-tokeniser and specials.

The special tokens stand at the end in the release's order, so a model trained with it is a K3 in
everything but the vocabulary. The files also open in tokenizers and transformers.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from baltoro.text.files import read_json, write_atomically
from baltoro.text.specials import (
    KEPT,
    NUM_NAMED,
    NUM_SPECIALS,
    block,
    read_specials,
    write_specials,
)
from baltoro.text.vocabulary import PATTERN, Tokenizer, pieces

TOKENIZER_FILE = "tokenizer.json"


class BpeTokenizer(Tokenizer):
    """Byte-level BPE by merges, with 256 or 16 special tokens at the end."""

    def __init__(self, bpe: tokenizers.Tokenizer, num_specials: int) -> None:
        num_ordinary = bpe.get_vocab_size(with_added_tokens=False)
        super().__init__(num_ordinary, block(num_ordinary, num_specials))
        self._bpe = bpe
        vocab = bpe.get_vocab(with_added_tokens=False)
        self._bytes_of = [
            bytes(_BYTE_OF[sign] for sign in token)
            for token in sorted(vocab, key=vocab.__getitem__)
        ]

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, num_specials: int = NUM_SPECIALS
    ) -> "BpeTokenizer":
        """Learn merges from `texts` for `vocab_size` ids, the special tokens among them.

        num_specials: 256, the release's block; or 16, the named ones alone, for tiny vocabularies.

        Raises `ValueError` if `vocab_size` has no room for bytes and special tokens, or if `texts`
        do not yield so many merges.
        """
        num_ordinary = vocab_size - len(block(0, num_specials))
        if num_ordinary < len(_BYTE_OF):
            raise ValueError(
                f"vocab_size={vocab_size}: must be at least {len(_BYTE_OF) + num_specials}, for "
                f"{len(_BYTE_OF)} bytes and {num_specials} special tokens "
                f"(num_specials={NUM_NAMED} needs the least)"
            )
        bpe = _with_pre_tokeniser(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=num_ordinary, initial_alphabet=list(_BYTE_OF), show_progress=False
        )
        bpe.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
        num_found = bpe.get_vocab_size(with_added_tokens=False)
        if num_found != num_ordinary:
            raise ValueError(
                f"vocab_size={vocab_size}: these texts yield only {num_found + num_specials} ids; "
                "give more text or ask for less"
            )
        return cls(bpe, num_specials)

    @classmethod
    def load(cls, directory: Path) -> "BpeTokenizer":
        """Read both files. Raises `ValueError` for a broken one or one of another kind."""
        path = directory / TOKENIZER_FILE
        content = read_json(path)
        fault = _fault(content)
        if fault:
            raise ValueError(f"{path}: {fault}; only files that we wrote can be read")
        vocab, merges = content["model"]["vocab"], content["model"]["merges"]
        num_specials = len(content["added_tokens"])
        bpe = _with_pre_tokeniser(models.BPE(vocab, [tuple(merge) for merge in merges]))
        read_specials(directory, len(vocab), num_specials)
        return cls(bpe, num_specials)

    def save(self, directory: Path) -> None:
        content = json.loads(self._bpe.to_str())
        content["added_tokens"] = [
            {
                "id": token_id,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": name not in KEPT,
            }
            for name, token_id in self.special_ids.items()
        ]
        text = json.dumps(content, ensure_ascii=False, indent=1)
        write_atomically(directory / TOKENIZER_FILE, text.encode())
        write_specials(directory, self.special_ids)

    def _encode_ordinary(self, text: str) -> list[int]:
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def _ordinary_bytes(self, token_id: int) -> bytes:
        return self._bytes_of[token_id]


def _printable_bytes() -> dict[str, int]:
    """Sign to byte as byte-level BPE spells them: bytes that do not print from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    signs = [chr(byte) for byte in printing] + [chr(0x100 + place) for place in range(len(others))]
    return dict(zip(signs, printing + others, strict=True))


_BYTE_OF = _printable_bytes()


def _with_pre_tokeniser(model: models.BPE) -> tokenizers.Tokenizer:
    bpe = tokenizers.Tokenizer(model)
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    return bpe


def _fault(content: dict[str, Any]) -> str:
    """What keeps a `tokenizer.json` from being one of ours, or nothing."""
    match content.get("model"):
        case {"type": "BPE", "vocab": dict(vocab), "merges": list(merges)}:
            pass
        case _:
            return "holds no BPE"
    match content.get("pre_tokenizer"):
        case {"pretokenizers": [{"pattern": {"Regex": pattern}}, {"type": "ByteLevel"}]}:
            cuts_as_k3 = pattern == PATTERN and not content.get("normalizer")
        case _:
            cuts_as_k3 = False
    if not cuts_as_k3:
        return "does not cut text as K3 does"
    if len(content.get("added_tokens") or ()) not in (NUM_SPECIALS, NUM_NAMED):
        return f"does not add {NUM_SPECIALS} or {NUM_NAMED} special tokens"
    if sorted(map(str, vocab.values())) != sorted(map(str, range(len(vocab)))):
        return "has gaps in its ids"
    if not set(_BYTE_OF) <= set(vocab) or not set("".join(vocab)) <= set(_BYTE_OF):
        return "lacks a byte, or has tokens that are not of bytes"
    for merge in merges:
        match merge:
            case [str(left), str(right)] if {left, right, left + right} <= vocab.keys():
                pass
            case _:
                return f"has the merge {merge!r}, which does not fit its tokens"
    return ""
