"""Reading the `arguments` of a call."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baltoro.text.arguments import Argument, read_arguments, split_object

texts = st.text(max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
separators = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t:\r")])


@given(members=st.dictionaries(texts, values, max_size=4), separators=separators)
def test_a_split_object_has_the_members_and_spellings_it_was_written_with(members, separators):
    text = json.dumps(members, separators=separators)
    parts = split_object(text)
    assert [part.key for part in parts] == list(members)
    for part, value in zip(parts, members.values(), strict=True):
        if isinstance(value, str):
            assert part == Argument(part.key, "string", value)
        else:
            assert part.text == json.dumps(value, separators=separators)


@given(text=texts | st.lists(st.sampled_from('{}[]":,1ae \n\\'), max_size=20).map("".join))
def test_a_text_is_an_object_to_b_if_a_decoder_finds_one_at_its_start(text):
    decoder = json.JSONDecoder(strict=False, object_pairs_hook=list)
    blanks = " \t\n\r"
    try:
        found, _ = decoder.raw_decode(text.lstrip(blanks))
    except ValueError:
        found = None
    is_object = text.lstrip(blanks).startswith("{") and isinstance(found, list)
    arguments = read_arguments(text, "B")
    assert (arguments.raw_json is None) == (is_object or text == "")


def test_control_characters_are_allowed_in_strings():
    assert split_object('{"a\n": "b\tc\x00"}') == [Argument("a\n", "string", "b\tc\x00")]


def test_only_the_blanks_of_json_may_stand_between_members():
    for blank in "\f\xa0\u2028":
        assert read_arguments("{" + blank + '"a":1}', "B").raw_json is not None
    assert split_object(' \t{\r\n"a" : 1 }') == [Argument("a", "number", "1")]


def test_numbers_without_limit_and_constants_of_python_keep_their_text():
    long = "9" * 5000
    text = f'{{"a":{long},"b":NaN,"c":-Infinity,"d":1e999}}'
    assert [part.text for part in split_object(text)] == [long, "NaN", "-Infinity", "1e999"]
    assert {part.type for part in split_object(text)} == {"number"}


@pytest.mark.parametrize("revision", ["A", "B"])
def test_text_nested_too_deeply_becomes_a_raw_block(revision):
    text = '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"
    assert read_arguments(text, revision).raw_json == text


def test_lone_surrogates_in_escapes_are_kept():
    assert split_object(r'{"a":"\ud800"}') == [Argument("a", "string", "\ud800")]


@pytest.mark.parametrize("text", ["", "{", '{"a"', '{"a":', '{"a":1', '{"a":1,', "{1:2}", "x{}"])
def test_a_text_cut_short_is_no_object(text):
    with pytest.raises(ValueError):
        split_object(text)
