"""Files of each kind to documents, and what is left out with its reason."""

import gzip
import json
import os
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from baltoro.data.config import FilesConfig
from baltoro.data.document import Document, data_url
from baltoro.data.images import png
from baltoro.data.readers import html_text, kind, man_text, read_file
from baltoro.data.source import AbsentSource, paths, read


def read_one(path: Path, **options: bool) -> tuple[list[Document], dict[str, int]]:
    dropped: Counter[str] = Counter()
    return list(read_file(path, "name", dropped, **options)), dict(dropped)


def config(root: Path, *suffixes: str, **fields: object) -> FilesConfig:
    return FilesConfig(
        name="s", domain="d", licence="l", roots=(root,), suffixes=suffixes, **fields
    )  # type: ignore[arg-type]


def test_text_is_read_with_and_without_compression(tmp_path):
    (tmp_path / "a.txt").write_text("über\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("über\n".encode()))
    for name in ("a.txt", "b.txt.gz"):
        (document,), _ = read_one(tmp_path / name)
        assert document.text == "über\n"


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.txt", b"ab\0cd", "binary"),
        ("a.txt", "über".encode("latin-1"), "not UTF-8"),
        ("a.txt.gz", gzip.compress(b"some text", mtime=0)[:-9], "truncated"),
        ("a.txt.gz", b"no gzip at all", "unreadable"),
        ("a.png", b"no picture", "no caption"),
    ],
)
def test_what_cannot_be_read_is_counted(tmp_path, name, data, reason):
    (tmp_path / name).write_bytes(data)
    assert read_one(tmp_path / name) == ([], {reason: 1})


def test_jsonl_holds_texts_and_conversations(tmp_path):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    lines = [json.dumps({"text": "one"}), "", "{broken", "[1]", json.dumps({"messages": messages})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    documents, dropped = read_one(tmp_path / "a.jsonl")
    assert [document.text for document in documents] == ["one", "Hi\nHello"]
    assert dropped == {"broken JSON": 1, "no text or messages": 1}


def test_parquet_is_read_or_its_package_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        path.write_bytes(b"PAR1")
        with pytest.raises(ValueError, match="need pyarrow; pip install pyarrow"):
            read_one(path)
        return
    parquet.write_table(pyarrow.table({"text": ["one", None, "two"]}), path)
    assert [document.text for document in read_one(path)[0]] == ["one", "two"]
    path.write_bytes(b"PAR1 cut")
    assert read_one(path) == ([], {"unreadable": 1})


@pytest.mark.parametrize(
    ("suffix", "content"),
    [(".txt", "A red square\n"), (".json", '{"caption": "A red square"}'),
     (".json", '{"title": "A red square"}')],
)  # fmt: skip
def test_a_caption_stands_beside_its_picture(tmp_path, suffix, content):
    Image.new("RGB", (30, 30), "red").save(tmp_path / "a.png")
    (tmp_path / "a").with_suffix(suffix).write_text(content)
    (document,), _ = read_one(tmp_path / "a.png")
    assert document.text == "A red square\n"
    assert document.pictures == ((tmp_path / "a.png").read_bytes(),)


def test_a_name_is_a_title_only_if_asked(tmp_path):
    Image.new("RGB", (30, 30), "red").save(tmp_path / "red-square.png")
    assert read_one(tmp_path / "red-square.png") == ([], {"no caption": 1})
    (document,), _ = read_one(tmp_path / "red-square.png", has_titles_in_names=True)
    assert document.text == "red square\n"


def test_a_broken_picture_is_counted(tmp_path):
    Image.new("RGB", (30, 30), "red").save(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:50])
    (tmp_path / "a.txt").write_text("red")
    assert read_one(tmp_path / "a.png") == ([], {"unreadable": 1})


def test_html_gives_the_text_that_a_page_shows():
    page = (
        "<html><head><title>T</title><style>p {}</style></head><body><nav>menu</nav>"
        "<h1>Tides</h1><p>The  sea &amp; the\nmoon.</p><script>x < 1</script><ul><li>one</li></ul>"
    )
    assert html_text(page).split("\n\n") == ["\nTides", "The sea & the moon.", "one\n"]


def test_html_keeps_the_lines_of_programs():
    assert "if x:\n    y\n" in html_text("<p>a</p><pre>if x:\n    y\n</pre>")


def test_man_pages_lose_their_markup():
    page = (
        '.TH LS 1 "today"\n.de XX\nhidden\n..\n.SH NAME\nls \\- list\n.SH "SEE ALSO"\n'
        '.BR cat (1),\n\\fBbold\\fR text\\&.\n.\\" comment\n.B word\n'
    )
    assert man_text(page) == "\nNAME\nls - list\n\nSEE ALSO\ncat(1),\nbold text.\nword"


def test_pages_of_the_manual_are_known_by_their_place(tmp_path):
    assert kind(tmp_path / "man3" / "printf.3posix.gz") == ".man"
    assert kind(tmp_path / "doc" / "release.3") == ".3"


def test_files_come_sorted_and_captions_and_links_are_left_out(tmp_path):
    for name in ("b.txt", "a.txt", "c.md", "skip.txt", "p.txt"):
        (tmp_path / name).write_text("text")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.txt").write_text("text")
    Image.new("RGB", (3, 3)).save(tmp_path / "p.png")
    os.symlink(tmp_path / "a.txt", tmp_path / "z.txt")
    found = paths(config(tmp_path, ".txt", excludes=("skip*",)))
    assert [path.name for path in found] == ["a.txt", "b.txt", "d.txt"]
    assert [path.name for path in paths(config(tmp_path, ".txt", excludes=("s*",)))] == [
        "a.txt",
        "b.txt",
    ]


def test_a_source_may_be_a_file(tmp_path):
    (tmp_path / "zone.tab").write_text("text")
    assert len(list(read(config(tmp_path / "zone.tab", ".tab"), Counter()))) == 1


def test_an_absent_source_says_so(tmp_path):
    with pytest.raises(AbsentSource, match="source 's': none of"):
        paths(config(tmp_path / "nowhere", ".txt"))


@pytest.mark.parametrize(
    "document",
    [
        Document("a", ("text", b"\x89PNG", "more")),
        Document("b", messages=({"role": "user", "content": "hi"},)),
    ],
)
def test_documents_survive_being_kept(document):
    assert Document.from_json(document.to_json()) == document


def test_pictures_count_in_the_hash():
    picture, other = (png(Image.new("RGB", (4, 4), colour)) for colour in ("red", "blue"))
    content = [{"type": "image", "image": data_url(picture)}, {"type": "text", "text": "What?"}]
    message = Document("a", messages=({"role": "user", "content": content},))
    assert message.pictures == (picture,) and message.text == "What?"
    assert Document("a", (picture, "x")).hash != Document("a", (other, "x")).hash
    assert Document("a", (picture, "x")).hash == Document("b", (picture, "X ")).hash


def test_a_conversation_with_a_picture_that_cannot_be_read_is_left_out(tmp_path):
    content = [{"type": "image", "image": "http://example.org/a.png"}]
    line = json.dumps({"messages": [{"role": "user", "content": content}]})
    (tmp_path / "a.jsonl").write_text(line)
    assert read_one(tmp_path / "a.jsonl") == ([], {"no text or messages": 1})
