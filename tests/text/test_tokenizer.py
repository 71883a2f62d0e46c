"""Training, saving and loading of tokenizers, and what is refused on the way."""

import json
import os
from pathlib import Path

import pytest
import tokenizers
from tokenizers.models import BPE

from baltoro.text.markers import MARKERS
from baltoro.text.specials import NUM_SPECIALS, PLACES, block
from baltoro.text.tiktoken_file import read_ranks
from baltoro.text.tokenizer import check_decoder, load_tokenizer, train

TEXTS = [f"the cat number {number} sat on mat {number * 7}" for number in range(400)]
SAMPLES = ["the cat sat", "naïve 世界 🎉", "  spaces\n\n\ttabs", "<|open|>think<|sep|>", ""]


def change_json(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def directory(tmp_path, small_bpe) -> Path:
    """A saved tokenizer, for a test to damage."""
    small_bpe.save(tmp_path)
    return tmp_path


def test_special_tokens_stand_at_the_end_in_the_order_of_the_release():
    full = block(163_584, NUM_SPECIALS)
    assert list(full.values()) == list(range(163_584, 163_840))
    assert full["<|open|>"] == 163_587 and full["[PAD]"] == 163_839
    assert full["<|reserved_token_163592|>"] == 163_592
    named = block(300, 16)
    assert list(named) == [name for name in full if name in PLACES]
    assert list(named.values()) == list(range(300, 316))
    with pytest.raises(ValueError, match="num_specials=20"):
        block(0, 20)


def test_a_trained_vocabulary_has_the_size_that_was_asked_for(small_bpe):
    assert small_bpe.vocab_size == 320
    assert small_bpe.special_ids["[BOS]"] == 304 and small_bpe.special_ids["[PAD]"] == 319
    assert small_bpe.stop_ids == (306, 305) and small_bpe.eos_id == 305
    large = train(TEXTS, vocab_size=540)
    assert large.vocab_size == 540 and large.special_ids["<|open|>"] == 284 + 3
    assert large.media_pad_id == 284 + 21


def test_training_learns_merges_and_gives_the_same_twice():
    one, other = train(TEXTS, vocab_size=540), train(TEXTS, vocab_size=540)
    assert len(one.encode("the cat")) < len("the cat")
    for sample in (*SAMPLES, *TEXTS[:20]):
        assert one.encode(sample) == other.encode(sample)
        assert one.decode(one.encode(sample)) == sample


@pytest.mark.parametrize(
    ("vocab_size", "num_specials", "message"),
    [
        (400, 256, "must be at least 512"),
        (271, 16, "must be at least 272"),
        (2000, 16, "yield only"),
        (300, 20, "num_specials"),
    ],
)
def test_a_vocabulary_that_cannot_be_made_is_refused(vocab_size, num_specials, message):
    with pytest.raises(ValueError, match=message):
        train(["a short text"], vocab_size=vocab_size, num_specials=num_specials)


@pytest.mark.parametrize("num_specials", [16, 256])
def test_our_own_tokenizer_is_the_same_after_saving_and_loading(tmp_path, num_specials):
    tokenizer = train(TEXTS, vocab_size=290 + num_specials, num_specials=num_specials)
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.special_ids == tokenizer.special_ids
    for sample in SAMPLES:
        for special in (False, True):
            assert loaded.encode(sample, special) == tokenizer.encode(sample, special)
    before = [(tmp_path / name).read_bytes() for name in sorted(os.listdir(tmp_path))]
    loaded.save(tmp_path)
    assert before == [(tmp_path / name).read_bytes() for name in sorted(os.listdir(tmp_path))]


def test_the_saved_file_opens_in_tokenizers_with_the_same_ids(directory, small_bpe):
    other = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert other.get_vocab_size() == small_bpe.vocab_size
    text = "the fox <|open|>think<|sep|>naïve 世界<|end_of_msg|>"
    ids = small_bpe.encode(text, allow_special=True)
    assert other.encode(text, add_special_tokens=False).ids == ids
    assert other.decode(ids, skip_special_tokens=False) == text


def test_the_release_format_is_the_same_after_saving_and_loading(tmp_path, k3_directory):
    load_tokenizer(k3_directory).save(tmp_path)
    for name in ("tiktoken.model", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (k3_directory / name).read_bytes()


def test_a_failed_write_leaves_the_old_file_and_no_rest(directory, small_bpe, monkeypatch):
    before = (directory / "tokenizer.json").read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        small_bpe.save(directory)
    assert (directory / "tokenizer.json").read_bytes() == before
    assert sorted(os.listdir(directory)) == ["tokenizer.json", "tokenizer_config.json"]


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    for directory in (tmp_path, tmp_path / "nothing", str(tmp_path)):
        with pytest.raises(ValueError, match="has neither"):
            load_tokenizer(directory)


def test_the_file_of_the_release_wins_over_ours(directory):
    (directory / "tiktoken.model").write_text("")
    with pytest.raises(ValueError, match=r"tiktoken\.model: the 0 tokens"):
        load_tokenizer(directory)


def test_the_special_tokens_of_another_model_are_refused(directory):
    path = directory / "tokenizer_config.json"
    decoder = json.loads(path.read_text())["added_tokens_decoder"]
    names = {"306": "<|im_end|>", "307": "<|im_user|>", "308": "<|im_assistant|>"}
    change_json(
        path,
        added_tokens_decoder={
            token_id: {**token, "content": names.get(token_id, token["content"])}
            for token_id, token in decoder.items()
        },
    )
    with pytest.raises(ValueError, match=r"id 306 is '<\|im_end\|>', K3 has '<\|end_of_msg\|>'"):
        load_tokenizer(directory)


def test_a_missing_marker_is_refused(directory):
    path = directory / "tokenizer_config.json"
    decoder = json.loads(path.read_text())["added_tokens_decoder"]
    change_json(path, added_tokens_decoder={k: v for k, v in decoder.items() if k != "307"})
    with pytest.raises(ValueError, match=r"id 307 is no token, K3 has '<\|open\|>'"):
        load_tokenizer(directory)
    change_json(path, added_tokens_decoder=None)
    with pytest.raises(ValueError, match="added_tokens_decoder=None"):
        load_tokenizer(directory)


@pytest.mark.parametrize("config", [{"vocab_size": 300}, {"text_config": {"vocab_size": 163840}}])
def test_a_vocabulary_of_another_size_than_the_model_is_refused(directory, config):
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"vocab_size=\d+, the tokenizer beside it has 320 ids"):
        load_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 320}}))
    assert load_tokenizer(directory).vocab_size == 320


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("damage", ["", "{", "[]", "\x00\xff"])
def test_half_a_file_is_refused_by_name(directory, name, damage):
    (directory / name).write_bytes(damage.encode("latin-1"))
    with pytest.raises(ValueError, match=name):
        load_tokenizer(directory)


def test_a_tokenizer_without_its_config_is_refused_by_name(directory):
    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        load_tokenizer(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"type": "WordPiece", "vocab": {}}}, "holds no BPE"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "does not cut text"),
        ({"normalizer": {"type": "NFC"}}, "does not cut text"),
        ({"added_tokens": []}, "does not add"),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 2}, "merges": []}}, "gaps"),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}, "lacks a byte"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(directory, changes, message):
    change_json(directory / "tokenizer.json", **changes)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(directory)


@pytest.mark.parametrize("merge", [["the", "zebra"], ["a"], [1, 2], "a b"])
def test_merges_that_do_not_fit_the_vocabulary_are_refused(directory, merge):
    path = directory / "tokenizer.json"
    model = json.loads(path.read_text())["model"]
    change_json(path, model={**model, "merges": [*model["merges"], merge]})
    with pytest.raises(ValueError, match="does not fit its tokens"):
        load_tokenizer(directory)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 tokens"),
        (b"IQ== 0\nnot base64! 1\n", "line 2"),
        (b"IQ== zero\n", "line 1"),
        (b"IQ==\n", "line 1"),
        (b"IQ== 0\nIg== 2\n", "do not have the ranks"),
        (b"IQ== 0\nIg== 1\n", "no token for byte 0"),
    ],
)
def test_a_broken_rank_file_is_refused_with_its_line(tmp_path, content, message):
    path = tmp_path / "tiktoken.model"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_ranks(path)


def test_a_decoder_that_loses_the_markers_is_refused_at_start(small_bpe):
    def with_spaces(ids):
        return " ".join(small_bpe.decode([token_id]) for token_id in ids)

    def without_markers(ids):
        text = small_bpe.decode(ids)
        for marker in MARKERS:
            text = text.replace(marker, "")
        return text

    check_decoder(small_bpe, small_bpe.decode)
    check_decoder(small_bpe, lambda ids: small_bpe.decode(ids, skip_special=True))
    with pytest.raises(ValueError, match="spaces_between_special_tokens=False"):
        check_decoder(small_bpe, with_spaces)
    with pytest.raises(ValueError, match="skip_special_tokens=False"):
        check_decoder(small_bpe, without_markers)


def test_tokenizers_itself_would_refuse_what_we_check_before():
    with pytest.raises(Exception, match="out of vocabulary"):
        BPE({"a": 0}, [("a", "b")])
