"""Special tokens: a block of ids after the ordinary ones, in the release's order.

`tokenizer_config.json` names those that have a meaning. The same ids mean other things to Kimi K2
and Kimi Linear, whose files would load and quietly take every marker apart; they are refused here.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from baltoro.text.files import read_json, write_atomically

CONFIG_FILE = "tokenizer_config.json"

# Place in the block; the id is 163584 + place in the release.
PLACES = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,
    "[UNK]": 254,
    "[PAD]": 255,
}
NUM_SPECIALS = 256
NUM_NAMED = len(PLACES)
# The release marks these three as not special, so decoding without special tokens keeps them.
KEPT = ("<|open|>", "<|close|>", "<|sep|>")


def block(first_id: int, num_specials: int) -> dict[str, int]:
    """Name to id of a block that starts at `first_id`: all 256, or only the named 16 in order."""
    if num_specials == NUM_NAMED:
        return {name: first_id + place for place, name in enumerate(PLACES)}
    if num_specials != NUM_SPECIALS:
        raise ValueError(f"num_specials={num_specials}: must be {NUM_SPECIALS} or {NUM_NAMED}")
    names = {place: name for name, place in PLACES.items()}
    return {
        names.get(place, f"<|reserved_token_{first_id + place}|>"): first_id + place
        for place in range(NUM_SPECIALS)
    }


def read_specials(directory: Path, first_id: int, num_specials: int) -> dict[str, int]:
    """The block of a directory's tokenizer, checked against its `tokenizer_config.json`.

    Raises `ValueError` if the file names other tokens than K3's, or lacks one.
    """
    path = directory / CONFIG_FILE
    named = read_json(path).get("added_tokens_decoder")
    if not isinstance(named, dict):
        raise ValueError(f"{path}: added_tokens_decoder={named!r}; must map ids to special tokens")
    name_of = {
        token_id: token.get("content") if isinstance(token, dict) else token
        for token_id, token in named.items()
    }
    special_ids = block(first_id, num_specials)
    for name in PLACES:
        found = name_of.get(str(special_ids[name]))
        if found != name:
            what = "no token" if found is None else repr(found)
            raise ValueError(
                f"{path}: id {special_ids[name]} is {what}, K3 has {name!r} there; these are the "
                "special tokens of another model, or of another vocabulary"
            )
    return special_ids


def write_specials(directory: Path, special_ids: Mapping[str, int]) -> None:
    """Write `tokenizer_config.json`, also readable by transformers."""
    config = {
        "added_tokens_decoder": {
            str(special_ids[name]): {
                "content": name,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": name not in KEPT,
            }
            for name in PLACES
        },
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "[UNK]",
    }
    write_atomically(directory / CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())
