"""What all tokenizers share: the cutting of text, special tokens, decoding piece by piece."""

import random
import unicodedata

import pytest
import regex
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from baltoro.text.markers import Segment
from baltoro.text.vocabulary import MAX_PIECE, MAX_RUN, PATTERN, pieces

# `regex` in version 1 defines what class intersection means.
DEFINITION = regex.compile(PATTERN, regex.V1)
TRICKY = "'sS'RE're\u2019 \n\r\t\v\f\x85\xa0\u2028\u3000"
TRICKY += "々\u3007〡ーｱ㈠㐀𠀀ǅʰªº\u0301\u0345ⅷ²①٣९K\u200d🏽"


def random_texts(count: int) -> list[str]:
    """Texts of assigned characters: engines differ on those that Unicode has not given out."""
    rng = random.Random(5)
    every = [chr(code) for code in (*range(0xD800), *range(0xE000, 0x32000))]
    assigned = [char for char in every if unicodedata.category(char) not in ("Cn", "Co")]
    han = [char for char in assigned if regex.match(r"\p{Han}", char)]
    pools = [[chr(code) for code in range(32, 127)], list(TRICKY), han, assigned]
    return ["".join(rng.choice(rng.choice(pools)) for _ in range(14)) for _ in range(count)]


def test_the_engine_of_tokenizers_cuts_as_the_definition():
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    for text in random_texts(2000):
        expected = [found.group() for found in DEFINITION.finditer(text)]
        assert [piece for piece, _ in split.pre_tokenize_str(text)] == expected


def test_the_engine_of_tiktoken_cuts_as_the_definition():
    for text in random_texts(120):
        expected = [found.group().encode() for found in DEFINITION.finditer(text)]
        # A vocabulary of bytes and of just these pieces can only cut like this.
        tokens = [bytes([byte]) for byte in range(256)]
        tokens += [piece for piece in dict.fromkeys(expected) if len(piece) > 1]
        encoding = tiktoken.Encoding(
            "pieces",
            pat_str=PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
            special_tokens={},
        )
        assert [tokens[token_id] for token_id in encoding.encode_ordinary(text)] == expected


def test_han_is_cut_from_other_letters():
    cut = [found.group() for found in DEFINITION.finditer("abc世界def 12345 it's")]
    assert cut == ["abc", "世界", "def", " ", "123", "45", " it's"]


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("", []),
        ("x" * MAX_RUN, [MAX_RUN]),
        ("x" * (MAX_RUN + 1), [MAX_RUN, 1]),
        ("x" * (2 * MAX_RUN), [MAX_RUN, MAX_RUN]),
        ("x" * (2 * MAX_RUN + 1), [MAX_RUN, MAX_RUN, 1]),
        (" " * (MAX_RUN + 2) + "x", [MAX_RUN, 3]),
        ("ab " + "x" * (MAX_RUN + 5) + " c", [MAX_RUN + 3, 7]),
        ("x " * 200_001, [MAX_PIECE, 2]),
        ("\u3000" * (MAX_RUN + 1), [MAX_RUN, 1]),
    ],
)
def test_long_text_is_cut_at_the_limits_of_the_release(text, lengths):
    assert [len(piece) for piece in pieces(text)] == lengths
    assert "".join(pieces(text)) == text


def test_the_cut_of_a_long_run_is_seen_in_the_ids(k3_tokenizer):
    text = "." * (MAX_RUN - 2) + "json"
    ids = k3_tokenizer.encode(text)
    assert ids == k3_tokenizer.encode(text[:MAX_RUN]) + k3_tokenizer.encode(text[MAX_RUN:])
    assert k3_tokenizer.encode("json")[0] not in ids
    assert k3_tokenizer.encode("json")[0] in k3_tokenizer.encode(text[4:])


def test_markers_in_a_very_long_text_stay_whole(k3_tokenizer):
    pads = "<|media_pad|>" * 16_384
    assert k3_tokenizer.encode(pads, allow_special=True) == [163605] * 16_384


@pytest.fixture(params=["k3_tokenizer", "small_bpe"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def test_special_tokens_are_text_unless_allowed(tokenizer):
    for name, token_id in tokenizer.special_ids.items():
        assert tokenizer.encode(name, allow_special=True) == [token_id]
        ordinary = tokenizer.encode(name)
        assert token_id not in ordinary and tokenizer.decode(ordinary) == name


def test_segments_are_encoded_one_by_one(tokenizer):
    segments = [Segment("<|sep|>", True), Segment("th", False), Segment("ink<|sep|>", False)]
    expected = [tokenizer.special_ids["<|sep|>"]]
    expected += tokenizer.encode("th") + tokenizer.encode("ink<|sep|>")
    assert tokenizer.encode_segments(segments) == expected
    assert expected != tokenizer.encode("<|sep|>think<|sep|>", allow_special=True)


def test_decoding_without_specials_keeps_open_close_and_sep(tokenizer):
    text = "[BOS]<|open|>a<|close|>b<|sep|><|end_of_msg|><|media_pad|>[PAD]"
    ids = tokenizer.encode(text, allow_special=True)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special=True) == "<|open|>a<|close|>b<|sep|>"


def test_lone_surrogates_become_replacement_characters(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83c\udf89")) == "🎉"


def test_ids_outside_the_vocabulary_are_refused(tokenizer):
    for token_id in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"token id {token_id}"):
            tokenizer.decode([token_id])


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_survives_encoding(small_bpe, text):
    ids = small_bpe.encode(text)
    assert small_bpe.decode(ids) == text
    stream = small_bpe.text_stream()
    parts = [stream.feed(token_id) for token_id in ids]
    assert "".join(parts) == text and stream.end() == ""


def test_a_stream_never_shows_half_a_character(small_bpe):
    stream = small_bpe.text_stream()
    ids = small_bpe.encode("ж𐍈")
    assert len(ids) == 6
    assert [stream.feed(token_id) for token_id in ids] == ["", "ж", "", "", "", "𐍈"]
    assert stream.feed(ids[0]) == "" and stream.end() == "\ufffd" and stream.end() == ""


def test_bytes_that_are_no_text_decode_alike_in_a_stream(small_bpe):
    ids = list(range(256)) * 2
    stream = small_bpe.text_stream()
    streamed = "".join(stream.feed(token_id) for token_id in ids) + stream.end()
    assert streamed == small_bpe.decode(ids) == small_bpe.decode_bytes(ids).decode(errors="replace")
