"""One of each: exact copies, near copies, similar pictures."""

import builtins

import pytest
from data.small import prose
from PIL import Image, ImageDraw

from baltoro.data.config import DedupConfig
from baltoro.data.dedup import Deduplicator
from baltoro.data.document import Document
from baltoro.data.images import png

LONG = " ".join(prose(number) for number in range(6))


def text(content: str) -> Document:
    return Document("x", (content,))


def picture(*, shift: int = 0, flipped: bool = False) -> bytes:
    image = Image.new("RGB", (96, 96), "white")
    draw = ImageDraw.Draw(image)
    left = 60 if flipped else 10
    draw.rectangle([left, 10 + shift, left + 25, 80], fill="black")
    draw.ellipse([40, 50, 60, 90 - shift], fill="red")
    return png(image)


def test_a_copy_in_other_case_and_blanks_is_a_duplicate():
    deduplicator = Deduplicator(None)
    assert deduplicator.fault(text("One two\nthree"), False) is None
    assert deduplicator.fault(text("ONE  two three "), False) == "duplicate"


def test_a_text_with_a_few_words_changed_is_a_near_duplicate():
    deduplicator = Deduplicator(DedupConfig())
    assert deduplicator.fault(text(LONG), False) is None
    assert deduplicator.fault(text(LONG.replace("1093", "about")), False) == "near duplicate"


def test_another_text_of_the_same_words_is_kept():
    deduplicator = Deduplicator(DedupConfig())
    words = LONG.split()
    assert deduplicator.fault(text(LONG), False) is None
    assert deduplicator.fault(text(" ".join(words[::-1])), False) is None


def test_without_the_fuzzy_part_only_copies_go():
    deduplicator = Deduplicator(None)
    assert deduplicator.fault(text(LONG), False) is None
    assert deduplicator.fault(text(LONG + " more"), False) is None


def test_what_the_build_makes_may_be_alike():
    deduplicator = Deduplicator(DedupConfig())
    assert deduplicator.fault(text(LONG), True) is None
    assert deduplicator.fault(text(LONG + " more"), True) is None
    assert deduplicator.fault(text(LONG), True) == "duplicate"


def test_a_picture_seen_before_is_left_out_whatever_its_caption():
    deduplicator = Deduplicator(DedupConfig())
    documents = [
        Document("a", (picture(), "a red dot\n")),
        Document("b", (picture(shift=1), "another caption\n")),
        Document("c", (picture(flipped=True), "mirrored\n")),
    ]
    found = [deduplicator.fault(document, False) for document in documents]
    assert found == [None, "similar picture", None]


def test_a_missing_package_is_named_with_the_remedy(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "datasketch":
            raise ImportError(name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"datasketch; install with `pip install baltoro\[data\]`"):
        Deduplicator(DedupConfig())
    Deduplicator(None)
