"""Files to documents: text, HTML, man pages, JSONL, parquet, pictures with captions.

A file that cannot be used is counted under a reason and left out; the manifest shows the counts.
"""

import gzip
import html.parser
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from baltoro.data.document import Document, conversation
from baltoro.text.pictures import open_picture

PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp")
_MAX_FILE = 1 << 26  # bytes; larger ones are data, not documents


def read_file(
    path: Path, name: str, dropped: Counter[str], has_titles_in_names: bool = False
) -> Iterator[Document]:
    """The documents of one file; what cannot be read is counted in `dropped` by reason."""
    suffix = kind(path)
    if suffix == ".parquet":
        yield from _parquet(path, name, dropped)
        return
    if path.stat().st_size > _MAX_FILE and suffix != ".jsonl":
        dropped["too large"] += 1
    elif suffix == ".jsonl":
        yield from _jsonl(path, name, dropped)
    elif suffix in PICTURES:
        yield from _picture(path, name, dropped, has_titles_in_names)
    else:
        text = _text(path, dropped)
        if text is not None:
            yield Document(name, (_CONVERT.get(suffix, str)(text).strip() + "\n",))


def kind(path: Path) -> str:
    """The suffix that decides how a file is read; `.man` for pages of the manual."""
    name = path.name.removesuffix(".gz").lower()
    if re.fullmatch(r".+\.[1-8][a-z]*", name) and path.parent.name.startswith("man"):
        return ".man"
    return Path(name).suffix


def is_caption(path: Path) -> bool:
    """Whether a file belongs to the picture beside it."""
    return path.suffix in (".txt", ".json") and any(
        path.with_suffix(suffix).is_file() for suffix in PICTURES
    )


def _text(path: Path, dropped: Counter[str]) -> str | None:
    """The text of a file, or None with the reason counted."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except OSError:
        dropped["unreadable"] += 1
        return None
    except (EOFError, zlib.error):
        dropped["truncated"] += 1
        return None
    if b"\0" in data[:8192]:
        dropped["binary"] += 1
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        dropped["not UTF-8"] += 1
        return None


def _jsonl(path: Path, name: str, dropped: Counter[str]) -> Iterator[Document]:
    """Objects with `messages` or `text`."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                dropped["broken JSON"] += 1
                continue
            document = _record(record, f"{name}:{number}")
            if document is None:
                dropped["no text or messages"] += 1
            else:
                yield document


def _record(record: object, name: str) -> Document | None:
    match record:
        case {"messages": list(messages)}:
            try:
                return conversation(name, messages)
            except ValueError:
                return None
        case {"text": str(text)}:
            return Document(name, (text,))
    return None


def _parquet(path: Path, name: str, dropped: Counter[str]) -> Iterator[Document]:
    """Rows with a column `text`."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"{path}: parquet files need pyarrow; pip install pyarrow") from error
    try:
        file = parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowInvalid):
        dropped["unreadable"] += 1
        return
    if "text" not in file.schema_arrow.names:
        dropped["no text or messages"] += 1
        return
    number = 0
    for batch in file.iter_batches(columns=["text"]):
        for text in batch.column("text").to_pylist():
            number += 1
            if isinstance(text, str):
                yield Document(f"{name}:{number}", (text,))


def _picture(
    path: Path, name: str, dropped: Counter[str], has_titles_in_names: bool
) -> Iterator[Document]:
    caption = _caption(path, dropped)
    if caption is None and has_titles_in_names:
        caption = re.sub(r"[-_.]+", " ", path.stem).removesuffix(" symbolic")
    if not caption:
        dropped["no caption"] += 1
        return
    try:
        open_picture(path)
    except ValueError:
        dropped["unreadable"] += 1
        return
    yield Document(name, (path.read_bytes(), caption.strip() + "\n"))


def _caption(path: Path, dropped: Counter[str]) -> str | None:
    if path.with_suffix(".txt").is_file():
        return _text(path.with_suffix(".txt"), dropped)
    if path.with_suffix(".json").is_file():
        try:
            record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError):
            return None
        caption = record.get("caption", record.get("title")) if isinstance(record, dict) else None
        return caption if isinstance(caption, str) else None
    return None


class _HtmlText(html.parser.HTMLParser):
    """The text that a page shows."""

    hidden = ("script", "style", "head", "nav", "svg", "template", "noscript")
    blocks = ("p", "div", "li", "tr", "br", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "dt", "dd")

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.out: list[str] = []
        self.depth = 0  # of hidden elements
        self.num_pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.depth += tag in self.hidden
        self.num_pre += tag == "pre"
        if tag in self.blocks:
            self.out.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.depth = max(0, self.depth - (tag in self.hidden))
        self.num_pre = max(0, self.num_pre - (tag == "pre"))
        if tag in self.blocks:
            self.out.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.depth:
            self.out.append(data if self.num_pre else re.sub(r"\s+", " ", data))


def html_text(page: str) -> str:
    """The text that a page shows, blocks on lines of their own."""
    parser = _HtmlText()
    parser.feed(page)
    parser.close()
    text = (
        re.sub(r" *\n *", "\n", "".join(parser.out)) if "<pre" not in page else "".join(parser.out)
    )
    return re.sub(r"\n{3,}", "\n\n", text)


_ROFF_ESCAPES = (
    (r"\\f(\[[^\]]*\]|\(..|.)", ""),
    (r"\\s[-+]?\d", ""),
    (r"\\\*?\((co|bu|em|en|aq|dq|lq|rq|oq|cq|mi|ti|ha)", ""),
    (
        r"\\[-&|^%~:,/ 0]",
        lambda match: {"-": "-", "~": " ", " ": " ", "0": " "}.get(match[0][1], ""),
    ),
    (r"\\e", r"\\"),
)
_TITLE = (".SH", ".SS", ".Sh", ".Ss")
_DROPPED = (".TH", ".ds", ".de", ".if", ".ie", ".el", ".nr", ".so", '.\\"', "'\\\"", ".tr", ".ft")


def man_text(page: str) -> str:
    """A page of the manual without its markup; definitions of macros are left out."""
    out: list[str] = []
    is_inside_definition = False
    for line in page.splitlines():
        if is_inside_definition:
            is_inside_definition = not line.startswith("..")
            continue
        is_inside_definition = line.startswith(".de")
        macro, _, rest = line.partition(" ")
        if line.startswith(_DROPPED):
            continue
        if macro in _TITLE:
            out.append("\n" + rest.strip('"'))
        elif line.startswith((".", "'")):
            is_joined = len(macro) == 3 and {*macro[1:]} <= {*"BIR"}
            words = re.findall(r'"[^"]*"|\S+', rest)
            out.append(("" if is_joined else " ").join(word.strip('"') for word in words))
        else:
            out.append(line)
    text = "\n".join(out)
    for pattern, replacement in _ROFF_ESCAPES:
        text = re.sub(pattern, replacement, text)
    return re.sub(r"\n{3,}", "\n\n", text)


_CONVERT: dict[str, Callable[[str], str]] = {
    ".html": html_text,
    ".htm": html_text,
    ".man": man_text,
}
