"""Each rule names what it is for, and ordinary text and code pass them all."""

import inspect

import pytest
from data.small import prose

from baltoro.data import filters
from baltoro.data.config import FilterConfig
from baltoro.data.filters import fault, is_truncated, quality

CONFIG = FilterConfig()
SENTENCE = "Numbers of sheep are kept on the hills above the town, and in winter they come down. "


def test_prose_and_code_pass():
    assert fault(prose(3), "prose", CONFIG) is None
    assert fault(inspect.getsource(filters), "code", CONFIG) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("A short one.\n", "too short"),
        (prose(1) + "\x01\x02\x03" * 5, "binary"),
        (prose(1) + "\ufffd" * 10, "binary"),
        (prose(1) + "x" * 3000 + "\n", "long lines"),
        ("".join(f"2024-05-0{i} 12:00:0{i} started worker\n" for i in range(9)), "log"),
        ("".join(f"[   {i}.123456] usb device {i} found\n" for i in range(20)), "log"),
        ("".join(f"INFO step {i} is done\n" for i in range(20)), "log"),
        ("!?$ %& " * 60 + "\n", "symbols"),
        ("12 34 567 890 " * 40 + "\n", "few letters"),
        (prose(2) + "and then he (", "truncated"),
        (prose(2) + "```python\nx = 1\n", "truncated"),
        ((SENTENCE + "\n") * 6, "repetition"),
        ("we do it again and " * 30 + "\n", "repetition"),
    ],
)
def test_what_is_no_document_is_left_out(text, reason):
    assert fault(text, "prose", CONFIG) == reason


def test_a_text_beyond_the_limit_is_left_out():
    assert fault("a" * 11, "prose", FilterConfig(max_characters=10)) == "too long"


def test_titles_need_not_be_long():
    assert fault("red door\n", "short", CONFIG) is None
    assert fault(" \n", "short", CONFIG) == "too short"


def test_code_may_have_more_symbols_than_prose():
    text = "".join(f"a[{i}] = (b{i} + c{i}) * d[{i}];\n" for i in range(12))
    assert fault(text, "code", CONFIG) is None
    assert fault(text, "prose", CONFIG) == "symbols"


def test_a_closing_bracket_may_recur():
    body = "".join(f"int f{i}(int a) {{\n    return a + {i};\n}}\n" for i in range(12))
    assert fault(body, "code", CONFIG) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("It ends.", False), ("It ends\n", False), ("f(a, b", True), ("a ```x``` b\n", False)],
)
def test_a_text_that_stops_within_something_is_truncated(text, expected):
    assert is_truncated(text) is expected


def test_prose_scores_above_tables_and_noise():
    table = "".join(f"{i * 7919 % 1000} {i * 104729 % 977} {i}\n" for i in range(60))
    noise = "".join(f"zq{i}xv kk{i * i} " for i in range(80))
    score = quality(SENTENCE * 3 + prose(5), "prose")
    assert score > quality(table, "prose") + 0.2
    assert score > quality(noise, "prose") + 0.2


def test_scores_lie_between_0_and_1():
    for rules in ("prose", "code", "short"):
        for text in ("", "a\n", prose(1), "=" * 500):
            assert 0 <= quality(text, rules) <= 1
