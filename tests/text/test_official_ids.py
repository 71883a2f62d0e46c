"""Ids that the release's tokenizer gives, chats and plain text, segment by segment.

They are checked with a vocabulary in which the tokens at hand have their published ids, and with
the release's own files if someone has put them into `tests/text/official`.
"""

import json
from pathlib import Path

import pytest

from baltoro.text.tokenizer import Tokenizer, load_tokenizer
from baltoro.text.xtml import render

HERE = Path(__file__).parent
VECTORS = json.loads((HERE / "official_ids.json").read_text())
HAS_OFFICIAL_FILES = (HERE / "official" / "tiktoken.model").is_file()


@pytest.fixture(scope="module", params=["known tokens", "official"][: 1 + HAS_OFFICIAL_FILES])
def tokenizer(request: pytest.FixtureRequest, k3_tokenizer: Tokenizer) -> Tokenizer:
    return load_tokenizer(HERE / "official") if request.param == "official" else k3_tokenizer


@pytest.mark.skipif(HAS_OFFICIAL_FILES, reason="the release's files are there and tested")
def test_the_release_files_would_be_tested():
    pytest.skip("tests/text/official has no tiktoken.model and tokenizer_config.json")


@pytest.mark.parametrize("chat", VECTORS["chats"], ids=lambda chat: chat["name"])
@pytest.mark.parametrize("revision", ["A", "B"])
def test_a_chat_has_the_ids_of_the_release(tokenizer, chat, revision):
    segments = render(chat["messages"], chat["tools"], revision=revision, **chat["options"])
    assert tokenizer.encode_segments(segments) == chat["ids"]


@pytest.mark.parametrize("case", VECTORS["texts"], ids=lambda case: case["text"])
def test_a_text_has_the_ids_of_the_release(tokenizer, case):
    assert tokenizer.encode(case["text"]) == case["ids"]
    assert tokenizer.decode(case["ids"]) == case["text"]


def test_the_markers_have_the_ids_of_the_release(tokenizer):
    markers = "<|end_of_msg|><|open|><|close|><|sep|>[EOS]<|media_pad|>[PAD]"
    expected = [163586, 163587, 163588, 163589, 163585, 163605, 163839]
    assert tokenizer.encode(markers, allow_special=True) == expected
    assert tokenizer.vocab_size == 163840


def test_the_default_effort_costs_67_ids(tokenizer):
    messages = [{"role": "user", "content": "Hi"}]
    plain = tokenizer.encode_segments(render(messages))
    with_effort = tokenizer.encode_segments(render(messages, thinking_effort="max"))
    assert len(with_effort) - len(plain) == 67


def test_joining_segments_before_encoding_would_lose_the_markers(tokenizer):
    segments = render([{"role": "user", "content": "Hi"}], add_generation_prompt=False)
    joined = "".join(segment.text for segment in segments)
    assert len(tokenizer.encode_segments(segments)) == 12
    assert len(tokenizer.encode(joined)) > 12
